#include "grouped/grouped_gemm.h"

#include "device/cpu.h"

// out = in W_e^T (transposed 1) or in W_e, for the rows of every expert e. Rows of `in` have K elements, those of `out`
// M. Experts have different numbers of rows, so threads take (tile, expert) pairs dynamically. Tile i is an expert's
// rows from i * TILE on; it is empty for an expert with fewer rows.
static void product(floatX* out, const floatX* in, const floatX* w, int transposed, Ragged r, int64_t K, int64_t M) {
    int64_t most = 0;
    for (int32_t e = 0; e < r.El; e++) most = max_i64(most, r.group_rows[e]);
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int64_t tile = 0; tile < ceil_div(most, TILE); tile++)
        for (int32_t e = 0; e < r.El; e++) {
            int64_t rows = min_i64(TILE, r.group_rows[e] - tile * TILE), at = r.group_start[e] + tile * TILE;
            if (rows > 0)
                gemm(0, transposed, rows, M, K, 1, in + at * K, K, w + e * K * M, transposed ? K : M, 0, out + at * M,
                     M);
        }
}

void grouped_gemm_forward(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    product(y, x, w, 1, r, IC, OC);
}

void grouped_gemm_dgrad(floatX* dx, const floatX* dy, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    product(dx, dy, w, 0, r, OC, IC);
}

void grouped_gemm_wgrad(real* dw, const floatX* dy, const floatX* x, Ragged r, int64_t IC, int64_t OC, int accumulate,
                        Ctx* ctx) {
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int32_t e = 0; e < r.El; e++)
        for (int64_t o = 0; o < OC; o += TILE) {
            int64_t at = r.group_start[e];
            gemm(1, 0, min_i64(TILE, OC - o), IC, r.group_rows[e], 1, dy + at * OC + o, OC, x + at * IC, IC, accumulate,
                 dw + (e * OC + o) * IC, IC);
        }
}
