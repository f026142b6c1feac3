#include "layers/adamw.h"

#include <math.h>
#include <string.h>

#include "device/cpu.h"

void step_begin(StepState* state, Ctx* ctx) { step_begin_now(state); }

void loss_add(double* sum, const real* loss, int64_t N, Ctx* ctx) {
    for (int64_t n = 0; n < N; n++) *sum += loss[n];
}

size_t adamw_workspace(int64_t n) { return (size_t)ceil_div(n, BLOCK) * sizeof(double); }

// In double: a sum for each block, and then the sum of these in order.
void grad_norm_add(StepState* state, const real* grad, const floatX* rounded, int64_t n, Ctx* ctx) {
    int64_t blocks = ceil_div(n, BLOCK);
    if (rounded) grad = rounded;
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

    // The blocks in order.
    for (int64_t b = 0; b < blocks; b++) state->grad_sq += partial[b];
}

void step_decide(StepState* state, int64_t tokens, const AdamW* opt, Ctx* ctx) { step_decide_now(state, tokens, opt); }

// Updates one buffer. Only the first n_decay elements have weight decay.
static void update_buffer(const AdamWBuffer* buffer, int bf16, const AdamW* opt, const StepState* state) {
    floatX* weight = buffer->weight;
    real* master = buffer->master;
    const real* grad = buffer->rounded ? buffer->rounded : buffer->grad;
    // Scalars that are the same for every element.
    real scale = (real)state->grad_scale, b1 = opt->beta1, b2 = opt->beta2, lr = opt->lr, eps = opt->eps;
    real fix1 = (real)(1 / state->correction1), fix2 = (real)(1 / state->correction2);
#pragma omp parallel for simd schedule(static, BLOCK)
    for (int64_t i = 0; i < buffer->n; i++) {
        real m = moment(buffer->m, bf16, i), v = moment(buffer->v, bf16, i);
        // m and v, then master and weight (formulas in the header). bf16 moments are rounded as they are stored.
        real g = scale * grad[i], decay = i < buffer->n_decay ? (real)opt->weight_decay : 0;
        m = b1 * m + (1 - b1) * g;
        v = b2 * v + (1 - b2) * g * g;
        set_moment(buffer->m, bf16, i, m);
        set_moment(buffer->v, bf16, i, v);
        master[i] -= lr * (m * fix1 / (sqrt(v * fix2) + eps) + decay * master[i]);
        weight[i] = master[i];
    }
}

void adamw_update(const AdamWBuffer* buffers, int count, int bf16, const AdamW* opt, const StepState* state, Ctx* ctx) {
    // A step that is not ok changes no weight and no moment.
    for (int i = 0; i < count && state->ok; i++) update_buffer(&buffers[i], bf16, opt, state);
}
