#include "layers/matmul.h"

#include "device/cpu.h"

// Each parallel loop is over tiles of the output; a tile is one GEMM on one thread. Tiles have the output's full width
// (in wgrad: TILE / 2 rows of dW and the full depth). This keeps the packing, which CBLAS repeats per call, small
// relative to the GEMM.

void matmul_forward(floatX* y, const floatX* x, const floatX* w, int64_t N, int64_t IC, int64_t OC, Ctx* ctx) {
#pragma omp parallel for schedule(dynamic)
    for (int64_t n = 0; n < N; n += TILE)
        gemm(0, 1, min_i64(TILE, N - n), OC, IC, 1, x + n * IC, IC, w, IC, 0, y + n * OC, OC);
}

// floatX is real here.
void matmul_forward_real(real* y, const floatX* x, const floatX* w, int64_t N, int64_t IC, int64_t OC, Ctx* ctx) {
    matmul_forward(y, x, w, N, IC, OC, ctx);
}

void matmul_dgrad(floatX* dx, const floatX* dy, const floatX* w, int64_t N, int64_t IC, int64_t OC, int accumulate,
                  Ctx* ctx) {
#pragma omp parallel for schedule(dynamic)
    for (int64_t n = 0; n < N; n += TILE)
        gemm(0, 0, min_i64(TILE, N - n), IC, OC, 1, dy + n * OC, OC, w, IC, accumulate, dx + n * IC, IC);
}

void matmul_wgrad(real* dw, const floatX* dy, const floatX* x, int64_t N, int64_t IC, int64_t OC, int accumulate,
                  Ctx* ctx) {
    const int64_t tile = TILE / 2;
#pragma omp parallel for schedule(dynamic)
    for (int64_t o = 0; o < OC; o += tile)
        gemm(1, 0, min_i64(tile, OC - o), IC, N, 1, dy + o, OC, x, IC, accumulate, dw + o * IC, IC);
}

size_t matmul_workspace(void) { return 0; }
