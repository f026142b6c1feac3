// The state of a training step, in device memory: its losses, the norm of its gradient, and whether it counts. All
// decisions are made on the device, so that the host never waits:
//
//   step_begin -> (loss_add per micro-step) -> grad_norm_add per buffer -> step_decide -> the optimizers' updates
//
// If the loss or the gradient norm is not finite (ok = 0), weights and moments stay unchanged. Also, ok is 0 if the
// square of the norm, after clipping, overflows float32: second moments would become infinite, and their weights would
// never move again.
#pragma once

#include <math.h>

#include "device/device.h"

// The state of a step, in device memory. The fields up to `stop` are contiguous, so that one all-reduce over the ranks
// sums them.
typedef struct StepState {
    double loss_sum;       // sum of token losses so far, nats
    double mtp_sum;        // loss_sum of the MTP module (multi-token prediction, model/model.h)
    double grad_sq;        // sum of squares of the gradient so far
    double stop;           // not 0: a rank received a request to stop
    double loss;           // loss_sum / tokens, set by step_decide
    double grad_norm;      // sqrt(grad_sq), before clipping
    double grad_scale;     // min(1, clip / grad_norm), or 1 where clip is 0
    double correction1;    // 1 - beta1^updates
    double correction2;    // 1 - beta2^updates
    int64_t updates;       // updates applied so far, this one included; saved in checkpoints
    int32_t ok;            // 1: the loss is finite, and the square of the clipped gradient norm is in float32
    int32_t bad_in_a_row;  // steps in a row with ok = 0
    real max_logit;        // largest attention logit of the step, of all layers
} StepState;
enum { STEP_SUMS = 4 };  // doubles from loss_sum on that are summed over the ranks

typedef struct AdamW AdamW;  // layers/adamw.h

void step_begin(StepState* state, Ctx* ctx);                        // sets the sums to 0
void loss_add(double* sum, const real* loss, int64_t N, Ctx* ctx);  // sum += sum_n loss[n]
// grad_sq += sum_i grad[i]^2, or sum_i rounded[i]^2; one of grad and rounded is NULL.
void grad_norm_add(StepState* state, const real* grad, const floatX* rounded, int64_t n, Ctx* ctx);
// Sets loss .. bad_in_a_row from the sums over `tokens` tokens; opt has the largest norm, and the corrections' betas.
void step_decide(StepState* state, int64_t tokens, const AdamW* opt, Ctx* ctx);

// Bytes of workspace for loss_add and grad_norm_add (partial sums).
size_t step_workspace(int64_t n);

// The start of a step, the same code in both builds.
static inline BOTH_SIDES void step_begin_now(StepState* s) {
    s->loss_sum = s->mtp_sum = s->grad_sq = s->stop = 0;
    s->max_logit = -INFINITY;
}

// The decisions of a step, the same code in both builds.
static inline BOTH_SIDES void step_decide_now(StepState* s, int64_t tokens, double clip, double beta1, double beta2) {
    s->loss = s->loss_sum / (double)tokens;
    s->grad_norm = sqrt(s->grad_sq);
    s->grad_scale = clip > 0 && s->grad_norm > clip ? clip / s->grad_norm : 1;
    s->correction1 = 1 - pow(beta1, (double)(s->updates + 1));
    s->correction2 = 1 - pow(beta2, (double)(s->updates + 1));
    s->ok = isfinite(s->loss) && isfinite((float)(s->grad_sq * s->grad_scale * s->grad_scale));
    s->bad_in_a_row = s->ok ? 0 : s->bad_in_a_row + 1;
    s->updates += s->ok;
}
