#include "layers/adamw.h"

#include "device/cpu.h"

// Updates one buffer. Only the first n_decay elements have weight decay.
static void update_buffer(const AdamWBuffer* buffer, int bf16, const AdamW* opt, const StepState* state) {
    floatX* weight = buffer->weight;
    real* master = buffer->master;
    const real* grad = buffer->rounded ? buffer->rounded : buffer->grad;
    // Scalars that are the same for every element.
    real scale = (real)state->grad_scale, b1 = opt->beta1, b2 = opt->beta2, lr = opt->lr;
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
        master[i] -= lr * (m * fix1 / (sqrt(v * fix2) + ADAMW_EPS) + decay * master[i]);
        weight[i] = master[i];
    }
}

void adamw_update(const AdamWBuffer* buffers, int count, int bf16, const AdamW* opt, const StepState* state, Ctx* ctx) {
    // A step that is not ok changes no weight and no moment.
    for (int i = 0; i < count && state->ok; i++) update_buffer(&buffers[i], bf16, opt, state);
}
