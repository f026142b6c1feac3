// What an expert does between its two products: SwiGLU, and its backward with the gate. Over ragged rows
// (grouped/permute.h).
//
// The gate multiplies the expert's output: out_n = sum_k gate_r Y_r. The backward never needs Y: with dA' = dOut W2
// (`da_ungated`),
//   dgate = <dOut, Y> = <dOut, W2 A> = <dA', A>,   dA = gate dA',   dW2 = sum_r dOut_r (gate_r A_r)^T
// Pad rows of the outputs are zeros. On the GPU F is a multiple of 8.
#ifndef GROUPED_EXPERTS_H
#define GROUPED_EXPERTS_H

#include "device/device.h"
#include "grouped/permute.h"

BEGIN_C

// a = silu(h_gate) * h_up
void experts_swiglu_forward(floatX* a,        // (capacity, F)
                            const floatX* h,  // (capacity, 2F)
                            Ragged ragged, int64_t F, Ctx* ctx);

void experts_swiglu_backward(floatX* dh,                // (capacity, 2F)
                             floatX* gated_a,           // (capacity, F): gate * A, for wgrad of W2
                             real* drow_gate,           // (capacity): <dA', A>
                             const floatX* da_ungated,  // (capacity, F): dA' = dOut W2
                             const floatX* h,           // (capacity, 2F)
                             Ragged ragged, int64_t F, Ctx* ctx);

END_C

#endif
