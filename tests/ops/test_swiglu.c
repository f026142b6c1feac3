// SwiGLU. tests/oracle.h has the method of these tests.
#include "layers/swiglu.h"
#include "tests/oracle.h"

typedef struct {
    int64_t N, F;
    real *h, *da, *a, *dh, *a_again;
    double *hd, *dad;
} Swiglu;

static void run_swiglu(void* arg) {
    Swiglu* s = arg;
    Ctx* ctx = ctx_create(0);
    s->a = poisoned(s->N * s->F), s->a_again = poisoned(s->N * s->F), s->dh = poisoned(2 * s->N * s->F);
    swiglu_forward(s->a, s->h, s->N, s->F, ctx);
    swiglu_backward(s->dh, s->a_again, s->da, s->h, s->N, s->F, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static double oracle_swiglu(double* a, const double* h, const double* da, int64_t N, int64_t F) {
    double sum = 0;
    for (int64_t i = 0; i < N * F; i++) {
        double g = h[i / F * 2 * F + i % F], u = h[i / F * 2 * F + F + i % F], value = g / (1 + exp(-g)) * u;
        if (a) a[i] = value;
        sum += value * da[i];
    }
    return sum;
}

static double swiglu_objective(void* arg) {
    Swiglu* s = arg;
    return oracle_swiglu(NULL, s->hd, s->dad, s->N, s->F);
}

static void test_swiglu(void) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {127, 24}, {129, 33}, {300, 40}, {2, 300}};
    for (int k = 0; k < 2 * COUNT(shapes); k++) {
        Swiglu s = {.N = shapes[k / 2][0], .F = shapes[k / 2][1]};
        int64_t n = s.N * s.F;
        s.h = tensor(2 * n, 1), s.da = tensor(n, 2);
        if (k % 2) {  // far into both tails, up to where exp(-g) is no float32
            for (int64_t i = 0; i < 2 * n; i++) s.h[i] *= (real)(i % 3 == 0 ? 1 : i % 3 == 1 ? 60 : 4000);
        }
        s.hd = doubles(s.h, 2 * n), s.dad = doubles(s.da, n);
        check_threads(run_swiglu, &s);
        double* a = zeros(n);
        oracle_swiglu(a, s.hd, s.dad, s.N, s.F);
        // exp, a sum, a quotient, two products, and exp's own argument: a few u.
        CHECK_CLOSE(s.a, a, n, TOL(5e-7, 1e-14));
        CHECK_CLOSE(s.a_again, a, n, TOL(5e-7, 1e-14));
        // At |u| of 4000 the differences lose 1e-16 * 4000^2 / 1e-5 of a gradient of 4000.
        if (k % 2 == 0) CHECK_GRADIENT(swiglu_objective, &s, s.hd, s.dh, NULL, 2 * n, 1e-6);
        for (int64_t i = 0; i < n && k % 2; i++) {
            double g = s.hd[i / s.F * 2 * s.F + i % s.F], u = s.hd[i / s.F * 2 * s.F + s.F + i % s.F], h = 1e-4;
            real dg = s.dh[i / s.F * 2 * s.F + i % s.F], du = s.dh[i / s.F * 2 * s.F + s.F + i % s.F];
            double slope = ((g + h) / (1 + exp(-g - h)) - (g - h) / (1 + exp(h - g))) / (2 * h) * s.dad[i] * u;
            double silu = g / (1 + exp(-g)) * s.dad[i];
            // h^2 / 6 and 1e-16 |g| / h of slopes up to |u|. silu' is 0 at g = -1.28, so the tolerance is absolute.
            CHECK(fabs(dg - slope) <= 1e-6 * fabs(s.dad[i] * u), "g %g u %g: dg %g, slope %g", g, u, (double)dg, slope);
            CHECK(fabs(du - silu) <= 1e-6 * fabs(silu) + 1e-30, "g %g: du %g, silu %g", g, (double)du, silu);
        }
        release_all();
    }
}

int main(void) {
    RUN(test_swiglu);
    return test_summary();
}
