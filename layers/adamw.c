#include "layers/adamw.h"

#include <math.h>
#include <string.h>

#include "device/cpu.h"

// Sums are in double over fixed blocks. The blocks' sums are added in order.
enum { BLOCK = 4096 };

void step_begin(StepState* state, Ctx* ctx) {
    step_begin_now(state);
}

void loss_add(double* sum, const real* loss, int64_t N, Ctx* ctx) {
    for (int64_t n = 0; n < N; n++) *sum += loss[n];
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

    // The blocks in order.
    for (int64_t b = 0; b < blocks; b++) state->grad_sq += partial[b];
}

void step_decide(StepState* state, int64_t tokens, const AdamW* opt, Ctx* ctx) {
    step_decide_now(state, tokens, opt);
}

// The moments of a block as real, n from `first` on: a pointer to them, or a copy of bf16 moments in `out`.
static real* moments_of(const void* moments, int bf16, int64_t first, int64_t n, real out[BLOCK]) {
    if (!bf16) return (real*)moments + first;
    for (int64_t i = 0; i < n; i++) out[i] = from_bf16(((const uint16_t*)moments)[first + i]);
    return out;
}

// Stores the moments back if moments_of made a copy.
static void store_moments(void* moments, int bf16, int64_t first, int64_t n, const real* values) {
    for (int64_t i = 0; i < n && bf16; i++) ((uint16_t*)moments)[first + i] = to_bf16(values[i]);
}

// Updates one buffer in blocks. Only the first n_decay elements have weight decay.
static void update_buffer(const AdamWBuffer* buffer, int bf16, const AdamW* opt, const StepState* state) {
    floatX* weight = buffer->weight;
    real* master = buffer->master;
    const real* grad = buffer->grad;
    const int64_t n = buffer->n, n_decay = buffer->n_decay;
    // Scalars that are the same for every element.
    real scale = (real)state->grad_scale, b1 = opt->beta1, b2 = opt->beta2, lr = opt->lr, eps = opt->eps;
    real fix1 = (real)(1 / state->correction1), fix2 = (real)(1 / state->correction2);
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < ceil_div(n, BLOCK); b++) {
        const int64_t first = b * BLOCK, end = min_i64(n, first + BLOCK);
        real copy[2][BLOCK];
        real* m = moments_of(buffer->m, bf16, first, end - first, copy[0]);
        real* v = moments_of(buffer->v, bf16, first, end - first, copy[1]);
#pragma omp simd
        for (int64_t i = first; i < end; i++) {
            // m and v, then master and weight (formulas in the header).
            real g = scale * grad[i], decay = i < n_decay ? (real)opt->weight_decay : 0;
            real m1 = b1 * m[i - first] + (1 - b1) * g, v1 = b2 * v[i - first] + (1 - b2) * g * g;
            m[i - first] = m1;
            v[i - first] = v1;
            master[i] -= lr * (m1 * fix1 / (sqrt(v1 * fix2) + eps) + decay * master[i]);
            weight[i] = master[i];
        }
        // bf16 moments are rounded as they are stored.
        store_moments(buffer->m, bf16, first, end - first, m);
        store_moments(buffer->v, bf16, first, end - first, v);
    }
}

void adamw_update(const AdamWBuffer* buffers, int count, int bf16, const AdamW* opt, const StepState* state, Ctx* ctx) {
    // A step that is not ok changes no weight and no moment.
    for (int i = 0; i < count && state->ok; i++) update_buffer(&buffers[i], bf16, opt, state);
}
