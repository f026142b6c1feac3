// Four-bit fake quantization. The kernels are plain: a thread takes a block of elements, and reads it twice. Thread
// blocks of one grid row walk over the blocks of a group, because its rows are known on the device alone. NVFP4 reads x
// once more, for the largest magnitude of each group.
#include "device/cuda.cuh"
#include "mx/fp4_values.h"

enum { THREADS = 256, STATS_SUMS = sizeof(QuantizationStats) / sizeof(double) };

// This thread's first item, and the distance to its next one.
static __device__ __forceinline__ int64_t item(void) { return blockIdx.x * (int64_t)THREADS + threadIdx.x; }
static __device__ __forceinline__ int64_t items(void) { return gridDim.x * (int64_t)THREADS; }

// amax (groups): bits of the largest magnitude, from zeros.
static __global__ void __launch_bounds__(THREADS) amax_kernel(uint32_t* amax, Fp4Work w) {
    const int32_t g = (int32_t)blockIdx.y;
    const floatX* x = w.x + fp4_first(w.groups, g) * w.columns;
    const int64_t n = fp4_rows(w.groups, g) * w.columns;
    uint32_t largest = 0;
    for (int64_t i = item(); i < n; i += items()) largest = max(largest, magnitude_bits((float)x[i]));
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (threadIdx.x % 32 == 0 && largest) atomicMax(amax + g, largest);
}

static __global__ void __launch_bounds__(THREADS) round_kernel(Fp4Work w, const uint32_t* amax) {
    const int32_t g = (int32_t)blockIdx.y;
    for (int64_t i = item(); i < fp4_blocks(&w, g); i += items()) fp4_block(&w, g, i, amax[g]);
}

// One thread block, as statistics are rare: their sums have the same bits on every run.
static __global__ void __launch_bounds__(THREADS)
    stats_kernel(QuantizationStats* stats, Fp4Work w, const uint32_t* amax) {
    QuantizationStats sums = {};
    w.stats = &sums;
    for (int32_t g = 0; g < w.groups.El; g++)
        for (int64_t i = item(); i < fp4_blocks(&w, g); i += items()) fp4_block(&w, g, i, amax[g]);
    for (int k = 0; k < STATS_SUMS; k++) {
        const double sum = block_sum(((const double*)&sums)[k]);
        if (threadIdx.x == 0) ((double*)stats)[k] += sum;
        __syncthreads();
    }
}

static __global__ void __launch_bounds__(THREADS)
    hadamard_kernel(floatX* out, const floatX* x, Ragged groups, int64_t columns) {
    const int32_t g = (int32_t)blockIdx.y;
    const int64_t n = ceil_div(fp4_rows(groups, g), FP4_HADAMARD) * columns;
    for (int64_t i = item(); i < n; i += items())
        fp4_transform_rows(out, x, groups, g, i / columns * FP4_HADAMARD, i % columns, columns);
}

// Thread blocks for `work` items in all groups: a row of the grid for each group. Ragged groups share `work`.
static dim3 grid_of(Ragged groups, int64_t work, Ctx* ctx) {
    const int64_t each = groups.group_start ? ceil_div(work, groups.El) : work;
    return dim3(walking_blocks(ceil_div(each, THREADS), ctx), (unsigned)groups.El);
}

// The largest magnitudes, in the workspace at `amax`.
static void find_amax(uint32_t* amax, Fp4Work w, Ctx* ctx) {
    device_zero(amax, (size_t)w.groups.El * sizeof(uint32_t), ctx);
    if (fp4_is_nv(w.blocks))
        launch(amax_kernel, grid_of(w.groups, w.groups.capacity * w.columns / 16, ctx), THREADS, 0, ctx, amax, w);
}

void fp4_round(floatX* out, floatX* back, const floatX* x, Ragged groups, int64_t columns, Fp4Blocks blocks, Draw draw,
               Ctx* ctx) {
    const Fp4Work w = {out, back, x, groups, columns, blocks, draw, NULL};
    uint32_t* amax = ctx_workspace<uint32_t>(ctx, groups.El);
    const int64_t work = ceil_div(groups.capacity, blocks.high) * ceil_div(columns, blocks.wide);
    find_amax(amax, w, ctx);
    launch(round_kernel, grid_of(groups, work, ctx), THREADS, 0, ctx, w, amax);
}

void fp4_hadamard(floatX* out, const floatX* x, Ragged groups, int64_t columns, Ctx* ctx) {
    const int64_t work = ceil_div(groups.capacity, FP4_HADAMARD) * columns;
    launch(hadamard_kernel, grid_of(groups, work, ctx), THREADS, 0, ctx, out, x, groups, columns);
}

void fp4_stats(QuantizationStats* stats, const floatX* x, Ragged groups, int64_t columns, Fp4Blocks blocks, Ctx* ctx) {
    const Fp4Work w = {NULL, NULL, x, groups, columns, blocks, {}, NULL};
    uint32_t* amax = ctx_workspace<uint32_t>(ctx, groups.El);
    find_amax(amax, w, ctx);
    launch(stats_kernel, 1, THREADS, 0, ctx, stats, w, amax);
}
