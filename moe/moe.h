// The MoE block: router, routed experts on ragged rows, one shared MLP.
//   y_n = shared(x_n) + sum_k gate_nk mlp_e(x_n), e = expert_nk,   mlp_e(x) = W2_e swiglu(W13_e x)
//
//   1. router     each token's experts and gates                                            moe/router.h
//   2. dispatch   tokens to the ranks of their experts; the shared MLP computes meanwhile   moe/dispatch.h
//   3. permute    received tokens into rows, sorted by expert                               grouped/permute.h
//   4. experts    each expert's MLP over its rows, all experts in one product               mx/products.h
//   5. combine    gate-weighted sums home                                                   moe/dispatch.h
//
// Backward goes from 5 to 1, and computes the experts' weight gradients while dx travels. It never needs the experts'
// outputs (grouped/experts.h). Source: DeepSeek-V2 (arXiv 2405.04434) section 2.2, DeepSeek-V3 (arXiv 2412.19437)
// section 2.1.2.
//
// Precision is in the formats of the tensors (mx/rows.h): of x and dy as they travel (shape.dispatch), of the operands
// of the experts' products (shape.expert, weights), of what travels back (shape.combine), and of the operands of the
// weights' gradients (shape.wgrad). A cast is made once, by the earliest stage that needs it, whatever ep is. The
// results of combine and wgrad depend on how the run lies on its ranks, those of the others do not: combine casts a sum
// per rank, wgrad blocks along the tokens that a rank's experts get in a micro-step. wgrad's do so with MX_FLOOR, which
// cuts off what is large in its block; with MX_RCEIL a block's scale matters only to elements some 2^14 below its
// largest. Where x, dy or the activation were cast, the weights' gradients see what the bytes stand for.
#ifndef MOE_MOE_H
#define MOE_MOE_H

#include "moe/dispatch.h"
#include "moe/router.h"
#include "mx/products.h"

BEGIN_C

typedef struct MoeShape {
    RouterShape router;  // N: the tokens of this rank
    int64_t F;           // hidden width of a routed expert
    int64_t shared_F;    // of the shared MLP, 0: there is none
    int32_t ep;          // ranks that share the experts; E % ep == 0
    int32_t recompute;   // 1: backward dispatches x again and rebuilds the hidden activations, which are not kept
    Format dispatch, expert, combine;  // as in DispatchShape; expert is that of the experts' weights too
    Format wgrad;                      // of the operands of the experts' weight gradients; fast only where expert is
    double capacity;                   // as in DispatchShape
} MoeShape;

// Weights with their gradients (Weight says whether these are = or +=). w13 (E / ep of (2F, C)), w2 (E / ep of (C, F));
// their statistics take in those of x, dy, the activation and its gradient.
typedef struct MoeWeights {
    const floatX* router;              // (E, C)
    real* drouter;                     // (E, C), +=
    const real* bias;                  // (E)
    const Weight *w13, *w2;            // routed experts
    const Weight *shared13, *shared2;  // (2 shared_F, C), (C, shared_F); their precision is their own
} MoeWeights;

// What one block keeps from forward to backward; all of it lies in the pool.
typedef struct MoeSaved {
    real* scores;          // (N, E)
    Route route;           // who sends what, and every token's experts and gates
    Rows x;                // (received, C)
    Ragged ragged;         // the received tokens by expert
    floatX *h, *shared_h;  // (rows, 2F), (N, 2 shared_F): before SwiGLU
} MoeSaved;

// Names in `pool` what `blocks` MoE blocks keep and what one of them needs while it works, when every rank receives
// `capacity` times the mean number of tokens and choices (1 with ep 1, where the number is known).
void moe_plan(Arena* pool, MoeShape shape, int64_t blocks, double capacity);
size_t moe_workspace(MoeShape shape);

// y = (N, C). counts += those of this rank's tokens, in training (moe/router.h). Takes *saved from the pool; the caller
// releases it.
void moe_forward(floatX* y, const floatX* x, MoeWeights w, MoeSaved* saved, RouterCounts counts, MoeShape shape,
                 Dispatch* dispatch, Pool* pool, Ctx* ctx);

// dx (N, C) is =. aux: see router_backward.
void moe_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeSaved* saved, float aux,
                  MoeShape shape, Dispatch* dispatch, Pool* pool, Ctx* ctx);

END_C

#endif
