// The optimizer step against float64, and its guard: a step that is not finite changes no bit.
#include "layers/adamw.h"
#include "tests/oracle.h"

enum { BUFFERS = 3 };
static const int64_t sizes[BUFFERS] = {129, 300, 1}, decayed[BUFFERS] = {129, 127, 0};  // n and n_decay of a buffer
static const AdamW options = {.lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.95f, .weight_decay = 0.5f, .clip = 1};

typedef struct {
    AdamW opt;
    int64_t updates;  // before the first step
    int steps;
    int alias;  // 1: weight and master are the same buffer
    real *loss, *grad[BUFFERS];
    StepState *state, *each;  // after the last step; after every step's decision
    real *weight[BUFFERS], *master[BUFFERS], *m[BUFFERS], *v[BUFFERS];
} Adam;

enum { TOKENS = 257 };

// The gradients of step s are scaled by a factor that makes their norm larger or smaller than 1.
static double gradient_size = 1;
static double gradient_factor(int s) { return gradient_size * (s % 3 == 0 ? 3 : s % 3 == 1 ? 1e-3 : 0.03); }

static void one_step(StepState* state, real* weight[], real* master[], real* m[], real* v[], const real* loss,
                     real* const grad[], const AdamW* opt, Ctx* ctx) {
    step_begin(state, ctx);
    loss_add(&state->loss_sum, loss, 130, ctx);  // two micro-steps
    loss_add(&state->loss_sum, loss + 130, TOKENS - 130, ctx);
    for (int b = 0; b < BUFFERS; b++) grad_norm_add(state, grad[b], NULL, sizes[b], ctx);
    step_decide(state, TOKENS, opt, ctx);
    AdamWBuffer list[BUFFERS];
    for (int b = 0; b < BUFFERS; b++) {
        const AdamWBuffer buffer = {weight[b], master[b], m[b], v[b], grad[b], sizes[b], decayed[b], NULL};
        list[b] = buffer;
    }
    adamw_update(list, BUFFERS, 0, opt, state, ctx);
    ctx_sync(ctx);
}

static void run_adam(void* arg) {
    Adam* a = arg;
    Ctx* ctx = ctx_create(step_workspace(300));
    a->state = kept_bytes(sizeof(StepState)), a->each = kept_bytes(a->steps * sizeof(StepState));
    a->state->updates = a->updates, a->state->loss_sum = a->state->grad_sq = NAN;  // step_begin must clear these
    for (int b = 0; b < BUFFERS; b++) {
        a->master[b] = tensor(sizes[b], 10 + b);
        a->weight[b] = a->alias ? a->master[b] : poisoned(sizes[b]);
        a->m[b] = filled(sizes[b], 0), a->v[b] = filled(sizes[b], 0);
    }
    for (int s = 0; s < a->steps; s++) {
        real *loss = tensor(TOKENS, 20 + s), *grad[BUFFERS];
        for (int b = 0; b < BUFFERS; b++) {
            grad[b] = tensor(sizes[b], 30 + BUFFERS * s + b);
            for (int64_t i = 0; i < sizes[b]; i++) grad[b][i] *= (real)gradient_factor(s);
        }
        one_step(a->state, a->weight, a->master, a->m, a->v, loss, grad, &a->opt, ctx);
        a->each[s] = *a->state;
    }
    ctx_destroy(ctx);
}

#define CHECK_NUMBER(value, expected, tolerance)                                                                       \
    CHECK(fabs((value) - (expected)) <= (tolerance)*fabs(expected), "%s = %.17g, expected %.17g", #value,              \
          (double)(value), (double)(expected))

