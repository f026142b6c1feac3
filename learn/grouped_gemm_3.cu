// Step 3: tensor cores. A warp multiplies 16 x 16 by 16 x 8 in one instruction, mma.sync, whose operands lie spread
// over the registers of its 32 lanes. ldmatrix brings them there from shared memory, and cp.async brings them to shared
// memory without a detour through registers (device/mma.cuh).
//
//     eight warps, 64 x 32 of the tile each:          a warp, one step of 16 along the contraction:
//
//         | 0 | 1 | 2 | 3 |  rows 0 .. 63                          b b b b   4 times 16 x 8 of W
//         | 4 | 5 | 6 | 7 |  rows 64 .. 127             16 x 16  a d d d d
//                                                         of x   a d d d d   16 instructions for 6 ldmatrix
//                                                                a d d d d
//                                                                a d d d d
//
// ldmatrix reads eight pieces of 16 bytes at a time, from rows below each other, 128 bytes apart: from the same banks.
// swizzled() (learn/learn.cuh) moves piece i of row r to place i ^ r % 8, where each has banks of its own.
//
// Bound by waiting: a tile comes, then it is multiplied, then the next one comes. Two blocks share an SM, and what one
// waits the other uses, in part. Then by shared memory: for a step of 16 ldmatrix reads 24 KB, 192 clocks. mma.sync
// takes as long, for it has some 63 % of Hopper's tensor cores (arXiv 2501.12084), which could multiply it in 128.
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
        // The stage: this thread's copies have arrived, then everyone's.
        load_tile(a, of_x, SIDE, IC, k);
        load_tile(b, of_w, OC - t.column, IC, k);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();

        // Four steps of 16: fragments, then products. A fragment of x is four matrices of 8 x 8: two below each other,
        // then the two right of them. One ldmatrix of W has the two halves of the contraction for each of two eights.
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

    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) store_sums(y, OC, t, m + i * 16, n + j * 8, d[i][j]);
}

}  // namespace

void learn_3(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    launch(kernel_3, tiles_of(r, IC, OC, SIDE, SIDE), THREADS, 0, ctx, y, x, w, r, IC, OC);
}
