// Statistics of the quantization error. Bound by instructions: about 50 per element (7 in float64) for 2 bytes read.
// The kernel runs once every --mx-stats steps, so it may be slow and simple. Each element is fake-quantized in
// registers twice: with its scale, and with its block's own scale (align 1). No q is written.
//
// A warp takes 256 columns of a row at a time, one 16-byte vector per lane. Each lane accumulates the six sums. A
// thread block reduces them over its warps, and a second kernel over the blocks.
#include "mx/mx_stats.h"

#include "mx/mxfp8.cuh"

enum { STATS_BLOCKS = 512, STATS_SUMS = sizeof(QuantizationStats) / sizeof(double) };

// The number of blocks is fixed, and their sums are added in order: the same bits on every run.
template <int ALIGN>
static __global__ void __launch_bounds__(32 * ROW_WARPS)
    stats_kernel(QuantizationStats* partial, const floatX* x, const uint8_t* tiles, int64_t count, int64_t rows,
                 int64_t columns, uint32_t rounding_bias) {
    const int64_t vectors = ceil_div(columns, 256);
    QuantizationStats sums = {};
    for (int64_t i = warp_in_grid(); i < count * rows * vectors; i += gridDim.x * ROW_WARPS) {
        // Load the lane's 8 elements. Find two scales: the block's own, and the one of the quantization.
        const int64_t row = i / vectors, c = i % vectors * 256 + threadIdx.x % 32 * 8;
        const uint4 p = c < columns ? *(const uint4*)(x + row * columns + c) : make_uint4(0, 0, 0, 0);
        const uint32_t s_alone = scale_of(higher_half(largest_of_lanes<MX_BLOCK / 8>(largest(p))), rounding_bias);
        uint32_t s = scale_of(higher_half(largest_of_lanes<ALIGN / 8>(largest(p))), rounding_bias);
        if (tiles && c < columns) {
            const int64_t above = row / rows * ceil_div(rows, MX_CHUNK) + row % rows / MX_CHUNK;
            s = tiles[above * ceil_div(columns, MX_CHUNK) + c / MX_CHUNK];
        }
        if (s == MX_NAN) continue;

        // Add up the statistics.
        float exact[8];
        floats_of(exact, p);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float value = value_of(exact[j], s);
            stats_add(&sums, exact[j], exact[j] * mx_scale_inverse(s), 448, value);
            sums.inexact += value != value_of(exact[j], s_alone);
        }
    }

    // Sums of the thread block.
    for (int k = 0; k < STATS_SUMS; k++) {
        const double sum = block_sum(((const double*)&sums)[k]);
        if (threadIdx.x == 0) ((double*)&partial[blockIdx.x])[k] = sum;
    }
}

static __global__ void add_stats_kernel(QuantizationStats* stats, const QuantizationStats* partial) {
    double sum = 0;
    for (int i = 0; i < STATS_BLOCKS; i++) sum += ((const double*)&partial[i])[threadIdx.x];
    ((double*)stats)[threadIdx.x] += sum;
}

void mx_stats(QuantizationStats* stats, const floatX* x, const uint8_t* tiles, int64_t count, int64_t rows,
              int64_t columns, MxRecipe recipe, Ctx* ctx) {
    ASSERT(aligned(x) && columns % MX_BLOCK == 0);
    // Sums per thread block, then over the blocks.
    QuantizationStats* partial = ctx_workspace<QuantizationStats>(ctx, STATS_BLOCKS);
    auto kernel = recipe.align == 1 ? stats_kernel<MX_BLOCK> : stats_kernel<MX_CHUNK>;
    launch(kernel, STATS_BLOCKS, 32 * ROW_WARPS, 0, ctx, partial, x, tiles, count, rows, columns,
           rounding_bias_of(recipe.scale));
    launch(add_stats_kernel, 1, STATS_SUMS, 0, ctx, stats, partial);
}
