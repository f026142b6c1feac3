// Statistics of casts: bound by instructions, some 50 an element (7 in float64) for 2 bytes read. They are taken once
// every --mx-stats steps, so the plain way will do: each element is cast in registers, with its scale and with that of
// its block alone, and none of the bytes is written.
//
// A warp takes pieces of 256 columns of a row, 8 a lane; each lane keeps the six sums. A block of threads adds up those
// of its warps, and a second kernel those of the blocks.
#include "mx/mx_stats.h"

#include "mx/mxfp8.cuh"

enum { STATS_BLOCKS = 512, STATS_SUMS = sizeof(MxStats) / sizeof(double) };

// The scales of matrices of `rows` rows in tiles; scale NULL: there are none.
struct Tiles {
    const uint8_t* scale;
    int64_t rows;
};

// Sums of a fixed number of blocks, then of those in order: the same bits on every run.
template <int ALIGN>
static __global__ void __launch_bounds__(32 * ROW_WARPS)
    stats_kernel(MxStats* partial, const floatX* x, Tiles tiles, int64_t rows, int64_t columns, uint32_t carry) {
    __shared__ double of_warp[ROW_WARPS][STATS_SUMS];
    const int64_t pieces = ceil_div(columns, 256);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double sums[STATS_SUMS] = {};
    for (int64_t i = warp_in_grid(); i < rows * pieces; i += gridDim.x * ROW_WARPS) {
        // The lane's 8 elements, and two scales: that of the block alone and that of the cast.
        const int64_t row = i / pieces, c = i % pieces * 256 + lane * 8;
        const uint4 p = c < columns ? *(const uint4*)(x + row * columns + c) : make_uint4(0, 0, 0, 0);
        const uint32_t s_alone = scale_of(higher_half(largest_of_lanes<MX_BLOCK / 8>(largest(p))), carry);
        uint32_t s = scale_of(higher_half(largest_of_lanes<ALIGN / 8>(largest(p))), carry);
        if (tiles.scale && c < columns) {
            const int64_t above = row / tiles.rows * ceil_div(tiles.rows, MX_CHUNK) + row % tiles.rows / MX_CHUNK;
            s = tiles.scale[above * ceil_div(columns, MX_CHUNK) + c / MX_CHUNK];
        }
        if (s == MX_NAN) continue;

        // What the cast does to each, in the order of MxStats.
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

    // Sums over the warp, then over the block of threads.
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

static __global__ void add_stats_kernel(MxStats* stats, const MxStats* partial) {
    double sum = 0;
    for (int i = 0; i < STATS_BLOCKS; i++) sum += ((const double*)&partial[i])[threadIdx.x];
    ((double*)stats)[threadIdx.x] += sum;
}

size_t mx_stats_workspace(void) { return STATS_BLOCKS * sizeof(MxStats); }

static void add_stats(MxStats* stats, const floatX* x, Tiles tiles, int64_t rows, int64_t columns, MxCast cast,
                      Ctx* ctx) {
    ASSERT(aligned(x) && columns % MX_BLOCK == 0);
    // Sums of each block of threads, then over the blocks.
    MxStats* partial = ctx_workspace<MxStats>(ctx, STATS_BLOCKS);
    auto kernel = cast.align == 1 ? stats_kernel<MX_BLOCK> : stats_kernel<MX_CHUNK>;
    launch(kernel, STATS_BLOCKS, 32 * ROW_WARPS, 0, ctx, partial, x, tiles, rows, columns, carry_of(cast.scale));
    launch(add_stats_kernel, 1, STATS_SUMS, 0, ctx, stats, partial);
}

void mx_stats(MxStats* stats, const floatX* x, int64_t rows, int64_t columns, MxCast cast, Ctx* ctx) {
    add_stats(stats, x, {NULL, rows}, rows, columns, cast, ctx);
}

void mx_stats_tiles(MxStats* stats, const floatX* w, const uint8_t* scale, int64_t count, int64_t rows, int64_t columns,
                    int32_t scale_mode, Ctx* ctx) {
    add_stats(stats, w, {scale, rows}, count * rows, columns, {scale_mode, MX_CHUNK}, ctx);
}
