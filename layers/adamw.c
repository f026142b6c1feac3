#include "layers/adamw.h"

#include <math.h>
#include <string.h>

#include "device/cpu.h"

// Sums run in double over fixed blocks, and the blocks' sums are added in order.
enum { BLOCK = 4096 };

void step_begin(StepState* state, Ctx* ctx) {
    (void)ctx;
    step_begin_now(state);
}

void loss_add(double* sum, const real* loss, int64_t N, Ctx* ctx) {
    (void)ctx;
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
    (void)ctx;
    step_decide_now(state, tokens, opt);
}

// Numbers without their sign as whole numbers: in the same order, and NaN above all.
#ifdef F64
typedef uint64_t Bits;
#else
typedef uint32_t Bits;
#endif
static inline Bits magnitude(real x) {
    Bits bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits & ~((Bits)1 << (8 * sizeof(Bits) - 1));
}

// own_largest takes in what these bits stand for.
static void keep_largest(StepState* state, const Bits most[LARGEST]) {
    for (int k = 0; k < LARGEST; k++) {
        real x;
        memcpy(&x, &most[k], sizeof(x));
        if (x > state->own_largest[k] || isnan(x)) state->own_largest[k] = x;  // a NaN stays
    }
}

// most takes in the magnitudes of elements first .. end - 1.
static void take_in(Bits most[LARGEST], const real* master, const real* m, const real* v, int64_t first, int64_t end) {
    Bits most_w = most[LARGEST_WEIGHT], most_m = most[LARGEST_M], most_v = most[LARGEST_V];
#pragma omp simd reduction(max : most_w, most_m, most_v)
    for (int64_t i = first; i < end; i++) {
        most_w = magnitude(master[i]) > most_w ? magnitude(master[i]) : most_w;
        most_m = magnitude(m[i]) > most_m ? magnitude(m[i]) : most_m;
        most_v = magnitude(v[i]) > most_v ? magnitude(v[i]) : most_v;
    }
    most[LARGEST_WEIGHT] = most_w, most[LARGEST_M] = most_m, most[LARGEST_V] = most_v;
}

void adamw_measure(StepState* state, const real* master, const real* m, const real* v, int64_t n, Ctx* ctx) {
    (void)ctx;
    Bits most[LARGEST] = {0};
    take_in(most, master, m, v, 0, n);
    keep_largest(state, most);
}

static void update_buffer(const AdamWBuffer* buffer, const AdamW* opt, StepState* state) {
    floatX* weight = buffer->weight;
    real *master = buffer->master, *m = buffer->m, *v = buffer->v;
    const real* grad = buffer->grad;
    const int64_t n = buffer->n, n_decay = buffer->n_decay;
    // What is the same for every element.
    real scale = (real)state->grad_scale, b1 = opt->beta1, b2 = opt->beta2, lr = opt->lr, eps = opt->eps;
    real fix1 = (real)(1 / state->correction1), fix2 = (real)(1 / state->correction2);
    Bits most[LARGEST] = {0};
#pragma omp parallel for schedule(static) reduction(max : most[:LARGEST])
    for (int64_t b = 0; b < ceil_div(n, BLOCK); b++) {
        int64_t end = min_i64(n, (b + 1) * BLOCK);
#pragma omp simd
        for (int64_t i = b * BLOCK; i < end; i++) {
            // m and v, then master and weight, as the header says.
            real g = scale * grad[i];
            real decay = i < n_decay ? (real)opt->weight_decay : 0;
            m[i] = b1 * m[i] + (1 - b1) * g;
            v[i] = b2 * v[i] + (1 - b2) * g * g;
            master[i] -= lr * (m[i] * fix1 / (sqrt(v[i] * fix2) + eps) + decay * master[i]);
            weight[i] = master[i];
        }
        take_in(most, master, m, v, b * BLOCK, end);  // still in the cache
    }
    keep_largest(state, most);
}

void adamw_update(const AdamWBuffer* buffers, int count, const AdamW* opt, StepState* state, Ctx* ctx) {
    (void)ctx;
    for (int i = 0; i < count && state->ok; i++) update_buffer(&buffers[i], opt, state);
}
