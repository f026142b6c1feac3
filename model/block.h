// The parts of a pass (model/passes.c): units, blocks and the MTP module.
#pragma once

#include "model/model.h"

// Between begin and end, unit->w holds the unit's weights: gathered, and quantized again if they have changed. `next`
// is prefetched meanwhile (out of range: none).
Unit* unit_begin(Model* model, int unit, int next);
// The quantized copies of a unit are those of its weights now.
void unit_quantized(Model* model, Unit* unit);
void unit_end(Model* model, int unit);
// Between begin and end, ops write or accumulate the unit's gradients. `end` starts their reduction over the ranks:
// sharded gradients in every micro-step, replicated ones in the last. The last adds their squares to state->grad_sq.
void unit_grads_begin(Model* model, int unit);
void unit_grads_end(Model* model, int unit, int last_micro_step);

// A block: forward writes work.out; backward turns work.dx, the gradient after the block, into the gradient before it.
// An output: the final norm of the main model (0) or of the MTP module (1); backward writes work.dx. module_: the MTP
// module (model/mtp.c).
void block_forward(Model* model, const Unit* unit, int train);
void block_backward(Model* model, const Unit* unit, float aux);
void output_forward(Model* model, int k, const Unit* unit);
void output_backward(Model* model, int k, const Unit* unit);
void module_forward(Model* model);
void module_backward(Model* model, float aux, int last_micro_step);

MoeWeights model_moe_weights(const Model* model, const Unit* unit);
void model_rope(Model* model, floatX* q, floatX* kva, int direction);
// Activation checkpointing: computes a block's activations again from its residual.
void model_rebuild_block(Model* model, const Unit* unit);
