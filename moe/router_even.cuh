// What evens out the choice of a sequence's tokens (moe/router.h): Sinkhorn's rounds, a block for each sequence.
#ifndef MOE_ROUTER_EVEN_CUH
#define MOE_ROUTER_EVEN_CUH

#include "device/cuda.cuh"
#include "moe/router.h"

// p = sigmoid(x - h), the soft choice of K experts; -inf beyond E.
template <int HELD>
static __device__ __forceinline__ void soft_choice(float (&p)[HELD], const float (&x)[HELD], float h) {
#pragma unroll
    for (int j = 0; j < HELD; j++) p[j] = 1 / (1 + expf(h - x[j]));
}

// share_d (sequences, E) = even d. A block takes a sequence, LANES lanes a token: lane l of them holds experts l,
// l + LANES, ... Sums over tokens stay in registers until all are read; then the warps' meet in shared memory, in
// order. Bound by the exponentials; only the first steps of a run need it.
template <int J>
static __global__ void __launch_bounds__(512) even_out(float* share_d, const float* logits, RouterShape s) {
    wait_for_previous();
    enum { HELD = J < 4 ? 4 * J : 16, LANES = 32 * J / HELD, WARPS = 16, AT_ONCE = 32 * WARPS / LANES };
    __shared__ float part[WARPS][32 * J], d[32 * J], h[EVEN_TOKENS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES, mine = threadIdx.x;
    const int64_t first = blockIdx.x * s.T, tokens = s.N - first < s.T ? s.N - first : s.T,
                  step = (tokens + EVEN_TOKENS - 1) / EVEN_TOKENS, count = (tokens + step - 1) / step;
    logits += first * s.E;
    for (int t = threadIdx.x; t < EVEN_TOKENS; t += 32 * WARPS) h[t] = 0;

    // The sum over tokens of what `make` turns their logits x into: thread e gets expert e's, then all threads meet.
    float x[HELD];
    auto over_tokens = [&](auto make) {
        // A thread's tokens. All threads go round as often, for the shuffles in `make`; a token after the last is the
        // last once more, and is not added.
        float sum[HELD] = {};
#pragma unroll 2
        for (int64_t n = threadIdx.x / LANES; n < round_up(count, AT_ONCE); n += AT_ONCE) {
            const float* of_token = logits + min(n, count - 1) * step * s.E;
#pragma unroll
            for (int j = 0; j < HELD; j++) x[j] = lane + LANES * j < s.E ? of_token[lane + LANES * j] : -INFINITY;
            make(n);
#pragma unroll
            for (int j = 0; j < HELD; j++) sum[j] += n < count ? x[j] : 0;
        }
        // The warp's, then those of all warps.
#pragma unroll
        for (int j = 0; j < HELD; j++) {
#pragma unroll
            for (int other = LANES; other < 32; other *= 2) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], other);
            if (threadIdx.x % 32 < LANES) part[warp][lane + LANES * j] = sum[j];
        }
        __syncthreads();
        float total = 0;
        for (int w = 0; w < WARPS && mine < s.E; w++) total += part[w][mine];
        __syncthreads();
        return total;
    };

    // d at first: the mean
    const float mean = over_tokens([](int64_t) {}) / (float)count;
    if (mine < 32 * J) d[mine] = mine < s.E ? mean : 0;
    __syncthreads();

    // tau: of the squares that are left, summed over experts in shared memory
    float square = over_tokens([&](int64_t) {
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            const float left = x[j] - d[lane + LANES * j];
            x[j] = lane + LANES * j < s.E ? left * left : 0;
        }
    });
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) part[0][warp] = square;
    __syncthreads();
    square = 0;
    for (int w = 0; w < WARPS; w++) square += part[0][w];
    float tau = (float)EVEN_TAU * sqrtf(square / ((float)count * s.E)) + 1e-20f;
    __syncthreads();

    // Rounds: each token's threshold towards a soft choice of K, and d towards equal sums of these choices.
    for (int round = 0; round < EVEN_ROUNDS; round++, tau *= (float)EVEN_COOLER) {
        const float sum = over_tokens([&](int64_t n) {
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
        });
        if (mine < s.E)
            d[mine] += (float)EVEN_STEP * tau * logf(sum * (float)s.E / (float)(s.K * count) + (float)EVEN_LEAST);
        __syncthreads();
    }
    if (mine < s.E) share_d[blockIdx.x * (int64_t)s.E + mine] = *s.even * d[mine];
}

#endif
