// The MoE block (mixture of experts): router, routed experts on ragged rows, one shared expert (shared MLP).
//   y_n = shared(x_n) + sum_k gate_nk mlp_e(x_n), e = expert_nk,   mlp_e(x) = W2_e swiglu(W13_e x)
//
//   1. router     each token's experts and gates                                            moe/router.h
//   2. dispatch   all-to-all: tokens to the ranks of their experts, beneath the shared MLP  moe/dispatch.h
//   3. permute    received tokens into rows, sorted by expert                               grouped/permute.h
//   4. experts    each expert's MLP over its rows, all experts in one grouped GEMM          mx/linear.h
//   5. combine    all-to-all: gate-weighted sums back to their tokens                       moe/dispatch.h
//
// Backward goes from 5 to 1. The experts' weight gradients overlap with the all-to-all of dx. Backward never needs the
// experts' outputs (grouped/experts.h). Source: DeepSeek-V2 (arXiv 2405.04434) section 2.2, DeepSeek-V3 (arXiv
// 2412.19437) section 2.1.2.
//
// Precision is a property of the tensors (mx/rows.h). The shape has four formats:
//
//   dispatch   x and dy in the all-to-all of dispatch
//   expert     operands of the experts' GEMMs in forward and dgrad, weights included
//   combine    outputs and dx in the all-to-all of combine
//   wgrad      operands of the experts' weight gradients
//
// A tensor is quantized once, by the earliest stage that needs it, for any ep. The weight gradients read the
// dequantized x, dy and activation where these were quantized.
//
// Results depend on the rank layout in two cases. (a) Combine quantizes one partial sum per rank. (b) Wgrad quantizes
// along tokens, so its blocks depend on the tokens that a rank's experts get in a micro-step. Case (b) matters only
// with MX_FLOOR, which saturates large values of a block. With MX_RCEIL a scale matters only to elements some 2^14
// below the largest of its block.
#pragma once

#include "moe/balance.h"
#include "moe/dispatch.h"
#include "mx/linear.h"

typedef struct MoeShape {
    RouterShape router;  // N: the tokens of this rank
    int64_t F;           // hidden width of a routed expert
    int64_t shared_F;    // hidden width of the shared MLP, 0: there is none
    int32_t ep;          // ranks of expert parallelism; E % ep == 0
    int32_t recompute;   // 1: activation checkpointing: backward dispatches x again and recomputes h and shared_h
    Format dispatch, expert, combine;  // as in DispatchShape; the experts' weights have the format `expert` too
    Format wgrad;                      // of the operands of the experts' weight gradients; fast only if expert is fast
    double capacity;                   // as in DispatchShape
    int32_t windows;                   // as in DispatchShape
} MoeShape;

// Weights with their gradients, which are = or += as in Weight. Shapes: w13 is E / ep of (2F, C), w2 is E / ep of (C,
// F). Their MxStats cover x, dy, the activation and its gradient too.
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
size_t moe_workspace(MoeShape shape);

// y (N, C) =. In training counts += the load and margins of this rank's tokens (moe/router.h). Takes *saved from the
// pool; the caller releases it.
void moe_forward(floatX* y, const floatX* x, MoeWeights w, MoeSaved* saved, BalanceCounts counts, MoeShape shape,
                 Dispatch* dispatch, Pool* pool, Ctx* ctx);

// dx (N, C) is =. aux: see router_backward.
void moe_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeSaved* saved, float aux,
                  MoeShape shape, Dispatch* dispatch, Pool* pool, Ctx* ctx);
