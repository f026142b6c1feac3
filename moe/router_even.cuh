// d of moe/router.h, by rounds like Sinkhorn's: 2 + EVEN_ROUNDS passes over the logits x of up to 1024 tokens.
//
//   pass      what a token's x_e become                            what their sum over tokens makes
//   mean      x_e                                                  d_e = mean
//   tau       (x_e - d_e)^2                                        tau = EVEN_TAU sqrt(mean, over experts too)
//   a round   h moves, then p_e = sigmoid((x_e - d_e - h) / tau)   d_e += EVEN_STEP tau log(E / K mean p_e)
//
// A cluster of 8 blocks takes a sequence; of 8 experts at most, and before Hopper, a block does. A token lies in LANES
// lanes, HELD experts each, and stays in their registers from the first pass to the last: 16 experts at most, and few
// lanes, because a sum over experts is log2(LANES) shuffles. Sums over tokens go from registers to the warps' (`part`),
// then to the blocks' (`ours`: two in turn, so that one barrier of the cluster a pass is enough). Bound by the latency
// of that chain, 1 to 2.5 us a pass.
#ifndef MOE_ROUTER_EVEN_CUH
#define MOE_ROUTER_EVEN_CUH

#include <cooperative_groups.h>

#include "device/cuda.cuh"
#include "moe/router.h"

// What the BLOCKS of a sequence do together: GPUs before Hopper know no clusters, and run it with one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define EVEN_IN_CLUSTERS(BLOCKS)
template <int BLOCKS>
static __device__ __forceinline__ void blocks_meet() {
    __syncthreads();
}
template <int BLOCKS>
static __device__ __forceinline__ float of_block(const float* place, int) {
    return *place;
}
#else
#define EVEN_IN_CLUSTERS(BLOCKS) __cluster_dims__(BLOCKS)
template <int BLOCKS>
static __device__ __forceinline__ void blocks_meet() {
    if constexpr (BLOCKS == 1)
        __syncthreads();
    else
        cooperative_groups::this_cluster().sync();
}
template <int BLOCKS>
static __device__ __forceinline__ float of_block(float* place, int block) {
    return BLOCKS == 1 ? *place : *cooperative_groups::this_cluster().map_shared_rank(place, block);
}
#endif

// share_d (sequences, E) = even d. Lane l of a token's holds experts l, l + LANES, ...
enum { EVEN_THREADS = 512, EVEN_BLOCKS = 8 };
template <int HELD, int LANES, int BLOCKS>
static __global__ void EVEN_IN_CLUSTERS(BLOCKS) __launch_bounds__(EVEN_THREADS)
    even_out(float* share_d, const float* logits, RouterShape s) {
    enum { ROOM = HELD * LANES, WARPS = EVEN_THREADS / 32, AT_ONCE = EVEN_THREADS / LANES };
    enum { STRIDE = AT_ONCE * BLOCKS, TURNS = EVEN_TOKENS / STRIDE, UNROLL = TURNS <= 8 ? TURNS : 1 };
    __shared__ float part[WARPS][ROOM], ours[2][ROOM], d[ROOM];  // of experts
    const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES, mine = threadIdx.x, rank = blockIdx.x % BLOCKS;
    const int64_t sequence = blockIdx.x / BLOCKS, first = sequence * s.T,
                  tokens = s.N - first < s.T ? s.N - first : s.T, step = (tokens + EVEN_TOKENS - 1) / EVEN_TOKENS;
    const int count = (int)((tokens + step - 1) / step), token = rank * AT_ONCE + threadIdx.x / LANES;

    // The thread's tokens: `token` and every STRIDE-th after it.
    wait_for_previous();
    float x[TURNS][HELD], h[TURNS] = {};
#pragma unroll UNROLL
    for (int i = 0; i < TURNS; i++)
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            const int64_t n = token + i * STRIDE, e = lane + LANES * j;
            x[i][j] = n < count && e < s.E ? logits[(first + n * step) * s.E + e] : -INFINITY;
        }

    // The sum over tokens of what make_y(y, x, h) makes of their logits x and threshold h, which it may move: thread e
    // gets expert e's, then all threads meet.
    int turn = 0;
    auto over_tokens = [&](auto make_y) {
        float sum[HELD] = {};
#pragma unroll UNROLL
        for (int i = 0; i < TURNS; i++) {
            if (i * STRIDE >= count) break;  // the same for all threads, for the shuffles in make_y
            float y[HELD] = {};
            make_y(y, x[i], h[i]);
#pragma unroll
            for (int j = 0; j < HELD; j++) sum[j] += token + i * STRIDE < count ? y[j] : 0;
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
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += mine < s.E ? part[w][mine] : 0;
        float* place = &ours[turn ^= 1][min(mine, ROOM - 1)];  // the one of the pass before may still be read
        if (mine < s.E) *place = total;
        blocks_meet<BLOCKS>();
        total = 0;
        for (int block = 0; block < BLOCKS && mine < s.E; block++) total += of_block<BLOCKS>(place, block);
        return total;
    };

    // What is summed: the logits; the squares of what the mean leaves of them; the soft choice of K, at the token's
    // threshold, which moves first. Experts that are not there add nothing.
    float tau = 0, per_tau = 0;
    auto logit = [&](float(&y)[HELD], const float(&x)[HELD], float&) {
#pragma unroll
        for (int j = 0; j < HELD; j++) y[j] = lane + LANES * j < s.E ? x[j] : 0;
    };
    auto square_left = [&](float(&y)[HELD], const float(&x)[HELD], float&) {
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            const float left = x[j] - d[lane + LANES * j];
            y[j] = lane + LANES * j < s.E ? left * left : 0;
        }
    };
    auto soft_choice = [&](float(&y)[HELD], const float(&x)[HELD], float& h) {
        float left[HELD], total = 0;
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            left[j] = (x[j] - d[lane + LANES * j]) * per_tau;
            total += sigmoid_fast(left[j] - h * per_tau);
        }
        h += tau * __logf(warp_sum<LANES>(total) / (float)s.K + (float)EVEN_LEAST);
#pragma unroll
        for (int j = 0; j < HELD; j++) y[j] = sigmoid_fast(left[j] - h * per_tau);
    };

    // d at first: the mean
    const float mean = over_tokens(logit) / (float)count;
    if (mine < ROOM) d[mine] = mine < s.E ? mean : 0;
    __syncthreads();

    // tau: of the squares that are left, summed over experts in shared memory
    float square = over_tokens(square_left);
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) part[warp][0] = square;
    __syncthreads();
    square = 0;
    for (int w = 0; w < WARPS; w++) square += part[w][0];
    tau = (float)EVEN_TAU * sqrtf(square / ((float)count * s.E)) + 1e-20f;
    __syncthreads();

    // Rounds: d towards equal sums of the tokens' choices.
    for (int round = 0; round < EVEN_ROUNDS; round++, tau *= (float)EVEN_COOLER) {
        per_tau = 1 / tau;
        const float sum = over_tokens(soft_choice);
        if (mine < s.E)
            d[mine] += (float)EVEN_STEP * tau * __logf(sum * (float)s.E / (float)(s.K * count) + (float)EVEN_LEAST);
        __syncthreads();
    }
    blocks_meet<BLOCKS>();  // nobody leaves while others read its sums
    if (rank == 0 && mine < s.E) share_d[sequence * s.E + mine] = *s.even * d[mine];
}

#endif
