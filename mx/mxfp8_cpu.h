// Helpers of the CPU references (mxfp8.c, mx_swiglu.c, mx_stats.c): bit-exact quantization of the elements that share
// a scale. Not for host code.
#pragma once

#include <string.h>

#include "device/cpu.h"
#include "mx/mx_values.h"
#include "mx/mxfp8.h"

// float32 -> e4m3: round to nearest even, saturate at 448 = 0x7e.
static inline uint8_t e4m3_of(float x) {
    uint32_t u = bits_of(x), sign = u >> 24 & 0x80, a = u & 0x7fffffff;
    if (a > 0x7f800000) return 0x7f;
    if (a >= bits_of(448)) return sign | 0x7e;
    // Below 2^-6 the step of e4m3 is 2^-9. A float32 from 2^14 on has the same step, so adding 2^14 rounds. The
    // difference of the bits is the e4m3 mantissa.
    if (a < bits_of(0x1p-6f)) return sign | (bits_of(float_of_bits(a) + 0x1p14f) - bits_of(0x1p14f));
    // Drops 20 mantissa bits, half to even. A carry out of the mantissa correctly increments the exponent.
    a += 0x7ffff + (a >> 20 & 1);
    return sign | ((a >> 20) - ((127 - 7) << 3));
}

// Fake quantization of x with scale s: quantized, then dequantized.
static inline float value_of(float x, int s) {
    return e4m3_value(e4m3_of(x * mx_scale_inverse(s))) * mx_scale_value(s);
}

// The scale byte of a group of rows x columns elements, with row stride `stride`.
static inline int scale_of(const floatX* x, int64_t stride, int64_t rows, int64_t columns, int32_t mode) {
    uint32_t amax = 0;  // magnitudes compare like their bits; Inf and NaN are above all others
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            uint32_t a = bits_of((float)x[r * stride + c]) & 0x7fffffff;
            amax = a > amax ? a : amax;
        }
    if (amax >= 0x7f800000) return MX_NAN;
    // 1.75 = 448 / 2^8. Only a mantissa above it carries into the exponent. For 0x04600001, amax / 448 is just above
    // 2^-127, and rounded to float32 it is 2^-127.
    int s = mode == MX_FLOOR ? (int)(amax >> 23) - 8 : amax == 0x04600001 ? 0 : (int)((amax + 0x1fffff) >> 23) - 8;
    return s > 0 ? s : 0;
}

// Quantizes rows x columns elements with scale s. The byte of element (r, c) goes to q[r q_row + c q_column].
static inline void quantize_blocks(uint8_t* q, int64_t q_row, int64_t q_column, const floatX* x, int64_t stride,
                                   int64_t rows, int64_t columns, int s) {
    const float factor = mx_scale_inverse(s);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) q[r * q_row + c * q_column] = e4m3_of((float)x[r * stride + c] * factor);
}

// The first row of group e in a channel: each group before it is padded to whole chunks.
static inline int64_t channel_start(Ragged r, int32_t e) {
    int64_t at = 0;
    while (e-- > 0) at += round_up(r.group_rows[e], MX_CHUNK);
    return at;
}

// Elements along the contraction that share a scale (fewer at the end of a row).
static inline int64_t chunk_of(MxRecipe recipe) { return recipe.align == 1 ? MX_BLOCK : MX_CHUNK; }
