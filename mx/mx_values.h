// Decodes MXFP8 scale bytes and e4m3 elements (mx/mxfp8.h), the same on CPU and GPU.
#pragma once

#include <math.h>
#include <string.h>

#include "device/types.h"

static inline BOTH_SIDES float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// 2^(s - 127): the factor that dequantizes a block with scale byte s. The product is exact in float32, up to 2^128.
static inline BOTH_SIDES float mx_scale_value(uint32_t s) {
    return float_of_bits(s == 255 ? 0x7fffffffu : s == 0 ? 0x00400000u : s << 23);
}

// 2^(127 - s): the factor of x before it is rounded to e4m3. It is a normal number, because no finite block has s >
// 247. The product is exact in float32, or so small that it is rounded to 0 anyway.
static inline BOTH_SIDES float mx_scale_inverse(uint32_t s) {
    return float_of_bits(s == 255 ? 0x7fffffffu : (254 - s) << 23);
}

// Decodes e4m3: sign, 4 exponent bits with bias 7, 3 mantissa bits, no Inf; S.1111.111 is NaN. The bits are shifted
// into a float32, whose exponent bias is larger by 120. Subnormal e4m3 numbers are subnormal there too.
static inline float e4m3_value(uint8_t q) {
    const float magnitude = (q & 0x7f) == 0x7f ? NAN : float_of_bits((uint32_t)(q & 0x7f) << 20) * 0x1p120f;
    return q & 0x80 ? -magnitude : magnitude;
}
