// The ragged layout, the grouped products and the experts, on random and on extreme routings; the whole expert path
// against differences; what expert parallelism sends where; and a whole MoE block on one rank, with its memory. (Blocks
// on several ranks: tests/test_expert_parallel.c.)
#include <unistd.h>

#include "device/pool.h"
#include "moe/dispatch.h"
#include "moe/experts.h"
#include "moe/grouped_gemm.h"
#include "moe/moe.h"
#include "moe/permute.h"
#include "tests/oracle.h"

enum { RANDOM, ONE_TAKES_ALL, ODD_ONES_EMPTY, NONE_HELD, IN_ORDER, ROUTINGS };

// A routing of N tokens to K different ones of E experts, of which El, from `first` on, are held here.
typedef struct {
    int64_t N;
    int32_t K, El, E, first;
    int32_t* expert;  // (N, K), as permute_plan takes it
    real* gate;
    Ragged ragged;  // filled by run_plan
} Routing;

static int contains(const int32_t* x, int32_t n, int32_t value) {
    for (int32_t i = 0; i < n; i++)
        if (x[i] == value) return 1;
    return 0;
}

static Routing make_routing(int64_t N, int32_t K, int32_t El, int32_t E, int32_t first, int kind) {
    Routing r = {.N = N, .K = K, .El = El, .E = E, .first = first};
    r.expert = kept_bytes(N * K * sizeof(int32_t));
    r.gate = tensor(N * K, 77);
    for (int64_t i = 0, draw = 0; i < N * K; i++) do
            r.expert[i] = (int32_t)(random_uniform(99, 1, draw++) * E);
        while (contains(r.expert + i / K * K, (int32_t)(i % K), r.expert[i]));
    for (int64_t i = 0; i < N * K; i++) {
        int32_t e = r.expert[i] - first;
        if (kind == ONE_TAKES_ALL) e = i % K == 0 ? El - 1 : -1;
        if (kind == ODD_ONES_EMPTY && e % 2 != 0) e = -1;
        if (kind == NONE_HELD) e = -1;
        if (kind == IN_ORDER) e = (int32_t)(i % E) - first;
        r.expert[i] = e < 0 || e >= El ? (i % 2 ? -1 : -7) : e;  // any negative number
    }
    return r;
}

static void run_plan(void* arg) {
    Routing* r = arg;
    int64_t capacity = ragged_capacity(r->N, r->K, r->El, BACKEND);
    Ctx* ctx = ctx_create(permute_workspace(r->N, r->K, r->El));
    Ragged g = {.El = r->El, .capacity = capacity};
    g.group_start = memset(kept_bytes((r->El + 1) * sizeof(int64_t)), 0x7b, (r->El + 1) * sizeof(int64_t));
    g.group_rows = poisoned_ints(r->El), g.row_token = poisoned_ints(capacity), g.row_gate = poisoned(capacity);
    g.token_row = poisoned_ints(r->N * r->K);
    permute_plan(g, r->expert, r->gate, r->N, r->K, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
    r->ragged = g;
}

static int64_t rows_used(const Routing* r) { return r->ragged.group_start[r->El]; }

// The expert of a row, -1 for a pad row.
static int32_t row_expert(const Routing* r, int64_t row) {
    const Ragged* g = &r->ragged;
    for (int32_t e = 0; e < g->El; e++)
        if (row >= g->group_start[e] && row < g->group_start[e] + g->group_rows[e]) return e;
    return -1;
}

// Rows in use random, the room behind them NaN: nobody may read it. Pad rows are zeros.
static real* random_rows(const Routing* r, int64_t C, uint32_t stream) {
    real* rows = tensor(r->ragged.capacity * C, stream);
    for (int64_t i = 0; i < r->ragged.capacity * C; i++)
        if (i / C >= rows_used(r))
            rows[i] = NAN;
        else if (row_expert(r, i / C) < 0)
            rows[i] = 0;
    return rows;
}

static void check_pads_zero(const Routing* r, const real* rows, int64_t C) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < rows_used(r) * C; i++) wrong += row_expert(r, i / C) < 0 && !(rows[i] == 0);
    CHECK(wrong == 0, "%lld elements of pad rows are not 0", (long long)wrong);
}

// --- The plan ---

