#include "grouped/grouped_gemm.h"

#include "device/cpu.h"

// Grouped GEMM on the CPU. Experts have different numbers of rows, so threads take (expert, tile) pairs dynamically.
// Tile i is an expert's rows from i * TILE on; it is empty for an expert with fewer rows.

// out (rows, columns) = in (rows, depth) W_e for every expert e, or W_e^T.
static void multiply_rows(floatX* out, const floatX* in, const floatX* w, int transpose, Ragged r, int64_t depth,
                          int64_t columns) {
    int64_t most = 0;  // rows of an expert
    for (int32_t e = 0; e < r.El; e++) most = max_i64(most, r.group_rows[e]);
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int64_t tile = 0; tile < ceil_div(most, TILE); tile++)
        for (int32_t e = 0; e < r.El; e++) {
            int64_t rows = min_i64(TILE, r.group_rows[e] - tile * TILE), at = r.group_start[e] + tile * TILE;
            if (rows > 0)
                gemm(0, transpose, rows, columns, depth, 1, in + at * depth, depth, w + e * depth * columns,
                     transpose ? depth : columns, 0, out + at * columns, columns);
        }
}

void grouped_gemm_forward(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    multiply_rows(y, x, w, 1, r, IC, OC);
}

void grouped_gemm_dgrad(floatX* dx, const floatX* dy, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    multiply_rows(dx, dy, w, 0, r, OC, IC);
}

int grouped_gemm_fuses(const Ctx* ctx) { return 0; }

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
