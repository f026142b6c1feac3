// The grouped GEMMs against sums in float64, on random and on extreme routings.
#include "grouped/grouped_gemm.h"
#include "tests/routing.h"

typedef struct {
    Routing* r;
    int64_t IC, OC;
    real *x, *w, *dy, *dw_before;
    real *y, *dx, *dw, *dw_written;
} Grouped;

static void run_grouped(void* arg) {
    Grouped* g = arg;
    Ragged ragged = g->r->ragged;
    Ctx* ctx = ctx_create(0);
    g->y = poisoned(ragged.capacity * g->OC), g->dx = poisoned(ragged.capacity * g->IC);
    g->dw = copied(g->dw_before, ragged.El * g->OC * g->IC), g->dw_written = poisoned(ragged.El * g->OC * g->IC);
    grouped_gemm_forward(g->y, g->x, g->w, ragged, g->IC, g->OC, ctx);
    grouped_gemm_dgrad(g->dx, g->dy, g->w, ragged, g->IC, g->OC, ctx);
    grouped_gemm_wgrad(g->dw, NULL, g->dy, g->x, ALL_BY_ROW, ragged, g->IC, g->OC, 1, ctx);
    grouped_gemm_wgrad(g->dw_written, NULL, g->dy, g->x, ALL_BY_ROW, ragged, g->IC, g->OC, 0, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

// NaN in the weights of `broken` (-1: none) must stay in its rows.
static void check_grouped(Routing* r, int64_t IC, int64_t OC, int32_t broken) {
    int64_t nw = r->El * OC * IC, used = rows_used(r);
    Grouped g = {.r = r, .IC = IC, .OC = OC, .w = tensor(nw, 1), .dw_before = tensor(nw, 2)};
    g.x = random_rows(r, IC, 3), g.dy = random_rows(r, OC, 4);
    for (int64_t i = 0; i < OC * IC && broken >= 0; i++) g.w[broken * OC * IC + i] = NAN;
    check_threads(run_grouped, &g);
    double *y = zeros(used * OC), *dx = zeros(used * IC), *dw = zeros(nw), *added = doubles(g.dw_before, nw);
    for (int64_t row = 0; row < used; row++) {
        int32_t e = row_expert(r, row);
        if (e < 0) continue;
        int64_t nan = 0;
        for (int64_t o = 0; o < OC; o++)
            for (int64_t i = 0; i < IC; i++) {
                double w = g.w[(e * OC + o) * IC + i], x = g.x[row * IC + i], grad = g.dy[row * OC + o];
                dw[(e * OC + o) * IC + i] += grad * x;
                y[row * OC + o] += w * x, dx[row * IC + i] += w * grad;
            }
        if (e != broken) continue;
        for (int64_t o = 0; o < OC; o++) nan += isnan(g.y[row * OC + o]), y[row * OC + o] = g.y[row * OC + o] = 0;
        for (int64_t i = 0; i < IC; i++) nan += isnan(g.dx[row * IC + i]), dx[row * IC + i] = g.dx[row * IC + i] = 0;
        CHECK(nan == OC + IC, "%lld NaN in row %lld", (long long)nan, (long long)row);
    }
    check_pads_zero(r, g.y, OC);
    check_pads_zero(r, g.dx, IC);
    // Sums of up to 130 products, of up to 300 in dw: sqrt(300) u = 1e-6.
    CHECK_CLOSE(g.y, y, used * OC, TOL(2e-6, 1e-14));
    CHECK_CLOSE(g.dx, dx, used * IC, TOL(2e-6, 1e-14));
    // Without rows dw is exactly zero.
    CHECK_CLOSE(g.dw_written, dw, nw, TOL(2e-6, 1e-14));
    for (int64_t i = 0; i < nw; i++) added[i] += dw[i];
    CHECK_CLOSE(g.dw, added, nw, TOL(2e-6, 1e-14));
    for (int32_t e = 0; e < r->El; e++)
        if (r->ragged.group_rows[e] == 0) {
            CHECK_BITS(g.dw + e * OC * IC, g.dw_before + e * OC * IC, OC * IC * sizeof(real));
            CHECK_BITS(g.dw_written + e * OC * IC, filled(OC * IC, 0), OC * IC * sizeof(real));
        }
}

static void test_grouped_gemm(void) {
    static const int64_t widths[][2] = {{5, 7}, {24, 40}, {33, 24}, {40, 130}, {1, 1}, {130, 3}, {8, 24}, {24, 33}};
    for (int i = 0; i < COUNT(routings) * ROUTINGS; i++) {
        const int32_t* s = routings[i / ROUTINGS];
        Routing r = make_routing(s[0], s[1], s[2], s[3], s[4], i % ROUTINGS);
        run_plan(&r);
        check_grouped(&r, widths[i / ROUTINGS][0], widths[i / ROUTINGS][1], -1);
        check_grouped(&r, widths[i / ROUTINGS][0], widths[i / ROUTINGS][1], r.El / 2);
        release_all();
    }
}

int main(void) {
    RUN(test_grouped_gemm);
    return test_summary();
}
