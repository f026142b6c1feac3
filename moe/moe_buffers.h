// The buffers that a MoE block takes from the pool (device/pool.h), by name. Planning and running use the same tables,
// so that the memory plan cannot differ from the run. For moe/moe.c and moe/moe_buffers.c only.
#pragma once

#include "moe/moe.h"

// Rows have the memory that their format requires (linear/rows.h); `rows` in the comments is saved->ragged.capacity.
typedef struct MoeForwardBuffers {
    AllToAll exchange;
    Rows rows;           // (rows, max(C, F)): x, unless GEMMs gather it; then the experts' outputs
    Rows act;            // (rows, F)
    floatX* shared_act;  // (N, shared_F)
} MoeForwardBuffers;

// dact, act and dh serve the shared MLP first: (N, shared_F), (N, shared_F), (N, 2 shared_F).
typedef struct MoeBackwardBuffers {
    AllToAll exchange, again;  // all-to-all buffers of dy; of x with recompute
    Rows rows;                 // (rows, C): x or dy, unless GEMMs gather it
    Rows channels;             // packed wgrad: x or dy, quantized along tokens
    floatX *dact, *act, *dh;  // (rows, max(C, F)): da', then dx; (rows, F): gate * a; (rows, 2F): dh, maybe column-wise
    Rows dh_quantized;        // (rows, 2F): dh, quantized; packed wgrad: then gate * a or dh, along tokens
    real *drow_gate, *dgate;  // (rows, parts), (N, K)
} MoeBackwardBuffers;

static inline DispatchShape dispatch_shape(MoeShape s) {
    DispatchShape d = {s.router.N, s.router.C, s.router.E, s.router.K, s.ep, s.dispatch, format_of_rows(s.expert),
                       s.combine,  s.capacity, s.windows};
    return d;
}

void moe_take_choices(Pool* pool, MoeSaved* saved, MoeShape s);  // before the counts of the all-to-all are known
// Needs the counts in saved->route. The mark is behind the saved tensors: releasing it frees *t alone.
PoolMark moe_take_forward(Pool* pool, MoeForwardBuffers* t, MoeSaved* saved, MoeShape s);
void moe_take_backward(Pool* pool, MoeBackwardBuffers* t, MoeSaved* saved, MoeShape s);
