#include "device/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void die(int code, const char* format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fprintf(stderr, "train_moe: error: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    fflush(stderr);
    // _Exit: other threads may still be at work (the loader), and exit handlers must not wait for them.
    _Exit(code);
}

void warn(const char* format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "train_moe: warning: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
}

void* host_alloc(size_t bytes) {
    void* p = calloc(1, bytes ? bytes : 1);
    if (!p) die(EXIT_FAILED, "out of host memory: %zu bytes were asked for", bytes);
    return p;
}

char* host_strdup(const char* text) {
    size_t n = strlen(text) + 1;
    char* copy = (char*)host_alloc(n);
    memcpy(copy, text, n);
    return copy;
}

char* host_format(const char* format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    ASSERT(n >= 0);
    char* text = (char*)host_alloc((size_t)n + 1);
    va_start(args, format);
    vsnprintf(text, (size_t)n + 1, format, args);
    va_end(args);
    return text;
}
