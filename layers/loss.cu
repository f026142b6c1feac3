// Cross-entropy, fused forward and backward. Bound by memory. A thread block cluster of two or four blocks shares a row
// of logits. Each block copies its part once into shared memory: one slot for each 16-byte vector.
//
//   prologue             for each row of the cluster
//   +---------------+    +----------------+    +-----------------+    +---------------------------+
//   | row 0: fetch  |    | online softmax |    | reduction over  |    | gradient over the logits  |
//   | by cp.async   |--->| of the part    |--->| warp, block and |--->| next row: fetch, into the |---> next row
//   +---------------+    +----------------+    | cluster         |    | slots of read vectors     |
//                                              +-----------------+    +---------------------------+
//
// The blocks exchange maximum and sum through distributed shared memory. Prefetch: as soon as a vector of this row
// is consumed, cp.async loads the next row's vector into its slot. So reads and writes of an SM overlap.
//
// Padding is -inf in shared memory, and full batches of vectors are processed without branches. So a logit costs 5
// instructions in either pass. One of them is ex2.approx (2^-22), whose unit is busy for 60 % of the time. Sums are in
// float32, in a fixed order.
#include <cooperative_groups.h>
#include <cuda_pipeline_primitives.h>

#include "layers/loss.h"
#include "layers/rows.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, BATCH = 3, ROWS = 4, ROW_LOGITS = 16384, PAIR_LOGITS = 65536 };

static const float LOG2_E = 1.44269504f, LN_2 = 0.693147181f, LOWEST = -1e38f;

// The state of an online softmax: a running maximum, times log2 e and rounded, and the sum of 2^(z log2 e - top). A
// logit costs one multiply-add and one ex2. The rounding of top cancels in log2(sum) + top. The maximum starts at
// LOWEST, not at -inf, so that a logit of -inf among others adds nothing. If all logits are -inf, the loss is not
// finite. NaN propagates through the sum.
struct Softmax {
    float top, sum;
    __device__ void add(float other_top, float other_sum) {
        float highest = fmaxf(top, other_top);
        sum = sum * exp2_approx(top - highest) + other_sum * exp2_approx(other_top - highest);
        top = highest;
    }
};

// The maximum of B vectors, two elements at a time. NaN is dropped, as in fmaxf.
template <int B>
static __device__ __forceinline__ float top_of(const Vec8 p[B]) {
    const __nv_bfloat162* pair = (const __nv_bfloat162*)p;
    __nv_bfloat162 top = pair[0];
#pragma unroll
    for (int i = 1; i < 4 * B; i++) top = __hmax2(top, pair[i]);
    return fmaxf(__low2float(top), __high2float(top));
}

// GPUs before Hopper have no clusters and use cross_entropy_row_kernel. It is also the kernel for vocabularies that are
// larger, or too small for a cluster's threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define IN_CLUSTERS(blocks)
#else
#define IN_CLUSTERS(blocks) __cluster_dims__(blocks)
#endif

// The block's part of a row, a slot of shared memory for each 16-byte vector. A thread reads only slots that it
// filled itself.
struct Part {
    Vec8* slots;
    int count;  // vectors
    int valid;  // logits that are not padding

    // Calls take() for the vectors of this thread, in full batches of BATCH and then one by one.
    template <typename Take>
    __device__ __forceinline__ void in_batches(Take take) const {
        int i = threadIdx.x;
        for (; i + (BATCH - 1) * THREADS < count; i += BATCH * THREADS) take(i, Int<BATCH>());
        for (; i < count; i += THREADS) take(i, Int<1>());
    }

    // Starts the copy of vector i of z; padding becomes -inf.
    __device__ __forceinline__ void fetch(int i, const floatX* z) const {
        const floatX* from = z + (int64_t)i * 8;
        if ((i + 1) * 8 <= valid) {
            __pipeline_memcpy_async(slots + i, from, 16);
        } else {  // padding may hold anything
            float f[8];
            load(f, from);
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (i * 8 + j >= valid) f[j] = -INFINITY;
            slots[i] = vec8_of(f);
        }
    }
};

// A batch of B vectors, THREADS slots apart, in registers.
template <int B>
static __device__ __forceinline__ void read_batch(Vec8 (&p)[B], const Vec8* slot) {
#pragma unroll
    for (int b = 0; b < B; b++) p[b] = slot[b * THREADS];
}

