// The values of narrow numbers: bf16, float16 and e4m3, the same on CPU and GPU. The bits of a number are shifted to
// their place in a float32.
#pragma once

#include <math.h>
#include <string.h>

#include "device/types.h"

static inline BOTH_SIDES float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// bf16 is the upper half of a float32.
static inline float bf16_value(uint16_t x) { return float_of_bits((uint32_t)x << 16); }

// float16: 5 bits of exponent, 10 of mantissa. The exponent bias of a float32 is larger by 112; the bits of a subnormal
// float16 are a subnormal float32. Inf becomes NaN.
static inline float half_value(uint16_t h) {
    const float magnitude = (h & 0x7c00) == 0x7c00 ? NAN : float_of_bits((uint32_t)(h & 0x7fff) << 13) * 0x1p112f;
    return h & 0x8000 ? -magnitude : magnitude;
}

// e4m3: sign, 4 exponent bits with bias 7, 3 mantissa bits, no Inf; S.1111.111 is NaN. The exponent bias of a float32
// is larger by 120; the bits of a subnormal e4m3 are a subnormal float32.
static inline float e4m3_value(uint8_t q) {
    const float magnitude = (q & 0x7f) == 0x7f ? NAN : float_of_bits((uint32_t)(q & 0x7f) << 20) * 0x1p120f;
    return q & 0x80 ? -magnitude : magnitude;
}
