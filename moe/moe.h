// The MoE block: router, routed experts on ragged rows, one shared MLP.
//   y_n = shared(x_n) + sum_k gate_nk E_{expert_nk}(x_n),   E(x) = W2 swiglu(W13 x)
//
// Expert parallelism (GShard, arXiv 2006.16668): the `ep` ranks of a group hold E / ep experts each, rank i the experts
// i E / ep onwards. A token goes once to each rank that holds one of its experts, with the ids and gates of its choices
// there (dispatch); it is placed there for each of them, and comes back as one gate-weighted sum per rank, summed in
// float32 and sent as floatX (combine). The shared MLP computes while tokens travel. Backward sends dy the same way,
// and dx returns while the weights' gradients are computed. Who sends what is settled once, in forward, and kept.
#ifndef MOE_MOE_H
#define MOE_MOE_H

#include "device/arena.h"
#include "device/pool.h"
#include "grouped/permute.h"
#include "moe/router.h"
#include "mx/linear_mx.h"
#include "mx/mx_stats.h"
#include "parallel/comm.h"

BEGIN_C

// What is MXFP8 (1) and what floatX (0). A cast is made once, by the earliest stage that needs it, whatever ep is:
//   dispatch  x and dy are cast before they travel to the experts
//   expert    the experts' products, weights and activations; x and dy too, where they were not before
//   combine   outputs and dx are cast before they travel back, as one sum per token and rank
//   wgrad     both operands of the weights' gradients, along the tokens, in blocks cut from those that a rank's experts
//             get in a micro-step
// The results of combine and wgrad depend on how the run lies on its ranks, those of the others do not. wgrad's do so
// with MX_FLOOR, which cuts off what is large in its block; with MX_RCEIL a block's scale matters only to elements some
// 2^14 below its largest.
// Where x, dy or the activation were cast, the weights' gradients see what the bytes stand for.
typedef struct MoePrecision {
    int32_t expert, dispatch, combine, wgrad;
    int32_t fast;   // the experts' products on the bytes, scales aligned to 128; else on the values, in floatX
    int32_t scale;  // MxScale
} MoePrecision;

typedef struct MoeShape {
    RouterShape router;  // N: the tokens of this rank
    int64_t F;           // hidden width of a routed expert
    int64_t shared_F;    // of the shared MLP, 0: there is none
    int32_t ep;          // ranks that share the experts; E % ep == 0
    int32_t recompute;   // 1: backward dispatches x again and rebuilds the hidden activations, which are not kept
    MoePrecision precision;
} MoeShape;

typedef struct MxExperts {
    MxWeight w13, w2;            // forward: (E / ep, 2F, C), (E / ep, C, F)
    MxWeight w13_back, w2_back;  // dgrad: (E / ep, C, 2F), (E / ep, F, C)
} MxExperts;

typedef struct MoeWeights {
    const floatX *router, *w13, *w2;  // (E, C), (E / ep, 2F, C), (E / ep, C, F)
    LinearWeight shared13, shared2;   // (2 shared_F, C), (C, shared_F); their precision is their own
    const real* bias;                 // (E)
    const MxExperts* mx;              // with precision.expert
} MoeWeights;

typedef struct MoeGrads {
    real *router, *w13, *w2, *shared13, *shared2;
} MoeGrads;

enum { MOE_MAX_EP = 64 };

// The casts that --mx-stats measures: x before dispatch and the activation between the experts' products, in forward;
// dy and the gradient of the hidden activation, in backward; the weights as forward reads them. All are as the products
// read them, along the contraction.
enum { MOE_STATS_X, MOE_STATS_ACT, MOE_STATS_DY, MOE_STATS_DH, MOE_STATS_W13, MOE_STATS_W2, MOE_STATS };
const char* moe_stats_name(int tensor, MoePrecision precision);  // "x", ..; NULL: no cast of it is made

// What one block keeps from forward to backward; all of it lies in the pool. N tokens of this rank, Nr tokens received.
typedef struct MoeSaved {
    real *scores, *gate;  // (N, E), (N, K)
    int32_t* expert;      // (N, K): chosen once, in forward; backward never chooses again
    // With ep > 1: the tokens by the rank they go to (El = K = ep), and for each rank, on the host, which rows of it
    // go there and which of the received tokens come from there.
    Ragged send;
    int64_t send_start[MOE_MAX_EP], send_rows[MOE_MAX_EP], recv_start[MOE_MAX_EP], recv_rows[MOE_MAX_EP];
    int64_t received;      // Nr; N with ep 1
    int64_t choices;       // token-expert pairs among them
    int32_t* recv_expert;  // (Nr, K): numbers of experts held here, -1 for choices held elsewhere
    real* recv_gate;       // (Nr, K)
    floatX* recv_x;        // (Nr, C); NULL with ep 1, where x itself is used, and where x was cast
    MxRows recv_mx;        // (Nr, C): the bytes that the products read, where x was cast
    Ragged ragged;         // the received tokens by expert
    floatX *h, *shared_h;  // (rows, 2F), (N, 2 shared_F): before SwiGLU
    MxStats* stats;        // forward's, for backward
} MoeSaved;

// What the MoE blocks of a model share: the pool their activations lie in, and how tokens travel: on a line of work
// beside ctx.
typedef struct MoeWays MoeWays;
MoeWays* moe_ways_create(Pool* pool, Comm* comm, MoeShape shape, Ctx* ctx);  // comm: of ep ranks, NULL with ep 1
void moe_ways_destroy(MoeWays* ways);

// Names in `pool` what `blocks` MoE blocks keep and what one of them needs while it works, when every rank receives
// `capacity` times the mean number of tokens and choices (1 with ep 1, where the number is known).
void moe_plan(Arena* pool, MoeShape shape, int64_t blocks, double capacity);
size_t moe_workspace(MoeShape shape);

// A block's expert weights in MXFP8: named in `arena`, and cast anew whenever the weights have changed.
void moe_plan_mx(Arena* arena, MxExperts* mx, MoeShape shape);
void moe_cast_weights(MxExperts* mx, const floatX* w13, const floatX* w2, MoeShape shape, MoeWays* ways, Ctx* ctx);

// y = (N, C). load (E) += the tokens of this rank that chose each expert, if not NULL (training). stats (MOE_STATS) +=
// what the casts do here and in moe_backward, if not NULL: tokens count once, rows and weights where the experts are.
// Takes *saved from the pool; whoever called releases it.
void moe_forward(floatX* y, const floatX* x, MoeWeights w, MoeSaved* saved, int64_t* load, MxStats* stats,
                 MoeShape shape, MoeWays* ways, Ctx* ctx);

// dx (N, C) is =; gradients of the weights +=. aux: see router_backward.
void moe_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeGrads dw, MoeSaved* saved, float aux,
                  MoeShape shape, MoeWays* ways, Ctx* ctx);

END_C

#endif
