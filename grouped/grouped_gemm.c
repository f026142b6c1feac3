#include "grouped/grouped_gemm.h"

#include <stdlib.h>

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

// The rows of an operand by token, to be freed.
static floatX* permuted(const floatX* tokens, Ragged r, int64_t columns, Ctx* ctx) {
    floatX* rows = (floatX*)malloc((size_t)(r.capacity * columns) * sizeof(floatX) + 1);
    ASSERT(rows);
    permute_rows(rows, tokens, r, (size_t)columns * sizeof(floatX), ctx);
    return rows;
}

void grouped_gemm_swiglu(floatX* h, floatX* a, const floatX* x, const floatX* w13, Ragged r, int64_t C, int64_t F,
                         Ctx* ctx) {
    floatX* rows = permuted(x, r, C, ctx);
    grouped_gemm_forward(h, rows, w13, r, C, 2 * F, ctx);
    experts_swiglu_forward(a, h, r, F, ctx);
    free(rows);
}

void grouped_gemm_dgrad_swiglu(ExpertsBackward t, const floatX* dy, const floatX* w2, GroupedRows order, Ragged r,
                               int64_t C, int64_t F, Ctx* ctx) {
    const int64_t parts = grouped_gemm_gate_parts(F);
    floatX* rows = order == DY_BY_TOKEN ? permuted(dy, r, C, ctx) : NULL;
    real* dgate = t.drow_gate;
    grouped_gemm_dgrad((floatX*)t.da_ungated, rows ? rows : dy, w2, r, F, C, ctx);
    experts_swiglu_backward(t, r, F, ctx);
    // A row's sum is its first part, the others are zeros.
    for (int64_t i = r.group_start[r.El] * parts - 1; i >= 0; i--) dgate[i] = i % parts ? 0 : dgate[i / parts];
    free(rows);
}

void grouped_gemm_wgrad(real* dw, floatX* rounded, const floatX* dy, const floatX* x, GroupedRows order, Ragged r,
                        int64_t IC, int64_t OC, int accumulate, Ctx* ctx) {
    floatX* rows = NULL;
    if (rounded) dw = rounded;
    if (order == DY_BY_TOKEN) dy = rows = permuted(dy, r, OC, ctx);
    if (order == X_BY_TOKEN) x = rows = permuted(x, r, IC, ctx);
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int32_t e = 0; e < r.El; e++)
        for (int64_t o = 0; o < OC; o += TILE) {
            int64_t at = r.group_start[e];
            gemm(1, 0, min_i64(TILE, OC - o), IC, r.group_rows[e], 1, dy + at * OC + o, OC, x + at * IC, IC, accumulate,
                 dw + (e * OC + o) * IC, IC);
        }
    free(rows);
}
