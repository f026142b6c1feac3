// The MoE block (mixture of experts): router, routed experts on ragged rows, one shared expert (shared MLP).
//   y_n = shared(x_n) + sum_k gate_nk mlp_e(x_n), e = expert_nk,   mlp_e(x) = W2_e swiglu(W13_e x)
//
//   1. router     each token's experts and gates                                            moe/router.h
//   2. dispatch   all-to-all: tokens to the ranks of their experts, beneath the shared MLP  moe/dispatch.h
//   3. permute    received tokens sorted by expert: rows, or an order for GEMMs to gather   grouped/permute.h
//   4. experts    each expert's MLP over its rows, all experts in one grouped GEMM          linear/linear.h
//   5. combine    all-to-all: gate-weighted sums back to their tokens                       moe/dispatch.h
//
// Backward goes from 5 to 1. The experts' weight gradients overlap with the all-to-all of dx. Backward never needs the
// experts' outputs (grouped/experts.h). Source: DeepSeek-V2 (arXiv 2405.04434) section 2.2, DeepSeek-V3 (arXiv
// 2412.19437) section 2.1.2.
//
// Precision is a property of the tensors (mx/format.h); docs/precision.md has its rules.
#pragma once

#include "linear/quantized.h"
#include "moe/balance.h"
#include "moe/dispatch.h"

typedef struct MoeShape {
    RouterShape router;  // N: the tokens of this rank
    int64_t F;           // hidden width of a routed expert
    int64_t shared_F;    // hidden width of the shared MLP, 0: there is none
    int32_t ep;          // ranks of expert parallelism; E % ep == 0
    int32_t recompute;   // 1: activation checkpointing: backward dispatches x again and recomputes h and shared_h
    Formats formats;     // formats of the experts' GEMMs, dispatch and combine
    double capacity;     // as in DispatchShape
    int32_t windows;     // as in DispatchShape
} MoeShape;

// Weights with their gradients, which are = or += as in Weight. Each of the E / ep experts has a w13 (2F, C) and a w2
// (C, F). The experts' weights have the formats of the shape; some blocks stay in floatX (Format.bf16_blocks).
// Statistics of the weights also cover x, dh, the activation and dy.
typedef struct MoeWeights {
    const floatX* router;              // (E, C)
    real* drouter;                     // (E, C), +=
    const real* bias;                  // (E)
    const Weight *w13, *w2;            // routed experts
    const Weight *shared13, *shared2;  // (2 shared_F, C), (C, shared_F), each in its own format
} MoeWeights;

// The tensors that one block keeps from forward to backward, all in the pool.
typedef struct MoeSaved {
    real* scores;          // (N, E)
    Route route;           // who sends what, and every token's experts and gates
    Rows x;                // (received, C)
    Ragged ragged;         // the received tokens by expert
    floatX *h, *shared_h;  // (rows, 2F), (N, 2 shared_F): before SwiGLU
} MoeSaved;

// Names in `pool` the saved tensors of `blocks` MoE blocks, and the buffers of one block in backward (dispatch_expect).
void moe_plan(Arena* pool, MoeShape shape, int64_t blocks);
// Bytes of moe_plan's table with another capacity factor, at most the factor at which all tokens of all ranks fit.
size_t moe_bytes(MoeShape shape, int64_t blocks, double capacity, Backend backend);
size_t moe_workspace(MoeShape shape);  // bytes, for forward and backward

// y (N, C) =. In training counts += the load and margins of this rank's tokens (moe/balance.h). Takes *saved from the
// pool; the caller releases it.
void moe_forward(floatX* y, const floatX* x, MoeWeights w, MoeSaved* saved, BalanceCounts counts, MoeShape shape,
                 Dispatch* dispatch, Pool* pool, Ctx* ctx);

// dx (N, C) is =. saved: as moe_forward left it. aux: see router_backward.
void moe_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeSaved* saved, float aux,
                  MoeShape shape, Dispatch* dispatch, Pool* pool, Ctx* ctx);