static void check_adam(AdamW opt, int64_t updates, int alias) {
    Adam a = {.opt = opt, .updates = updates, .steps = 6, .alias = alias};
    check_threads(run_adam, &a);
    double *master[BUFFERS], *change[BUFFERS], *m[BUFFERS], *v[BUFFERS], b1 = opt.beta1, b2 = opt.beta2;
    for (int b = 0; b < BUFFERS; b++) {
        master[b] = doubles(tensor(sizes[b], 10 + b), sizes[b]);
        change[b] = zeros(sizes[b]), m[b] = zeros(sizes[b]), v[b] = zeros(sizes[b]);
    }
    int clipped = 0;
    for (int s = 0; s < a.steps; s++) {
        double loss = 0, squares = 0, done = (double)updates + s + 1, *grad[BUFFERS];
        real* losses = tensor(TOKENS, 20 + s);
        for (int64_t n = 0; n < TOKENS; n++) loss += losses[n];
        for (int b = 0; b < BUFFERS; b++) {
            real* g = tensor(sizes[b], 30 + BUFFERS * s + b);
            for (int64_t i = 0; i < sizes[b]; i++) g[i] *= (real)gradient_factor(s);
            grad[b] = doubles(g, sizes[b]);
            squares += dot(grad[b], grad[b], sizes[b]);
        }
        double norm = sqrt(squares), scale = opt.clip > 0 && norm > opt.clip ? opt.clip / norm : 1;
        clipped += scale < 1;
        const StepState* e = &a.each[s];
        // Sums of 430 numbers in double; a backend may sum its parts in float32.
        CHECK_NUMBER(e->loss_sum, loss, TOL(1e-5, 1e-12));
        CHECK_NUMBER(e->loss, loss / TOKENS, TOL(1e-5, 1e-12));
        CHECK_NUMBER(e->grad_sq, squares, TOL(1e-6, 1e-12));
        CHECK_NUMBER(e->grad_norm, norm, TOL(1e-6, 1e-12));
        CHECK_NUMBER(e->grad_scale, scale, TOL(1e-6, 1e-12));
        CHECK_NUMBER(e->correction1, 1 - pow(b1, done), 1e-12);
        CHECK_NUMBER(e->correction2, 1 - pow(b2, done), 1e-12);
        CHECK(e->updates == updates + s + 1 && e->ok == 1 && e->bad_in_a_row == 0, "updates %lld ok %d bad %d",
              (long long)e->updates, e->ok, e->bad_in_a_row);
        for (int b = 0; b < BUFFERS; b++)
            for (int64_t i = 0; i < sizes[b]; i++) {
                double g = scale * grad[b][i], decay = i < decayed[b] ? opt.weight_decay : 0;
                m[b][i] = b1 * m[b][i] + (1 - b1) * g;
                v[b][i] = b2 * v[b][i] + (1 - b2) * g * g;
                double mean = m[b][i] / (1 - pow(b1, done)), root = sqrt(v[b][i] / (1 - pow(b2, done)));
                double step = (double)opt.lr * (mean / (root + (double)ADAMW_EPS) + decay * master[b][i]);
                master[b][i] -= step;
                change[b][i] -= step;
            }
    }
    CHECK(opt.clip == 0 ? clipped == 0 : clipped == 2, "%d steps were clipped", clipped);
    for (int b = 0; b < BUFFERS; b++) {
        real *start = tensor(sizes[b], 10 + b), *moved = copied(a.master[b], sizes[b]);
        for (int64_t i = 0; i < sizes[b]; i++) moved[i] -= start[i];
        // Six steps of some roundings each. The change is about 0.3 of a master of 1, which is rounded six times at 1:
        // 6 u / 0.3.
        CHECK_CLOSE(moved, change[b], sizes[b], TOL(2e-6, 1e-14));
        CHECK_CLOSE(a.m[b], m[b], sizes[b], TOL(1e-6, 1e-14));
        CHECK_CLOSE(a.v[b], v[b], sizes[b], TOL(1e-6, 1e-14));
        CHECK_BITS(a.weight[b], a.master[b], sizes[b] * sizeof(real));  // floatX is real on the CPU
    }
    release_all();
}

static void test_adamw(void) {
    AdamW opt = options;
    check_adam(opt, 0, 0);
    check_adam(opt, 41, 1);  // resumed
    opt.clip = 0;
    check_adam(opt, 3, 0);
    // Gradients so small that ADAMW_EPS counts.
    opt.weight_decay = 0, opt.lr = 0.03f;
    gradient_size = 1e-6;
    check_adam(opt, 0, 1);
    gradient_size = 1;
}

