// The optimizer step: AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101) over flat buffers, clipping by the global
// norm, and the guard against steps that are not finite. All decisions are taken on the device, so that the host never
// waits:
//
//   step_begin -> (loss_add per micro-step) -> grad_norm_add per buffer -> step_decide -> adamw_update per buffer
//
// A step whose loss or gradient norm is not finite (ok = 0) changes no weight and no moment.
#ifndef LAYERS_ADAMW_H
#define LAYERS_ADAMW_H

#include "device/device.h"

BEGIN_C

// In device memory. The first three lie side by side: one sum over the ranks serves them.
typedef struct StepState {
    double loss_sum;       // sum of token losses so far, nats
    double grad_sq;        // sum of squares of the gradient so far
    double stop;           // not 0: a rank was asked to stop
    double loss;           // loss_sum / tokens, set by step_decide
    double grad_norm;      // sqrt(grad_sq), before clipping
    double grad_scale;     // min(1, clip / grad_norm), or 1 where clip is 0
    double correction1;    // 1 - beta1^updates
    double correction2;    // 1 - beta2^updates
    int64_t updates;       // updates applied so far, this one included; saved in checkpoints
    int32_t ok;            // 1: this step's loss and gradient norm are finite
    int32_t bad_in_a_row;  // steps in a row that were not
} StepState;

typedef struct AdamW {
    float lr, beta1, beta2, eps, weight_decay, clip;  // clip: largest gradient norm, 0 for none
} AdamW;

void step_begin(StepState* state, Ctx* ctx);                                     // loss_sum = grad_sq = stop = 0
void loss_add(StepState* state, const real* loss, int64_t N, Ctx* ctx);          // loss_sum += sum_n loss[n]
void grad_norm_add(StepState* state, const real* grad, int64_t n, Ctx* ctx);     // grad_sq += sum_i grad[i]^2
void step_decide(StepState* state, int64_t tokens, const AdamW* opt, Ctx* ctx);  // the rest of StepState

// g = grad_scale * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
// master -= lr * ((m / correction1) / (sqrt(v / correction2) + eps) + decay * master),  weight = round(master)
// with decay = weight_decay for i < n_decay and 0 after (matrices lie before vectors in a buffer).
// weight may be master where floatX is real. Nothing is written if state->ok is 0.
void adamw_update(floatX* weight, real* master, real* m, real* v, const real* grad, int64_t n, int64_t n_decay,
                  const AdamW* opt, const StepState* state, Ctx* ctx);

// Bytes of workspace for loss_add and grad_norm_add (partial sums).
size_t adamw_workspace(int64_t n);

END_C

#endif
