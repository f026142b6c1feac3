// The mean input of a router and what its rows lose: sums exactly, against whole numbers made elsewhere; the projection
// against float64; and the same bits for every cut of tokens and weights.
#include "layers/adamw.h"
#include "moe/center.h"
#include "tests/oracle.h"

typedef struct {
    int64_t N, E, C, cut;  // tokens before the cut are added by themselves; so are elements of Wg
    real *x, *w;
    int64_t *sum, *along;
    real *u, *master, *weight;
    StepState* state;
} Center;

static void run_center(void* arg) {
    Center* k = arg;
    const int64_t E = k->E, C = k->C, n = E * C, tokens = k->cut % (k->N + 1), cut = k->cut % (n + 1);
    Ctx* ctx = ctx_create(64);
    k->sum = host_alloc(C * sizeof(int64_t)), k->along = host_alloc(2 * E * sizeof(int64_t));
    memset(k->sum, 0, C * sizeof(int64_t));
    center_add(k->sum, k->x, tokens, C, ctx);
    center_add(k->sum, k->x + tokens * C, k->N - tokens, C, ctx);
    k->u = poisoned(C);
    center_direction(k->u, k->sum, C, ctx);
    center_along(k->along, k->w, k->u, 0, cut, E, C, ctx);
    center_along(k->along + E, k->w + cut, k->u, cut, n - cut, E, C, ctx);
    for (int64_t e = 0; e < E; e++) k->along[e] += k->along[E + e];
    k->master = copied(k->w, n), k->weight = poisoned(n);
    center_apply(k->weight, k->master, k->along, k->u, 0, cut, C, k->state, ctx);
    center_apply(k->weight + cut, k->master + cut, k->along, k->u, cut, n - cut, C, k->state, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static void free_center(Center* k) { free(k->sum), free(k->along), release_all(); }

static void check_center(int64_t N, int64_t E, int64_t C, double offset) {
    StepState state = {.ok = 1};
    Center k = {.N = N, .E = E, .C = C, .x = tensor(N * C, 1), .w = tensor(E * C, 2), .state = &state};
    for (int64_t i = 0; i < N * C; i++) k.x[i] += (real)(offset * (i % C % 3 - 1));
    check_threads(run_center, &k);

    // The direction: its numbers are off by half of 2^-15 a token, and by their rounding.
    double *mean = zeros(C), square = 0, *u = zeros(C);
    for (int64_t i = 0; i < N * C; i++) mean[i % C] += (double)k.x[i];
    for (int64_t c = 0; c < C; c++) {
        CHECK(fabs((double)k.sum[c] / 32768 - mean[c]) <= (double)N / 65536 + 1e-9 * N, "sum %ld is %g, not %g", c,
              (double)k.sum[c] / 32768, mean[c]);
        square += (double)k.sum[c] * (double)k.sum[c];
    }
    for (int64_t c = 0; c < C; c++) u[c] = square > 0 ? (double)k.sum[c] / sqrt(square) : 0;
    CHECK_CLOSE(k.u, u, C, TOL(1e-7, 1e-15));

    // The rows, as a part of their length: roundings of C products by 2^-33 at most and of random signs, over a row of
    // length sqrt(C), are 7e-11, three times that at most; u, what is taken away and what is left are off by 2^-24
    // each.
    double* expected = zeros(E * C);
    for (int64_t e = 0; e < E; e++) {
        double along = 0;
        for (int64_t c = 0; c < C; c++) along += (double)k.w[e * C + c] * u[c];
        for (int64_t c = 0; c < C; c++) expected[e * C + c] = (double)k.w[e * C + c] - along * u[c];
    }
    CHECK_CLOSE(k.master, expected, E * C, 2e-10 + TOL(1.8e-7, 1e-15));
    CHECK_BITS(k.weight, k.master, E * C * sizeof(real));

    // Any cut gives the same.
    Center other = k;
    other.cut = 1 + (N * 7 + C) % (E * C);
    run_center(&other);
    CHECK_BITS(other.sum, k.sum, C * sizeof(int64_t));
    CHECK_BITS(other.along, k.along, E * sizeof(int64_t));
    CHECK_BITS(other.master, k.master, E * C * sizeof(real));
    free(other.sum), free(other.along);

    // Nothing is written in a bad step.
    state.ok = 0;
    Center bad = k;
    run_center(&bad);
    CHECK_BITS(bad.master, k.w, E * C * sizeof(real));
    CHECK(isnan((double)bad.weight[0]), "a bad step wrote a weight");
    free(bad.sum), free(bad.along);
    free_center(&k);
}

static void test_center_random(void) {
    check_center(1, 1, 1, 0);
    check_center(7, 3, 5, 0);
    check_center(40, 8, 24, 1);
    check_center(300, 5, 129, 0.1);
    check_center(2, 64, 300, 3);
}

// No direction: nothing to lose.
static void test_center_nothing(void) {
    StepState state = {.ok = 1};
    Center k = {.N = 0, .E = 3, .C = 8, .x = tensor(8, 1), .w = tensor(24, 2), .state = &state};
    run_center(&k);
    for (int64_t c = 0; c < k.C; c++) CHECK(k.u[c] == 0, "u is %g", (double)k.u[c]);
    CHECK_BITS(k.master, k.w, 24 * sizeof(real));
    free_center(&k);
}

// What no training should see stays a number: NaN and infinities in the inputs, weights near float32's end.
static void test_center_extremes(void) {
    StepState state = {.ok = 1};
    Center k = {.N = 4, .E = 2, .C = 8, .x = tensor(32, 1), .w = tensor(16, 2), .state = &state};
    k.x[0] = NAN, k.x[9] = INFINITY, k.x[18] = -INFINITY;
    k.w[3] = (real)1e38, k.w[12] = (real)-1e38;
    run_center(&k);
    CHECK(k.sum[1] > 100 * 32768 && k.sum[2] < -100 * 32768 && k.sum[0] < -100 * 32768, "not held at 128");
    for (int i = 0; i < 16; i++) CHECK(isfinite((double)k.master[i]), "weight %d is %g", i, (double)k.master[i]);
    free_center(&k);
}

int main(void) {
    RUN(test_center_random);
    RUN(test_center_nothing);
    RUN(test_center_extremes);
    return test_summary();
}
