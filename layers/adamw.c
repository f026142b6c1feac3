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

// A block's moments, n from `first` on, as real: where they lie, or of bf16 in `room`.
static real* moments_of(const void* moments, int bf16, int64_t first, int64_t n, real room[BLOCK]) {
    if (!bf16) return (real*)moments + first;
    for (int64_t i = 0; i < n; i++) room[i] = from_bf16(((const uint16_t*)moments)[first + i]);
    return room;
}

// What moments_of gave is stored, and is then what was stored.
static void keep_moments(void* moments, int bf16, int64_t first, int64_t n, real* values) {
    for (int64_t i = 0; i < n && bf16; i++) values[i] = from_bf16(((uint16_t*)moments)[first + i] = to_bf16(values[i]));
}

// own_largest takes in what these bits stand for.
static void keep_largest(StepState* state, const Bits most[LARGEST]) {
    for (int k = 0; k < LARGEST; k++) {
        real x;
        memcpy(&x, &most[k], sizeof(x));
        if (x > state->own_largest[k] || isnan(x)) state->own_largest[k] = x;  // a NaN stays
    }
}

// most takes in the magnitudes of n elements.
static void take_in(Bits most[LARGEST], const real* master, const real* m, const real* v, int64_t n) {
    Bits most_w = most[LARGEST_WEIGHT], most_m = most[LARGEST_M], most_v = most[LARGEST_V];
#pragma omp simd reduction(max : most_w, most_m, most_v)
    for (int64_t i = 0; i < n; i++) {
        most_w = magnitude(master[i]) > most_w ? magnitude(master[i]) : most_w;
        most_m = magnitude(m[i]) > most_m ? magnitude(m[i]) : most_m;
        most_v = magnitude(v[i]) > most_v ? magnitude(v[i]) : most_v;
    }
    most[LARGEST_WEIGHT] = most_w, most[LARGEST_M] = most_m, most[LARGEST_V] = most_v;
}

void adamw_measure(StepState* state, const real* master, const void* m, const void* v, int bf16, int64_t n, Ctx* ctx) {
    (void)ctx;
    Bits most[LARGEST] = {0};
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t count = min_i64(n - first, BLOCK);
        real room[2][BLOCK];
        take_in(most, master + first, moments_of(m, bf16, first, count, room[0]),
                moments_of(v, bf16, first, count, room[1]), count);
    }
    keep_largest(state, most);
}

static void update_buffer(const AdamWBuffer* buffer, int bf16, const AdamW* opt, StepState* state) {
    floatX* weight = buffer->weight;
    real* master = buffer->master;
    const real* grad = buffer->grad;
    const int64_t n = buffer->n, n_decay = buffer->n_decay;
    // What is the same for every element.
    real scale = (real)state->grad_scale, b1 = opt->beta1, b2 = opt->beta2, lr = opt->lr, eps = opt->eps;
    real fix1 = (real)(1 / state->correction1), fix2 = (real)(1 / state->correction2);
    Bits most[LARGEST] = {0};
#pragma omp parallel for schedule(static) reduction(max : most[:LARGEST])
    for (int64_t b = 0; b < ceil_div(n, BLOCK); b++) {
        const int64_t first = b * BLOCK, end = min_i64(n, first + BLOCK);
        real room[2][BLOCK];
        real* m = moments_of(buffer->m, bf16, first, end - first, room[0]);
        real* v = moments_of(buffer->v, bf16, first, end - first, room[1]);
#pragma omp simd
        for (int64_t i = first; i < end; i++) {
            // m and v, then master and weight, as the header says.
            real g = scale * grad[i], decay = i < n_decay ? (real)opt->weight_decay : 0;
            real m1 = b1 * m[i - first] + (1 - b1) * g, v1 = b2 * v[i - first] + (1 - b2) * g * g;
            m[i - first] = m1, v[i - first] = v1;
            master[i] -= lr * (m1 * fix1 / (sqrt(v1 * fix2) + eps) + decay * master[i]);
            weight[i] = master[i];
        }
        keep_moments(buffer->m, bf16, first, end - first, m);
        keep_moments(buffer->v, bf16, first, end - first, v);
        take_in(most, master + first, m, v, end - first);  // still in the cache
    }
    keep_largest(state, most);
}

void adamw_update(const AdamWBuffer* buffers, int count, int bf16, const AdamW* opt, StepState* state, Ctx* ctx) {
    (void)ctx;
    for (int i = 0; i < count && state->ok; i++) update_buffer(&buffers[i], bf16, opt, state);
}
