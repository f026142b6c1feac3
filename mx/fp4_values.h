// The arithmetic of mx/fp4.h, the same on CPU and GPU. A block is computed by one thread. Not for host code.
#pragma once

#include "device/random.h"
#include "mx/fp4.h"
#include "mx/mx_values.h"
#include "mx/mxfp8.h"

// Magnitudes compare like these bits; Inf and NaN are above all others.
static inline BOTH_SIDES uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffff; }

// x >= 0 to the nearest e4m3, ties to even, at most 448. Below 2^-6 the step is 2^-9, as that of float32 from 2^14 on.
static inline BOTH_SIDES float e4m3_nearest(float x) {
    if (x >= 448) return 448;
    if (x < 0x1p-6f) return (x + 0x1p14f) - 0x1p14f;
    const uint32_t u = bits_of(x);
    return float_of_bits((u + 0x7ffff + (u >> 20 & 1)) & 0xfff00000u);
}

// x to e2m1. Its neighbours are the multiples of a step that grows with |x|. word: a random number, NULL: to nearest.
static inline BOTH_SIDES float e2m1_rounded(float x, const uint32_t* word) {
    const float a = fabsf(x) > 6 ? 6 : fabsf(x),
                step = a < 2   ? 0.5f
                       : a < 4 ? 1.0f
                               : 2.0f,
                t = a / step, low = floorf(t);
    // A fraction of t is a multiple of 2^-24 or smaller than one, so the probability is off by less than 2^-24.
    return copysignf((word ? low + ((float)(*word >> 8) * 0x1p-24f < t - low) : rintf(t)) * step, x);
}

// The factors of a block: before e2m1, and two after it.
typedef struct Fp4Scale {
    float inverse, block, tensor;
} Fp4Scale;

static inline BOTH_SIDES float fp4_value(float scaled, Fp4Scale s, const uint32_t* word) {
    return e2m1_rounded(scaled, word) * s.block * s.tensor;
}

// From the bits of the largest magnitudes, of the block and of the tensor.
static inline BOTH_SIDES Fp4Scale mxfp4_scale(int32_t rule, uint32_t amax) {
    // 1.5 = 6 / 2^2: only a mantissa above it carries into the exponent.
    const int32_t exponent = (int32_t)((amax + (rule == MX_RCEIL ? 0x3fffff : 0)) >> 23) - 2;
    const uint32_t byte = amax >= 0x7f800000 ? (uint32_t)MX_NAN : exponent > 0 ? (uint32_t)exponent : 0;
    const Fp4Scale s = {mx_scale_inverse(byte), mx_scale_value(byte), 1};
    return s;
}

// largest: the e2m1 that a block's largest magnitude becomes, 6 or 4.
static inline BOTH_SIDES Fp4Scale nvfp4_scale(int32_t rule, uint32_t amax, uint32_t amax_tensor, int largest) {
    const float most = float_of_bits(0x7f7fffff);
    const float e = fminf((rule == NVFP4_FOUR_SIX ? 1536.0f : 2688.0f) / float_of_bits(amax_tensor), most);
    Fp4Scale s = {0, 0, amax_tensor >= 0x7f800000 ? float_of_bits(0x7fffffff) : 1 / e};
    s.block = e4m3_nearest(float_of_bits(amax) / 6 * e * (largest == 4 ? 1.5f : 1.0f));
    if (s.block > 0) s.inverse = fminf(1 / (s.tensor * s.block), most);
    return s;
}

// Everything that fp4_round is told.
typedef struct Fp4Work {
    floatX *out, *back;
    const floatX* x;
    Ragged groups;
    int64_t columns;
    Fp4Blocks blocks;
    Draw draw;
    QuantizationStats* stats;  // not NULL: += instead of writing values
} Fp4Work;

// A group's first row and its rows; on the GPU pad rows, zeros, belong to it.
static inline BOTH_SIDES int64_t fp4_first(Ragged r, int32_t g) {
    return r.group_start ? r.group_start[g] : g * r.capacity;
}
static inline BOTH_SIDES int64_t fp4_rows(Ragged r, int32_t g) { return fp4_first(r, g + 1) - fp4_first(r, g); }
static inline BOTH_SIDES int64_t fp4_blocks(const Fp4Work* w, int32_t g) {
    return ceil_div(fp4_rows(w->groups, g), w->blocks.high) * ceil_div(w->columns, w->blocks.wide);
}

