// Weights and operands as the ops take them, for the tests of GEMMs and blocks.
#ifndef TESTS_WEIGHT_H
#define TESTS_WEIGHT_H

#include "linear/quantized.h"
#include "mx/formats.h"

// `count` matrices (OC, IC), not quantized. Their gradients are added to `grad`.
static inline Weight plain_weight(const floatX* w, real* grad, int64_t count, int64_t OC, int64_t IC) {
    Weight weight;
    memset(&weight, 0, sizeof(weight));
    weight.w = w, weight.grad = grad, weight.accumulate = 1;
    weight.count = count, weight.OC = OC, weight.IC = IC;
    return weight;
}

// n numbers in floatX, in fresh device memory.
static inline floatX* values_on_device(const real* x, int64_t n, Ctx* ctx) {
    const size_t bytes = (size_t)n * sizeof(floatX);
    floatX *values = (floatX*)device_alloc(bytes, "x"), *rounded = (floatX*)host_alloc(bytes);
    for (int64_t i = 0; i < n; i++) rounded[i] = (floatX)x[i];
    device_upload(values, rounded, bytes, ctx);
    ctx_sync(ctx);
    free(rounded);
    return values;
}

// Fills an output with NaN.
static inline void fill_with_nan(void* p, size_t bytes, Ctx* ctx) {
    char* nan = (char*)host_alloc(bytes);
    memset(nan, 0xff, bytes);
    device_upload(p, nan, bytes, ctx);
    free(nan);
}

#endif