static void check_plan(const Routing* r) {
    const Ragged* g = &r->ragged;
    const int64_t align = BACKEND == BACKEND_CUDA ? 128 : 1;
    int64_t wrong = 0, row = 0;
    for (int32_t e = 0; e < r->El; e++) {  // experts, then tokens, in order: the whole layout follows
        CHECK(g->group_start[e] == row, "expert %d starts at %lld, expected %lld", e, (long long)g->group_start[e],
              (long long)row);
        int32_t count = 0;
        for (int64_t i = 0; i < r->N * r->K; i++) {
            if (r->expert[i] != e) continue;
            wrong += g->row_token[row] != i / r->K || g->token_row[i] != row || g->row_gate[row] != r->gate[i];
            row++, count++;
        }
        CHECK(g->group_rows[e] == count, "expert %d has %d rows, expected %d", e, g->group_rows[e], count);
        for (; row % align; row++) wrong += g->row_token[row] != -1 || g->row_gate[row] != 0;
    }
    CHECK(rows_used(r) == row && row <= g->capacity, "%lld rows, expected %lld, room for %lld", (long long)rows_used(r),
          (long long)row, (long long)g->capacity);
    for (int64_t i = 0; i < r->N * r->K; i++) wrong += r->expert[i] < 0 && g->token_row[i] != -1;
    CHECK(wrong == 0, "%lld wrong rows", (long long)wrong);
}

// N, K, El, E, first
static const int32_t routings[][5] = {{1, 1, 1, 1, 0},    {1, 3, 5, 8, 2},   {3, 2, 4, 4, 0},     {127, 2, 8, 8, 0},
                                      {129, 3, 5, 16, 7}, {300, 4, 7, 7, 0}, {300, 6, 64, 64, 0}, {257, 1, 3, 3, 0}};

static void test_permute_plan(void) {
    for (int i = 0; i < COUNT(routings) * ROUTINGS; i++) {
        const int32_t* s = routings[i / ROUTINGS];
        Routing r = make_routing(s[0], s[1], s[2], s[3], s[4], i % ROUTINGS);
        check_threads(run_plan, &r);
        check_plan(&r);
        // Without gates: the same, and row_gate is left alone.
        Ragged g = r.ragged;
        r.ragged.row_gate = poisoned(g.capacity);
        memset(g.token_row, 0x7b, r.N * r.K * sizeof(int32_t));
        Ctx* ctx = ctx_create(permute_workspace(r.N, r.K, r.El));
        permute_plan(r.ragged, r.expert, NULL, r.N, r.K, ctx);
        ctx_destroy(ctx);
        CHECK_BITS(r.ragged.row_gate, poisoned(g.capacity), g.capacity * sizeof(real));
        r.ragged.row_gate = g.row_gate;
        check_plan(&r);
        release_all();
    }
}

static void test_capacity(void) {
    // min(K, El) choices a token may be held here. With tiles of 128 rows the worst is one row too many in every
    // expert.
    for (int64_t N = 1; N < 700; N += 49)
        for (int32_t K = 1; K <= 6; K++)
            for (int32_t El = 1; El <= 20; El += 3) {
                int64_t rows = N * (K < El ? K : El), padded = 0, left = rows;
                CHECK(ragged_capacity(N, K, El, BACKEND_CPU) >= rows, "N %lld K %d El %d", (long long)N, K, El);
                for (int32_t e = 0; e < El && left > 0; e++) {  // a row each, the last takes what a token can give it
                    int64_t take = e == El - 1 ? left : 1 + (left - 1 - (El - 1 - e)) / 128 * 128;
                    take = take < 1 ? 1 : take > N ? (N - 1) / 128 * 128 + 1 : take;
                    take = take > left ? left : take;
                    padded += (take + 127) / 128 * 128, left -= take;
                }
                CHECK(ragged_capacity(N, K, El, BACKEND_CUDA) >= padded, "N %lld K %d El %d", (long long)N, K, El);
                CHECK(ragged_capacity(N, K, El, BACKEND_CUDA) % 128 == 0, "N %lld K %d El %d", (long long)N, K, El);
            }
}

// --- Rows to and fro ---

typedef struct {
    Routing* r;
    int64_t C;
    real *tokens, *tokens_before, *from, *drow_gate;
    real *rows, *combined, *summed, *added, *dgate;
} Move;

