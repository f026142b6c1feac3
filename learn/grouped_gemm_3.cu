// Step 3: tensor cores. A warp multiplies 16 x 16 by 16 x 8 in one instruction, mma.sync. Its operands are distributed
// over the registers of the 32 lanes. They are loaded from shared memory by ldmatrix. Copies from global to shared
// memory are by cp.async, without registers (device/mma.cuh).
//
//     eight warps, 64 x 32 of the tile each:          a warp, one step of 16 along the contraction:
//
//         | 0 | 1 | 2 | 3 |  rows 0 .. 63                          b b b b   4 times 16 x 8 of W
//         | 4 | 5 | 6 | 7 |  rows 64 .. 127             16 x 16  a d d d d
//                                                         of x   a d d d d   16 instructions for 6 ldmatrix
//                                                                a d d d d
//                                                                a d d d d
//
// ldmatrix reads eight 16-byte vectors at a time, from eight rows that are 128 bytes apart: all in the same banks. The
// swizzle moves vector i of row r to position i ^ r % 8, without bank conflicts (learn/learn.cuh).
//
// Bound first by waiting: a stage is loaded, then multiplied, then the next one is loaded. Two blocks share an SM, and
// each uses a part of the other's waiting time. Bound then by shared memory: for a step of 16 ldmatrix reads 24 KB in
// 192 clocks. mma.sync takes as long. It has about 63 % of the rate of Hopper's tensor cores (arXiv 2501.12084). At the
// full rate they would need 128 clocks.
#include "learn/learn.cuh"

namespace {

enum { THREADS = 256 };

__global__ void __launch_bounds__(THREADS, 2)
    kernel_3(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC) {
    __shared__ alignas(128) uint8_t a[TILE_BYTES], b[TILE_BYTES];
    Tile t;
    if (!find_tile<SIDE, SIDE>(r, OC, t)) return;
    const floatX *of_x = x + t.row * IC, *of_w = w + (t.expert * OC + t.column) * IC;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m = warp / 4 * 64, n = warp % 4 * 32;
    float d[4][4][4] = {};

    for (int64_t k = 0; k < IC; k += BLOCK_K) {
        // Load the stage: wait for this thread's copies, then for all threads'.
        load_tile(a, of_x, SIDE, IC, k);
        load_tile(b, of_w, OC - t.column, IC, k);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();

        // Four steps of 16: load fragments, then mma. A fragment of x is four matrices of 8 x 8: the two on the left,
        // then the two on the right. One ldmatrix of W loads two fragments of 8 columns, each with both halves of the
        // contraction.
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; step++) {
            uint32_t of_a[4][4], of_b[2][4];
            for (int i = 0; i < 4; i++)
                ldmatrix_x4(of_a[i], a + swizzled(m + i * 16 + lane % 16, step * 2 + lane / 16));
            for (int j = 0; j < 2; j++)
                ldmatrix_x4(of_b[j], b + swizzled(n + j * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) mma_bf16(d[i][j], of_a[i], of_b[j / 2] + j % 2 * 2);
        }
        __syncthreads();
    }

    // Epilogue.
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) store_sums(y, OC, t, m + i * 16, n + j * 8, d[i][j]);
}

}  // namespace

void learn_3(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    launch(kernel_3, tiles_of(r, IC, OC, SIDE, SIDE), THREADS, 0, ctx, y, x, w, r, IC, OC);
}
