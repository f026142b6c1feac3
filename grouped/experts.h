// The activation between an expert's two GEMMs, on the rows of a ragged buffer (grouped/permute.h): SwiGLU, and its
// backward with the gate.
//
//   a = silu(h_gate) * h_up,   Y = W2 a,   out_n = sum_k gate_r Y_r
//
// `gate` alone is the router's; h_gate is SwiGLU's. The backward does not need Y. With da' = dy W2 (`da_ungated`):
//
//   dgate = <dy, Y> = <dy, W2 a> = <da', a>,   da = gate da',   dW2 = sum_r dy_r (gate_r a_r)^T
//
// Pad rows of the outputs are zeros. On the GPU F is a multiple of 8.
#pragma once

#include "device/device.h"
#include "grouped/permute.h"

// a (capacity, F) = silu(h_gate) * h_up for h (capacity, 2F)
void experts_swiglu_forward(floatX* a, const floatX* h, Ragged ragged, int64_t F, Ctx* ctx);

// The outputs and inputs of the backward.
typedef struct ExpertsBackward {
    floatX* dh;                // (capacity, 2F)
    floatX* gated_a;           // (capacity, F): gate * a, for wgrad of W2
    real* drow_gate;           // (capacity): <da', a>; in parts from grouped_gemm_dgrad_swiglu
    const floatX* da_ungated;  // (capacity, F): da' = dy W2
    const floatX* h;           // (capacity, 2F)
} ExpertsBackward;
// dh, gated_a and drow_gate of the rows in use; dh from da by the formulas of layers/activation.h
void experts_swiglu_backward(ExpertsBackward tensors, Ragged ragged, int64_t F, Ctx* ctx);
