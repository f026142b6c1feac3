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

// The smallest s + bias that selects each expert (moe/balance.h): threshold[j] = alpha, and for experts of groups that
// the token did not select at least omega - partner. `mine`: 32 J floats of the warp in shared memory.
template <int J>
static __device__ __forceinline__ void thresholds(float (&threshold)[J], const float (&compared)[J],
                                                  const bool (&taken)[J], float* mine, const RouterShape& s) {
    const int lane = threadIdx.x % 32, size = s.E / s.groups;

    // lift[j] = omega - partner; -inf where the token selected the group.
    float lift[J];
#pragma unroll
    for (int j = 0; j < J; j++) lift[j] = -INFINITY;
    if (s.groups > 1) {
#pragma unroll
        for (int j = 0; j < J; j++) mine[lane + 32 * j] = compared[j];
        __syncwarp();
        uint32_t group[J];
        float best[J], second[J], omega = INFINITY;
        best_groups(group, best, second, mine, s);
        __syncwarp();
        // The lanes of the groups write both candidates for the partner: the best expert, and the second for the best.
#pragma unroll
        for (int j = 0; j < J; j++) {
            const int g = lane + 32 * j;
            if (g >= s.groups) continue;
            const bool pairs = group_of_pairs(s);
            if (group[j] == 0) omega = fminf(omega, pairs ? best[j] + second[j] : best[j]);
            mine[g] = group[j] == 0 ? INFINITY : pairs ? best[j] : 0;
            if (pairs) mine[s.groups + g] = second[j];
        }
        omega = -warp_max(-omega);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < J; j++) {
            const int e = lane + 32 * j, g = e / size;
            if (e >= s.E || mine[g] == INFINITY) continue;
            lift[j] = omega - (group_of_pairs(s) && compared[j] >= mine[g] ? mine[s.groups + g] : mine[g]);
        }
    }

    // alpha: the best expert that the token did not select in its groups, or the last one that it selected.
    float best = -INFINITY, smallest = INFINITY;
#pragma unroll
    for (int j = 0; j < J; j++) {
        if (taken[j]) smallest = fminf(smallest, compared[j]);
        if (!taken[j] && lift[j] == -INFINITY) best = fmaxf(best, compared[j]);
    }
    best = warp_max(best);
    smallest = -warp_max(-smallest);
#pragma unroll
    for (int j = 0; j < J; j++) threshold[j] = fmaxf(best > -INFINITY ? best : smallest, lift[j]);
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

    // s + bias, and the experts that the token selected.
    const int selected = lane < s.K ? expert[n * s.K + lane] : -1;
    float compared[J], threshold[J];
    bool taken[J];
#pragma unroll
    for (int j = 0; j < J; j++) {
        const int e = lane + 32 * j;
        compared[j] = e < s.E ? scores[n * s.E + e] + bias[e] : -INFINITY;
        taken[j] = false;
        for (int k = 0; k < s.K; k++) taken[j] |= __shfl_sync(0xffffffffu, selected, k) == e;
    }
    thresholds(threshold, compared, taken, row_values[warp], s);

    // One count per expert, in the bin of its margin.
#pragma unroll
    for (int j = 0; j < J; j++) {
        const int64_t e = lane + 32 * j;
        if (e < s.E) atomicAdd(&margins[margin_bin(threshold[j] - compared[j]) * (int64_t)s.E + e], 1ull);
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
    int64_t last = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int64_t before = __shfl_up_sync(0xffffffffu, last, d);
        if (lane >= d) last += before;
    }
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
    balance_quantile_kernel(float* bias, const int64_t* margins, int32_t E, int32_t K, double rate,
                            const StepState* state) {
    wait_for_previous();
    __shared__ double raised[ROUTER_MOST_EXPERTS];
    const int lane = threadIdx.x % 32;
    bias += blockIdx.x * (int64_t)E;
    margins += blockIdx.x * (int64_t)MARGIN_BINS * E;
    if (!state->ok) return;

    // Each bias rises by its quantile, with groups by half of it.
    for (int e = threadIdx.x / 32; e < E; e += UPDATE_THREADS / 32) {
        const double rise = margin_quantile(margins, e, E, K);
        if (lane == 0) raised[e] = bias[e] + rate * rise;
    }
    __syncthreads();

    // Their mean becomes 0. It is NaN in a layer that counted no token.
    double sum = 0;
    for (int e = lane; e < E; e += 32) sum += raised[e];
    const double mean = warp_sum(sum) / E;
    if (isnan(mean)) return;
    for (int e = threadIdx.x; e < E; e += UPDATE_THREADS) bias[e] = (float)(raised[e] - mean);
}

void balance_quantile(real* bias, const int64_t* margins, int64_t layers, int32_t E, int32_t K, int32_t groups,
                      const StepState* state, Ctx* ctx) {
    launch_early(balance_quantile_kernel, (unsigned)layers, UPDATE_THREADS, 0, ctx, bias, margins, E, K,
                 groups > 1 ? 0.5 : 1.0, state);
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
