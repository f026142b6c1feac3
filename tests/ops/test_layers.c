// The dense ops: embedding, linear, rmsnorm, swiglu, cross-entropy. tests/oracle.h says how they are tested.
#include "layers/embedding.h"
#include "layers/loss.h"
#include "layers/matmul.h"
#include "layers/rmsnorm.h"
#include "layers/swiglu.h"
#include "tests/oracle.h"

// --- Embedding ---

typedef struct {
    int64_t N, V, C;
    int32_t* token;
    real *table, *dout, *before, *out, *dtable;
} Embedding;

static void run_embedding(void* arg) {
    Embedding* e = arg;
    Ctx* ctx = ctx_create(0);
    e->out = poisoned(e->N * e->C);
    embedding_forward(e->out, e->token, e->table, e->N, e->C, ctx);
    e->dtable = copied(e->before, e->V * e->C);
    embedding_backward(e->dtable, e->dout, e->token, e->N, e->V, e->C, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static void test_embedding(void) {
    static const int64_t shapes[][3] = {{1, 1, 1}, {3, 5, 24}, {127, 7, 33}, {129, 300, 40}, {300, 3, 129}};
    for (int s = 0; s < COUNT(shapes); s++) {
        Embedding e = {.N = shapes[s][0], .V = shapes[s][1], .C = shapes[s][2]};
        e.token = random_ints(e.N, (int32_t)e.V, 1);
        e.table = tensor(e.V * e.C, 2);
        e.dout = tensor(e.N * e.C, 3);
        e.before = tensor(e.V * e.C, 4);
        check_threads(run_embedding, &e);
        double* ref = doubles(e.before, e.V * e.C);
        for (int64_t n = 0; n < e.N; n++) {
            CHECK_BITS(e.out + n * e.C, e.table + e.token[n] * e.C, e.C * sizeof(real));
            for (int64_t c = 0; c < e.C; c++) ref[e.token[n] * e.C + c] += e.dout[n * e.C + c];
        }
        // Up to 100 additions of random signs: sqrt(100) u = 6e-7; in double 1e-15.
        CHECK_CLOSE(e.dtable, ref, e.V * e.C, TOL(1e-6, 1e-14));
        release_all();
    }
}

// --- Linear ---

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
        if (l.N && l.N <= 3) {
            CHECK_GRADIENT(linear_objective, &l, l.xd, l.dx, NULL, nx, tolerance);
            CHECK_GRADIENT(linear_objective, &l, l.xd, l.dx_added, l.dx_before, nx, tolerance);
            CHECK_GRADIENT(linear_objective, &l, l.wd, l.dw, NULL, nw, tolerance);
            CHECK_GRADIENT(linear_objective, &l, l.wd, l.dw_added, l.dw_before, nw, tolerance);
        }
        release_all();
    }
}

// --- RMSNorm ---

typedef struct {
    int64_t N, C, stride;
    real *x, *w, *dy, *dx_before, *dw_before, *a, *b;
    real *y, *rstd, *dx, *dw, *dx_added, *dw_again, *sum, *sum_y, *sum_rstd, *in_place, *in_place_y;
    double *xd, *wd, *dyd;
} Norm;

