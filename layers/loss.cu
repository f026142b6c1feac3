// Cross-entropy: bound by memory. Four blocks (a cluster) share a row of logits: each reads its quarter once, into
// shared memory, while its threads keep a running maximum and sum of exponentials; the four exchange theirs through
// distributed shared memory, and the gradient is written from shared memory over the logits. At V = 102400 a quarter
// takes 50 KiB, so that several clusters at different stages keep reads and writes of an SM going side by side.
// Sums in float32 in a fixed order. __expf is good to 2^-21 near the maximum, where the terms matter.
#include <cooperative_groups.h>
#include <float.h>

#include "layers/loss.h"
#include "layers/rows.cuh"

enum { CLUSTER = 4, THREADS = 256, WARPS = THREADS / 32, BATCH = 4 };

// A running maximum and the sum of exp(z - maximum). The maximum starts at the lowest number, not at -inf, so that a
// logit of -inf among others counts nothing; all of them -inf make a loss that is not finite. NaN goes through the sum.
struct Softmax {
    float top, sum;
    __device__ void add(float other_top, float other_sum) {
        float highest = fmaxf(top, other_top);
        sum = sum * __expf(top - highest) + other_sum * __expf(other_top - highest);
        top = highest;
    }
};

template <int W>
static __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 4)
    softmax_loss(float* loss, floatX* logits, const int32_t* target, int64_t V, int64_t Vp, float dscale) {
    extern __shared__ char quarter[];
    __shared__ Softmax of_warp[WARPS], of_block[CLUSTER];
    Piece<W>* kept = (Piece<W>*)quarter;
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const int rank = (int)cluster.block_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t n = blockIdx.x / CLUSTER, pieces = Vp / W, per = ceil_div(pieces, CLUSTER);
    const int64_t first = rank * per, count = first + per <= pieces ? per : first < pieces ? pieces - first : 0;
    floatX* z = logits + n * Vp;
    const int64_t right = target[n];
    const float z_right = z[right];  // before anyone of the cluster writes

    Softmax mine = {-FLT_MAX, 0};
    for (int64_t i0 = threadIdx.x; i0 < count; i0 += BATCH * THREADS) {
        Piece<W> p[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (i0 + b * THREADS < count) p[b] = *(const Piece<W>*)(z + (first + i0 + b * THREADS) * W);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int64_t i = i0 + b * THREADS, v = (first + i) * W;
            if (i >= count) continue;
            kept[i] = p[b];
            float f[W], top = mine.top;
            load<W>(f, (const floatX*)&p[b]);
#pragma unroll
            for (int j = 0; j < W; j++) {
                if (v + j >= V) f[j] = -INFINITY;
                top = fmaxf(top, f[j]);
            }
            mine.sum *= __expf(mine.top - top);
            mine.top = top;
#pragma unroll
            for (int j = 0; j < W; j++) mine.sum += __expf(f[j] - top);
        }
    }
#pragma unroll
    for (int d = 16; d; d /= 2)
        mine.add(__shfl_xor_sync(0xffffffffu, mine.top, d), __shfl_xor_sync(0xffffffffu, mine.sum, d));
    if (lane == 0) of_warp[warp] = mine;
    cluster.sync();  // also: every block of the cluster runs, so its shared memory may be written
    if (threadIdx.x < CLUSTER) {
        mine = of_warp[0];
        for (int w = 1; w < WARPS; w++) mine.add(of_warp[w].top, of_warp[w].sum);
        *cluster.map_shared_rank(&of_block[rank], threadIdx.x) = mine;
    }
    cluster.sync();
    Softmax all = of_block[0];
    for (int r = 1; r < CLUSTER; r++) all.add(of_block[r].top, of_block[r].sum);
    // In this order small losses keep their digits.
    if (rank == 0 && threadIdx.x == 0) loss[n] = logf(all.sum) + (all.top - z_right);
    if (dscale == 0) return;
    const float scale = dscale / all.sum;
    for (int64_t i = threadIdx.x; i < count; i += THREADS) {
        const int64_t v = (first + i) * W;
        float f[W];
        Piece<W> p = kept[i];
        load<W>(f, (const floatX*)&p);
#pragma unroll
        for (int j = 0; j < W; j++) {
            f[j] = scale * __expf(f[j] - all.top);
            if (v + j == right) f[j] -= dscale;
            if (v + j >= V) f[j] = 0;
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
    CUDA_CHECK(cudaFuncSetAttribute(softmax_loss<W>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    softmax_loss<W><<<(unsigned)(N * CLUSTER), THREADS, (size_t)shared, ctx->stream>>>(loss, logits, target, V, Vp,
                                                                                       dscale);
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
