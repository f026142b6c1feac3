// AdamW, with decoupled weight decay (Loshchilov & Hutter 2017, arXiv 1711.05101), over flat buffers, after step_decide
// (layers/step.h): gradients are clipped by their global norm, and a step that is not finite is skipped.
//
// Moments are real, or bf16 as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.3):
//
//   moments   bytes read and written per parameter
//   float32   28
//   bf16      20; 2 less where the gradient is rounded, in both rows
//
// With bf16 moments the update uses the new m and v in registers, before rounding. So a change that rounding loses
// still counts in this update. Moments are rounded to nearest even, so that runs are reproducible.
//
// Effect of rounding a moment. Half a step of bf16 is h = 2^-9 to 2^-8 of the moment, depending on its place between
// two powers of two. Changes of less than half a step are lost:
//
//   v is constant where |g^2 - v| <= h v / (1 - b2)
//     b2 = 0.95    v changes by about 0.05 v per step, far above h v. For a constant g^2, v stops within 8 % of it, and
//                  its root within 4 %. If g^2 varies from step to step, v moves on, and rounding errors average out
//     b2 = 0.99    v stops within 39 %, its root within about 20 %; above b2 = 0.99 the run prints a warning
//     b2 = 0.999   (1 - b2) v is less than h v: v never falls, however small g becomes, and updates stay small
//
//   m is constant where |g - m| <= h |m| / (1 - b1)
//     b1 = 0.9     m stops within 4 %; g varies by more than m from step to step anyway
//     b1 = 0.98    m stops within 20 %; above b1 = 0.98 the run prints a warning
#pragma once

#include "layers/step.h"

#define ADAMW_EPS 1e-8f  // as in Adam (Kingma & Ba 2014, arXiv 1412.6980)

// Per-step hyperparameters, also in device memory. The host writes them before the step, above all lr.
typedef struct AdamW {
    float lr, beta1, beta2, weight_decay, clip;  // clip: largest gradient norm, 0 for none
} AdamW;

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
//   master -= lr * ((m / correction1) / (sqrt(v / correction2) + ADAMW_EPS) + decay * master)
//   weight = round(master)
//
// weight and master are stored as by masters_upload (device/device.h). weight may be master where floatX is real. If
// bf16 is 1, the m and v of all buffers are bf16, rounded when they are stored, after the update. Nothing is written if
// state->ok is 0. On the GPU n is a multiple of 8.
void adamw_update(const AdamWBuffer* buffers, int count, int bf16, const AdamW* opt, const StepState* state, Ctx* ctx);
