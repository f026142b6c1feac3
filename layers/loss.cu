// Cross-entropy: bound by memory. Four blocks (a cluster) share a row of logits: each reads its quarter once, into
// shared memory, while its threads keep a running maximum and sum of exponentials; the four exchange theirs through
// distributed shared memory, and the gradient is written from shared memory over the logits. At V = 102400 a quarter
// takes 50 KiB, so that several clusters at different stages keep reads and writes of an SM going side by side.
// Sums in float32 in a fixed order. Exponentials are ex2.approx (2^-22), two a logit: the second bound.
#include <cooperative_groups.h>

#include "layers/loss.h"
#include "layers/rows.cuh"

enum { CLUSTER = 4, THREADS = 256, WARPS = THREADS / 32, BATCH = 4 };

static const float LOG2_E = 1.44269504f, LN_2 = 0.693147181f, LOWEST = -1e38f;

static __device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A running maximum, times log2 e and rounded, and the sum of 2^(z log2 e - top): one multiply-add and one ex2 a logit,
// and a rounding of top that cancels in log2(sum) + top. The maximum starts at LOWEST, not at -inf, so that a logit of
// -inf among others counts nothing; all of them -inf make a loss that is not finite. NaN goes through the sum.
struct Softmax {
    float top, sum;
    __device__ void add(float other_top, float other_sum) {
        float highest = fmaxf(top, other_top);
        sum = sum * exp2_fast(top - highest) + other_sum * exp2_fast(other_top - highest);
        top = highest;
    }
};

// The logits of a piece; padding, which may hold anything, as -inf.
template <int W>
static __device__ __forceinline__ void logits_of(float f[W], const Piece<W>& p, int64_t v, int64_t V) {
    load<W>(f, (const floatX*)&p);
    if (v + W > V) {
#pragma unroll
        for (int j = 0; j < W; j++)
            if (v + j >= V) f[j] = -INFINITY;
    }
}

// The largest of a piece, two at a time where none is padding. NaN loses, as in fmaxf.
template <int W>
static __device__ __forceinline__ float top_of(const Piece<W>& p, int64_t v, int64_t V) {
    if constexpr (W == 8) {
        if (v + 8 <= V) {
            const Pack8& q = *(const Pack8*)&p;
            const float2 top =
                __bfloat1622float2(__hmax2(__hmax2(q.pair[0], q.pair[1]), __hmax2(q.pair[2], q.pair[3])));
            return fmaxf(top.x, top.y);
        }
    }
    float f[W], top = -INFINITY;
    logits_of<W>(f, p, v, V);
#pragma unroll
    for (int j = 0; j < W; j++) top = fmaxf(top, f[j]);
    return top;
}

template <int W>
static __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 4)
    cross_entropy_kernel(float* loss, floatX* logits, const int32_t* target, int64_t V, int64_t Vp, float dscale) {
    extern __shared__ __align__(16) char quarter[];
    __shared__ Softmax of_warp[WARPS], of_block[CLUSTER];
    Piece<W>* kept = (Piece<W>*)quarter;
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const int rank = (int)cluster.block_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t n = blockIdx.x / CLUSTER, first = rank * ceil_div(Vp / W, CLUSTER);
    const int64_t rest = Vp / W - first, per = ceil_div(Vp / W, CLUSTER);
    const int count = (int)(rest < 0 ? 0 : rest < per ? rest : per);  // pieces of this block
    floatX* z = logits + n * Vp;
    const int64_t right = target[n];
    const float z_right = z[right];  // before anyone of the cluster writes

    Softmax mine = {LOWEST, 0};
    for (int i0 = threadIdx.x; i0 < count; i0 += BATCH * THREADS) {
        Piece<W> p[BATCH];
        float f[W], top = -INFINITY;
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (i0 + b * THREADS < count) p[b] = *(const Piece<W>*)(z + (first + i0 + b * THREADS) * W);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int i = i0 + b * THREADS;
            if (i >= count) continue;
            kept[i] = p[b];
            top = fmaxf(top, top_of<W>(p[b], (first + i) * W, V));
        }
        top = fmaxf(mine.top, top * LOG2_E);
        mine.sum *= exp2_fast(mine.top - top);
        mine.top = top;
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int i = i0 + b * THREADS;
            if (i >= count) continue;
            logits_of<W>(f, p[b], (first + i) * W, V);
#pragma unroll
            for (int j = 0; j < W; j++) f[j] = exp2_fast(fmaf(f[j], LOG2_E, -top));
#pragma unroll
            for (int d = 1; d < W; d *= 2)
#pragma unroll
                for (int j = 0; j < W; j += 2 * d) f[j] += f[j + d];
            mine.sum += f[0];
        }
    }
#pragma unroll
    for (int d = 16; d; d /= 2)
        mine.add(__shfl_xor_sync(0xffffffffu, mine.top, d), __shfl_xor_sync(0xffffffffu, mine.sum, d));
    if (lane == 0) of_warp[warp] = mine;
    __syncwarp();
    cluster.sync();  // also: every block of the cluster runs, so its shared memory may be written
    if (threadIdx.x < CLUSTER) {
        mine = of_warp[0];
        for (int w = 1; w < WARPS; w++) mine.add(of_warp[w].top, of_warp[w].sum);
        *cluster.map_shared_rank(&of_block[rank], threadIdx.x) = mine;
    }
    __syncwarp();
    cluster.sync();
    Softmax all = of_block[0];
    for (int r = 1; r < CLUSTER; r++) all.add(of_block[r].top, of_block[r].sum);
    // In this order small losses keep their digits.
    if (rank == 0 && threadIdx.x == 0) loss[n] = LN_2 * (log2f(all.sum) + fmaf(-z_right, LOG2_E, all.top));
    if (dscale == 0) return;
    const float scale = dscale / all.sum;
#pragma unroll 2
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int64_t v = (first + i) * W;
        float f[W];
        Piece<W> p = kept[i];
        logits_of<W>(f, p, v, V);  // padding: -inf, so its gradient is 0
#pragma unroll
        for (int j = 0; j < W; j++) f[j] = scale * exp2_fast(fmaf(f[j], LOG2_E, -all.top));
        if (right >= v && right < v + W) {
#pragma unroll
            for (int j = 0; j < W; j++)
                if (v + j == right) f[j] -= dscale;
        }
        store<W>(z + v, f);
    }
}

template <int W>
static void launch(float* loss, floatX* logits, const int32_t* target, int64_t N, int64_t V, int64_t Vp, float dscale,
                   Ctx* ctx) {
    int64_t shared = ceil_div(Vp / W, CLUSTER) * W * (int64_t)sizeof(floatX);
    if (shared > 220 << 10)
        die(EXIT_FAILED, "cross_entropy: a vocabulary of %lld does not fit in shared memory (at most %d)", (long long)V,
            CLUSTER * (220 << 10) / (int)sizeof(floatX));
    CUDA_CHECK(cudaFuncSetAttribute(cross_entropy_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    cross_entropy_kernel<W>
        <<<(unsigned)(N * CLUSTER), THREADS, (size_t)shared, ctx->stream>>>(loss, logits, target, V, Vp, dscale);
    LAUNCH_CHECK();
}

void cross_entropy(real* loss, floatX* logits, const int32_t* target, int64_t N, int64_t V, int64_t Vp, float dscale,
                   Ctx* ctx) {
    if (N == 0) return;
    if (wide(Vp, logits))
        launch<8>(loss, logits, target, N, V, Vp, dscale, ctx);
    else
        launch<1>(loss, logits, target, N, V, Vp, dscale, ctx);
}
