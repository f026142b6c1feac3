// Statistics of the quantization error. Bound by instructions: about 50 per element (7 in float64) for 2 bytes read.
// The kernel runs once every --mx-stats steps, so it is kept simple. Each element is fake-quantized in registers twice:
// with its scale, and with its block's own scale (align 1). No q is written.
//
// A warp takes 256 columns of a row at a time, one 16-byte vector per lane. Each lane accumulates the six sums. A
// thread block reduces them over its warps, and a second kernel over the blocks.
#include "mx/mx_stats.h"

#include "mx/mxfp8.cuh"

enum { STATS_BLOCKS = 512, STATS_SUMS = sizeof(QuantizationStats) / sizeof(double) };

// Tile scales of matrices with `rows` rows each. scale NULL: quantized along the rows instead.
struct Tiles {
    const uint8_t* scale;
    int64_t rows;
};

// The number of blocks is fixed, and their sums are added in order: the same bits on every run.
template <int ALIGN>
static __global__ void __launch_bounds__(32 * ROW_WARPS)
    stats_kernel(QuantizationStats* partial, const floatX* x, Tiles tiles, int64_t rows, int64_t columns,
                 uint32_t rounding_bias) {
    __shared__ double of_warp[ROW_WARPS][STATS_SUMS];
    const int64_t vectors = ceil_div(columns, 256);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double sums[STATS_SUMS] = {};
    for (int64_t i = warp_in_grid(); i < rows * vectors; i += gridDim.x * ROW_WARPS) {
        // Load the lane's 8 elements. Find two scales: the block's own, and the one of the quantization.
        const int64_t row = i / vectors, c = i % vectors * 256 + lane * 8;
        const uint4 p = c < columns ? *(const uint4*)(x + row * columns + c) : make_uint4(0, 0, 0, 0);
        const uint32_t s_alone = scale_of(higher_half(largest_of_lanes<MX_BLOCK / 8>(largest(p))), rounding_bias);
        uint32_t s = scale_of(higher_half(largest_of_lanes<ALIGN / 8>(largest(p))), rounding_bias);
        if (tiles.scale && c < columns) {
            const int64_t above = row / tiles.rows * ceil_div(tiles.rows, MX_CHUNK) + row % tiles.rows / MX_CHUNK;
            s = tiles.scale[above * ceil_div(columns, MX_CHUNK) + c / MX_CHUNK];
        }
        if (s == MX_NAN) continue;

        // Add up the statistics, in the order of QuantizationStats.
        float exact[8];
        floats_of(exact, p);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float value = value_of(exact[j], s);
            const double off = (double)exact[j] - value;
            sums[0] += exact[j] != 0;
            sums[1] += fabsf(exact[j] * mx_scale_inverse(s)) > 448;
            sums[2] += exact[j] != 0 && value == 0;
            sums[3] += value != value_of(exact[j], s_alone);
            sums[4] += (double)exact[j] * exact[j];
            sums[5] += off * off;
        }
    }

    // Reduce over the warp, then over the thread block.
#pragma unroll
    for (int k = 0; k < STATS_SUMS; k++) {
        sums[k] = warp_sum(sums[k]);
        if (lane == 0) of_warp[warp][k] = sums[k];
    }
    __syncthreads();
    if (threadIdx.x >= STATS_SUMS) return;
    double sum = 0;
    for (int k = 0; k < ROW_WARPS; k++) sum += of_warp[k][threadIdx.x];
    ((double*)&partial[blockIdx.x])[threadIdx.x] = sum;
}

static __global__ void add_stats_kernel(QuantizationStats* stats, const QuantizationStats* partial) {
    double sum = 0;
    for (int i = 0; i < STATS_BLOCKS; i++) sum += ((const double*)&partial[i])[threadIdx.x];
    ((double*)stats)[threadIdx.x] += sum;
}

void mx_stats(QuantizationStats* stats, const floatX* x, const uint8_t* tiles, int64_t count, int64_t rows, int64_t columns,
              MxRecipe recipe, Ctx* ctx) {
    ASSERT(aligned(x) && columns % MX_BLOCK == 0);
    // Sums per thread block, then over the blocks.
    QuantizationStats* partial = ctx_workspace<QuantizationStats>(ctx, STATS_BLOCKS);
    auto kernel = recipe.align == 1 ? stats_kernel<MX_BLOCK> : stats_kernel<MX_CHUNK>;
    launch(kernel, STATS_BLOCKS, 32 * ROW_WARPS, 0, ctx, partial, x, Tiles{tiles, rows}, count * rows, columns,
           rounding_bias_of(recipe.scale));
    launch(add_stats_kernel, 1, STATS_SUMS, 0, ctx, stats, partial);
}
