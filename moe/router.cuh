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
