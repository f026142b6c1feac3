#include "grouped/grouped_gemm.h"

#include "device/cpu.h"

// Grouped GEMM on the CPU. Experts have different numbers of rows, so threads take (expert, tile) pairs dynamically.
// Tile i is an expert's rows from i * TILE on; it is empty for an expert with fewer rows.

static int64_t most_tiles(Ragged r) {
    int64_t most = 0;
    for (int32_t e = 0; e < r.El; e++) most = max_i64(most, r.group_rows[e]);
    return ceil_div(most, TILE);
}

void grouped_gemm_forward(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    int64_t tiles = most_tiles(r);
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int32_t e = 0; e < r.El; e++) {
            int64_t rows = min_i64(TILE, r.group_rows[e] - tile * TILE), at = r.group_start[e] + tile * TILE;
            if (rows > 0) gemm(0, 1, rows, OC, IC, 1, x + at * IC, IC, w + e * OC * IC, IC, 0, y + at * OC, OC);
        }
}

void grouped_gemm_dgrad(floatX* dx, const floatX* dy, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    int64_t tiles = most_tiles(r);
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int32_t e = 0; e < r.El; e++) {
            int64_t rows = min_i64(TILE, r.group_rows[e] - tile * TILE), at = r.group_start[e] + tile * TILE;
            if (rows > 0) gemm(0, 0, rows, IC, OC, 1, dy + at * OC, OC, w + e * OC * IC, IC, 0, dx + at * IC, IC);
        }
}

int grouped_gemm_gathers(const Ctx* ctx) { return 0; }

void grouped_gemm_swiglu(floatX* h, floatX* a, const floatX* x, const floatX* w13, GroupedRows order, Ragged r,
                         int64_t C, int64_t F, Ctx* ctx) {
    ASSERT(order == ALL_BY_ROW);
    grouped_gemm_forward(h, x, w13, r, C, 2 * F, ctx);
    experts_swiglu_forward(a, h, r, F, ctx);
}

int32_t grouped_gemm_dgrad_swiglu(ExpertsBackward t, const floatX* dy, const floatX* w2, GroupedRows order, Ragged r,
                                  int64_t C, int64_t F, Ctx* ctx) {
    ASSERT(order == ALL_BY_ROW);
    grouped_gemm_dgrad((floatX*)t.da_ungated, dy, w2, r, F, C, ctx);
    experts_swiglu_backward(t, r, F, ctx);
    return 1;
}

void grouped_gemm_wgrad(real* dw, floatX* rounded, const floatX* dy, const floatX* x, GroupedRows order, Ragged r,
                        int64_t IC, int64_t OC, int accumulate, Ctx* ctx) {
    ASSERT(order == ALL_BY_ROW);
    if (rounded) dw = rounded;
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int32_t e = 0; e < r.El; e++)
        for (int64_t o = 0; o < OC; o += TILE) {
            int64_t at = r.group_start[e];
            gemm(1, 0, min_i64(TILE, OC - o), IC, r.group_rows[e], 1, dy + at * OC + o, OC, x + at * IC, IC, accumulate,
                 dw + (e * OC + o) * IC, IC);
        }
}
