#include "mx/fp4_values.h"

// Block i of group g. amax: that of the tensor; NULL: returns that of the block alone.
static uint32_t block(const Fp4Work* w, int32_t g, int64_t i, const uint32_t* amax) {
    const Fp4Group group = fp4_group(w, g, w->blocks.high, w->blocks.wide);
    const int lines = (int)group.block_lines, n = (int)max_i64(group.high, group.wide);
    const int64_t step = group.wide > 1 ? 1 : group.columns;

    // Its lines, transformed where they are, and their largest magnitude.
    float v[32][32], value[32];
    uint32_t largest = 0;
    for (int l = 0; l < lines; l++) {
        const Fp4Line line = fp4_line(group, (uint32_t)i * group.block_lines + (uint32_t)l);
        const floatX* x = w->x + (group.first + line.row) * group.columns + line.column;
        for (int k = 0; k < n; k++) v[l][k] = k < line.inside ? (float)x[k * step] : 0;
        largest = (uint32_t)max_i64(largest, fp4_prepare(v[l], n, line));
    }
    if (!amax) return largest;

    // Its scale.
    const Fp4Scale s =
        fp4_is_nv(w->blocks) ? nvfp4_scale(nvfp4_tensor(*amax), largest) : mxfp4_scale(w->blocks.scale, largest);

    // Its values, also transposed, or their statistics.
    for (int l = 0; l < lines; l++) {
        const Fp4Line line = fp4_line(group, (uint32_t)i * group.block_lines + (uint32_t)l);
        fp4_values(value, v[l], n, group.wide, s, w, g, line);
        for (int k = 0; k < min_i64(n, line.inside); k++) {
            if (w->stats) stats_add(w->stats, v[l][k], v[l][k] * s.inverse, 6, value[k]);
            if (w->out) w->out[(group.first + line.row) * group.columns + line.column + k * step] = value[k];
            if (w->back) w->back[((int64_t)g * group.columns + line.column + k) * group.rows + line.row] = value[k];
        }
    }
    return largest;
}

// Sums of statistics are in order.
void fp4_round(Fp4Work w, Ctx* ctx) {
    for (int32_t g = 0; g < w.groups.El; g++) {
        const Fp4Group group = fp4_group(&w, g, w.blocks.high, w.blocks.wide);
        const int64_t blocks = group.lines / group.block_lines, measured = fp4_is_nv(w.blocks) ? blocks : 0;
        uint32_t amax = 0;  // of the tensor, for NVFP4
#pragma omp parallel for reduction(max : amax) schedule(static)
        for (int64_t i = 0; i < measured; i++) amax = (uint32_t)max_i64(amax, block(&w, g, i, NULL));
#pragma omp parallel for schedule(static) if (!w.stats)
        for (int64_t i = 0; i < blocks; i++) block(&w, g, i, &amax);
    }
}
