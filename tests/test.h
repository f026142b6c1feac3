// The harness of the C tests. A test is a function; it fails by CHECK. A program runs its tests by name and ends with
// one line `N passed, N failed, N skipped` (tests/run.py adds these up).
//
// Error measure of float results: relative_error = ||out - ref|| / ||ref|| over a whole tensor.
#ifndef TESTS_TEST_H
#define TESTS_TEST_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "device/device.h"
#include "layers/normal.h"

static int test_failures_here, test_passed, test_failed, test_skipped;

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("    %s:%d: %s: ", __FILE__, __LINE__, #condition);                                                 \
            printf(__VA_ARGS__);                                                                                       \
            printf("\n");                                                                                              \
            test_failures_here++;                                                                                      \
        }                                                                                                              \
    } while (0)

// Whether this machine has a device. Tests of a CUDA build are skipped without a GPU.
static inline int device_available(void) { return device_free_memory(1) > 0; }
#define RUN(test)                                                                                                      \
    do {                                                                                                               \
        if (!device_available()) {                                                                                     \
            SKIP(test, "no GPU");                                                                                      \
            break;                                                                                                     \
        }                                                                                                              \
        test_failures_here = 0;                                                                                        \
        test();                                                                                                        \
        if (test_failures_here)                                                                                        \
            test_failed++;                                                                                             \
        else                                                                                                           \
            test_passed++;                                                                                             \
        printf("%s %s\n", test_failures_here ? "FAIL" : "ok  ", #test);                                                \
        fflush(stdout);                                                                                                \
    } while (0)

#define SKIP(test, why)                                                                                                \
    do {                                                                                                               \
        test_skipped++;                                                                                                \
        printf("skip %s: %s\n", #test, why);                                                                           \
    } while (0)

static inline int test_summary(void) {
    printf("%d passed, %d failed, %d skipped\n", test_passed, test_failed, test_skipped);
    return test_failed ? 1 : 0;
}

static inline double relative_error(const real* out, const real* ref, int64_t n) {
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)out[i] - (double)ref[i];
        diff += d * d;
        norm += (double)ref[i] * (double)ref[i];
    }
    return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}

// n numbers of a standard normal truncated at 3, from `stream`, in fresh memory.
static inline real* random_tensor(int64_t n, uint32_t stream) {
    real* x = (real*)host_alloc((size_t)n * sizeof(real));
#pragma omp parallel for schedule(static)
    for (int64_t four = 0; four < ceil_div(n, 4); four++) {
        uint32_t word[4];
        philox(word, 1234, stream, (uint64_t)four);
        for (int64_t i = 4 * four; i < min_i64(4 * four + 4, n); i++) x[i] = (float)normal_of(word[i % 4]);
    }
    return x;
}

#endif
