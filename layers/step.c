#include "layers/step.h"

#include "device/cpu.h"
#include "layers/adamw.h"

void step_begin(StepState* state, Ctx* ctx) { step_begin_now(state); }

void loss_add(double* sum, const real* loss, int64_t N, Ctx* ctx) {
    for (int64_t n = 0; n < N; n++) *sum += loss[n];
}

size_t step_workspace(int64_t n) { return (size_t)ceil_div(n, BLOCK) * sizeof(double); }

// In double: a sum for each block, and then the sum of these in order.
void grad_norm_add(StepState* state, const real* grad, const floatX* rounded, int64_t n, Ctx* ctx) {
    int64_t blocks = ceil_div(n, BLOCK);
    if (rounded) grad = rounded;
    ASSERT(step_workspace(n) <= ctx->workspace_bytes);
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

void step_decide(StepState* state, int64_t tokens, const AdamW* opt, Ctx* ctx) {
    step_decide_now(state, tokens, opt->clip, opt->beta1, opt->beta2);
}
