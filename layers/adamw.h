// The optimizer step: AdamW, with decoupled weight decay (Loshchilov & Hutter 2017, arXiv 1711.05101), over flat
// buffers. Gradient clipping is by the global norm. A step that is not finite is skipped. All decisions are made on the
// device, so that the host never waits:
//
//   step_begin -> (loss_add per micro-step) -> grad_norm_add per buffer -> step_decide -> adamw_update
//
// If the loss or the gradient norm is not finite (ok = 0), weights and moments stay unchanged. The same holds if the
// square of the norm, after clipping, overflows float32: second moments would become infinite, and their weights would
// never move again. It also holds for a step whose dispatch overflowed its capacity (moe/dispatch.h), and for all steps
// after it. The host grows the capacity and retries these steps.
//
// Moments are real, or bf16 as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.3):
//
//   moments   bytes read and written per parameter
//   float32   28
//   bf16      20; 2 less where the gradient is rounded, in both rows
//
// With bf16 moments the update uses the new m and v before they are rounded. They are in registers, and a change that
// the rounding loses still counts in this update. The rounding is to nearest even, so that runs are reproducible.
//
// Effect of that rounding. Half a step of bf16 is h = 2^-9 to 2^-8 of the number, depending on its place between two
// powers of two. Smaller changes are lost:
//
//   v is constant where |g^2 - v| <= h v / (1 - b2)
//     b2 = 0.95    v changes by about 0.05 v per step, far above h v. For a constant g^2, v stops within 8 % of it, and
//                  its root within 4 %. If g^2 varies from step to step, v moves on, and rounding errors average out
//     b2 = 0.99    39 % and about 20 %; the run prints a warning above it
//     b2 = 0.999   (1 - b2) v is less than h v: v never falls, however small g becomes, and updates stay small
//
//   m is constant where |g - m| <= h |m| / (1 - b1)
//     b1 = 0.9     4 %, where g varies by more than m from step to step anyway
//     b1 = 0.98    20 %; the run prints a warning above it, also for Muon's momentum
#pragma once

#include <math.h>

#include "device/device.h"

enum { MTP_MAX = 4 };  // MTP modules at most (multi-token prediction, model/model.h)

// The state of a step, in device memory. The fields up to `overflows` are contiguous, so that one all-reduce over the
// ranks sums them.
typedef struct StepState {
    double loss_sum;          // sum of token losses so far, nats
    double mtp_sum[MTP_MAX];  // the same of each MTP module
    double grad_sq;           // sum of squares of the gradient so far
    double stop;              // not 0: a rank received a request to stop
    double overflows;         // dispatches whose tokens exceeded the capacity (moe/dispatch.h)
    double loss;              // loss_sum / tokens, set by step_decide
    double grad_norm;         // sqrt(grad_sq), before clipping
    double grad_scale;        // min(1, clip / grad_norm), or 1 where clip is 0
    double correction1;       // 1 - beta1^updates
    double correction2;       // 1 - beta2^updates
    int64_t updates;          // updates applied so far, this one included; saved in checkpoints
    int32_t ok;               // 1: the loss is finite, and the square of the clipped gradient norm is in float32
    int32_t bad_in_a_row;     // steps in a row that were not
    real max_logit;           // largest attention logit of the step, of all layers
    int32_t retry;  // 1: a dispatch overflowed in this step or an earlier one. Steps change nothing until the host
                    // has grown the capacity
    double needed;  // needed capacity / available capacity at the first overflow. Later steps do not measure it
} StepState;
enum { STEP_SUMS = 4 + MTP_MAX };  // doubles from loss_sum on that are summed over the ranks

// Per-step hyperparameters, also in device memory. The host writes them before the step, above all lr.
typedef struct AdamW {
    float lr, beta1, beta2, eps, weight_decay, clip;  // clip: largest gradient norm, 0 for none
} AdamW;

void step_begin(StepState* state, Ctx* ctx);                        // sets the sums to 0
void loss_add(double* sum, const real* loss, int64_t N, Ctx* ctx);  // sum += sum_n loss[n]
// grad_sq += sum_i grad[i]^2, or of `rounded` in its place; the other one is NULL.
void grad_norm_add(StepState* state, const real* grad, const floatX* rounded, int64_t n, Ctx* ctx);
void step_decide(StepState* state, int64_t tokens, const AdamW* opt, Ctx* ctx);  // sets the rest of StepState

// A flat buffer of n parameters, with their master weights, moments and gradients.
typedef struct AdamWBuffer {
    floatX* weight;
    Master* master;
    void *m, *v;  // real, or bf16
    const real* grad;
    int64_t n, n_decay;
    const floatX* rounded;  // the gradient in place of grad, or NULL
} AdamWBuffer;

// The update of each buffer, with decay = weight_decay for i < n_decay and 0 after it (matrices come before vectors):
//
//   g = grad_scale * grad
//   m = b1 m + (1 - b1) g
//   v = b2 v + (1 - b2) g^2
//   master -= lr * ((m / correction1) / (sqrt(v / correction2) + eps) + decay * master)
//   weight = round(master)
//
// The two are stored as masters_upload does (device/device.h). weight may be master where floatX is real. If bf16 is 1,
// the m and v of all buffers are bf16; they are rounded when they are stored, after the update. Nothing is written if
// state->ok is 0. On the GPU n is a multiple of 8.
void adamw_update(const AdamWBuffer* buffers, int count, int bf16, const AdamW* opt, const StepState* state, Ctx* ctx);

// Bytes of workspace for loss_add and grad_norm_add (partial sums).
size_t adamw_workspace(int64_t n);

// The start of a step, the same code in both builds.
static inline BOTH_SIDES void step_begin_now(StepState* s) {
    s->loss_sum = s->grad_sq = s->stop = s->overflows = 0;
    for (int k = 0; k < MTP_MAX; k++) s->mtp_sum[k] = 0;
    s->max_logit = -INFINITY;
}

// The decisions of a step, the same code in both builds.
static inline BOTH_SIDES void step_decide_now(StepState* s, int64_t tokens, const AdamW* opt) {
    s->loss = s->loss_sum / (double)tokens;
    s->grad_norm = sqrt(s->grad_sq);
    s->grad_scale = opt->clip > 0 && s->grad_norm > opt->clip ? opt->clip / s->grad_norm : 1;
    s->correction1 = 1 - pow((double)opt->beta1, (double)(s->updates + 1));
    s->correction2 = 1 - pow((double)opt->beta2, (double)(s->updates + 1));
    s->retry |= s->overflows > 0;
    s->ok = !s->retry && isfinite(s->loss) && isfinite((float)(s->grad_sq * s->grad_scale * s->grad_scale));
    if (!s->retry) s->bad_in_a_row = s->ok ? 0 : s->bad_in_a_row + 1;
    s->updates += s->ok;
}