static inline BOTH_SIDES void fp4_count(QuantizationStats* stats, float x, float scaled, float value) {
    if (value != value) return;
    stats->elements += x != 0;
    stats->saturated += fabsf(scaled) > 6;
    stats->flushed += x != 0 && value == 0;
    stats->signal += (double)x * x;
    stats->noise += ((double)x - value) * ((double)x - value);
}

// Block i of group g, from left to right, then down. The random number of an element depends on its column and on the
// place of its row in the step.
static inline BOTH_SIDES void fp4_block(const Fp4Work* w, int32_t g, int64_t i, uint32_t amax_tensor) {
    const Fp4Blocks f = w->blocks;
    const int64_t across = ceil_div(w->columns, f.wide), first = fp4_first(w->groups, g), rows = fp4_rows(w->groups, g);
    const int64_t r0 = i / across * f.high, c0 = i % across * f.wide;
    const int64_t r1 = min_i64(r0 + f.high, rows), c1 = min_i64(c0 + f.wide, w->columns);
    const BatchDraws* draws = w->draw.batch;

    uint32_t amax = 0;
    for (int64_t r = r0; r < r1; r++)
        for (int64_t c = c0; c < c1; c++)
            amax = (uint32_t)max_i64(amax, magnitude_bits((float)w->x[(first + r) * w->columns + c]));
    Fp4Scale s = fp4_is_nv(f) ? nvfp4_scale(f.scale, amax, amax_tensor, 6) : mxfp4_scale(f.scale, amax);

    // Four Over Six. fma: the same bits on CPU and GPU.
    if (f.scale == NVFP4_FOUR_SIX) {
        const Fp4Scale four = nvfp4_scale(f.scale, amax, amax_tensor, 4);
        double error_6 = 0, error_4 = 0;
        for (int64_t r = r0; r < r1; r++)
            for (int64_t c = c0; c < c1; c++) {
                const float x = (float)w->x[(first + r) * w->columns + c];
                const double off_6 = (double)x - fp4_value(x * s.inverse, s, NULL);
                const double off_4 = (double)x - fp4_value(x * four.inverse, four, NULL);
                error_6 = fma(off_6, off_6, error_6);
                error_4 = fma(off_4, off_4, error_4);
            }
        if (error_4 < error_6) s = four;
    }

    uint64_t have = UINT64_MAX;  // the counter that `word` belongs to: one serves four neighbours of a block
    uint32_t word[4];
    for (int64_t r = r0; r < r1; r++)
        for (int64_t c = c0; c < c1; c++) {
            const int64_t at = (first + r) * w->columns + c;
            const float x = (float)w->x[at], scaled = x * s.inverse;
            uint64_t element = 0;
            if (draws) {
                const uint64_t row = (uint64_t)(draws->first + r);
                element = f.high > 1 ? (uint64_t)c << 40 | row : row << 24 | (uint64_t)c;
                if (element / 4 != have) philox(word, draws->key, w->draw.stream + (uint32_t)g, have = element / 4);
            }
            const float value = fp4_value(scaled, s, draws ? &word[element % 4] : NULL);
            if (w->stats) fp4_count(w->stats, x, scaled, value);
            if (w->out) w->out[at] = value;
            if (w->back) w->back[((int64_t)g * w->columns + c) * rows + r] = value;
        }
}

// H S x for rows r0 .. r0 + 15 of column c of group g: a butterfly of sums and differences of quarters, which are
// exact. Where the group's own rows end before, they are copied.
static inline BOTH_SIDES void fp4_transform_rows(floatX* out, const floatX* x, Ragged groups, int32_t g, int64_t r0,
                                                 int64_t c, int64_t columns) {
    const int64_t own = groups.group_start ? groups.group_rows[g] : groups.capacity;
    const int64_t at = (fp4_first(groups, g) + r0) * columns + c,
                  rows = min_i64(fp4_rows(groups, g) - r0, FP4_HADAMARD);
    float v[FP4_HADAMARD];
    for (int64_t k = 0; k < rows; k++) v[k] = (float)x[at + k * columns];
    if (r0 + FP4_HADAMARD <= own) {
        for (int k = 0; k < FP4_HADAMARD; k++) v[k] *= FP4_SIGNS >> k & 1 ? -0.25f : 0.25f;
        for (int half = 1; half < FP4_HADAMARD; half *= 2)
            for (int k = 0; k < FP4_HADAMARD; k++)
                if (!(k & half)) {
                    const float a = v[k], b = v[k + half];
                    v[k] = a + b;
                    v[k + half] = a - b;
                }
    }
    for (int64_t k = 0; k < rows; k++) out[at + k * columns] = v[k];
}
