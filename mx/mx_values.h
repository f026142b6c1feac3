// Decodes MXFP8 scale bytes (mx/mxfp8.h), and counts elements, the same on CPU and GPU. device/values.h decodes e4m3
// elements.
#pragma once

#include "device/values.h"
#include "mx/format.h"

static inline BOTH_SIDES uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
}

// 2^(s - 127): the factor that dequantizes a block with scale byte s. The product is exact in float32, up to 2^128.
static inline BOTH_SIDES float mx_scale_value(uint32_t s) {
    return float_of_bits(s == 255 ? 0x7fffffffu : s == 0 ? 0x00400000u : s << 23);
}

// 2^(127 - s): the factor of x before rounding to e4m3. The factor is a normal number, because no finite block has s >
// 247. The product is exact in float32, or so small that it is rounded to 0 anyway.
static inline BOTH_SIDES float mx_scale_inverse(uint32_t s) {
    return float_of_bits(s == 255 ? 0x7fffffffu : (254 - s) << 23);
}

// Adds x to the statistics, except to `inexact`, unless `value` is NaN. scaled: x times the factor before rounding.
// most: the largest magnitude to which `scaled` can be rounded.
static inline BOTH_SIDES void stats_add(QuantizationStats* stats, float x, float scaled, float most, float value) {
    if (value != value) return;
    stats->elements += x != 0;
    stats->saturated += fabsf(scaled) > most;
    stats->flushed += x != 0 && value == 0;
    stats->signal += (double)x * x;
    stats->noise += ((double)x - value) * ((double)x - value);
}
