// The arithmetic of mx/fp4.h, the same on CPU and GPU. Not for host code.
//
// A block is made of lines: one line down the column if blocks are one element wide, else the block's rows. A thread of
// a kernel has lines in registers: nvcc unrolls short loops with constant bounds, and longer loops with UNROLL. n:
// elements of a line, 16 or 32. Where the group ends within a block, zeros follow, which change nothing.
#pragma once

#include <float.h>

#include "device/random.h"
#include "mx/fp4.h"
#include "mx/mx_values.h"
#include "mx/mxfp8.h"

// x >= 0 to the nearest e4m3, ties to even, at most 448. Below 2^-6 e4m3 has the step 2^-9, as float32 has from 2^14
// on.
static inline BOTH_SIDES float e4m3_nearest(float x) {
    const uint32_t u = bits_of(x);
    const float small = (x + 0x1p14f) - 0x1p14f, other = float_of_bits((u + 0x7ffff + (u >> 20 & 1)) & 0xfff00000u);
    return fminf(x < 0x1p-6f ? small : other, 448);
}

// The offset, in units of two steps, of bits 7 to 22 of a word: 1/4 - r / 2, where r = (bits + 1/2) 2^-16. A number is
// rounded up if r is below its distance d from the lower neighbour, in steps. The probability is d, to 2^-17.
static inline BOTH_SIDES float e2m1_offset(uint32_t word) {
    return 0.75f - float_of_bits(0x3f000040 | (word & 0x7fff80));
}

// The factors of a block: one before rounding to e2m1, two after. For a tensor the members are e, 0 and t (mx/fp4.h).
typedef struct Fp4Scale {
    float inverse, block, tensor;
} Fp4Scale;

// The factors of a block. rule: an MxScale. amax: the bits of the block's largest magnitude.
static inline BOTH_SIDES Fp4Scale mxfp4_scale(int32_t rule, uint32_t amax) {
    // 1.5 = 6 / 2^2: only a mantissa above it carries into the exponent.
    const int32_t exponent = (int32_t)((amax + (rule == MX_RCEIL ? 0x3fffff : 0)) >> 23) - 2;
    const uint32_t byte = amax >= 0x7f800000 ? (uint32_t)MX_NAN : exponent > 0 ? (uint32_t)exponent : 0;
    const Fp4Scale s = {mx_scale_inverse(byte), mx_scale_value(byte), 1};
    return s;
}

// The factors of a tensor. amax: the bits of the tensor's largest magnitude.
static inline BOTH_SIDES Fp4Scale nvfp4_tensor(uint32_t amax) {
    const float e = fminf(2688 / float_of_bits(amax), FLT_MAX);
    const Fp4Scale s = {e, 0, amax >= 0x7f800000 ? float_of_bits(0x7fffffff) : 1 / e};
    return s;
}

// The factors of a block. s: the tensor's factors. amax: as in mxfp4_scale.
static inline BOTH_SIDES Fp4Scale nvfp4_scale(Fp4Scale s, uint32_t amax) {
    s.block = e4m3_nearest(float_of_bits(amax) / 6 * s.inverse);
    s.inverse = s.block > 0 ? fminf(1 / (s.tensor * s.block), FLT_MAX) : 0;
    return s;
}

// Rounds x to e2m1. Neighbours are multiples of a step that grows with |x|: half of `power`, which is 1, 2 or 4.
// float32 has this step around `large`, so adding `large` rounds to nearest, ties to even. Stochastic rounding first
// adds an offset of less than half a step. A NaN may become 6 here, because the scale of a block with NaN is NaN.
static inline BOTH_SIDES float fp4_e2m1(float x, bool random, float offset) {
    const float a = fminf(fabsf(x), 6), power = float_of_bits(bits_of(fmaxf(a, 1)) & 0xff800000u);
    const float large = power * 0x1.8p22f;
    return copysignf((random ? a + power * offset : a) + large - large, x);
}

