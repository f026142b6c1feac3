// Step 4: wgmma. A warpgroup (four warps) multiplies 64 x 16 by 16 x 128 in one instruction. Both operands stay in
// shared memory: no ldmatrix, and registers hold only the sums (device/wgmma.cuh).
//
//     two warpgroups, 64 x 128 of the tile each       a descriptor gives the tensor cores an operand's layout:
//
//         |    0    |  rows 0 .. 63                       start address, groups of 8 rows 1024 bytes apart,
//         |    1    |  rows 64 .. 127                     rows of 128 bytes, swizzle: vector i at i ^ r % 8
//
// Step 3's swizzle is one of the hardware's own layouts. So the tiles are loaded as before, and only the mainloop
// differs. wgmma is asynchronous: issue, commit, wait. It reads shared memory through the async proxy; fence_async()
// makes the copies of ordinary instructions visible there.
//
// Still bound by waiting: the tensor cores are idle while a stage is loaded.
#include "device/wgmma.cuh"
#include "learn/learn.cuh"

namespace {

enum { THREADS = 256 };

__global__ void __launch_bounds__(THREADS, 2)
    kernel_4(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC) {
    // The tile, and the operands' descriptors.
    __shared__ alignas(1024) uint8_t a[TILE_BYTES], b[TILE_BYTES];
    Tile t;
    if (!find_tile<SIDE, SIDE>(r, OC, t)) return;
    const floatX *of_x = x + t.row * IC, *of_w = w + (t.expert * OC + t.column) * IC;
    const int warp = threadIdx.x / 32, group = warp / 4;
    const uint64_t at_a = wgmma_descriptor<BLOCK_K>(shared_address(a) + group * (TILE_BYTES / 2), TILE_BYTES);
    const uint64_t at_b = wgmma_descriptor<BLOCK_K>(shared_address(b), TILE_BYTES);
    float d[SIDE / 2] = {};

    for (int64_t k = 0; k < IC; k += BLOCK_K) {
        // Load the stage as in step 3, and make it visible to the tensor cores.
        load_tile(a, of_x, SIDE, IC, k);
        load_tile(b, of_w, OC - t.column, IC, k);
        copy_async_commit();
        copy_async_wait<0>();
        fence_async();
        __syncthreads();

        // Four steps of 16 elements: 32 bytes along a row, or 2 in a descriptor, which counts in 16 bytes.
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; step++) wgmma_ss<SIDE, 0, 0>(d, at_a + step * 2, at_b + step * 2, 1);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();
    }

    // Epilogue: each warp has 16 rows.
    wgmma_pin(d);
#pragma unroll
    for (int j = 0; j < SIDE / 8; j++) store_sums(y, OC, t, warp * 16, j * 8, d + j * 4);
}

}  // namespace

void learn_4(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    launch(kernel_4, tiles_of(r, IC, OC, SIDE, SIDE), THREADS, 0, ctx, y, x, w, r, IC, OC);
}
