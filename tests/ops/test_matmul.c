// The dense GEMMs: forward, dgrad and wgrad. tests/oracle.h has the method of these tests.
#include "layers/matmul.h"
#include "tests/oracle.h"

typedef struct {
    int64_t N, IC, OC;
    real *x, *w, *dy, *dx_before, *dw_before;
    real *y, *y_real, *dx, *dx_added, *dw, *dw_added;
    double *xd, *wd, *dyd;
} Linear;

static void run_linear(void* arg) {
    Linear* l = arg;
    Ctx* ctx = ctx_create(0);
    l->y = poisoned(l->N * l->OC);
    matmul_forward(l->y, l->x, l->w, l->N, l->IC, l->OC, ctx);
    l->y_real = poisoned(l->N * l->OC);
    matmul_forward_real(l->y_real, l->x, l->w, l->N, l->IC, l->OC, ctx);
    l->dx = poisoned(l->N * l->IC);
    matmul_dgrad(l->dx, l->dy, l->w, l->N, l->IC, l->OC, 0, ctx);
    l->dx_added = copied(l->dx_before, l->N * l->IC);
    matmul_dgrad(l->dx_added, l->dy, l->w, l->N, l->IC, l->OC, 1, ctx);
    l->dw = poisoned(l->OC * l->IC);
    matmul_wgrad(l->dw, l->dy, l->x, l->N, l->IC, l->OC, 0, ctx);
    l->dw_added = copied(l->dw_before, l->OC * l->IC);
    matmul_wgrad(l->dw_added, l->dy, l->x, l->N, l->IC, l->OC, 1, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static double* oracle_linear(const double* x, const double* w, int64_t N, int64_t IC, int64_t OC) {
    double* y = host_alloc(N * OC * sizeof(double));
    for (int64_t n = 0; n < N; n++)
        for (int64_t o = 0; o < OC; o++)
            for (int64_t i = 0; i < IC; i++) y[n * OC + o] += x[n * IC + i] * w[o * IC + i];
    return keep(y, N * OC * sizeof(double));
}

static double linear_objective(void* arg) {
    Linear* l = arg;
    int mark = kept_count;
    double value = dot(oracle_linear(l->xd, l->wd, l->N, l->IC, l->OC), l->dyd, l->N * l->OC);
    while (kept_count > mark) free(kept[--kept_count].p);
    return value;
}

static void test_linear(void) {
    static const int64_t shapes[][3] = {{0, 24, 40},   {1, 1, 1},      {1, 24, 40},     {3, 5, 7},
                                        {127, 40, 24}, {129, 33, 130}, {300, 129, 257}, {130, 300, 127}};
    for (int s = 0; s < COUNT(shapes); s++) {
        Linear l = {.N = shapes[s][0], .IC = shapes[s][1], .OC = shapes[s][2]};
        int64_t nx = l.N * l.IC, nw = l.OC * l.IC, ny = l.N * l.OC;
        l.x = tensor(nx, 1), l.w = tensor(nw, 2), l.dy = tensor(ny, 3);
        l.dx_before = tensor(nx, 4), l.dw_before = tensor(nw, 5);
        l.xd = doubles(l.x, nx), l.wd = doubles(l.w, nw), l.dyd = doubles(l.dy, ny);
        check_threads(run_linear, &l);
        // Sums of up to 300 products: sqrt(300) u = 1e-6, u = 1.1e-16 in double.
        double tolerance = TOL(2e-6, 1e-14);
        CHECK_CLOSE(l.y, oracle_linear(l.xd, l.wd, l.N, l.IC, l.OC), ny, tolerance);
        CHECK_BITS(l.y_real, l.y, ny * sizeof(real));
        // dgrad and wgrad, written and added.
        double *dx = zeros(nx), *added = doubles(l.dx_before, nx), *dw = zeros(nw),
               *dw_added = doubles(l.dw_before, nw);
        for (int64_t n = 0; n < l.N; n++)
            for (int64_t o = 0; o < l.OC; o++)
                for (int64_t i = 0; i < l.IC; i++) {
                    dx[n * l.IC + i] += l.dyd[n * l.OC + o] * l.wd[o * l.IC + i];
                    dw[o * l.IC + i] += l.dyd[n * l.OC + o] * l.xd[n * l.IC + i];
                }
        for (int64_t i = 0; i < nx; i++) added[i] += dx[i];
        for (int64_t i = 0; i < nw; i++) dw_added[i] += dw[i];
        CHECK_CLOSE(l.dx, dx, nx, tolerance);
        CHECK_CLOSE(l.dx_added, added, nx, tolerance);
        CHECK_CLOSE(l.dw, dw, nw, tolerance);
        CHECK_CLOSE(l.dw_added, dw_added, nw, tolerance);
        // Against differences, where the shapes are small.
        if (l.N && l.N <= 3) {
            CHECK_GRADIENT(linear_objective, &l, l.xd, l.dx, NULL, nx, tolerance);
            CHECK_GRADIENT(linear_objective, &l, l.xd, l.dx_added, l.dx_before, nx, tolerance);
            CHECK_GRADIENT(linear_objective, &l, l.wd, l.dw, NULL, nw, tolerance);
            CHECK_GRADIENT(linear_objective, &l, l.wd, l.dw_added, l.dw_before, nw, tolerance);
        }
        release_all();
    }
}

int main(void) {
    RUN(test_linear);
    return test_summary();
}
