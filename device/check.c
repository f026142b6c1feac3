#include "device/check.h"

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// The arguments of die_as_rank: this process among the ranks of a run.
static struct {
    int rank;
    char who[128];
    void (*end_all)(int code);
} run;

void die_as_rank(int rank, const char* who, void (*end_all)(int code)) {
    run.rank = rank;
    snprintf(run.who, sizeof(run.who), "%s", who);
    run.end_all = end_all;
}

// Waits before a rank prints a failure that other ranks may share. A rank that rank 0 ends meanwhile exits at once: no
// SIGTERM handler needs to save any more. If the exit hangs, an alarm ends this process some seconds later.
static void wait_for_rank_0(void) {
    unsigned patience_ms = run.rank == 0 ? 0 : 1000 + 250 * (unsigned)(run.rank < 20 ? run.rank : 20);
    signal(SIGTERM, SIG_DFL);
    signal(SIGALRM, SIG_DFL);
    alarm(patience_ms / 1000 + 5);
    struct timespec patience = {patience_ms / 1000, patience_ms % 1000 * 1000000};
    nanosleep(&patience, NULL);
}

// Writes control characters as text, because they can move a terminal's cursor and more. Each byte becomes at most 4.
// In UTF-8, U+0080 to U+009F are control characters too: a pair of bytes.
static size_t printable(char* to, const char* bytes, size_t n, const char* keep) {
    size_t length = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)bytes[i], next = i + 1 < n ? (unsigned char)bytes[i + 1] : 0;
        const int pair = c == 0xc2 && next >= 0x80 && next < 0xa0;
        if (pair)
            length += (size_t)sprintf(to + length, "\\xc2\\x%02x", next);
        else if ((c < 0x20 && !(c && strchr(keep, c))) || c == 0x7f)
            length += (size_t)sprintf(to + length, "\\x%02x", c);
        else
            to[length++] = (char)c;
        i += (size_t)pair;
    }
    to[length] = 0;
    return length;
}

char* host_printable(const char* bytes, size_t n, const char* keep) {
    char* text = (char*)host_alloc(4 * n + 1);
    printable(text, bytes, n, keep);
    return text;
}

// Prints one line in a single write, because other ranks write to the same terminal. It allocates nothing: memory may
// be exhausted, and the stack may be small.
static void say(const char* kind, const char* who, const char* format, va_list args) {
    static char text[8192], line[4 * sizeof(text) + 2];
    flockfile(stderr);  // one thread at a time
    int capacity = (int)sizeof(text), n = snprintf(text, (size_t)capacity, "train_moe: %s: %s", kind, who);
    n += vsnprintf(text + n, (size_t)(capacity - n), format, args);
    strcpy(line + printable(line, text, (size_t)(n < capacity ? n : capacity - 1), ""), "\n");
    fputs(line, stderr);
    fflush(stderr);
    funlockfile(stderr);
}

void die(int code, const char* format, ...) {
    static pthread_mutex_t first = PTHREAD_MUTEX_INITIALIZER;  // never unlocked: other threads wait for the end
    pthread_mutex_lock(&first);
    if (run.end_all) wait_for_rank_0();

    // Earlier output of the run comes before the message.
    fflush(stdout);
    va_list args;
    va_start(args, format);
    say("error", run.who, format, args);
    va_end(args);

    if (run.end_all) run.end_all(code);
    // _Exit: other threads may still be at work (the loader), and exit handlers must not wait for them.
    _Exit(code);
}

void warn(const char* format, ...) {
    // All ranks would print the same line.
    if (run.rank != 0) return;
    va_list args;
    va_start(args, format);
    say("warning", "", format, args);
    va_end(args);
}

void warn_here(const char* format, ...) {
    va_list args;
    va_start(args, format);
    say("warning", run.who, format, args);
    va_end(args);
}

static double seconds_of(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double host_seconds(void) { return seconds_of(CLOCK_MONOTONIC); }
double host_time(void) { return seconds_of(CLOCK_REALTIME); }

void* host_alloc(size_t bytes) {
    // Callers rely on zeros.
    void* p = calloc(1, bytes ? bytes : 1);
    if (!p) die(EXIT_FAILED, "out of host memory: %zu bytes were asked for", bytes);
    return p;
}

void* host_at_least(void* memory, size_t* capacity, size_t bytes) {
    if (bytes <= *capacity) return memory;
    // No realloc: callers overwrite the whole buffer, so the old contents are not copied.
    free(memory);
    *capacity = bytes;
    return host_alloc(bytes);
}

char* host_strdup(const char* text) { return host_format("%s", text); }

// Returns `before` and the printed text, newly allocated: the length is measured first.
static char* print_after(const char* before, const char* format, va_list args) {
    va_list again;
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    ASSERT(n >= 0);
    size_t length = strlen(before);
    char* text = (char*)host_alloc(length + (size_t)n + 1);
    memcpy(text, before, length);
    vsnprintf(text + length, (size_t)n + 1, format, again);
    va_end(again);
    return text;
}

char* host_format(const char* format, ...) {
    va_list args;
    va_start(args, format);
    char* text = print_after("", format, args);
    va_end(args);
    return text;
}

void host_append(char** text, const char* format, ...) {
    va_list args;
    va_start(args, format);
    char* longer = print_after(*text, format, args);
    va_end(args);
    free(*text);
    *text = longer;
}
