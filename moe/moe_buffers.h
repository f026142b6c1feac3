// The buffers that a MoE block takes from the pool (device/pool.h), by name. Planning and running use the same tables,
// so that the memory plan cannot differ from the run. For moe/moe.c and moe/moe_buffers.c only.
#pragma once

#include "moe/moe.h"

// Rows have the memory that their format requires (linear/rows.h); `rows` in the comments is saved->ragged.capacity.
typedef struct MoeForwardBuffers {
    AllToAll exchange;
    Rows x_rows;       // (rows, C), unless GEMMs gather x
    Rows a;            // (rows, F)
    floatX* out_rows;  // (rows, C): the experts' outputs
    floatX* shared_a;  // (N, shared_F)
} MoeForwardBuffers;

// Some of these buffers share memory, one after the other (moe_take_backward).
typedef struct MoeBackwardBuffers {
    AllToAll exchange, again;                   // all-to-all buffers of dy; `again` of x with recompute
    MlpBuffers shared, experts;                 // the experts' `a` is gate * a, their da is da', dh may be column-wise
    Rows x_rows, dy_rows;                       // (rows, C), unless GEMMs gather them; x with recompute
    Rows dh_quantized;                          // (rows, 2F)
    Rows wgrad_dy, wgrad_a, wgrad_dh, wgrad_x;  // operands that wgrad permutes, or quantizes along tokens
    floatX* dx_rows;                            // (rows, C)
    real *drow_gate, *dgate;                    // (rows, parts), (N, K)
} MoeBackwardBuffers;

void moe_take_choices(Pool* pool, MoeSaved* saved, MoeShape s);  // before the counts of the all-to-all are known
// Both functions need the counts in saved->route. The mark returned is behind the saved tensors: pool_release with this
// mark frees *t alone.
size_t moe_take_forward(Pool* pool, MoeForwardBuffers* t, MoeSaved* saved, MoeShape s);
void moe_take_backward(Pool* pool, MoeBackwardBuffers* t, MoeSaved* saved, MoeShape s);