static void run_norm(void* arg) {
    Norm* t = arg;
    int64_t N = t->N, C = t->C;
    Ctx* ctx = ctx_create(rmsnorm_workspace(N, C));
    t->y = poisoned(N * C), t->rstd = poisoned(N);
    rmsnorm_forward(t->y, t->rstd, t->x, t->stride, t->w, N, C, ctx);
    t->dx = poisoned(N * t->stride), t->dw = copied(t->dw_before, C);
    rmsnorm_backward(t->dx, t->dw, t->dy, t->x, t->stride, t->w, t->rstd, N, C, 0, ctx);
    t->dx_added = copied(t->dx_before, N * t->stride), t->dw_again = copied(t->dw, C);
    rmsnorm_backward(t->dx_added, t->dw_again, t->dy, t->x, t->stride, t->w, t->rstd, N, C, 1, ctx);
    t->sum = poisoned(N * C), t->sum_y = poisoned(N * C), t->sum_rstd = poisoned(N);
    residual_rmsnorm_forward(t->sum, t->sum_y, t->sum_rstd, t->a, t->b, t->w, N, C, ctx);
    t->in_place = copied(t->a, N * C), t->in_place_y = poisoned(N * C);
    real* rstd = poisoned(N);
    residual_rmsnorm_forward(t->in_place, t->in_place_y, rstd, t->in_place, t->b, t->w, N, C, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static void oracle_norm(double* y, double* rstd, const double* x, const double* w, int64_t N, int64_t C) {
    for (int64_t n = 0; n < N; n++) {
        double squares = dot(x + n * C, x + n * C, C);
        rstd[n] = 1 / sqrt(squares / C + (double)1e-6f);
        for (int64_t c = 0; c < C; c++) y[n * C + c] = w[c] * x[n * C + c] * rstd[n];
    }
}

static double norm_objective(void* arg) {
    Norm* t = arg;
    double *y = host_alloc(t->N * t->C * sizeof(double)), *rstd = host_alloc(t->N * sizeof(double));
    oracle_norm(y, rstd, t->xd, t->wd, t->N, t->C);
    double value = dot(y, t->dyd, t->N * t->C);
    free(y), free(rstd);
    return value;
}

static void check_norm(int64_t N, int64_t C, int64_t stride, double scale) {
    Norm t = {.N = N, .C = C, .stride = stride};
    real *x = tensor(N * C, 1), *dx_before = tensor(N * C, 4);
    for (int64_t i = 0; i < N * C; i++) x[i] = (real)(x[i] * scale);
    t.x = spread(x, N, C, stride), t.dx_before = spread(dx_before, N, C, stride);
    t.w = tensor(C, 2), t.dy = tensor(N * C, 3), t.dw_before = tensor(C, 5);
    t.a = x, t.b = tensor(N * C, 6);
    t.xd = doubles(x, N * C), t.wd = doubles(t.w, C), t.dyd = doubles(t.dy, N * C);
    check_threads(run_norm, &t);
    double *y = zeros(N * C), *rstd = zeros(N);
    oracle_norm(y, rstd, t.xd, t.wd, N, C);
    // A mean of up to 300 squares (all positive: errors add up to a few u), then 3 operations.
    double tolerance = TOL(1e-6, 1e-14);
    CHECK_CLOSE(t.y, y, N * C, tolerance);
    CHECK_CLOSE(t.rstd, rstd, N, tolerance);
    check_gaps(t.dx, N, C, stride);
    check_gaps(t.dx_added, N, C, stride);
    // dx is a difference of two terms of its own size, dw a sum over up to 300 tokens: 20 u. scale 1e-4: `before` is as
    // large as 1 where dx is 1e3.
    real *dx = packed(t.dx, N, C, stride), *dx_added = packed(t.dx_added, N, C, stride);
    if (scale == 1) {
        CHECK_GRADIENT(norm_objective, &t, t.xd, dx, NULL, N * C, 3e-6);
        CHECK_GRADIENT(norm_objective, &t, t.xd, dx_added, dx_before, N * C, 3e-6);
    }
    CHECK_GRADIENT(norm_objective, &t, t.wd, t.dw, t.dw_before, C, 3e-6);
    CHECK_GRADIENT(norm_objective, &t, t.wd, t.dw_again, t.dw, C, 3e-6);
    // The residual sum is one exact-as-can-be addition, and its norm is the norm of that sum.
    real* sum = copied(x, N * C);
    for (int64_t i = 0; i < N * C; i++) sum[i] = x[i] + t.b[i];
    CHECK_BITS(t.sum, sum, N * C * sizeof(real));
    CHECK_BITS(t.in_place, sum, N * C * sizeof(real));
    CHECK_BITS(t.in_place_y, t.sum_y, N * C * sizeof(real));
    oracle_norm(y, rstd, doubles(sum, N * C), t.wd, N, C);
    CHECK_CLOSE(t.sum_y, y, N * C, tolerance);
    CHECK_CLOSE(t.sum_rstd, rstd, N, tolerance);
    release_all();
}

static void test_rmsnorm(void) {
    static const int64_t shapes[][3] = {{1, 2, 2},     {1, 24, 24},   {3, 5, 9},       {127, 40, 40},
                                        {129, 33, 50}, {300, 24, 27}, {128, 300, 300}, {257, 7, 8}};
    for (int s = 0; s < COUNT(shapes); s++) check_norm(shapes[s][0], shapes[s][1], shapes[s][2], 1);
    check_norm(5, 24, 24, 1e-3);  // mean square 1e-6: eps is half of it
    check_norm(3, 24, 30, 0);     // rows of zeros: y = 0, rstd = 1000
}

static void test_rmsnorm_small_dx(void) {
    // Where eps counts, dx = rstd (g - x rstd^2 mean(g x)) with rstd^2 mean(x^2) = 1/2, not 1. Inputs are 1e-3, so are
    // the steps of the differences: scale x up inside the objective's own variable instead (x = 1e-3 z, dz = 1e-3 dx).
    enum { N = 3, C = 24 };
    Ctx* ctx = ctx_create(rmsnorm_workspace(N, C));
    Norm t = {.N = N, .C = C, .stride = C};
    t.x = tensor(N * C, 1), t.w = tensor(C, 2), t.dy = tensor(N * C, 3);
    for (int i = 0; i < N * C; i++) t.x[i] = t.x[i] * (real)1e-3;
    t.y = poisoned(N * C), t.rstd = poisoned(N), t.dx = poisoned(N * C), t.dw = filled(C, 0);
    rmsnorm_forward(t.y, t.rstd, t.x, C, t.w, N, C, ctx);
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
    oracle_norm(y, rstd, t.xd, t.wd, N, C);
    CHECK(rstd[0] * rstd[0] * dot(t.xd, t.xd, C) / C < 0.7, "eps does not count here");
    // h = 1e-8 is the usual 1e-5 in units of x: 1e-16 |y| / 1e-8 over dx of 1e3 and h^2 f''' / 6 both are about 1e-10.
    CHECK(sqrt(diff / size) <= TOL(3e-6, 1e-6), "dx: %.3g", sqrt(diff / size));
    ctx_destroy(ctx);
    release_all();
}

// --- SwiGLU ---

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
        // The differences at |u| of 4000 lose 1e-16 * 4000^2 / 1e-5 of a gradient of 4000.
        if (k % 2 == 0) CHECK_GRADIENT(swiglu_objective, &s, s.hd, s.dh, NULL, 2 * n, 1e-6);
        for (int64_t i = 0; i < n && k % 2; i++) {
            double g = s.hd[i / s.F * 2 * s.F + i % s.F], u = s.hd[i / s.F * 2 * s.F + s.F + i % s.F], h = 1e-4;
            real dg = s.dh[i / s.F * 2 * s.F + i % s.F], du = s.dh[i / s.F * 2 * s.F + s.F + i % s.F];
            double slope = ((g + h) / (1 + exp(-g - h)) - (g - h) / (1 + exp(h - g))) / (2 * h) * s.dad[i] * u;
            double silu = g / (1 + exp(-g)) * s.dad[i];
            // h^2 / 6 and 1e-16 |g| / h of slopes up to |u|; silu' goes through 0 at g = -1.28, so the bound is
            // absolute.
            CHECK(fabs(dg - slope) <= 1e-6 * fabs(s.dad[i] * u), "g %g u %g: dg %g, slope %g", g, u, (double)dg, slope);
            CHECK(fabs(du - silu) <= 1e-6 * fabs(silu) + 1e-30, "g %g: du %g, silu %g", g, (double)du, silu);
        }
        release_all();
    }
}

// --- Cross-entropy ---

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
        // A positive sum of exps of differences of logits: some u, whatever the logits' offset.
        CHECK_CLOSE(l.loss, ref, N, TOL(1e-6, 1e-14));
        CHECK_BITS(l.loss, l.loss_only, N * sizeof(real));
        CHECK_BITS(l.untouched, l.logits, N * Vp * sizeof(real));
        // exp of a difference of logits, rounded at 10: 10 u. An offset shifts no gradient; the differences do without
        // it, as 1e4 + h is not exact enough.
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
    RUN(test_embedding);
    RUN(test_linear);
    RUN(test_rmsnorm);
    RUN(test_rmsnorm_small_dx);
    RUN(test_swiglu);
    RUN(test_cross_entropy);
    RUN(test_cross_entropy_extreme);
    return test_summary();
}
