// The cross-entropy loss and its gradient. tests/oracle.h has the method of these tests.
#include "layers/loss.h"
#include "tests/oracle.h"

typedef struct {
    int64_t N, V, Vp;
    float dscale;
    real *logits, *loss, *loss_only, *gradient, *untouched;
    int32_t* target;
    double* packed;
} Loss;

static void run_loss(void* arg) {
    Loss* l = arg;
    Ctx* ctx = ctx_create(0);
    l->loss = poisoned(l->N), l->loss_only = poisoned(l->N);
    l->gradient = copied(l->logits, l->N * l->Vp), l->untouched = copied(l->logits, l->N * l->Vp);
    cross_entropy(l->loss, l->gradient, l->target, l->N, l->V, l->Vp, l->dscale, ctx);
    cross_entropy(l->loss_only, l->untouched, l->target, l->N, l->V, l->Vp, 0, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static void oracle_loss(double* loss, const double* logits, const int32_t* target, int64_t N, int64_t V) {
    for (int64_t n = 0; n < N; n++) {
        const double* row = logits + n * V;
        double sum = 0;  // relative to the target: no maximum needed, and no cancellation
        for (int64_t v = 0; v < V; v++) sum += exp(row[v] - row[target[n]]);
        loss[n] = log(sum);
    }
}

static double loss_objective(void* arg) {
    Loss* l = arg;
    double *loss = host_alloc(l->N * sizeof(double)), sum = 0;
    oracle_loss(loss, l->packed, l->target, l->N, l->V);
    for (int64_t n = 0; n < l->N; n++) sum += loss[n];
    free(loss);
    return sum * (double)l->dscale;
}

static void test_cross_entropy(void) {
    static const int64_t shapes[][3] = {{1, 1, 1},     {1, 2, 128},   {3, 7, 8},     {127, 50, 64},
                                        {129, 33, 33}, {300, 24, 40}, {5, 257, 384}, {2, 1000, 1024}};
    static const double offsets[] = {0, 1e4, -1e4};
    for (int k = 0; k < 3 * COUNT(shapes); k++) {
        const int64_t *shape = shapes[k / 3], N = shape[0], V = shape[1], Vp = shape[2];
        double offset = offsets[k % 3];
        Loss l = {.N = N, .V = V, .Vp = Vp, .dscale = 0.37f};
        real* logits = tensor(N * V, 1);
        for (int64_t i = 0; i < N * V; i++) logits[i] = (real)(3 * logits[i] + offset);
        l.target = random_ints(N, (int32_t)V, 2);
        l.logits = spread(logits, N, V, Vp);  // NaN in the padding, and huge numbers
        for (int64_t n = 0; n < N; n++)
            for (int64_t v = V; v < Vp; v++)
                if ((n + v) % 2) l.logits[n * Vp + v] = (real)1e30;
        l.packed = doubles(logits, N * V);
        check_threads(run_loss, &l);
        double* ref = zeros(N);
        oracle_loss(ref, l.packed, l.target, N, V);
        // A positive sum of exps of differences of logits: some u, for any offset of the logits.
        CHECK_CLOSE(l.loss, ref, N, TOL(1e-6, 1e-14));
        CHECK_BITS(l.loss, l.loss_only, N * sizeof(real));
        CHECK_BITS(l.untouched, l.logits, N * Vp * sizeof(real));
        // exp of a difference of logits, rounded at 10: 10 u. An offset shifts no gradient. The differences are
        // computed without it, because 1e4 + h is not exact enough.
        for (int64_t i = 0; i < N * V; i++) l.packed[i] -= offset;
        real* gradient = packed(l.gradient, N, V, Vp);
        CHECK_GRADIENT(loss_objective, &l, l.packed, gradient, NULL, N * V, 2e-6);
        int64_t wrong = 0;
        for (int64_t n = 0; n < N; n++)
            for (int64_t v = V; v < Vp; v++) wrong += !(l.gradient[n * Vp + v] == 0);
        CHECK(wrong == 0, "%lld gradients in the padding are not 0", (long long)wrong);
        release_all();
    }
}

// A gap of 1e4 between logits: no overflow, a loss of 1e4 or 0, a gradient of exactly one and minus one.
static void test_cross_entropy_extreme(void) {
    Ctx* ctx = ctx_create(0);
    real logits[] = {0, 10000, 0, 0, 10000, 0}, loss[2] = {NAN, NAN};
    int32_t target[] = {0, 1};
    cross_entropy(loss, logits, target, 2, 3, 3, 1, ctx);
    ctx_sync(ctx);
    CHECK(loss[0] == 10000 && loss[1] == 0, "losses %g %g", (double)loss[0], (double)loss[1]);
    CHECK(logits[0] == -1 && logits[1] == 1 && logits[2] == 0, "%g %g %g", (double)logits[0], (double)logits[1],
          (double)logits[2]);
    CHECK(logits[3] == 0 && logits[4] == 0 && logits[5] == 0, "%g %g %g", (double)logits[3], (double)logits[4],
          (double)logits[5]);
    ctx_destroy(ctx);
}

int main(void) {
    RUN(test_cross_entropy);
    RUN(test_cross_entropy_extreme);
    return test_summary();
}