// Online softmax: adds a batch, with one correction of the running sum.
template <int B>
static __device__ __forceinline__ void add_batch(Softmax& mine, const Vec8* slot, Int<B>) {
    Vec8 p[B];
    read_batch(p, slot);
    const float top = fmaxf(mine.top, top_of<B>(p) * LOG2_E);
    mine.sum *= exp2_approx(mine.top - top);
    mine.top = top;
#pragma unroll
    for (int b = 0; b < B; b++) {
        float f[8];
        floats_of(f, p[b]);
#pragma unroll
        for (int j = 0; j < 8; j++) f[j] = exp2_approx(fmaf(f[j], LOG2_E, -top));
#pragma unroll
        for (int d = 1; d < 8; d *= 2)
#pragma unroll
            for (int j = 0; j < 8; j += 2 * d) f[j] += f[j + d];
        mine.sum += f[0];
    }
}

// Reduction over the warp, the block and the cluster: every block receives the partial results of the others.
template <int CLUSTER>
static __device__ __forceinline__ Softmax reduce(Softmax mine, int turn, int rank, auto& cluster) {
    __shared__ Softmax of_warp[WARPS], of_block[2][CLUSTER];
#pragma unroll
    for (int d = 16; d; d /= 2)
        mine.add(__shfl_xor_sync(0xffffffffu, mine.top, d), __shfl_xor_sync(0xffffffffu, mine.sum, d));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x < CLUSTER) {
        mine = of_warp[0];
        for (int w = 1; w < WARPS; w++) mine.add(of_warp[w].top, of_warp[w].sum);
        *cluster.map_shared_rank(&of_block[turn][rank], threadIdx.x) = mine;
    }
    __syncwarp();
    cluster.sync();  // one a row: of_block alternates
    Softmax all = of_block[turn][0];
    for (int r = 1; r < CLUSTER; r++) all.add(of_block[turn][r].top, of_block[turn][r].sum);
    return all;
}

// The gradient scale exp(z - top) of a batch, which begins at vector i, overwrites its logits.
template <int B>
static __device__ __forceinline__ void write_gradient(floatX* z, int i, const Vec8 (&p)[B], float scale, float top) {
#pragma unroll
    for (int b = 0; b < B; b++) {
        float f[8];
        floats_of(f, p[b]);
#pragma unroll
        for (int j = 0; j < 8; j++) f[j] = scale * exp2_approx(fmaf(f[j], LOG2_E, -top));
        store(z + (int64_t)(i + b * THREADS) * 8, f);
    }
}

// A cluster processes rows n, n + next, n + 2 next, ..
template <int CLUSTER>
static __global__ void IN_CLUSTERS(CLUSTER) __launch_bounds__(THREADS, 4)
    cross_entropy_kernel(float* loss, floatX* logits, const int32_t* target, int64_t N, int64_t V, int64_t Vp,
                         float dscale) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    wait_for_previous();
    extern __shared__ __align__(16) char shared[];
    auto cluster = cooperative_groups::this_cluster();
    const int rank = (int)cluster.block_rank();
    const int vectors = (int)(Vp / 8), per = (vectors + CLUSTER - 1) / CLUSTER, first = rank * per;
    const Part part = {(Vec8*)shared, min(per, vectors - first), (int)V - first * 8};
    const int64_t next = gridDim.x / CLUSTER;

    // Prologue: the first row starts to load.
    int64_t n = blockIdx.x / CLUSTER;
    floatX* z = logits + n * Vp + (int64_t)first * 8;
    for (int i = threadIdx.x; i < part.count; i += THREADS) part.fetch(i, z);
    __pipeline_commit();
    cluster.sync();  // every block of the cluster runs: its shared memory may be written
    for (int turn = 0; n < N; n += next, z += next * Vp, turn ^= 1) {
        // The block's part has arrived. The softmax of the row: of the thread, then over the cluster.
        const int right = target[n] - first * 8;
        Softmax mine = {LOWEST, 0};
        __pipeline_wait_prior(0);
        part.in_batches([&](int i, auto batch) { add_batch(mine, part.slots + i, batch); });
        const Softmax all = reduce<CLUSTER>(mine, turn, rank, cluster);

        // The owner of the target keeps its logit, before the next row takes the slot.
        const float scale = dscale / all.sum;
        const bool more = n + next < N;
        const bool owner = right >= 0 && right < part.count * 8 && right / 8 % THREADS == threadIdx.x;
        float z_right = 0;
        if (owner) z_right = __bfloat162float(((const floatX*)part.slots)[right]);

        // The gradient dscale softmax(z). Meanwhile the next row is prefetched into the slots.
        part.in_batches([&]<int B>(int i, Int<B>) {
            Vec8 p[B];
            read_batch(p, part.slots + i);
            if (more)
#pragma unroll
                for (int b = 0; b < B; b++) part.fetch(i + b * THREADS, z + next * Vp);
            if (dscale != 0) write_gradient(z, i, p, scale, all.top);
        });
        __pipeline_commit();

        // loss = ln sum exp(z) - z_target, in an order that keeps the digits of small losses. -dscale at the target.
        if (!owner) continue;
        loss[n] = LN_2 * (log2f(all.sum) + fmaf(-z_right, LOG2_E, all.top));
        if (dscale != 0) z[right] = (floatX)(scale * exp2_approx(fmaf(z_right, LOG2_E, -all.top)) - dscale);
    }