static void test_step_not_finite(void) {
    Ctx* ctx = ctx_create(step_workspace(300));
    StepState* state = kept_bytes(sizeof(StepState));
    real *weight[BUFFERS], *master[BUFFERS], *m[BUFFERS], *v[BUFFERS], *grad[BUFFERS], *loss = tensor(TOKENS, 1);
    for (int b = 0; b < BUFFERS; b++) {
        master[b] = tensor(sizes[b], 10 + b), weight[b] = copied(master[b], sizes[b]),
        grad[b] = tensor(sizes[b], 20 + b);
        m[b] = tensor(sizes[b], 30 + b), v[b] = filled(sizes[b], 0.25);
    }
    state->updates = 7;
    one_step(state, weight, master, m, v, loss, grad, &options, ctx);
    CHECK(state->ok == 1 && state->updates == 8 && state->bad_in_a_row == 0, "a good step");
    // The place of the bad number: the first or last element of a buffer, or the loss.
    real* const places[] = {&grad[0][0], &grad[0][128], &grad[1][299], &grad[2][0], &loss[0], &loss[TOKENS - 1]};
    const real bad[] = {NAN, INFINITY, -INFINITY};
    int in_a_row = 0;
    for (int k = 0; k < 3 * COUNT(places); k++) {
        real *place = places[k / 3], saved = *place;
        *place = bad[k % 3];
        real* before[4 * BUFFERS];
        for (int b = 0; b < BUFFERS; b++) {
            before[4 * b] = copied(weight[b], sizes[b]), before[4 * b + 1] = copied(master[b], sizes[b]);
            before[4 * b + 2] = copied(m[b], sizes[b]), before[4 * b + 3] = copied(v[b], sizes[b]);
        }
        one_step(state, weight, master, m, v, loss, grad, &options, ctx);
        *place = saved;
        in_a_row++;
        CHECK(state->ok == 0 && state->bad_in_a_row == in_a_row, "case %d: ok %d, %d in a row, expected %d", k,
              state->ok, state->bad_in_a_row, in_a_row);
        for (int b = 0; b < BUFFERS; b++) {
            CHECK_BITS(before[4 * b], weight[b], sizes[b] * sizeof(real));
            CHECK_BITS(before[4 * b + 1], master[b], sizes[b] * sizeof(real));
            CHECK_BITS(before[4 * b + 2], m[b], sizes[b] * sizeof(real));
            CHECK_BITS(before[4 * b + 3], v[b], sizes[b] * sizeof(real));
        }
        CHECK(state->updates == 8 + k / 5, "case %d: updates %lld", k, (long long)state->updates);
        if (k % 5 == 4) {  // a good one in between
            one_step(state, weight, master, m, v, loss, grad, &options, ctx);
            in_a_row = 0;
            CHECK(state->ok == 1 && state->bad_in_a_row == 0, "case %d: ok %d, %d in a row", k, state->ok,
                  state->bad_in_a_row);
            CHECK(memcmp(before[1], master[0], sizes[0] * sizeof(real)), "a good step changed nothing");
            CHECK_NUMBER(state->correction1, 1 - pow((double)options.beta1, (double)state->updates), 1e-12);
        }
    }
    ctx_destroy(ctx);
    release_all();
}

// Gradients of zero are a step like any other: the norm is 0, and clip / 0 must not matter. Gradients whose square is
// too large for float32 still make a finite norm. Clipped, they are a good step; without clipping, their second moments
// would be infinite, so the step changes nothing.
static void test_extreme_gradients(void) {
    Ctx* ctx = ctx_create(step_workspace(300));
    StepState* state = kept_bytes(sizeof(StepState));
    real *weight[BUFFERS], *m[BUFFERS], *v[BUFFERS], *grad[BUFFERS], *loss = filled(TOKENS, 2);
    for (int b = 0; b < BUFFERS; b++) {
        weight[b] = filled(sizes[b], 1), grad[b] = filled(sizes[b], 0);
        m[b] = filled(sizes[b], 0), v[b] = filled(sizes[b], 0);
    }
    one_step(state, weight, weight, m, v, loss, grad, &options, ctx);
    CHECK(state->ok == 1 && state->grad_norm == 0 && state->grad_scale == 1, "norm %g scale %g", state->grad_norm,
          state->grad_scale);
    CHECK_NUMBER(state->loss, 2.0, 1e-12);
    // Only decay changes the matrices: 1 - 0.1 * 0.5. Elements from n_decay on stay.
    for (int b = 0; b < BUFFERS; b++)
        for (int64_t i = 0; i < sizes[b]; i++)
            CHECK(fabs((double)weight[b][i] - (i < decayed[b] ? 0.95 : 1)) < 1e-7, "buffer %d element %lld is %.9g", b,
                  (long long)i, (double)weight[b][i]);  // one rounding of 0.05f
    for (int b = 0; b < BUFFERS; b++)
        for (int64_t i = 0; i < sizes[b]; i++) grad[b][i] = (real)1e30;
    one_step(state, weight, weight, m, v, loss, grad, &options, ctx);
    CHECK_NUMBER(state->grad_norm, 1e30 * sqrt(430.0), 1e-6);
    CHECK_NUMBER(state->grad_scale, 1 / (1e30 * sqrt(430.0)), 1e-6);
    CHECK(state->ok == 1 && isfinite(weight[0][0]), "ok %d, weight %g", state->ok, (double)weight[0][0]);
    // The largest norm that passes is that whose square is the largest float32, 1.8e19.
    AdamW unclipped = options;
    unclipped.clip = 0;
    for (int fits = 0; fits < 2; fits++) {
        const real before = weight[0][0], g = (real)((fits ? 1.8e19 : 1.9e19) / sqrt(430.0));
        for (int b = 0; b < BUFFERS; b++)
            for (int64_t i = 0; i < sizes[b]; i++) grad[b][i] = g;
        one_step(state, weight, weight, m, v, loss, grad, &unclipped, ctx);
        CHECK(state->ok == fits && (weight[0][0] != before) == fits && isfinite((float)v[0][0]),
              "norm %g: ok %d, weight %g was %g, second moment %g", state->grad_norm, state->ok, (double)weight[0][0],
              (double)before, (double)v[0][0]);
    }
    ctx_destroy(ctx);
    release_all();
}

int main(void) {
    RUN(test_adamw);
    RUN(test_step_not_finite);
    RUN(test_extreme_gradients);
    return test_summary();
}
