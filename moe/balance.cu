// Load balancing on the GPU: integer counts by atomics, then a block per layer for the biases. Counting is bound by the
// atomics, the update by the latency of its loads.
#include "moe/balance.h"

#include "layers/step.h"
#include "moe/router.cuh"

// load += tokens that selected each expert. Blocks count in shared memory, so that few atomics reach `load`. Integer
// sums do not depend on their order.
static __global__ void count_loads(unsigned long long* load, const int32_t* expert, int64_t count, int32_t E) {
    wait_for_previous();
    extern __shared__ int local_count[];
    for (int e = threadIdx.x; e < E; e += 256) local_count[e] = 0;
    __syncthreads();
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < count; i += gridDim.x * (int64_t)256)
        atomicAdd(&local_count[expert[i]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += 256)
        if (local_count[e]) atomicAdd(&load[e], (unsigned long long)local_count[e]);
}

// The groups of a token: inside[j] is true if it selected the group of expert j, and rise[j] = (beta - score) / W
// (moe/balance.h). `mine`: 32 J floats of the warp in shared memory.
template <int J>
static __device__ __forceinline__ void look_at_groups(bool (&inside)[J], float (&rise)[J], const float (&compared)[J],
                                                      float* mine, const RouterShape& s) {
    const int lane = threadIdx.x % 32, size = s.E / s.groups;
#pragma unroll
    for (int j = 0; j < J; j++) mine[lane + 32 * j] = compared[j];
    __syncwarp();
    uint32_t group[J];
    float score[J], beta = -INFINITY;
    best_groups(inside, group, score, mine, s);
#pragma unroll
    for (int j = 0; j < J; j++)
        if (group[j] != 0) beta = fmaxf(beta, score[j]);
    beta = warp_max(beta);

    // Each lane writes the values of its groups, then reads those of its experts' groups.
#pragma unroll
    for (int j = 0; j < J; j++)
        if (lane + 32 * j < s.groups) mine[lane + 32 * j] = (beta - score[j]) / (float)experts_in_score(s);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < J; j++)
        if (lane + 32 * j < s.E) rise[j] = mine[(lane + 32 * j) / size];
}

// margins (MARGIN_BINS, E) += the margins of all tokens, one warp per token; lane l has experts l, l + 32, ... Integer
// atomics in the L2 cache, whose result does not depend on their order.
template <int J>
static __global__ void __launch_bounds__(256) count_margins(unsigned long long* margins, const float* scores,
                                                            const int32_t* expert, const float* bias, RouterShape s) {
    wait_for_previous();
    __shared__ float row_values[8][32 * J];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t n = blockIdx.x * (int64_t)8 + warp;
    if (n >= s.N) return;

    // s + bias, and the groups.
    float compared[J], rise[J];
    bool inside[J];
#pragma unroll
    for (int j = 0; j < J; j++) {
        const int e = lane + 32 * j;
        compared[j] = e < s.E ? scores[n * s.E + e] + bias[e] : -INFINITY;
        inside[j] = true;
        rise[j] = -INFINITY;
    }
    if (s.groups > 1) look_at_groups(inside, rise, compared, row_values[warp], s);

    // alpha: the largest s + bias of the experts of the selected groups that the token did not select.
    const int selected = lane < s.K ? expert[n * s.K + lane] : -1;
    float alpha = -INFINITY;
#pragma unroll
    for (int j = 0; j < J; j++) {
        bool taken = !inside[j];
        for (int k = 0; k < s.K; k++) taken |= __shfl_sync(0xffffffffu, selected, k) == lane + 32 * j;
        if (!taken) alpha = fmaxf(alpha, compared[j]);
    }
    alpha = warp_max(alpha);

    // One count per expert, in the bin of its margin.
#pragma unroll
    for (int j = 0; j < J; j++) {
        const int64_t e = lane + 32 * j;
        if (e < s.E) atomicAdd(&margins[margin_bin(fmaxf(alpha - compared[j], rise[j])) * (int64_t)s.E + e], 1ull);
    }
}

