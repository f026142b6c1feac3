// The experts: SwiGLU and gates between the GEMMs, and the whole path of a token through them against differences.
#include "grouped/experts.h"
#include "grouped/grouped_gemm.h"
#include "mx/mx_swiglu.h"
#include "tests/routing.h"

// --- Between the GEMMs ---

typedef struct {
    Routing* r;
    int64_t F;
    real *h, *dap;
    real *a, *dh, *gated_a, *drow_gate;
} Middle;

static void run_middle(void* arg) {
    Middle* m = arg;
    Ragged ragged = m->r->ragged;
    Ctx* ctx = ctx_create(0);
    m->a = poisoned(ragged.capacity * m->F), m->gated_a = poisoned(ragged.capacity * m->F);
    m->dh = poisoned(2 * ragged.capacity * m->F), m->drow_gate = poisoned(ragged.capacity);
    experts_swiglu_forward(m->a, m->h, ragged, m->F, ctx);
    experts_swiglu_backward((ExpertsBackward){m->dh, m->gated_a, m->drow_gate, m->dap, m->h}, ragged, m->F, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static void test_experts_swiglu(void) {
    for (int i = 0; i < COUNT(routings) * ROUTINGS; i++) {
        const int32_t* s = routings[i / ROUTINGS];
        Routing r = make_routing(s[0], s[1], s[2], s[3], s[4], i % ROUTINGS);
        run_plan(&r);
        int64_t F = (int64_t[]){3, 24, 40, 129}[i % 4], used = rows_used(&r);
        Middle m = {.r = &r, .F = F, .h = random_rows(&r, 2 * F, 1), .dap = random_rows(&r, F, 2)};
        for (int64_t j = 0; j < used * 2 * F; j++) m.h[j] *= (real)(j % 7 == 0 ? 200 : 1);
        check_threads(run_middle, &m);
        double *a = zeros(used * F), *gated = zeros(used * F), *dh = zeros(2 * used * F), *dgate = zeros(used);
        for (int64_t row = 0; row < used; row++)
            for (int64_t f = 0; f < F && row_expert(&r, row) >= 0; f++) {
                double g = m.h[row * 2 * F + f], u = m.h[row * 2 * F + F + f], sigmoid = 1 / (1 + exp(-g));
                double da = (double)r.ragged.row_gate[row] * m.dap[row * F + f];
                a[row * F + f] = g * sigmoid * u;
                gated[row * F + f] = r.ragged.row_gate[row] * a[row * F + f];
                dgate[row] += m.dap[row * F + f] * a[row * F + f];
                dh[row * 2 * F + f] = da * u * (sigmoid + g * sigmoid * (1 - sigmoid));
                dh[row * 2 * F + F + f] = da * g * sigmoid;
            }
        // A few operations each. dgate is a sum over 129, sqrt(129) u = 7e-7. With a single row its terms may cancel to
        // a tenth of their size.
        CHECK_CLOSE(m.a, a, used * F, TOL(5e-7, 1e-14));
        CHECK_CLOSE(m.gated_a, gated, used * F, TOL(5e-7, 1e-14));
        CHECK_CLOSE(m.dh, dh, 2 * used * F, TOL(1e-6, 1e-14));
        CHECK_CLOSE(m.drow_gate, dgate, used, TOL(7e-6, 1e-13));
        check_pads_zero(&r, m.a, F);
        check_pads_zero(&r, m.gated_a, F);
        check_pads_zero(&r, m.dh, 2 * F);
        release_all();
    }
}

// --- The whole path: out_n = sum_k gate_nk W2 swiglu(W13 x_n) over the experts held here ---

typedef struct {
    Routing* r;
    int64_t C, F;
    real *x, *w13, *w2, *dout, *w13_before, *w2_before;
    real *out, *dx, *dgate, *dw13, *dw2;
    double *xd, *gated, *w13d, *w2d, *doutd;
    int given_a;
} Path;

static void run_path(void* arg) {
    Path* p = arg;
    run_plan(p->r);
    Routing* r = p->r;
    Ragged g = r->ragged;
    int64_t C = p->C, F = p->F, rows = g.capacity;
    Ctx* ctx = ctx_create(permute_workspace(r->N, r->K, r->El));
    real *x = poisoned(rows * C), *h = poisoned(rows * 2 * F), *a = poisoned(rows * F), *y = poisoned(rows * C);
    p->out = poisoned(r->N * C);
    // Forward.
    permute_rows(x, p->x, g, (size_t)C * sizeof(real), ctx);
    grouped_gemm_forward(h, x, p->w13, g, C, 2 * F, ctx);
    experts_swiglu_forward(a, h, g, F, ctx);
    grouped_gemm_forward(y, a, p->w2, g, F, C, ctx);
    unpermute_rows(p->out, y, r->gate, g, r->N, r->K, C, 0, ctx);

    real *dout = poisoned(rows * C), *dap = poisoned(rows * F), *dh = poisoned(rows * 2 * F), *dx = poisoned(rows * C);
    real *gated_a = poisoned(rows * F), *drow_gate = poisoned(rows);
    p->dx = poisoned(r->N * C), p->dgate = poisoned(r->N * r->K);
    p->dw13 = copied(p->w13_before, r->El * 2 * F * C), p->dw2 = copied(p->w2_before, r->El * C * F);
    // Backward.
    permute_rows(dout, p->dout, g, (size_t)C * sizeof(real), ctx);
    grouped_gemm_dgrad(dap, dout, p->w2, g, F, C, ctx);
    experts_swiglu_backward((ExpertsBackward){dh, gated_a, drow_gate, dap, h}, g, F, ctx);
    if (p->given_a) {
        experts_swiglu_forward(gated_a, h, g, F, ctx);
        memset(drow_gate, 0xff, (size_t)rows * sizeof(real));
        experts_gate_backward((ExpertsBackward){NULL, gated_a, drow_gate, dap, NULL}, g, F, ctx);
    }
    grouped_gemm_dgrad(dx, dh, p->w13, g, C, 2 * F, ctx);
    unpermute_rows(p->dx, dx, NULL, g, r->N, r->K, C, 0, ctx);
    unpermute_gates(p->dgate, drow_gate, 1, g, r->N, r->K, ctx);
    grouped_gemm_wgrad(p->dw2, NULL, dout, gated_a, ALL_BY_ROW, g, F, C, 1, ctx);
    grouped_gemm_wgrad(p->dw13, NULL, dh, x, ALL_BY_ROW, g, C, 2 * F, 1, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

// Token by token, without rows. Returns <dout, out>.
static double oracle_path(double* out, const Path* p) {
    const Routing* r = p->r;
    int64_t C = p->C, F = p->F;
    double objective = 0, *a = host_alloc(F * sizeof(double));
    for (int64_t i = 0; i < r->N * r->K; i++) {
        int64_t n = i / r->K, e = r->expert[i];
        if (e < 0) continue;
        for (int64_t f = 0; f < F; f++) {
            double g = dot(p->w13d + (e * 2 * F + f) * C, p->xd + n * C, C);
            a[f] = g / (1 + exp(-g)) * dot(p->w13d + (e * 2 * F + F + f) * C, p->xd + n * C, C);
        }
        for (int64_t c = 0; c < C; c++) {
            double y = p->gated[i] * dot(p->w2d + (e * C + c) * F, a, F);
            if (out) out[n * C + c] += y;
            objective += y * p->doutd[n * C + c];
        }
    }
    free(a);
    return objective;
}

static double path_objective(void* p) { return oracle_path(NULL, p); }

// given_a: the gate's part of the backward runs on its own, from `a` in memory.
static void check_path(Routing r, int64_t C, int64_t F, int given_a) {
    Path p = {.r = &r, .C = C, .F = F, .given_a = given_a, .x = tensor(r.N * C, 1), .dout = tensor(r.N * C, 2)};
    int64_t n13 = r.El * 2 * F * C, n2 = r.El * C * F;
    p.w13 = tensor(n13, 3), p.w2 = tensor(n2, 4), p.w13_before = tensor(n13, 5), p.w2_before = tensor(n2, 6);
    for (int64_t i = 0; i < n13; i++) p.w13[i] /= (real)sqrt((double)C);
    for (int64_t i = 0; i < n2; i++) p.w2[i] /= (real)sqrt((double)F);
    p.xd = doubles(p.x, r.N * C), p.gated = doubles(r.gate, r.N * r.K), p.doutd = doubles(p.dout, r.N * C);
    p.w13d = doubles(p.w13, n13), p.w2d = doubles(p.w2, n2);
    check_threads(run_path, &p);
    double* out = zeros(r.N * C);
    oracle_path(out, &p);
    // Two GEMMs of up to 24 terms, a function and a sum: 2 sqrt(24) u = 6e-7. The backward is twice as long.
    CHECK_CLOSE(p.out, out, r.N * C, TOL(1e-6, 1e-14));
    CHECK_GRADIENT(path_objective, &p, p.xd, p.dx, NULL, r.N * C, 3e-6);
    CHECK_GRADIENT(path_objective, &p, p.gated, p.dgate, NULL, r.N * r.K, 3e-6);
    CHECK_GRADIENT(path_objective, &p, p.w13d, p.dw13, p.w13_before, n13, 3e-6);
    CHECK_GRADIENT(path_objective, &p, p.w2d, p.dw2, p.w2_before, n2, 3e-6);
    release_all();
}

static void test_expert_path(void) {
    for (int given_a = 0; given_a < 2; given_a++) {
        check_path(make_routing(5, 2, 3, 3, 0, RANDOM), 3, 4, given_a);
        check_path(make_routing(1, 3, 4, 8, 2, RANDOM), 5, 3, given_a);
        check_path(make_routing(9, 2, 4, 4, 0, ODD_ONES_EMPTY), 4, 3, given_a);
        check_path(make_routing(130, 1, 3, 3, 0, ONE_TAKES_ALL), 5, 2, given_a);
        check_path(make_routing(129, 3, 5, 8, 1, RANDOM), 24, 17, given_a);
        check_path(make_routing(3, 2, 2, 4, 2, NONE_HELD), 3, 4, given_a);
    }
}

int main(void) {
    RUN(test_experts_swiglu);
    RUN(test_expert_path);
    return test_summary();
}
