// The MoE block: router, routed experts on ragged rows, one shared MLP.
//   y_n = shared(x_n) + sum_k gate_nk E_{expert_nk}(x_n),   E(x) = W2 swiglu(W13 x)
#ifndef MOE_MOE_H
#define MOE_MOE_H

#include "device/arena.h"
#include "moe/permute.h"
#include "moe/router.h"

BEGIN_C

typedef struct MoeShape {
    RouterShape router;
    int64_t F;         // hidden width of a routed expert
    int64_t shared_F;  // of the shared MLP, 0: there is none
} MoeShape;

typedef struct MoeWeights {
    const floatX *router, *w13, *w2, *shared13,
        *shared2;      // (E, C), (E, 2F, C), (E, C, F), (2 shared_F, C), (C, shared_F)
    const real* bias;  // (E)
} MoeWeights;

typedef struct MoeGrads {
    real *router, *w13, *w2, *shared13, *shared2;
} MoeGrads;

// What one block keeps from forward to backward.
typedef struct MoeSaved {
    real *scores, *gate;  // (N, E), (N, K)
    int32_t* expert;      // (N, K): chosen once, in forward; backward never chooses again
    Ragged ragged;
    floatX *h, *shared_h;  // (capacity, 2F), (N, 2 shared_F): before SwiGLU
} MoeSaved;

// What lives only inside forward or backward; all blocks share it.
typedef struct MoeScratch {
    floatX *rows_a, *rows_b;                   // (capacity, C)
    floatX *act_a, *act_b, *dh;                // (capacity, F), (capacity, F), (capacity, 2F)
    floatX *shared_a, *shared_da, *shared_dh;  // (N, shared_F), (N, shared_F), (N, 2 shared_F)
    real *drow_gate, *dgate;                   // (capacity), (N, K)
} MoeScratch;

void moe_plan_saved(Arena* arena, MoeSaved* saved, MoeShape shape);
void moe_plan_scratch(Arena* arena, MoeScratch* scratch, MoeShape shape);
size_t moe_workspace(MoeShape shape);

// y = (N, C). load (E) += the tokens of each expert, if not NULL (training).
void moe_forward(floatX* y, const floatX* x, MoeWeights w, MoeSaved saved, MoeScratch scratch, int64_t* load,
                 MoeShape shape, Ctx* ctx);

// dx (N, C) is =; gradients of the weights +=. aux: see router_backward.
void moe_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeGrads dw, MoeSaved saved,
                  MoeScratch scratch, float aux, MoeShape shape, Ctx* ctx);

END_C

#endif
