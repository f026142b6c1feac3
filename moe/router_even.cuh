// d of moe/router.h, by rounds like Sinkhorn's: 2 + EVEN_ROUNDS passes over the logits x of up to 1024 tokens.
//
//   pass      what a token's x_e become                            what their sum over tokens makes
//   mean      x_e                                                  d_e = mean
//   tau       (x_e - d_e)^2                                        tau = EVEN_TAU sqrt(mean, over experts too)
//   a round   h moves, then p_e = sigmoid((x_e - d_e - h) / tau)   d_e += EVEN_STEP tau log(E / K mean p_e)
//
// A cluster of 8 blocks takes a sequence (before Hopper one block). Sums go from registers to the warps' (`part`), then
// to the blocks' (`ours`: two in turn, so that one barrier of the cluster a pass is enough). A token lies in LANES
// lanes, HELD experts each: 16 at most, for the registers; few lanes, because a sum over experts is log2(LANES)
// shuffles. Bound by the exponentials, 2 E a token and round, and by a barrier of the cluster after each pass.
#ifndef MOE_ROUTER_EVEN_CUH
#define MOE_ROUTER_EVEN_CUH

#include <cooperative_groups.h>

#include "device/cuda.cuh"
#include "moe/router.h"

// What the blocks of a sequence do together. GPUs before Hopper know no clusters: a block takes a sequence there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
enum { EVEN_BLOCKS = 1 };
#define EVEN_IN_CLUSTERS
static __device__ __forceinline__ void blocks_meet() { __syncthreads(); }
static __device__ __forceinline__ float of_block(const float* place, int) { return *place; }
#else
enum { EVEN_BLOCKS = 8 };
#define EVEN_IN_CLUSTERS __cluster_dims__(EVEN_BLOCKS)
static __device__ __forceinline__ void blocks_meet() { cooperative_groups::this_cluster().sync(); }
static __device__ __forceinline__ float of_block(float* place, int block) {
    return *cooperative_groups::this_cluster().map_shared_rank(place, block);
}
#endif

// p = sigmoid(x - h), the soft choice of K experts; -inf beyond E.
template <int HELD>
static __device__ __forceinline__ void soft_choice(float (&p)[HELD], const float (&x)[HELD], float h) {
#pragma unroll
    for (int j = 0; j < HELD; j++) p[j] = sigmoid_fast(x[j] - h);
}

// share_d (sequences, E) = even d. Lane l of a token's holds experts l, l + LANES, ...
enum { EVEN_THREADS = 512 };
template <int J>
static __global__ void EVEN_IN_CLUSTERS __launch_bounds__(EVEN_THREADS)
    even_out(float* share_d, const float* logits, RouterShape s) {
    wait_for_previous();
    enum { HELD = J < 4 ? 4 * J : 16, LANES = 32 * J / HELD, WARPS = EVEN_THREADS / 32, AT_ONCE = 32 * WARPS / LANES };
    __shared__ float part[WARPS][32 * J], ours[2][32 * J], d[32 * J], h[EVEN_TOKENS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES, mine = threadIdx.x, rank = blockIdx.x % EVEN_BLOCKS;
    const int64_t sequence = blockIdx.x / EVEN_BLOCKS, first = sequence * s.T,
                  tokens = s.N - first < s.T ? s.N - first : s.T, step = (tokens + EVEN_TOKENS - 1) / EVEN_TOKENS,
                  count = (tokens + step - 1) / step;
    logits += first * s.E;
    for (int t = threadIdx.x; t < EVEN_TOKENS; t += EVEN_THREADS) h[t] = 0;

    // The sum over tokens of their logits x as change_x(n), which edits those of token n in place, leaves them: thread
    // e gets expert e's, then all threads meet.
    float x[HELD];
    int turn = 0;
    auto over_tokens = [&](auto change_x) {
        // A thread's tokens. All threads of a block go round as often, for the shuffles in change_x; a token after the
        // last is the last once more, and is not added.
        float sum[HELD] = {};
#pragma unroll 2
        for (int64_t n = rank * AT_ONCE + threadIdx.x / LANES; n < round_up(count, AT_ONCE);
             n += AT_ONCE * EVEN_BLOCKS) {
            const float* of_token = logits + min(n, count - 1) * step * s.E;
#pragma unroll
            for (int j = 0; j < HELD; j++) x[j] = lane + LANES * j < s.E ? of_token[lane + LANES * j] : -INFINITY;
            change_x(n);
#pragma unroll
            for (int j = 0; j < HELD; j++) sum[j] += n < count ? x[j] : 0;
        }
        // The warp's, those of all warps, and those of all blocks.
#pragma unroll
        for (int j = 0; j < HELD; j++) {
#pragma unroll
            for (int other = LANES; other < 32; other *= 2) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], other);
            if (threadIdx.x % 32 < LANES) part[warp][lane + LANES * j] = sum[j];
        }
        __syncthreads();
        float total = 0;
        for (int w = 0; w < WARPS && mine < s.E; w++) total += part[w][mine];
        float* place = &ours[turn ^= 1][min(mine, 32 * J - 1)];  // the one of the pass before may still be read
        if (mine < s.E) *place = total;
        blocks_meet();
        total = 0;
        for (int block = 0; block < EVEN_BLOCKS && mine < s.E; block++) total += of_block(place, block);
        return total;
    };

    // What x becomes: in the pass for tau the squares of what the mean leaves; in a round the soft choice of K, at the
    // token's threshold h, which moves first.
    float tau;
    auto to_squares = [&](int64_t) {
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            const float left = x[j] - d[lane + LANES * j];
            x[j] = lane + LANES * j < s.E ? left * left : 0;
        }
    };
    auto to_choice = [&](int64_t n) {
        const float per_tau = 1 / tau;
        float p[HELD], total = 0, threshold = n < count ? h[n] : 0;
#pragma unroll
        for (int j = 0; j < HELD; j++) x[j] = (x[j] - d[lane + LANES * j]) * per_tau;
        soft_choice(p, x, threshold * per_tau);
#pragma unroll
        for (int j = 0; j < HELD; j++) total += p[j];
        threshold += tau * logf(warp_sum<LANES>(total) / (float)s.K + (float)EVEN_LEAST);
        if (n < count && lane == 0) h[n] = threshold;
        soft_choice(x, x, threshold * per_tau);
    };

    // d at first: the mean
    const float mean = over_tokens([](int64_t) {}) / (float)count;
    if (mine < 32 * J) d[mine] = mine < s.E ? mean : 0;
    __syncthreads();

    // tau: of the squares that are left, summed over experts in shared memory
    float square = over_tokens(to_squares);
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) part[0][warp] = square;
    __syncthreads();
    square = 0;
    for (int w = 0; w < WARPS; w++) square += part[0][w];
    tau = (float)EVEN_TAU * sqrtf(square / ((float)count * s.E)) + 1e-20f;
    __syncthreads();

    // Rounds: d towards equal sums of the tokens' choices.
    for (int round = 0; round < EVEN_ROUNDS; round++, tau *= (float)EVEN_COOLER) {
        const float sum = over_tokens(to_choice);
        if (mine < s.E)
            d[mine] += (float)EVEN_STEP * tau * logf(sum * (float)s.E / (float)(s.K * count) + (float)EVEN_LEAST);
        __syncthreads();
    }
    blocks_meet();  // nobody leaves while others read its sums
    if (rank == 0 && mine < s.E) share_d[sequence * s.E + mine] = *s.even * d[mine];
}

#endif