static void run_move(void* arg) {
    Move* m = arg;
    Routing* r = m->r;
    int64_t n = r->N * m->C;
    Ctx* ctx = ctx_create(permute_workspace(r->N, r->K, r->El));
    m->rows = poisoned(r->ragged.capacity * m->C);
    permute_rows(m->rows, m->tokens, r->ragged, (size_t)m->C * sizeof(real), ctx);
    m->combined = poisoned(n), m->summed = poisoned(n), m->added = copied(m->tokens_before, n);
    unpermute_rows(m->combined, m->from, r->gate, r->ragged, r->N, r->K, m->C, 0, ctx);
    unpermute_rows(m->summed, m->from, NULL, r->ragged, r->N, r->K, m->C, 0, ctx);
    unpermute_rows(m->added, m->from, r->gate, r->ragged, r->N, r->K, m->C, 1, ctx);
    m->dgate = poisoned(r->N * r->K);
    unpermute_gates(m->dgate, m->drow_gate, r->ragged, r->N, r->K, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static void test_permute_rows(void) {
    for (int i = 0; i < COUNT(routings) * ROUTINGS; i++) {
        const int32_t* s = routings[i / ROUTINGS];
        Routing r = make_routing(s[0], s[1], s[2], s[3], s[4], i % ROUTINGS);
        run_plan(&r);
        int64_t C = (int64_t[]){1, 7, 24, 129}[i % 4], n = r.N * C;
        Move m = {.r = &r, .C = C, .tokens = tensor(n, 1), .tokens_before = tensor(n, 2)};
        m.from = random_rows(&r, C, 3), m.drow_gate = random_rows(&r, 1, 4);
        check_threads(run_move, &m);
        double *combined = zeros(n), *summed = zeros(n), *added = doubles(m.tokens_before, n), left = 0, right = 0;
        for (int64_t row = 0; row < rows_used(&r); row++)
            if (row_expert(&r, row) >= 0)
                CHECK_BITS(m.rows + row * C, m.tokens + r.ragged.row_token[row] * C, C * sizeof(real));
        check_pads_zero(&r, m.rows, C);
        for (int64_t j = 0; j < r.N * r.K; j++) {
            int64_t row = r.ragged.token_row[j];
            CHECK(m.dgate[j] == (row < 0 ? 0 : m.drow_gate[row]), "dgate of choice %lld", (long long)j);
            for (int64_t c = 0; c < C && row >= 0; c++) {
                double x = m.from[row * C + c], gated = (double)r.gate[j] * x;
                combined[j / r.K * C + c] += gated, added[j / r.K * C + c] += gated, summed[j / r.K * C + c] += x;
            }
        }
        double tolerance = TOL(3e-7, 1e-15);  // up to 6 products and 6 sums: sqrt(12) u
        CHECK_CLOSE(m.combined, combined, n, tolerance);
        CHECK_CLOSE(m.summed, summed, n, tolerance);
        CHECK_CLOSE(m.added, added, n, tolerance);
        // Moving rows is linear: unpermute without gates is permute's backward if <permute x, y> = <x, unpermute y>.
        for (int64_t j = 0; j < rows_used(&r) * C; j++) left += (double)m.rows[j] * m.from[j];
        for (int64_t j = 0; j < n; j++) right += (double)m.tokens[j] * m.summed[j];
        // n = up to 2e5 random products add up to sqrt(n); the n roundings on the way, in double, to sqrt(n) u of that.
        CHECK(fabs(left - right) <= TOL(1e-6, 2e-13) * sqrt((double)rows_used(&r) * C), "%.9g and %.9g", left, right);
        release_all();
    }
}

// --- Grouped products ---

typedef struct {
    Routing* r;
    int64_t IC, OC;
    real *x, *w, *dy, *dw_before;
    real *y, *dx, *dw;
} Grouped;

static void run_grouped(void* arg) {
    Grouped* g = arg;
    Ragged ragged = g->r->ragged;
    Ctx* ctx = ctx_create(0);
    g->y = poisoned(ragged.capacity * g->OC), g->dx = poisoned(ragged.capacity * g->IC);
    g->dw = copied(g->dw_before, ragged.El * g->OC * g->IC);
    grouped_gemm_forward(g->y, g->x, g->w, ragged, g->IC, g->OC, ctx);
    grouped_gemm_dgrad(g->dx, g->dy, g->w, ragged, g->IC, g->OC, ctx);
    grouped_gemm_wgrad(g->dw, g->dy, g->x, ragged, g->IC, g->OC, ctx);
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
    double *y = zeros(used * OC), *dx = zeros(used * IC), *dw = doubles(g.dw_before, nw);
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
    CHECK_CLOSE(g.dw, dw, nw, TOL(2e-6, 1e-14));
    for (int32_t e = 0; e < r->El; e++)
        if (r->ragged.group_rows[e] == 0)
            CHECK_BITS(g.dw + e * OC * IC, g.dw_before + e * OC * IC, OC * IC * sizeof(real));
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

// --- Between the products ---

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
    experts_swiglu_backward(m->dh, m->gated_a, m->drow_gate, m->dap, m->h, ragged, m->F, ctx);
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
        // A few operations each. dgate is a sum over 129, sqrt(129) u = 7e-7, and where there is one row its terms may
        // well cancel to a tenth of their size.
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
    permute_rows(x, p->x, g, (size_t)C * sizeof(real), ctx);
    grouped_gemm_forward(h, x, p->w13, g, C, 2 * F, ctx);
    experts_swiglu_forward(a, h, g, F, ctx);
    grouped_gemm_forward(y, a, p->w2, g, F, C, ctx);
    unpermute_rows(p->out, y, r->gate, g, r->N, r->K, C, 0, ctx);

    real *dout = poisoned(rows * C), *dap = poisoned(rows * F), *dh = poisoned(rows * 2 * F), *dx = poisoned(rows * C);
    real *gated_a = poisoned(rows * F), *drow_gate = poisoned(rows);
    p->dx = poisoned(r->N * C), p->dgate = poisoned(r->N * r->K);
    p->dw13 = copied(p->w13_before, r->El * 2 * F * C), p->dw2 = copied(p->w2_before, r->El * C * F);
    permute_rows(dout, p->dout, g, (size_t)C * sizeof(real), ctx);
    grouped_gemm_dgrad(dap, dout, p->w2, g, F, C, ctx);
    experts_swiglu_backward(dh, gated_a, drow_gate, dap, h, g, F, ctx);
    grouped_gemm_dgrad(dx, dh, p->w13, g, C, 2 * F, ctx);
    unpermute_rows(p->dx, dx, NULL, g, r->N, r->K, C, 0, ctx);
    unpermute_gates(p->dgate, drow_gate, g, r->N, r->K, ctx);
    grouped_gemm_wgrad(p->dw2, dout, gated_a, g, F, C, ctx);
    grouped_gemm_wgrad(p->dw13, dh, x, g, C, 2 * F, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

// Token by token, without any rows; returns <dout, out>.
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

static void check_path(Routing r, int64_t C, int64_t F) {
    Path p = {.r = &r, .C = C, .F = F, .x = tensor(r.N * C, 1), .dout = tensor(r.N * C, 2)};
    int64_t n13 = r.El * 2 * F * C, n2 = r.El * C * F;
    p.w13 = tensor(n13, 3), p.w2 = tensor(n2, 4), p.w13_before = tensor(n13, 5), p.w2_before = tensor(n2, 6);
    for (int64_t i = 0; i < n13; i++) p.w13[i] /= (real)sqrt((double)C);
    for (int64_t i = 0; i < n2; i++) p.w2[i] /= (real)sqrt((double)F);
    p.xd = doubles(p.x, r.N * C), p.gated = doubles(r.gate, r.N * r.K), p.doutd = doubles(p.dout, r.N * C);
    p.w13d = doubles(p.w13, n13), p.w2d = doubles(p.w2, n2);
    check_threads(run_path, &p);
    double* out = zeros(r.N * C);
    oracle_path(out, &p);
    // Two products of up to 24 terms, a function and a sum: 2 sqrt(24) u = 6e-7; the backward is twice as long.
    CHECK_CLOSE(p.out, out, r.N * C, TOL(1e-6, 1e-14));
    CHECK_GRADIENT(path_objective, &p, p.xd, p.dx, NULL, r.N * C, 3e-6);
    CHECK_GRADIENT(path_objective, &p, p.gated, p.dgate, NULL, r.N * r.K, 3e-6);
    CHECK_GRADIENT(path_objective, &p, p.w13d, p.dw13, p.w13_before, n13, 3e-6);
    CHECK_GRADIENT(path_objective, &p, p.w2d, p.dw2, p.w2_before, n2, 3e-6);
    release_all();
}

static void test_expert_path(void) {
    check_path(make_routing(5, 2, 3, 3, 0, RANDOM), 3, 4);
    check_path(make_routing(1, 3, 4, 8, 2, RANDOM), 5, 3);
    check_path(make_routing(9, 2, 4, 4, 0, ODD_ONES_EMPTY), 4, 3);
    check_path(make_routing(130, 1, 3, 3, 0, ONE_TAKES_ALL), 5, 2);
    check_path(make_routing(129, 3, 5, 8, 1, RANDOM), 24, 17);
    check_path(make_routing(3, 2, 2, 4, 2, NONE_HELD), 3, 4);
}

// --- What goes to which rank ---

typedef struct {
    int64_t N;
    int32_t K, P, El;
    int32_t* expert;
    real *gate, *sent;
    int32_t *rank, *row_expert;
    int64_t* counts;
    real *row_gate, *dgate;
    Ragged send;
} Dispatch;

static void run_dispatch(void* arg) {
    Dispatch* d = arg;
    int64_t capacity = d->send.capacity = ragged_capacity(d->N, d->P, d->P, BACKEND);
    d->send.El = d->P;
    d->rank = poisoned_ints(d->N * d->P), d->counts = kept_bytes(2 * d->P * sizeof(int64_t));
    memset(d->counts, 0x7b, 2 * d->P * sizeof(int64_t));
    d->send.group_start = kept_bytes((d->P + 1) * sizeof(int64_t)), d->send.group_rows = poisoned_ints(d->P);
    d->send.row_token = poisoned_ints(capacity), d->send.token_row = poisoned_ints(d->N * d->P);
    d->row_expert = poisoned_ints(capacity * d->K), d->row_gate = poisoned(capacity * d->K);
    d->dgate = poisoned(d->N * d->K);
    Ctx* ctx = ctx_create(permute_workspace(d->N, d->P, d->P));
    dispatch_ranks(d->rank, d->counts, d->expert, d->N, d->K, d->P, d->El, ctx);
    permute_plan(d->send, d->rank, NULL, d->N, d->P, ctx);
    dispatch_choices(d->row_expert, d->row_gate, d->expert, d->gate, d->send, d->N, d->K, d->El, ctx);
    dispatch_choices_backward(d->dgate, d->sent, d->expert, d->send, d->N, d->K, d->El, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static void check_dispatch(int64_t N, int32_t K, int32_t P, int32_t El, int kind) {
    Routing r = make_routing(N, K, P * El, P * El, 0, kind == ONE_TAKES_ALL ? RANDOM : kind);
    if (kind == ONE_TAKES_ALL)  // one rank, as far as its experts go
        for (int64_t i = 0; i < N * K; i++) r.expert[i] = (int32_t)(((P - 1) * El + i % K) % (P * El));
    Dispatch d = {.N = N, .K = K, .P = P, .El = El, .expert = r.expert, .gate = r.gate};
    d.sent = tensor(ragged_capacity(N, P, P, BACKEND) * K, 4);
    check_threads(run_dispatch, &d);
    int64_t wrong = 0, row = 0;
    for (int32_t j = 0; j < P; j++) {  // in order of ranks, then of tokens
        int64_t first = row, choices = 0;
        for (int64_t n = 0; n < N; n++) {
            int64_t here = 0;
            for (int32_t k = 0; k < K; k++) here += r.expert[n * K + k] / El == j;
            wrong += d.rank[n * P + j] != (here ? j : -1);
            choices += here;
            if (!here) continue;
            wrong += d.send.row_token[row] != n;
            for (int32_t k = 0; k < K; k++) {
                int32_t local = r.expert[n * K + k] - j * El, held = local >= 0 && local < El;
                wrong += d.row_expert[row * K + k] != (held ? local : -1);
                wrong += d.row_gate[row * K + k] != (held ? r.gate[n * K + k] : 0);
                wrong += held && d.dgate[n * K + k] != d.sent[row * K + k];
            }
            row++;
        }
        CHECK(d.counts[2 * j] == row - first && d.counts[2 * j + 1] == choices,
              "rank %d: %lld tokens, %lld choices, expected %lld and %lld", j, (long long)d.counts[2 * j],
              (long long)d.counts[2 * j + 1], (long long)(row - first), (long long)choices);
    }
    CHECK(wrong == 0, "%lld wrong values, N %lld K %d P %d El %d kind %d", (long long)wrong, (long long)N, K, P, El,
          kind);
    release_all();
}

static void test_dispatch(void) {
    for (int kind = 0; kind < 3; kind++) {
        static const int kinds[3] = {RANDOM, IN_ORDER, ONE_TAKES_ALL};
        check_dispatch(1, 1, 1, 1, kinds[kind]);
        check_dispatch(5, 2, 2, 1, kinds[kind]);
        check_dispatch(129, 3, 4, 2, kinds[kind]);
        check_dispatch(130, 1, 8, 1, kinds[kind]);
        check_dispatch(300, 6, 8, 8, kinds[kind]);
        check_dispatch(0, 3, 4, 2, kinds[kind]);
    }
}

// --- The pool ---

// How often `pool` said that it grew while `use` ran.
static int growths(void (*use)(Pool*), Pool* pool) {
    FILE* said = tmpfile();
    int before = dup(2), count = 0;
    dup2(fileno(said), 2);
    use(pool);
    dup2(before, 2);
    close(before);
    rewind(said);
    for (char line[256]; fgets(line, sizeof(line), said);) count += strstr(line, "the pool for a test grew by") != NULL;
    fclose(said);
    return count;
}

enum { ROOM = 10 * 256, MEGABYTE = 1 << 20 };
static char* pool_memory;

static void use_pool(Pool* pool) {
    static char *grown, *large;  // where memory was found the first time
    PoolMark empty = pool_mark(pool);
    char *a = pool_take(pool, 1), *b = pool_take(pool, 257), *none = pool_take(pool, 0);
    CHECK(a == pool_memory && b == a + 256 && none == b + 512, "%td, %td", b - a, none - b);
    PoolMark mark = pool_mark(pool);
    char* c = pool_take(pool, ROOM - 3 * 256);  // all that is left
    CHECK(c == none, "%td behind", c - none);
    pool_release(pool, mark);
    CHECK(pool_take(pool, 5) == c, "released memory was not given again");

    char* d = pool_take(pool, ROOM);  // more than is left: the pool grows by a megabyte
    CHECK(d + ROOM <= pool_memory || d >= pool_memory + ROOM, "the same memory twice");
    CHECK((uintptr_t)d % 256 == 0 && (!grown || d == grown), "not aligned, or not what grew before");
    memset(grown = d, 1, ROOM);
    mark = pool_mark(pool);
    char* e = pool_take(pool, MEGABYTE - ROOM);
    CHECK(e == d + ROOM, "not behind it: %td", e - d);
    char* f = pool_take(pool, 3 * MEGABYTE);
    memset(f, 2, 3 * MEGABYTE);
    CHECK(!large || f == large, "not what grew before");
    large = f;
    pool_release(pool, mark);
    CHECK(pool_take(pool, 1) == e, "not where the mark was");
    CHECK(pool_take(pool, 2 * MEGABYTE) == f, "a chunk was not used again");
    pool_release(pool, empty);
}

static void test_pool(void) {
    pool_memory = device_alloc(ROOM, "a test");
    Pool* pool = pool_create("a test", pool_memory, ROOM);
    int first = growths(use_pool, pool), again = growths(use_pool, pool);
    CHECK(first == 2 && again == 0, "%d growths, then %d", first, again);
    pool_destroy(pool);
    device_free(pool_memory);
}

// --- A whole block on one rank ---

typedef struct {
    MoeShape s;
    int blocks;         // run forward one after the other, and backward
    int64_t pool_room;  // bytes, -1: what moe_plan says
    real *x, *dy, *router, *w13, *w2, *shared13, *shared2, *bias;
    real *drouter_before, *dw13_before, *dw2_before, *dshared13_before, *dshared2_before;
    char* memory;
    real *y, *dx, *drouter, *dw13, *dw2, *dshared13, *dshared2;
    int32_t* expert;
    int64_t* load;
    double *xd, *dyd, *routerd, *w13d, *w2d, *shared13d, *shared2d;
} Block;

static int64_t planned(const Block* b) {
    Arena plan;
    arena_init(&plan, "a test", BACKEND);
    moe_plan(&plan, b->s, b->blocks, 1);
    size_t bytes = arena_bytes(&plan);
    arena_free(&plan);
    return (int64_t)bytes;
}

// All blocks have the same x, weights and gradients; `y` and `dx` are those of the last that ran.
static void run_block(void* arg) {
    Block* b = arg;
    MoeShape s = b->s;
    int64_t N = s.router.N, C = s.router.C, E = s.router.E, F = s.F, sF = s.shared_F;
    size_t room = b->pool_room < 0 ? (size_t)planned(b) : (size_t)b->pool_room;
    b->memory = memset(kept_bytes(room), 0xff, room);  // NaN, and -1
    Ctx* ctx = ctx_create(moe_workspace(s));
    Pool* pool = pool_create("a test", b->memory, room);
    MoeWays* ways = moe_ways_create(pool, NULL, s, ctx);
    MoeWeights w = {b->router,
                    b->w13,
                    b->w2,
                    linear_weight(b->shared13, 2 * sF, C),
                    linear_weight(b->shared2, C, sF),
                    b->bias,
                    NULL};
    b->drouter = copied(b->drouter_before, E * C);
    b->dw13 = copied(b->dw13_before, E * 2 * F * C), b->dw2 = copied(b->dw2_before, E * C * F);
    b->dshared13 = copied(b->dshared13_before, 2 * sF * C), b->dshared2 = copied(b->dshared2_before, C * sF);
    MoeGrads dw = {b->drouter, b->dw13, b->dw2, b->dshared13, b->dshared2};
    b->y = poisoned(N * C), b->dx = poisoned(N * C), b->load = kept_bytes(E * sizeof(int64_t));
    b->expert = poisoned_ints(N * s.router.K);
    MoeSaved saved[3];
    PoolMark mark[3];
    for (int i = 0; i < b->blocks; i++) {
        mark[i] = pool_mark(pool);
        moe_forward(b->y, b->x, w, &saved[i], i == 0 ? b->load : NULL, NULL, s, ways, ctx);
    }
    memcpy(b->expert, saved[0].expert, N * s.router.K * sizeof(int32_t));
    for (int i = b->blocks - 1; i >= 0; i--) {
        moe_backward(b->dx, b->dy, b->x, w, dw, &saved[i], 0, s, ways, ctx);
        pool_release(pool, mark[i]);
    }
    moe_ways_destroy(ways);
    pool_destroy(pool);
    ctx_destroy(ctx);
}

// <dy, y>, with the experts that forward chose.
static double block_objective(void* arg) {
    Block* b = arg;
    MoeShape s = b->s;
    int64_t C = s.router.C, E = s.router.E, K = s.router.K;
    double objective = 0, *p = host_alloc(E * sizeof(double)), *a = host_alloc((s.F + s.shared_F) * sizeof(double));
    for (int64_t n = 0; n < s.router.N; n++) {
        const double *x = b->xd + n * C, *dy = b->dyd + n * C;
        double all = 0, chosen = 1e-20;
        for (int64_t e = 0; e < E; e++) {
            p[e] = exp(dot(b->routerd + e * C, x, C));
            all += p[e];
        }
        for (int64_t e = 0; e < E; e++) p[e] = s.router.score == SCORE_SIGMOID ? p[e] / (1 + p[e]) : p[e] / all;
        for (int64_t k = 0; k < K; k++) chosen += p[b->expert[n * K + k]];
        for (int64_t k = -1; k < K; k++) {  // -1: the shared MLP
            int64_t e = k < 0 ? 0 : b->expert[n * K + k], F = k < 0 ? s.shared_F : s.F;
            double* w13 = k < 0 ? b->shared13d : b->w13d + e * 2 * F * C;
            double* w2 = k < 0 ? b->shared2d : b->w2d + e * C * F;
            double gate = k < 0 ? 1 : p[e] * s.router.scale / (s.router.norm ? chosen : 1);
            for (int64_t f = 0; f < F; f++) {
                double g = dot(w13 + f * C, x, C);
                a[f] = g / (1 + exp(-g)) * dot(w13 + (F + f) * C, x, C);
            }
            for (int64_t c = 0; c < C; c++) objective += dy[c] * gate * dot(w2 + c * F, a, F);
        }
    }
    free(p);
    free(a);
    return objective;
}

static real* scaled(int64_t n, uint32_t stream, double scale) {
    real* x = tensor(n, stream);
    for (int64_t i = 0; i < n; i++) x[i] = (real)(scale * x[i]);
    return x;
}

static Block make_block(MoeShape s) {
    int64_t N = s.router.N, C = s.router.C, E = s.router.E, F = s.F, sF = s.shared_F;
    int64_t n13 = E * 2 * F * C, n2 = E * C * F, s13 = 2 * sF * C, s2 = C * sF;
    double c = 1 / sqrt((double)C), f = 1 / sqrt((double)F);
    Block b = {.s = s, .blocks = 1, .pool_room = -1, .x = tensor(N * C, 1), .dy = tensor(N * C, 2)};
    b.router = scaled(E * C, 3, c), b.w13 = scaled(n13, 4, c), b.w2 = scaled(n2, 5, f), b.bias = scaled(E, 8, 0.1);
    b.shared13 = scaled(s13, 6, c), b.shared2 = scaled(s2, 7, f);
    b.drouter_before = tensor(E * C, 9), b.dw13_before = tensor(n13, 10), b.dw2_before = tensor(n2, 11);
    b.dshared13_before = tensor(s13, 12), b.dshared2_before = tensor(s2, 13);
    b.xd = doubles(b.x, N * C), b.dyd = doubles(b.dy, N * C), b.routerd = doubles(b.router, E * C);
    b.w13d = doubles(b.w13, n13), b.w2d = doubles(b.w2, n2);
    b.shared13d = doubles(b.shared13, s13), b.shared2d = doubles(b.shared2, s2);
    return b;
}

static void check_same_block(const Block* a, const Block* b) {
    int64_t N = a->s.router.N, C = a->s.router.C, E = a->s.router.E, F = a->s.F, sF = a->s.shared_F;
    CHECK_BITS(a->expert, b->expert, N * a->s.router.K * sizeof(int32_t));
    CHECK_BITS(a->load, b->load, E * sizeof(int64_t));
    CHECK_BITS(a->y, b->y, N * C * sizeof(real));
    CHECK_BITS(a->dx, b->dx, N * C * sizeof(real));
    CHECK_BITS(a->drouter, b->drouter, E * C * sizeof(real));
    CHECK_BITS(a->dw13, b->dw13, E * 2 * F * C * sizeof(real));
    CHECK_BITS(a->dw2, b->dw2, E * C * F * sizeof(real));
    CHECK_BITS(a->dshared13, b->dshared13, 2 * sF * C * sizeof(real));
    CHECK_BITS(a->dshared2, b->dshared2, C * sF * sizeof(real));
}

static void check_block(MoeShape s) {
    Block b = make_block(s);
    int64_t N = s.router.N, C = s.router.C, E = s.router.E, K = s.router.K, F = s.F, sF = s.shared_F, loads = 0;
    check_threads(run_block, &b);
    double y = 0;
    for (int64_t i = 0; i < N * C; i++) y += (double)b.y[i] * b.dy[i];
    for (int64_t e = 0; e < E; e++) loads += b.load[e];
    CHECK(loads == N * K, "%lld loads", (long long)loads);
    // Every gradient against differences; y itself as <dy, y>: each of its roundings counts 1 / sqrt(N C) there.
    double objective = block_objective(&b);
    CHECK(fabs(y - objective) <= TOL(1e-6, 1e-14) * sqrt(dot(b.dyd, b.dyd, N * C) * (double)(N * C)), "%.9g and %.9g",
          y, objective);
    CHECK_GRADIENT(block_objective, &b, b.xd, b.dx, NULL, N * C, 2e-6);
    CHECK_GRADIENT(block_objective, &b, b.routerd, b.drouter, b.drouter_before, E * C, 2e-6);
    CHECK_GRADIENT(block_objective, &b, b.w13d, b.dw13, b.dw13_before, E * 2 * F * C, 2e-6);
    CHECK_GRADIENT(block_objective, &b, b.w2d, b.dw2, b.dw2_before, E * C * F, 2e-6);
    if (sF) CHECK_GRADIENT(block_objective, &b, b.shared13d, b.dshared13, b.dshared13_before, 2 * sF * C, 2e-6);
    if (sF) CHECK_GRADIENT(block_objective, &b, b.shared2d, b.dshared2, b.dshared2_before, C * sF, 2e-6);

    b.blocks = 2;  // so that the second uses what the first gave back
    run_block(&b);
    Block again = b;
    again.s.recompute = 1;
    run_block(&again);
    check_same_block(&again, &b);
    again.s.recompute = 0;
    again.pool_room = 512;  // next to nothing: all comes from growing
    run_block(&again);
    check_same_block(&again, &b);
    release_all();
}

#define BF16                                                                                                           \
    { 0, 0, 0, 0, 0, 0 }  // nothing in MXFP8
static void test_block(void) {
    //             N    T   C  E  K  groups   score    norm scale force  F  shared ep recompute
    check_block((MoeShape){{1, 1, 3, 1, 1, 1, 1, SCORE_SIGMOID, 1, 1, 0}, 2, 2, 1, 0, BF16});
    check_block((MoeShape){{23, 23, 6, 5, 2, 1, 1, SCORE_SIGMOID, 1, 2.5f, 0}, 4, 3, 1, 0, BF16});
    check_block((MoeShape){{130, 65, 9, 8, 3, 1, 1, SCORE_SOFTMAX, 0, 1, 0}, 5, 0, 1, 0, BF16});
    check_block((MoeShape){{40, 20, 8, 8, 2, 4, 2, SCORE_SIGMOID, 0, 1, 0}, 3, 7, 1, 0, BF16});
}

static int64_t rounded(int64_t reals) { return ((int64_t)sizeof(real) * reals + 255) / 256 * 256; }

// With one rank all sizes are known: the plan is what the pool is asked for, to the last buffer.
static void test_plan_of_block(void) {
    for (int i = 0; i < 4; i++) {
        RouterShape router = {150, 50, 24, 8, 3, 1, 1, SCORE_SIGMOID, 1, 1, 0};
        MoeShape s = {router, i & 1 ? 40 : 16, i & 2 ? 700 : 0, 1, 0, BF16};  // also where shared_F > K F
        Block b = make_block(s);
        b.blocks = 3;
        int64_t bytes[2], hidden = rounded(150 * 3 * 2 * s.F) + rounded(150 * 2 * s.shared_F);
        for (int recompute = 0; recompute < 2; recompute++) {
            b.s.recompute = recompute;
            bytes[recompute] = planned(&b);
            int64_t used = b.pool_room = 2 * bytes[recompute];
            run_block(&b);
            while (used > 0 && b.memory[used - 1] == (char)0xff) used--;  // as it was
            CHECK(used <= bytes[recompute] && used > bytes[recompute] - 256, "%lld bytes planned, %lld used",
                  (long long)bytes[recompute], (long long)used);
        }
        CHECK(bytes[0] - bytes[1] == (b.blocks - 1) * hidden, "recomputing saves %lld bytes, not %lld",
              (long long)(bytes[0] - bytes[1]), (long long)((b.blocks - 1) * hidden));
        release_all();
    }
}

int main(void) {
    RUN(test_permute_plan);
    RUN(test_capacity);
    RUN(test_permute_rows);
    RUN(test_grouped_gemm);
    RUN(test_experts_swiglu);
    RUN(test_expert_path);
    RUN(test_dispatch);
    RUN(test_pool);
    RUN(test_block);
    RUN(test_plan_of_block);
    return test_summary();
}
