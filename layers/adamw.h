// The optimizer step: AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101) over flat buffers, clipping by the global
// norm, and the guard against steps that are not finite. All decisions are taken on the device, so that the host never
// waits:
//
//   step_begin -> (loss_add per micro-step) -> grad_norm_add per buffer -> step_decide -> adamw_update
//
// A step whose loss or gradient norm is not finite (ok = 0) changes no weight and no moment. A step that overflowed
// the capacity of a dispatch (moe/dispatch.h) changes nothing either, and no step after it does until the host has
// grown the capacity and runs them again.
//
// Moments are real, or bf16 as DeepSeek-V3 keeps them (arXiv 2412.19437, section 3.3.3): 22 bytes a parameter are read
// and written instead of 30. Of bf16 ones the update takes the new m and v before they are rounded: they are in
// registers anyway, and what a rounding swallows counts in this update at least. They are stored rounded to nearest
// even, so that a run is the same each time.
//
// What that rounding does. Half a step of bf16 is h = 2^-9 to 2^-8 of the number, by where it lies between two powers
// of two, and a smaller change is lost: v stays where |g^2 - v| <= h v / (1 - b2).
//   b2 = 0.95    the change of a step, some 0.05 v, is far above h v. For a steady g^2 v stops within 8 % of itself,
//                its root within 4 %; for one that varies from step to step v goes on, and roundings even out
//   b2 = 0.99    39 % and some 20 %; the run is warned beyond it
//   b2 = 0.999   (1 - b2) v is less than h v: v never falls, however small g becomes, and updates stay small
// m stops where |g - m| <= h |m| / (1 - b1): 4 % for b1 = 0.9, where g varies by more than m from step to step anyway.
#ifndef LAYERS_ADAMW_H
#define LAYERS_ADAMW_H

#include <math.h>

#include "device/device.h"

BEGIN_C

enum { MTP_MAX = 4 };  // MTP modules at most (multi-token prediction, model/model.h)

// In device memory. The first fields, up to `overflows`, lie side by side: one sum over the ranks serves them.
typedef struct StepState {
    double loss_sum;          // sum of token losses so far, nats
    double mtp_sum[MTP_MAX];  // the same of each MTP module
    double grad_sq;           // sum of squares of the gradient so far
    double stop;              // not 0: a rank was asked to stop
    double overflows;         // dispatches whose tokens exceeded the capacity (moe/dispatch.h)
    double loss;              // loss_sum / tokens, set by step_decide
    double grad_norm;         // sqrt(grad_sq), before clipping
    double grad_scale;        // min(1, clip / grad_norm), or 1 where clip is 0
    double correction1;       // 1 - beta1^updates
    double correction2;       // 1 - beta2^updates
    int64_t updates;          // updates applied so far, this one included; saved in checkpoints
    int32_t ok;               // 1: this step's loss and gradient norm are finite
    int32_t bad_in_a_row;     // steps in a row that were not
    real max_logit;           // largest attention logit of the step, of all layers
    int32_t retry;  // 1: a dispatch overflowed in this step or in one before it. Steps change nothing until the host
                    // has grown the capacity
    double needed;  // of the first such step: the capacity it needs over the one it has. Later steps measure nothing
} StepState;
enum { STEP_SUMS = 4 + MTP_MAX };  // doubles from loss_sum on that are summed over the ranks

// In device memory too: what the host knows of a step, lr first of all, is written there before the step.
typedef struct AdamW {
    float lr, beta1, beta2, eps, weight_decay, clip;  // clip: largest gradient norm, 0 for none
} AdamW;

void step_begin(StepState* state, Ctx* ctx);                                     // the sums are 0
void loss_add(double* sum, const real* loss, int64_t N, Ctx* ctx);               // sum += sum_n loss[n]
void grad_norm_add(StepState* state, const real* grad, int64_t n, Ctx* ctx);     // grad_sq += sum_i grad[i]^2
void step_decide(StepState* state, int64_t tokens, const AdamW* opt, Ctx* ctx);  // the rest of StepState

// A flat buffer of n parameters, and what is kept of them.
typedef struct AdamWBuffer {
    floatX* weight;
    real* master;
    void *m, *v;  // real, or bf16
    const real* grad;
    int64_t n, n_decay;
} AdamWBuffer;

// Of each buffer:
// g = grad_scale * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
// master -= lr * ((m / correction1) / (sqrt(v / correction2) + eps) + decay * master),  weight = round(master)
// with decay = weight_decay for i < n_decay and 0 after (matrices lie before vectors in a buffer).
// weight may be master where floatX is real. bf16 1: the m and v of all buffers are bf16; they are rounded as they are
// stored, after all this. Nothing is written if state->ok is 0.
// On the GPU n is a multiple of 8.
void adamw_update(const AdamWBuffer* buffers, int count, int bf16, const AdamW* opt, const StepState* state, Ctx* ctx);

// Bytes of workspace for loss_add and grad_norm_add (partial sums).
size_t adamw_workspace(int64_t n);

// A step begins in both builds alike.
static inline BOTH_SIDES void step_begin_now(StepState* s) {
    s->loss_sum = s->grad_sq = s->stop = s->overflows = 0;
    for (int k = 0; k < MTP_MAX; k++) s->mtp_sum[k] = 0;
    s->max_logit = -INFINITY;
}

// The decisions, as both builds take them.
static inline BOTH_SIDES void step_decide_now(StepState* s, int64_t tokens, const AdamW* opt) {
    s->loss = s->loss_sum / (double)tokens;
    s->grad_norm = sqrt(s->grad_sq);
    s->grad_scale = opt->clip > 0 && s->grad_norm > opt->clip ? opt->clip / s->grad_norm : 1;
    s->correction1 = 1 - pow((double)opt->beta1, (double)(s->updates + 1));
    s->correction2 = 1 - pow((double)opt->beta2, (double)(s->updates + 1));
    s->retry |= s->overflows > 0;
    s->ok = !s->retry && isfinite(s->loss) && isfinite(s->grad_norm);
    if (!s->retry) s->bad_in_a_row = s->ok ? 0 : s->bad_in_a_row + 1;
    s->updates += s->ok;
}

END_C

#endif