void balance_count(BalanceCounts counts, const real* scores, const int32_t* expert, const real* bias, RouterShape s,
                   Ctx* ctx) {
    const int64_t NK = s.N * s.K, blocks = min_i64(ceil_div(NK, 1024), 4 * (int64_t)ctx->sms);
    launch_early(count_loads, blocks, 256, s.E * sizeof(int), ctx, (unsigned long long*)counts.load, expert, NK, s.E);
    if (!counts.margins) return;
    by_experts(s, [&](auto j) {
        launch_early(count_margins<decltype(j)::value>, blocks_for(s.N, 8), 256, 0, ctx,
                     (unsigned long long*)counts.margins, scores, expert, bias, s);
    });
}

// The K/E quantile of expert e's margins, by one warp; NaN if there are none. Each lane has BINS neighbouring bins.
static __device__ double margin_quantile(const int64_t* margins, int e, int32_t E, int32_t K) {
    constexpr int BINS = (MARGIN_BINS + 31) / 32;
    const int lane = threadIdx.x % 32;
    int64_t count[BINS], own = 0;
#pragma unroll
    for (int i = 0; i < BINS; i++) {
        const int64_t bin = lane * BINS + i;
        count[i] = bin < MARGIN_BINS ? margins[bin * E + e] : 0;
        own += count[i];
    }

    // The number of tokens up to each lane's last bin: an inclusive scan. Every histogram counts all tokens.
    const int64_t last = warp_scan(own);
    const double wanted = (double)__shfl_sync(0xffffffffu, last, 31) * K / E;

    // The first lane that reaches the wanted number walks over its bins.
    int64_t below = last - own, inside = 0;
    int found = lane * BINS;
#pragma unroll
    for (int i = 0; i < BINS; i++) {
        if ((double)(below + inside) >= wanted) break;
        below += inside;
        inside = count[i];
        found = lane * BINS + i;
    }
    const int owner = __ffs(__ballot_sync(0xffffffffu, (double)last >= wanted)) - 1;
    return __shfl_sync(0xffffffffu, margin_in_bin(found, wanted, below, inside), owner);
}

// One block per layer, one warp per expert at a time. Bound by the latency of its loads.
enum { UPDATE_THREADS = 512 };
static __global__ void __launch_bounds__(UPDATE_THREADS)
    balance_quantile_kernel(float* bias, const int64_t* margins, int32_t E, int32_t K, const StepState* state) {
    wait_for_previous();
    __shared__ double raised[ROUTER_MOST_EXPERTS];
    const int lane = threadIdx.x % 32;
    bias += blockIdx.x * (int64_t)E;
    margins += blockIdx.x * (int64_t)MARGIN_BINS * E;
    if (!state->ok) return;

    // Each bias rises by its quantile.
    for (int e = threadIdx.x / 32; e < E; e += UPDATE_THREADS / 32) {
        const double rise = margin_quantile(margins, e, E, K);
        if (lane == 0) raised[e] = bias[e] + rise;
    }
    __syncthreads();

    // Their mean becomes 0. It is NaN in a layer that counted no token.
    double sum = 0;
    for (int e = lane; e < E; e += 32) sum += raised[e];
    const double mean = warp_sum(sum) / E;
    if (isnan(mean)) return;
    for (int e = threadIdx.x; e < E; e += UPDATE_THREADS) bias[e] = (float)(raised[e] - mean);
}

void balance_quantile(real* bias, const int64_t* margins, int64_t layers, int32_t E, int32_t K, const StepState* state,
                      Ctx* ctx) {
    launch_early(balance_quantile_kernel, (unsigned)layers, UPDATE_THREADS, 0, ctx, bias, margins, E, K, state);
}

// One block per layer.
static __global__ void __launch_bounds__(256)
    balance_sign_kernel(float* bias, const int64_t* load, int32_t E, float rate, const StepState* state) {
    wait_for_previous();
    __shared__ unsigned long long total;
    bias += blockIdx.x * (int64_t)E;
    load += blockIdx.x * (int64_t)E;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += 256) atomicAdd(&total, (unsigned long long)load[e]);
    __syncthreads();
    if (!state->ok) return;
    for (int e = threadIdx.x; e < E; e += 256) {
        const int64_t below = (int64_t)total - load[e] * E;  // E * (mean load - load_e), exact
        bias[e] += rate * (float)((below > 0) - (below < 0));
    }
}

void balance_sign(real* bias, const int64_t* load, int64_t layers, int32_t E, float rate, const StepState* state,
                  Ctx* ctx) {
    launch_early(balance_sign_kernel, (unsigned)layers, 256, 0, ctx, bias, load, E, rate, state);
}
