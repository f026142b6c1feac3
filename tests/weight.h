// Weights as the ops take them, for the tests of products and blocks.
#ifndef TESTS_WEIGHT_H
#define TESTS_WEIGHT_H

#include "mx/products.h"

// `count` matrices (OC, IC), of values, whose products add to `grad`.
static inline Weight plain_weight(const floatX* w, real* grad, int64_t count, int64_t OC, int64_t IC) {
    Weight weight;
    memset(&weight, 0, sizeof(weight));
    weight.w = w, weight.grad = grad, weight.accumulate = 1;
    weight.count = count, weight.OC = OC, weight.IC = IC;
    return weight;
}

#endif
