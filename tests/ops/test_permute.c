// The ragged layout of a routing, and permute and unpermute of rows.
#include "tests/routing.h"

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

static void test_permute_plan(void) {
    for (int i = 0; i < COUNT(routings) * ROUTINGS; i++) {
        const int32_t* s = routings[i / ROUTINGS];
        Routing r = make_routing(s[0], s[1], s[2], s[3], s[4], i % ROUTINGS);
        check_threads(run_plan, &r);
        check_plan(&r);
        // Without gates: the same layout, and row_gate is not written.
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
    // At most min(K, El) choices of a token are held here. With tiles of 128 rows the worst case is one row too many in
    // every expert.
    for (int64_t N = 1; N < 700; N += 49)
        for (int32_t K = 1; K <= 6; K++)
            for (int32_t El = 1; El <= 20; El += 3) {
                int64_t rows = N * (K < El ? K : El), padded = 0, left = rows;
                CHECK(ragged_capacity(N, K, El, BACKEND_CPU) >= rows, "N %lld K %d El %d", (long long)N, K, El);
                for (int32_t e = 0; e < El && left > 0; e++) {  // one row over whole tiles each; the last gets the rest
                    int64_t take = e == El - 1 ? left : 1 + (left - 1 - (El - 1 - e)) / 128 * 128;
                    take = take < 1 ? 1 : take > N ? (N - 1) / 128 * 128 + 1 : take;
                    take = take > left ? left : take;
                    padded += (take + 127) / 128 * 128, left -= take;
                }
                CHECK(ragged_capacity(N, K, El, BACKEND_CUDA) >= padded, "N %lld K %d El %d", (long long)N, K, El);
                CHECK(ragged_capacity(N, K, El, BACKEND_CUDA) % 128 == 0, "N %lld K %d El %d", (long long)N, K, El);
            }
}

// --- Permute and unpermute ---

typedef struct {
    Routing* r;
    int64_t C;
    real *tokens, *tokens_before, *from, *drow_gate;
    real *rows, *combined, *summed, *added, *dgate, *dgate_parts;
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
    unpermute_gates(m->dgate, m->drow_gate, 1, r->ragged, r->N, r->K, ctx);
    m->dgate_parts = poisoned(r->N * r->K);
    unpermute_gates(m->dgate_parts, m->from, (int32_t)m->C, r->ragged, r->N, r->K, ctx);
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
            real parts = 0;
            for (int64_t c = 0; c < C && row >= 0; c++) parts += m.from[row * C + c];
            CHECK(m.dgate_parts[j] == parts, "dgate of choice %lld, in parts", (long long)j);
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
        // n = up to 2e5 random products add up to sqrt(n). The n roundings, in double, add up to sqrt(n) u of that.
        CHECK(fabs(left - right) <= TOL(1e-6, 2e-13) * sqrt((double)rows_used(&r) * C), "%.9g and %.9g", left, right);
        release_all();
    }
}

int main(void) {
    RUN(test_permute_plan);
    RUN(test_capacity);
    RUN(test_permute_rows);
    return test_summary();
}
