// For kernels of a warp per token, which have the experts in registers: lane l has experts l, l + 32, ...
#pragma once

#include "layers/rows.cuh"
#include "moe/router.h"

// Calls launch_for(J) with the smallest J such that 32 J >= E. Kernels have the experts in registers, so J is a
// template parameter.
template <int J = 1, typename Launch>
static void by_experts(RouterShape s, Launch launch_for) {
    ASSERT(s.E <= ROUTER_MOST_EXPERTS && s.K <= ROUTER_MOST_CHOICES && s.K <= s.E);
    if constexpr (32 * J < ROUTER_MOST_EXPERTS)
        if (s.E > 32 * J) return by_experts<2 * J>(s, launch_for);
    launch_for(Int<J>());
}

// Floats as integers of the same order, all above 1; NaN is 1, below everything; 0 means "taken".
static __device__ __forceinline__ uint32_t ordered(float x) {
    if (x != x) return 1;
    uint32_t u = __float_as_uint(x + 0.0f);  // -0 becomes 0: they are equal
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The index of the largest `value`, the lowest of equals; this `value` becomes 0 (taken). Lane l has indices l, l + 32,
// ...
template <int J>
static __device__ __forceinline__ int take_best(uint32_t value[J]) {
    const int lane = threadIdx.x % 32;
    uint32_t best = 0;
    int index = 32 * J;
#pragma unroll
    for (int j = 0; j < J; j++)
        if (value[j] > best) {
            best = value[j];
            index = lane + 32 * j;
        }
    uint32_t highest = __reduce_max_sync(0xffffffffu, best);
    int taken = (int)__reduce_min_sync(0xffffffffu, best == highest ? (uint32_t)index : 32u * J);
#pragma unroll
    for (int j = 0; j < J; j++)
        if (taken == lane + 32 * j) value[j] = 0;
    return taken;
}

// The groups of a token. compared: the token's s + bias in shared memory; flags of the groups overwrite these numbers.
// Lane l has the scores of groups l, l + 32, ... `group` is 0 for the top_groups best groups (selected) and for groups
// that do not exist. The flag inside[j] says whether the token selected the group of expert lane + 32 j.
template <int J>
static __device__ __forceinline__ void best_groups(bool (&inside)[J], uint32_t (&group)[J], float (&score)[J],
                                                   float* compared, const RouterShape& s) {
    const int lane = threadIdx.x % 32, size = s.E / s.groups;
#pragma unroll
    for (int j = 0; j < J; j++) {
        const int g = lane + 32 * j;
        group[j] = 0;
        if (g >= s.groups) continue;
        float best = -INFINITY, second = -INFINITY;
        for (int i = 0; i < size; i++) {
            const float x = compared[g * size + (i + lane) % size];  // lanes start apart: no bank conflicts
            if (x > best) {
                second = best;
                best = x;
            } else if (x > second) {
                second = x;
            }
        }
        score[j] = experts_in_score(s) == 2 ? best + second : best;
        group[j] = ordered(score[j]);
    }
    for (int i = 0; i < s.top_groups; i++) take_best<J>(group);

    // Each lane looks up the groups of its experts.
    __syncwarp();
#pragma unroll
    for (int j = 0; j < J; j++)
        if (lane + 32 * j < s.groups) compared[lane + 32 * j] = group[j] == 0 ? 1.0f : 0.0f;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < J; j++) inside[j] = lane + 32 * j < s.E && compared[(lane + 32 * j) / size] != 0;
    __syncwarp();
}
