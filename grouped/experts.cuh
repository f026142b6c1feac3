// Backward of SwiGLU with the gate (grouped/experts.h) for one row, by one warp. Two kernels use it: experts.cu's, and
// the one that also quantizes to MXFP8 (mx/mx_swiglu.cu). They differ in two callbacks: round() on a, made() on the
// gradients.
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

// Backward of one row. The callbacks may use warp shuffles, so all lanes call them the same number of times, even with
// c >= F:
//
//     round(a)             may change the 8 elements of a
//     made(c, dgate, dup)  gets the gradients of columns c .. c + 7
template <typename Round, typename Made>
static __device__ __forceinline__ void swiglu_backward_row(floatX* dh, floatX* gated_a, float* drow_gate,
                                                           const floatX* da_ungated, const floatX* h, const Ragged& r,
                                                           int64_t row, int64_t F, Round round, Made made) {
    // Pointers: the row's gate, up and da', and their gradients.
    enum { PIECES_AT_ONCE = 2 };
    const int lane = threadIdx.x % 32;
    const bool real_row = r.row_token[row] >= 0;
    const float weight = real_row ? r.row_gate[row] : 0;
    const floatX *h_row = h + row * 2 * F, *da = da_ungated + row * F;
    floatX* d = dh + row * 2 * F;
    float dot = 0;
    for (int64_t c0 = lane * 8; c0 - lane * 8 < F; c0 += PIECES_AT_ONCE * 256) {
        // All loads are issued first. Pad rows are not read: they count as zeros.
        uint4 gs[PIECES_AT_ONCE] = {}, us[PIECES_AT_ONCE] = {}, ds[PIECES_AT_ONCE] = {};
#pragma unroll
        for (int i = 0; i < PIECES_AT_ONCE; i++) {
            const int64_t c = c0 + i * 256;
            if (!real_row || c >= F) continue;
            gs[i] = *(const uint4*)(h_row + c);
            us[i] = *(const uint4*)(h_row + F + c);
            ds[i] = *(const uint4*)(da + c);
        }

#pragma unroll
        for (int i = 0; i < PIECES_AT_ONCE; i++) {
            const int64_t c = c0 + i * 256;
            float g[8], u[8], x[8], a[8];
            floats_of(g, gs[i]);
            floats_of(u, us[i]);
            floats_of(x, ds[i]);
            dot += swiglu_backward_piece(a, g, u, x, weight, round);

            // The stored gradients and those given to made() are the same rounded values. A lane past F stores nothing.
            const uint4 gate = vec8_of(g), up = vec8_of(u);
            if (c < F) {
                store(gated_a + row * F + c, a);
                *(uint4*)(d + c) = gate;
                *(uint4*)(d + F + c) = up;
            }
            made(c, gate, up);
        }
    }

    // dgate = <da', a> of the row, summed in a fixed order.
    dot = warp_sum(dot);
    if (lane == 0) drow_gate[row] = dot;
}
