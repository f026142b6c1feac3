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
    real* wide = (real*)device_alloc((size_t)n * sizeof(real), "x");
    floatX* values = (floatX*)device_alloc((size_t)n * sizeof(floatX), "x");
    device_upload(wide, x, (size_t)n * sizeof(real), ctx);
    device_to_floatX(values, wide, n, ctx);
    ctx_sync(ctx);
    device_free(wide);
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
