// Fatal errors and warnings. Every failure prints one line on stderr, `train_moe: error: ...`: the failure, its place,
// and a remedy.
#pragma once

#include "device/types.h"

// Exit codes of the program (0: done, or saved on a signal).
enum { EXIT_FAILED = 1, EXIT_USAGE = 2 };

#define PRINTF_LIKE(f, a) __attribute__((format(printf, f, a)))
#define NORETURN __attribute__((noreturn))

// Prints "train_moe: error: <message>" and ends the run with `code`. Any thread may call die(); if several threads fail
// at once, only the first prints.
NORETURN void die(int code, const char* format, ...) PRINTF_LIKE(2, 3);

// Prints "train_moe: warning: <message>" on rank 0 only; for conditions that are the same on all ranks.
void warn(const char* format, ...) PRINTF_LIKE(1, 2);
// Prints a warning on every rank that calls warn_here, with the rank's name; for conditions of that rank alone.
void warn_here(const char* format, ...) PRINTF_LIKE(1, 2);

// Makes die() end a run of several ranks (parallel/ranks_mpi.c calls it). die() prints `who` ("rank 2 of 4 (host): ")
// before the message. Then end_all(code) ends every rank, this rank too. Ranks other than 0 wait a moment before they
// print: if all ranks fail for one reason, rank 0 prints the reason and ends the others. With end_all NULL, die() ends
// this process alone again.
void die_as_rank(int rank, const char* who, void (*end_all)(int code));

// An internal check, for bugs and not for bad input: reports file:line and the condition.
#define ASSERT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) die(EXIT_FAILED, "%s:%d: internal check failed: %s", __FILE__, __LINE__, #condition);        \
    } while (0)

// n bytes as a string for a terminal, newly allocated. Control characters outside of `keep` become escapes like \\x1b.
char* host_printable(const char* bytes, size_t n, const char* keep);

// Seconds of a monotonic clock.
double host_seconds(void);
double host_time(void);  // seconds since 1970

// Zeroed memory, and a copy of `text`, newly allocated. Without memory the run ends. For use outside the training step.
void* host_alloc(size_t bytes);
char* host_strdup(const char* text);
// A buffer of at least `bytes` bytes: `memory` if its *capacity bytes suffice, else a new one; `memory` is then freed.
void* host_at_least(void* memory, size_t* capacity, size_t bytes);
// printf into a newly allocated string of the right length; the caller frees it.
char* host_format(const char* format, ...) PRINTF_LIKE(1, 2);
// Appends by printf to *text, an allocated string, which may move.
void host_append(char** text, const char* format, ...) PRINTF_LIKE(2, 3);