#endif
}

// One block per row. The row is read twice, the second time mostly from the caches. For every GPU, and any vocabulary.
template <int THREADS>
static __global__ void __launch_bounds__(THREADS)
    cross_entropy_row_kernel(float* loss, floatX* logits, const int32_t* target, int64_t V, int64_t Vp, float dscale) {
    // A read of eight logits; padding, which may hold anything, counts as -inf.
    wait_for_previous();
    constexpr int WARPS = THREADS / 32;
    __shared__ Softmax of_warp[WARPS];
    floatX* z = logits + blockIdx.x * Vp;
    const int right = target[blockIdx.x];
    const float z_right = __bfloat162float(z[right]);
    auto read = [&](float(&f)[8], int64_t c) {
        load(f, z + c);
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (c + j >= V) f[j] = -INFINITY;
    };

    // Online softmax of the thread, then the reduction over the warp and the block.
    Softmax all = {LOWEST, 0};
    for (int64_t c = threadIdx.x * 8; c < Vp; c += THREADS * 8) {
        float f[8], sum = 0, top = all.top;
        read(f, c);
#pragma unroll
        for (int j = 0; j < 8; j++) top = fmaxf(top, f[j] * LOG2_E);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += exp2_approx(fmaf(f[j], LOG2_E, -top));
        all.sum = all.sum * exp2_approx(all.top - top) + sum;
        all.top = top;
    }
#pragma unroll
    for (int d = 16; d; d /= 2)
        all.add(__shfl_xor_sync(0xffffffffu, all.top, d), __shfl_xor_sync(0xffffffffu, all.sum, d));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = all;
    __syncthreads();
    all = of_warp[0];
    for (int w = 1; w < WARPS; w++) all.add(of_warp[w].top, of_warp[w].sum);
    if (threadIdx.x == 0) loss[blockIdx.x] = LN_2 * (log2f(all.sum) + fmaf(-z_right, LOG2_E, all.top));
    if (dscale == 0) return;

    // The gradient overwrites the logits: dscale (softmax(z) - 1 at the target).
    const float scale = dscale / all.sum;
    for (int64_t c = threadIdx.x * 8; c < Vp; c += THREADS * 8) {
        float f[8];
        read(f, c);
#pragma unroll
        for (int j = 0; j < 8; j++)
            f[j] = scale * exp2_approx(fmaf(f[j], LOG2_E, -all.top)) - (c + j == right ? dscale : 0);
        store(z + c, f);
    }
}

void cross_entropy(real* loss, floatX* logits, const int32_t* target, int64_t N, int64_t V, int64_t Vp, float dscale,
                   Ctx* ctx) {
    if (N == 0) return;
    ASSERT(wide(Vp, logits));
    // Two blocks share a row, and four a longer one: an SM then has several. Four parts fit up to 450560 logits.
    const int64_t blocks = Vp <= PAIR_LOGITS ? 2 : 4;
    const int64_t shared = ceil_div(Vp / 8, blocks) * 8 * (int64_t)sizeof(floatX);
    if (ctx->portable || shared > 220 << 10 || Vp <= ROW_LOGITS) {
        const bool narrow = Vp <= 32 * 8 * 4;  // four iterations of a warp
        return launch_early(narrow ? cross_entropy_row_kernel<32> : cross_entropy_row_kernel<THREADS>, (unsigned)N,
                            narrow ? 32 : THREADS, 0, ctx, loss, logits, target, V, Vp, dscale);
    }

    // The number of clusters leaves each a few rows, so that copies and sums overlap.
    const int64_t clusters = ceil_div(N, min_i64(ROWS, ceil_div(N, ctx->sms)));
    const auto kernel = blocks == 2 ? cross_entropy_kernel<2> : cross_entropy_kernel<4>;
    launch_early(kernel, clusters * blocks, THREADS, shared, ctx, loss, logits, target, N, V, Vp, dscale);
}
