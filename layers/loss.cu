// Cross-entropy, fused forward and backward. Bound by memory. A block owns a row of logits and reads it twice:
//
//   1. online softmax: of each thread's vectors, then over the warps and the block
//   2. the gradient over the logits, from the end of the row back: the vectors that were read last are in the caches
//
// Padding is -inf in registers. A logit costs 5 instructions in either pass, ex2.approx (2^-22) among them. Sums are in
// float32, in a fixed order.
#include "layers/loss.h"
#include "layers/rows.cuh"

static const float LOG2_E = 1.44269504f, LN_2 = 0.693147181f, LOWEST = -1e38f;

// The state of an online softmax: a running maximum, times log2 e and rounded, and the sum of 2^(z log2 e - top). A
// logit costs one multiply-add and one ex2. The rounding of top cancels in log2(sum) + top. The maximum starts at
// LOWEST, not at -inf, so that a logit of -inf among others adds nothing. If all logits are -inf, the loss is not
// finite. NaN propagates through the sum.
struct Softmax {
    float top, sum;
};

// The softmax over groups of LANES lanes.
template <int LANES>
static __device__ __forceinline__ Softmax over_lanes(Softmax x) {
    const float top = warp_max<LANES>(x.top);
    return {top, warp_sum<LANES>(x.sum * exp2_approx(x.top - top))};
}

enum { BATCH = 4 };  // vectors that a thread has in flight

// Vectors i, i + THREADS, .. of a row. Padding, which may hold anything, and vectors after the row become -inf.
template <int THREADS>
static __device__ __forceinline__ void load_batch(Vec8 (&p)[BATCH], const floatX* row, int i, int V) {
    const uint32_t nothing = 0xff80ff80;  // two bf16 of -inf
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
        const int c = (i + b * THREADS) * 8;
        p[b] = c < V ? *(const Vec8*)(row + c) : make_uint4(nothing, nothing, nothing, nothing);
    }
#pragma unroll
    for (int b = 0; b < BATCH; b++)
        if (i + b * THREADS == V / 8)
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (j >= V % 8) ((floatX*)&p[b])[j] = -INFINITY;
}

// The maximum of a batch, two elements at a time. NaN is dropped, as in fmaxf.
static __device__ __forceinline__ float top_of(const Vec8 (&p)[BATCH]) {
    const __nv_bfloat162* pair = (const __nv_bfloat162*)p;
    __nv_bfloat162 top = pair[0];
#pragma unroll
    for (int i = 1; i < 4 * BATCH; i++) top = __hmax2(top, pair[i]);
    return fmaxf(__low2float(top), __high2float(top));
}

// 3 blocks of 512 threads on an SM: one loads while another computes or stores. More rows at once would not stay in the
// caches until their second pass.
template <int THREADS>
static __global__ void __launch_bounds__(THREADS, THREADS == 512 ? 3 : 1)
    cross_entropy_kernel(float* loss, floatX* logits, const int32_t* target, int V, int Vp, float dscale) {
    wait_for_previous();
    constexpr int WARPS = THREADS / 32, STEP = BATCH * THREADS;
    __shared__ Softmax of_warp[WARPS];
    floatX* row = logits + blockIdx.x * (int64_t)Vp;
    const int right = target[blockIdx.x], vectors = Vp / 8;

    // Online softmax of the thread, with one correction of the running sum for each batch.
    Vec8 p[BATCH];
    float f[8];
    Softmax all = {LOWEST, 0};
    for (int i = threadIdx.x; i < vectors; i += STEP) {
        load_batch<THREADS>(p, row, i, V);
        const float top = fmaxf(all.top, top_of(p) * LOG2_E);
        all.sum *= exp2_approx(all.top - top);
        all.top = top;
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (i + b * THREADS >= vectors) break;
            floats_of(f, p[b]);
            float sum = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) sum += exp2_approx(fmaf(f[j], LOG2_E, -top));
            all.sum += sum;
        }
    }

    // The softmax of the warp, then that of the block. The target's logit is read before other threads overwrite it.
    const float z_right = __bfloat162float(row[right]);
    all = over_lanes<32>(all);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = all;
    __syncthreads();
    all = over_lanes<WARPS>(of_warp[threadIdx.x % WARPS]);

    // loss = ln sum exp(z) - z_target, in an order that keeps the digits of small losses.
    if (threadIdx.x == 0) loss[blockIdx.x] = LN_2 * (log2f(all.sum) + fmaf(-z_right, LOG2_E, all.top));
    if (dscale == 0) return;

    // The gradient dscale softmax(z) overwrites the logits.
    const float scale = dscale / all.sum;
    for (int i = (vectors - 1) / STEP * STEP + threadIdx.x; i >= 0; i -= STEP) {
        load_batch<THREADS>(p, row, i, V);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (i + b * THREADS >= vectors) break;
            floats_of(f, p[b]);
#pragma unroll
            for (int j = 0; j < 8; j++) f[j] = scale * exp2_approx(fmaf(f[j], LOG2_E, -all.top));
            store(row + (i + b * THREADS) * 8, f);
        }
    }

    // -dscale at the target, by the thread that stored its vector.
    if (right / 8 % THREADS == threadIdx.x)
        row[right] = (floatX)(scale * exp2_approx(fmaf(z_right, LOG2_E, -all.top)) - dscale);
}

void cross_entropy(real* loss, floatX* logits, const int32_t* target, int64_t N, int64_t V, int64_t Vp, float dscale,
                   Ctx* ctx) {
    ASSERT(wide(Vp, logits) && Vp < INT32_MAX);
    auto run = [&](auto threads) {
        constexpr int THREADS = decltype(threads)::value;
        launch_early(cross_entropy_kernel<THREADS>, (unsigned)N, THREADS, 0, ctx, loss, logits, target, V, Vp, dscale);
    };
    // Short rows: fewer threads, so that each has about a batch.
    if (Vp <= 32 * 8 * BATCH)
        run(Int<32>());
    else if (Vp <= 16384)
        run(Int<256>());
    else
        run(Int<512>());
}
