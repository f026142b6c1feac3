// How the program ends when it must. Every failure prints one line on stderr, `train_moe: error: ...`, with what
// failed, where, and what to do about it.
#ifndef DEVICE_CHECK_H
#define DEVICE_CHECK_H

#include "device/types.h"

BEGIN_C

// Exit codes of the program (0: done, a save on a signal too).
enum { EXIT_FAILED = 1, EXIT_USAGE = 2 };

#if defined(__GNUC__)
#define PRINTF_LIKE(f, a) __attribute__((format(printf, f, a)))
#define NORETURN __attribute__((noreturn))
#else
#define PRINTF_LIKE(f, a)
#define NORETURN
#endif

// Prints "train_moe: error: <message>" and ends the run with `code`. Any thread may call it; of several that fail at
// once, the first is heard.
NORETURN void die(int code, const char* format, ...) PRINTF_LIKE(2, 3);

// Prints "train_moe: warning: <message>"; on rank 0 only, for what all ranks find alike.
void warn(const char* format, ...) PRINTF_LIKE(1, 2);
// On every rank that calls it, with its name: for what concerns that rank alone.
void warn_here(const char* format, ...) PRINTF_LIKE(1, 2);

// Makes die() end a run of several ranks (parallel/ranks_mpi.c calls it): `who` ("rank 2 of 4 (host): ") stands before
// the message, and end_all(code) then ends every rank, this one too. Ranks other than 0 wait a moment before they
// print: where all fail for one reason, rank 0 prints it and ends them. end_all NULL: this process is on its own again.
void die_as_rank(int rank, const char* who, void (*end_all)(int code));

// A broken promise inside the program (a bug, not bad input): file:line and the condition.
#define ASSERT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) die(EXIT_FAILED, "%s:%d: internal check failed: %s", __FILE__, __LINE__, #condition);        \
    } while (0)

// n bytes as a string for a terminal, in fresh memory: control characters but those in `keep` as \\x1b.
char* host_printable(const char* bytes, size_t n, const char* keep);

// Seconds on a clock that only moves forward.
double host_seconds(void);
double host_time(void);  // seconds since 1970

// malloc and strdup that never return NULL. Zeroed. For host memory outside the training step.
void* host_alloc(size_t bytes);
char* host_strdup(const char* text);
// Room for `bytes` bytes: that at `memory`, of *room bytes, or a new one in its place. What it held is lost.
void* host_at_least(void* memory, size_t* room, size_t bytes);
// printf into a fresh string of the right length; the caller frees it.
char* host_format(const char* format, ...) PRINTF_LIKE(1, 2);
// printf at the end of *text, a string in memory of its own, which moves.
void host_append(char** text, const char* format, ...) PRINTF_LIKE(2, 3);

END_C

#endif
