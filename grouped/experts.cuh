// Backward of SwiGLU with the gate (grouped/experts.h) for eight columns of a row: for the kernel of experts.cu, and
// for a kernel of mx/ that rounds `a` first and quantizes the results.
#pragma once

#include "grouped/experts.h"
#include "layers/activation.h"
#include "layers/rows.cuh"

// Eight columns of a row. Inputs: the gate g, up u, and x = da'. The gradients overwrite g and u; `a` becomes a times
// the router's gate (weight). Returns these columns' part of <da', a>. round() may change `a`.
template <typename Round>
static __device__ __forceinline__ float swiglu_backward_piece(float a[8], float g[8], float u[8], float x[8],
                                                              float weight, Round round) {
    // a = silu(g) u
    float dot = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) a[j] = swiglu(g[j], u[j], sigmoid_fast(g[j]));
    round(a);

    // dgate += <da', a>; da = gate da', and from it dg and du
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float s = sigmoid_fast(g[j]);
        dot += x[j] * a[j];
        a[j] *= weight;
        x[j] *= weight;
        const float du = swiglu_du(x[j], g[j], s);
        g[j] = swiglu_dg(x[j], g[j], u[j], s);
        u[j] = du;
    }
    return dot;
}
