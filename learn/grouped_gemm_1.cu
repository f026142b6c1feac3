// Step 1: one thread per element. A block is 8 x 32 threads; a warp is 32 neighbours in a row of y.
//
//     thread (m, n):   y[m][n] = x[m][0] w[n][0] + x[m][1] w[n][1] + ..
//
// A warp's threads read the same element of x, and one element each of 32 rows of W, at 32 distant addresses
// (uncoalesced). So every multiplication needs two loads, and one of these takes 32 accesses to the L1 cache.
//
// Bound by loads: the L1 cache serves one request after the other, and the arithmetic waits.
#include "learn/learn.cuh"

namespace {

enum { ROWS = 8, COLUMNS = 32 };

__global__ void kernel_1(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC) {
    // The element.
    Tile t;
    if (!find_tile<ROWS, COLUMNS>(r, OC, t)) return;
    const int m = threadIdx.y, n = t.column + threadIdx.x;
    if (n >= OC) return;

    // Its sum.
    const floatX *a = x + (t.row + m) * IC, *b = w + (t.expert * OC + n) * IC;
    float sum = 0;
    for (int64_t k = 0; k < IC; k++) sum += (float)a[k] * (float)b[k];

    // Pad rows are zeros.
    y[(t.row + m) * OC + n] = (floatX)(m < t.valid ? sum : 0.0f);
}

}  // namespace

void learn_1(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    launch(kernel_1, tiles_of(r, IC, OC, ROWS, COLUMNS), dim3(COLUMNS, ROWS), 0, ctx, y, x, w, r, IC, OC);
}