// H S x of 16 elements, in place: a butterfly of sums and differences of quarters, which are exact.
static inline BOTH_SIDES void fp4_hadamard(float* v) {
    for (int k = 0; k < FP4_HADAMARD; k++) v[k] *= FP4_SIGNS >> k & 1 ? -0.25f : 0.25f;
    UNROLL
    for (int half = 1; half < FP4_HADAMARD; half *= 2)
        for (int k = 0; k < FP4_HADAMARD; k++)
            if (!(k & half)) {
                const float a = v[k], b = v[k + half];
                v[k] = a + b;
                v[k + half] = a - b;
            }
}

// A group in blocks of high x wide: first row, number of rows, and number of rows that the transform may take (own). On
// the GPU `rows` counts pad rows too, which are zeros; `own` does not. Lines count block by block, to the right and
// then down.
typedef struct Fp4Group {
    int64_t first;
    int32_t rows, own, columns, high, wide;
    uint32_t block_lines, lines;
} Fp4Group;

static inline BOTH_SIDES Fp4Group fp4_group(const Fp4Work* w, int32_t g, int32_t high, int32_t wide) {
    const Ragged r = w->groups;
    const int64_t first = r.group_start ? r.group_start[g] : g * r.capacity;
    const int32_t rows = (int32_t)(r.group_start ? r.group_start[g + 1] - first : r.capacity);
    const int32_t own = wide > 1 || !w->blocks.transform ? 0 : r.group_start ? r.group_rows[g] : rows;
    Fp4Group group = {first, rows, own, (int32_t)w->columns, high, wide, wide > 1 ? (uint32_t)high : 1, 0};
    group.lines = (uint32_t)(ceil_div(rows, high) * (group.columns / wide)) * group.block_lines;
    return group;
}

// Line i: first element, number of elements inside the group, number of elements that the transform may take (own).
typedef struct Fp4Line {
    int32_t row, column, inside, own;
} Fp4Line;

static inline BOTH_SIDES Fp4Line fp4_line(Fp4Group g, uint32_t i) {
    const uint32_t block = i / g.block_lines, across = (uint32_t)(g.columns / g.wide);
    const int32_t r = (int32_t)(block / across) * g.high + (int32_t)(i % g.block_lines), left = g.rows - r;
    const Fp4Line line = {r, (int32_t)(block % across) * g.wide, g.wide > 1 && left > 0 ? g.wide : left, g.own - r};
    return line;
}

// Transforms a line. Returns the line's largest magnitude, as bits. Bits compare like magnitudes; Inf and NaN are above
// all others.
static inline BOTH_SIDES uint32_t fp4_prepare(float* v, int n, Fp4Line line) {
    uint32_t amax = 0;
    for (int k = 0; k < n; k += FP4_HADAMARD)
        if (k + FP4_HADAMARD <= line.own) fp4_hadamard(v + k);
    for (int k = 0; k < n; k++) amax = (uint32_t)max_i64(amax, bits_of(v[k]) & 0x7fffffff);
    return amax;
}

// The values of a line of group g, in blocks that are `wide`. The random number of an element depends on its column and
// on the place of its row in the step. Eight neighbours along the line share a counter.
static inline BOTH_SIDES void fp4_values(float* out, const float* v, int n, int wide, Fp4Scale s, const Fp4Work* w,
                                         int32_t g, Fp4Line line) {
    const BatchDraws* draws = w->draw.batch;
    if (!draws) {
        UNROLL
        for (int k = 0; k < n; k++) out[k] = fp4_e2m1(v[k] * s.inverse, false, 0) * s.block * s.tensor;
        return;
    }
    const uint64_t row = (uint64_t)(draws->first + line.row), column = (uint64_t)line.column, key = draws->key;
    const uint64_t counter = (wide == 1 ? column << 40 | row : row << 24 | column) / 8;
    UNROLL
    for (int k = 0; k < n; k += 8) {
        uint32_t word[4];
        philox(word, key, w->draw.stream + (uint32_t)g, counter + (uint64_t)k / 8);
        for (int j = 0; j < 8; j++) {
            const uint32_t u = word[j / 2];  // an odd element has the other 16 bits
            const float offset = e2m1_offset(j % 2 ? u << 16 | u >> 16 : u);
            out[k + j] = fp4_e2m1(v[k + j] * s.inverse, true, offset) * s.block * s.tensor;
        }
    }
}
