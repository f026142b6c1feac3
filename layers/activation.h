// The activation of every MLP, SwiGLU (Shazeer 2020, arXiv 2002.05202), and its derivatives. The GEMM with the gate and
// up weights gives g and u. Then
//
//   a = silu(g) u = g s u   with s = sigmoid(g)
//   da/du = silu(g) = g s,   da/dg = u s (1 + g (1 - s))
//
// One source for the dense MLP (layers/swiglu.h), the experts (grouped/experts.h) and the experts in eight bits (mx/),
// on the CPU and on the GPU. So backward's recomputed activation is bit-identical to forward's. Callers pass s, because
// CPU and GPU compute the sigmoid differently.
#pragma once

#include "device/types.h"

static inline BOTH_SIDES real swiglu(real g, real u, real s) { return g * s * u; }

// du and dg from da, the gradient of a.
static inline BOTH_SIDES real swiglu_du(real da, real g, real s) { return da * (g * s); }
static inline BOTH_SIDES real swiglu_dg(real da, real g, real u, real s) { return da * u * s * (1 + g * (1 - s)); }
