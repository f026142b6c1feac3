// The parts of a pass (model/passes.c): units, blocks and the MTP module.
#pragma once

#include "model/model.h"

// From unit_begin to unit_end, unit->w has the unit's weights: gathered, and quantized again if they have changed.
// unit_begin also prefetches the weights of unit `next`; out of range: none.
Unit* unit_begin(Model* model, int unit, int next);
// Records that a unit's quantized copies are of its present weights.
void unit_quantized(Model* model, Unit* unit);
void unit_end(Model* model, int unit);
// From unit_grads_begin to unit_grads_end, ops write or accumulate the unit's gradients. unit_grads_end starts their
// reduction over the ranks: of sharded gradients always, of replicated gradients in the last micro-step. In the last
// micro-step it also adds the squares of the sums to state->grad_sq.
void unit_grads_begin(Model* model, int unit);
void unit_grads_end(Model* model, int unit, int last_micro_step);

// block_forward writes work.out. block_backward reads the gradient after the block from work.dx, and writes the
// gradient before the block there. aux: see router_backward.
// output_: the final norm of the main model (k 0) or of the MTP module (k 1). output_backward writes work.dx. module_:
// the MTP module (model/mtp.c).
void block_forward(Model* model, const Unit* unit, int train);
void block_backward(Model* model, const Unit* unit, float aux);
void output_forward(Model* model, int k, const Unit* unit);
void output_backward(Model* model, int k, const Unit* unit);
void module_forward(Model* model);
void module_backward(Model* model, float aux, int last_micro_step);

MoeWeights model_moe_weights(const Model* model, const Unit* unit);  // of a MoE unit, as moe_forward takes them
// Turns q and the k_rope columns of kva, in place, by their positions; direction 1: forward, -1: backward.
void model_rope(Model* model, floatX* q, floatX* kva, int direction);
// Activation checkpointing: computes a block's activations again, from the block's `residual`.
void model_rebuild_block(Model* model, const Unit* unit);
