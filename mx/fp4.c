#include "mx/fp4_values.h"

// The tensor's largest magnitude, as bits.
static uint32_t largest_of(const Fp4Work* w, int32_t g) {
    uint32_t amax = 0;
#pragma omp parallel for reduction(max : amax) schedule(static)
    for (int64_t i = 0; i < fp4_rows(w->groups, g) * w->columns; i++)
        amax = (uint32_t)max_i64(amax, magnitude_bits((float)w->x[fp4_first(w->groups, g) * w->columns + i]));
    return amax;
}

// Sums of statistics are in order.
static void run(Fp4Work w) {
    for (int32_t g = 0; g < w.groups.El; g++) {
        const uint32_t amax = fp4_is_nv(w.blocks) ? largest_of(&w, g) : 0;
#pragma omp parallel for schedule(static) if (!w.stats)
        for (int64_t i = 0; i < fp4_blocks(&w, g); i++) fp4_block(&w, g, i, amax);
    }
}

void fp4_round(floatX* out, floatX* back, const floatX* x, Ragged groups, int64_t columns, Fp4Blocks blocks, Draw draw,
               Ctx* ctx) {
    const Fp4Work w = {out, back, x, groups, columns, blocks, draw, NULL};
    run(w);
}

void fp4_stats(QuantizationStats* stats, const floatX* x, Ragged groups, int64_t columns, Fp4Blocks blocks, Ctx* ctx) {
    const Fp4Work w = {NULL, NULL, x, groups, columns, blocks, {NULL, 0}, stats};
    run(w);
}

void fp4_hadamard(floatX* out, const floatX* x, Ragged groups, int64_t columns, Ctx* ctx) {
    for (int32_t g = 0; g < groups.El; g++)
#pragma omp parallel for collapse(2) schedule(static)
        for (int64_t r = 0; r < fp4_rows(groups, g); r += FP4_HADAMARD)
            for (int64_t c = 0; c < columns; c++) fp4_transform_rows(out, x, groups, g, r, c, columns);
}
