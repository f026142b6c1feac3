// Step 2: tiles in shared memory. A block computes 128 x 128 elements of y, in steps of 16 elements of the contraction.
// In each step its 256 threads load 128 rows of x and of W into shared memory. Each thread then reads 8 + 8 numbers
// there for 64 multiplications.
//
//                      w: 16 x 128 (transposed)
//                     |  tx*4 ..  | 64 + tx*4 .. |
//     x: 16 x 128     +-----------+--------------+
//       ty*4 ..       |   4 x 4   |    4 x 4     |    the 64 sums of thread (ty, tx)
//       64 + ty*4 ..  |   4 x 4   |    4 x 4     |
//
// A thread's eight columns are two groups of four, 64 apart. Eight threads at a time then read 128 contiguous bytes,
// each bank once. (With eight contiguous columns every other thread's four would be in the same banks: bank conflicts.)
// An element is loaded from memory once for 128 multiplications, not once for each.
//
// Bound by the arithmetic of the ordinary units, at most 128 multiplications and additions a clock and SM, and by
// waiting for each 16 elements. The tensor cores, 16 times as fast, are idle.
#include "learn/learn.cuh"

namespace {

enum { WIDTH = 128, DEPTH = 16, THREADS = 256 };

// Each thread loads half a row, 8 elements, and converts them to float32. In shared memory the contraction is the slow
// dimension, so a thread later reads four rows at once. Zeros past the operand's end.
__device__ __forceinline__ void load(float (*to)[WIDTH], const floatX* from, int64_t rows, int64_t IC, int64_t k) {
    const int row = threadIdx.x % WIDTH, half = threadIdx.x / WIDTH * 8;
    alignas(16) floatX vector[8] = {};
    if (row < rows && k + half < IC) *(uint4*)vector = *(const uint4*)(from + row * IC + k + half);
#pragma unroll
    for (int i = 0; i < 8; i++) to[half + i][row] = (float)vector[i];
}

__global__ void __launch_bounds__(THREADS)
    kernel_2(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC) {
    __shared__ alignas(16) float a[DEPTH][WIDTH], b[DEPTH][WIDTH];
    Tile t;
    if (!find_tile<WIDTH, WIDTH>(r, OC, t)) return;
    const floatX *of_x = x + t.row * IC, *of_w = w + (t.expert * OC + t.column) * IC;
    const int ty = threadIdx.x / 16 * 4, tx = threadIdx.x % 16 * 4;
    float sums[8][8] = {};

    for (int64_t k = 0; k < IC; k += DEPTH) {
        // Load both tiles. All threads write before any reads, and all read before any writes the next tiles.
        load(a, of_x, WIDTH, IC, k);
        load(b, of_w, OC - t.column, IC, k);
        __syncthreads();

        // Accumulate: 8 x 8 products for each of the 16 elements.
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            alignas(16) float m[8], n[8];
            *(float4*)m = *(float4*)&a[i][ty], *(float4*)(m + 4) = *(float4*)&a[i][64 + ty];
            *(float4*)n = *(float4*)&b[i][tx], *(float4*)(n + 4) = *(float4*)&b[i][64 + tx];
#pragma unroll
            for (int j = 0; j < 64; j++) sums[j / 8][j % 8] += m[j / 8] * n[j % 8];
        }
        __syncthreads();
    }

    // Epilogue: stores of four neighbours, 8 bytes; pad rows are zeros.
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const int i = j / 2, m = i / 4 * 64 + ty + i % 4, n = t.column + j % 2 * 64 + tx;
        const float* sum = sums[i] + j % 2 * 4;
        alignas(8) floatX four[4] = {};
        if (m < t.valid)
            for (int l = 0; l < 4; l++) four[l] = (floatX)sum[l];
        if (n < OC) *(uint2*)(y + (t.row + m) * OC + n) = *(uint2*)four;
    }
}

}  // namespace

void learn_2(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    launch(kernel_2, tiles_of(r, IC, OC, WIDTH, WIDTH), THREADS, 0, ctx, y, x, w, r, IC, OC);
}
