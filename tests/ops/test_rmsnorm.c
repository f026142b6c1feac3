// RMSNorm, alone and with the residual addition. tests/oracle.h has the method of these tests.
#include "layers/rmsnorm.h"
#include "tests/oracle.h"

typedef struct {
    int64_t N, C, stride;
    double eps;
    real *x, *w, *dy, *dx_before, *dw_before, *a, *b;
    real *y, *rstd, *dx, *dw, *dx_added, *dw_again, *sum, *sum_y, *sum_rstd, *in_place, *in_place_y;
    double *xd, *wd, *dyd;
} Norm;

static void run_norm(void* arg) {
    Norm* t = arg;
    int64_t N = t->N, C = t->C;
    Ctx* ctx = ctx_create(rmsnorm_workspace(N, C));
    t->y = poisoned(N * C), t->rstd = poisoned(N);
    rmsnorm_forward(t->y, t->rstd, t->x, t->stride, t->w, t->eps, N, C, ctx);
    t->dx = poisoned(N * t->stride), t->dw = copied(t->dw_before, C);
    rmsnorm_backward(t->dx, t->dw, t->dy, t->x, t->stride, t->w, t->rstd, N, C, 0, ctx);
    t->dx_added = copied(t->dx_before, N * t->stride), t->dw_again = copied(t->dw, C);
    rmsnorm_backward(t->dx_added, t->dw_again, t->dy, t->x, t->stride, t->w, t->rstd, N, C, 1, ctx);
    t->sum = poisoned(N * C), t->sum_y = poisoned(N * C), t->sum_rstd = poisoned(N);
    residual_rmsnorm_forward(t->sum, t->sum_y, t->sum_rstd, t->a, t->b, t->w, t->eps, N, C, ctx);
    t->in_place = copied(t->a, N * C), t->in_place_y = poisoned(N * C);
    real* rstd = poisoned(N);
    residual_rmsnorm_forward(t->in_place, t->in_place_y, rstd, t->in_place, t->b, t->w, t->eps, N, C, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static void oracle_norm(double* y, double* rstd, const double* x, const double* w, double eps, int64_t N, int64_t C) {
    for (int64_t n = 0; n < N; n++) {
        double squares = dot(x + n * C, x + n * C, C);
        rstd[n] = 1 / sqrt(squares / C + eps);
        for (int64_t c = 0; c < C; c++) y[n * C + c] = w[c] * x[n * C + c] * rstd[n];
    }
}

static double norm_objective(void* arg) {
    Norm* t = arg;
    double *y = host_alloc(t->N * t->C * sizeof(double)), *rstd = host_alloc(t->N * sizeof(double));
    oracle_norm(y, rstd, t->xd, t->wd, t->eps, t->N, t->C);
    double value = dot(y, t->dyd, t->N * t->C);
    free(y), free(rstd);
    return value;
}

static void check_norm(int64_t N, int64_t C, int64_t stride, double scale, double eps) {
    Norm t = {.N = N, .C = C, .stride = stride, .eps = eps};
    real *x = tensor(N * C, 1), *dx_before = tensor(N * C, 4);
    for (int64_t i = 0; i < N * C; i++) x[i] = (real)(x[i] * scale);
    t.x = spread(x, N, C, stride), t.dx_before = spread(dx_before, N, C, stride);
    t.w = tensor(C, 2), t.dy = tensor(N * C, 3), t.dw_before = tensor(C, 5);
    t.a = x, t.b = tensor(N * C, 6);
    t.xd = doubles(x, N * C), t.wd = doubles(t.w, C), t.dyd = doubles(t.dy, N * C);
    check_threads(run_norm, &t);
    double *y = zeros(N * C), *rstd = zeros(N);
    oracle_norm(y, rstd, t.xd, t.wd, eps, N, C);
    // A mean of up to 300 squares (all positive, so the error is a few u), then 3 operations.
    double tolerance = TOL(1e-6, 1e-14);
    CHECK_CLOSE(t.y, y, N * C, tolerance);
    CHECK_CLOSE(t.rstd, rstd, N, tolerance);
    check_gaps(t.dx, N, C, stride);
    check_gaps(t.dx_added, N, C, stride);
    // dx is a difference of two terms of its own size, dw a sum over up to 300 tokens: 20 u. scale 1e-3: `before` is as
    // large as 1 where dx is 1e3.
    real *dx = packed(t.dx, N, C, stride), *dx_added = packed(t.dx_added, N, C, stride);
    if (scale == 1) {
        CHECK_GRADIENT(norm_objective, &t, t.xd, dx, NULL, N * C, 3e-6);
        CHECK_GRADIENT(norm_objective, &t, t.xd, dx_added, dx_before, N * C, 3e-6);
    }
    CHECK_GRADIENT(norm_objective, &t, t.wd, t.dw, t.dw_before, C, 3e-6);
    CHECK_GRADIENT(norm_objective, &t, t.wd, t.dw_again, t.dw, C, 3e-6);
    // The residual sum is one addition, rounded once. The norm is that of the rounded sum.
    real* sum = copied(x, N * C);
    for (int64_t i = 0; i < N * C; i++) sum[i] = x[i] + t.b[i];
    CHECK_BITS(t.sum, sum, N * C * sizeof(real));
    CHECK_BITS(t.in_place, sum, N * C * sizeof(real));
    CHECK_BITS(t.in_place_y, t.sum_y, N * C * sizeof(real));
    oracle_norm(y, rstd, doubles(sum, N * C), t.wd, eps, N, C);
    CHECK_CLOSE(t.sum_y, y, N * C, tolerance);
    CHECK_CLOSE(t.sum_rstd, rstd, N, tolerance);
    release_all();
}

static void test_rmsnorm(void) {
    static const int64_t shapes[][3] = {{1, 2, 2},     {1, 24, 24},   {3, 5, 9},       {127, 40, 40},
                                        {129, 33, 50}, {300, 24, 27}, {128, 300, 300}, {257, 7, 8}};
    for (int s = 0; s < COUNT(shapes); s++) check_norm(shapes[s][0], shapes[s][1], shapes[s][2], 1, 1e-6);
    check_norm(5, 24, 24, 1e-3, 1e-6);  // mean square 1e-6: eps is half of it
    check_norm(3, 24, 30, 0, 1e-6);     // rows of zeros: y = 0, rstd = 1000
    check_norm(129, 33, 50, 1, 0.5);    // eps counts: x is about 1
}

static void test_rmsnorm_small_dx(void) {
    // Where eps matters, dx = rstd (g - x rstd^2 mean(g x)) with rstd^2 mean(x^2) = 1/2, not 1. Inputs are 1e-3, so the
    // steps of the differences must be too. Therefore the objective's own variable is scaled up (x = 1e-3 z, dz = 1e-3
    // dx).
    enum { N = 3, C = 24 };
    Ctx* ctx = ctx_create(rmsnorm_workspace(N, C));
    Norm t = {.N = N, .C = C, .stride = C, .eps = 1e-6};
    t.x = tensor(N * C, 1), t.w = tensor(C, 2), t.dy = tensor(N * C, 3);
    for (int i = 0; i < N * C; i++) t.x[i] = t.x[i] * (real)1e-3;
    t.y = poisoned(N * C), t.rstd = poisoned(N), t.dx = poisoned(N * C), t.dw = filled(C, 0);
    rmsnorm_forward(t.y, t.rstd, t.x, C, t.w, t.eps, N, C, ctx);
    rmsnorm_backward(t.dx, t.dw, t.dy, t.x, C, t.w, t.rstd, N, C, 0, ctx);
    double diff = 0, size = 0, *y = zeros(N * C), *rstd = zeros(N);
    t.xd = doubles(t.x, N * C), t.wd = doubles(t.w, C), t.dyd = doubles(t.dy, N * C);
    for (int i = 0; i < N * C; i++) {
        double saved = t.xd[i], h = 1e-8;
        t.xd[i] = saved + h;
        double up = norm_objective(&t);
        t.xd[i] = saved - h;
        double slope = (up - norm_objective(&t)) / (2 * h);
        t.xd[i] = saved;
        diff += (slope - t.dx[i]) * (slope - t.dx[i]), size += slope * slope;
    }
    oracle_norm(y, rstd, t.xd, t.wd, t.eps, N, C);
    CHECK(rstd[0] * rstd[0] * dot(t.xd, t.xd, C) / C < 0.7, "eps does not count here");
    // h = 1e-8 is the usual 1e-5 in units of x: 1e-16 |y| / 1e-8 over dx of 1e3 and h^2 f''' / 6 both are about 1e-10.
    CHECK(sqrt(diff / size) <= TOL(3e-6, 1e-6), "dx: %.3g", sqrt(diff / size));
    ctx_destroy(ctx);
    release_all();
}

int main(void) {
    RUN(test_rmsnorm);
    RUN(test_rmsnorm_small_dx);
    return test_summary();
}
