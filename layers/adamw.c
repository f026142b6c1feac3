#include "layers/adamw.h"

#include <math.h>

#include "device/cpu.h"

// Sums run in double over fixed blocks, and the blocks' sums are added in order.
enum { BLOCK = 4096 };

void step_begin(StepState* state, Ctx* ctx) {
    (void)ctx;
    state->loss_sum = state->grad_sq = state->stop = 0;
}

void loss_add(StepState* state, const real* loss, int64_t N, Ctx* ctx) {
    (void)ctx;
    for (int64_t n = 0; n < N; n++) state->loss_sum += loss[n];
}

size_t adamw_workspace(int64_t n) { return (size_t)ceil_div(n, BLOCK) * sizeof(double); }

void grad_norm_add(StepState* state, const real* grad, int64_t n, Ctx* ctx) {
    int64_t blocks = ceil_div(n, BLOCK);
    ASSERT(adamw_workspace(n) <= ctx->workspace_bytes);
    double* partial = (double*)ctx->workspace;
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        double sum = 0;
        int64_t end = min_i64(n, (b + 1) * BLOCK);
#pragma omp simd reduction(+ : sum)
        for (int64_t i = b * BLOCK; i < end; i++) sum += (double)grad[i] * grad[i];
        partial[b] = sum;
    }
    for (int64_t b = 0; b < blocks; b++) state->grad_sq += partial[b];
}

void step_decide(StepState* state, int64_t tokens, const AdamW* opt, Ctx* ctx) {
    (void)ctx;
    state->loss = state->loss_sum / tokens;
    state->grad_norm = sqrt(state->grad_sq);
    state->ok = isfinite(state->loss) && isfinite(state->grad_norm);
    state->bad_in_a_row = state->ok ? 0 : state->bad_in_a_row + 1;
    if (!state->ok) return;
    state->updates++;
    state->grad_scale = opt->clip > 0 && state->grad_norm > opt->clip ? opt->clip / state->grad_norm : 1;
    state->correction1 = 1 - pow(opt->beta1, (double)state->updates);
    state->correction2 = 1 - pow(opt->beta2, (double)state->updates);
}

void adamw_update(floatX* weight, real* master, real* m, real* v, const real* grad, int64_t n, int64_t n_decay,
                  const AdamW* opt, const StepState* state, Ctx* ctx) {
    (void)ctx;
    if (!state->ok) return;
    real scale = (real)state->grad_scale, b1 = opt->beta1, b2 = opt->beta2, lr = opt->lr, eps = opt->eps;
    real fix1 = (real)(1 / state->correction1), fix2 = (real)(1 / state->correction2);
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < ceil_div(n, BLOCK); b++) {
        int64_t end = min_i64(n, (b + 1) * BLOCK);
#pragma omp simd
        for (int64_t i = b * BLOCK; i < end; i++) {
            real g = scale * grad[i];
            real decay = i < n_decay ? (real)opt->weight_decay : 0;
            m[i] = b1 * m[i] + (1 - b1) * g;
            v[i] = b2 * v[i] + (1 - b2) * g * g;
            master[i] -= lr * (m[i] * fix1 / (sqrt(v[i] * fix2) + eps) + decay * master[i]);
            weight[i] = master[i];
        }
    }
}
