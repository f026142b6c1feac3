// What the bytes of MXFP8 (mx/mxfp8.h) mean, on both sides alike.
#ifndef MX_MX_VALUES_H
#define MX_MX_VALUES_H

#include <math.h>
#include <string.h>

#include "device/types.h"

static inline BOTH_SIDES float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// 2^(s - 127): what the bytes of a block with scale byte s are multiplied by. The product is exact in float32, up to
// 2^128.
static inline BOTH_SIDES float mx_scale_value(uint32_t s) {
    return float_of_bits(s == 255 ? 0x7fffffffu : s == 0 ? 0x00400000u : s << 23);
}

// 2^(127 - s): what x is multiplied by before its cast. It is a normal number, for no finite block has s > 247. The
// product is exact in float32, or so small that it is rounded to 0 anyway.
static inline BOTH_SIDES float mx_scale_inverse(uint32_t s) {
    return float_of_bits(s == 255 ? 0x7fffffffu : (254 - s) << 23);
}

// e4m3 (sign, 4 bits of exponent with bias 7, 3 of mantissa, no Inf; S.1111.111 is NaN). The same bits as a float32,
// whose bias is 120 more; subnormal numbers are subnormal there too.
static inline float e4m3_value(uint8_t q) {
    const float magnitude = (q & 0x7f) == 0x7f ? NAN : float_of_bits((uint32_t)(q & 0x7f) << 20) * 0x1p120f;
    return q & 0x80 ? -magnitude : magnitude;
}

#endif
