// Shared by the tests of the experts' ops: random and extreme routings, and the ragged layouts of their rows.
#ifndef TESTS_ROUTING_H
#define TESTS_ROUTING_H

#include "grouped/permute.h"
#include "tests/oracle.h"

enum { RANDOM, ONE_TAKES_ALL, ODD_ONES_EMPTY, NONE_HELD, IN_ORDER, ROUTINGS };

// A routing of N tokens, each to K different experts out of E. This rank holds El experts, from `first` on.
typedef struct {
    int64_t N;
    int32_t K, El, E, first;
    int32_t* expert;  // (N, K), as permute_plan takes it
    real* gate;
    Ragged ragged;  // filled by run_plan
} Routing;

static inline int contains(const int32_t* x, int32_t n, int32_t value) {
    for (int32_t i = 0; i < n; i++)
        if (x[i] == value) return 1;
    return 0;
}

static inline Routing make_routing(int64_t N, int32_t K, int32_t El, int32_t E, int32_t first, int kind) {
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

static inline void run_plan(void* arg) {
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

static inline int64_t rows_used(const Routing* r) { return r->ragged.group_start[r->El]; }

// The expert of a row, -1 for a pad row.
static inline int32_t row_expert(const Routing* r, int64_t row) {
    const Ragged* g = &r->ragged;
    for (int32_t e = 0; e < g->El; e++)
        if (row >= g->group_start[e] && row < g->group_start[e] + g->group_rows[e]) return e;
    return -1;
}

// Rows in use are random and pad rows are zeros. The rows behind them are NaN and may not be read.
static inline real* random_rows(const Routing* r, int64_t C, uint32_t stream) {
    real* rows = tensor(r->ragged.capacity * C, stream);
    for (int64_t i = 0; i < r->ragged.capacity * C; i++)
        if (i / C >= rows_used(r))
            rows[i] = NAN;
        else if (row_expert(r, i / C) < 0)
            rows[i] = 0;
    return rows;
}

static inline void check_pads_zero(const Routing* r, const real* rows, int64_t C) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < rows_used(r) * C; i++) wrong += row_expert(r, i / C) < 0 && !(rows[i] == 0);
    CHECK(wrong == 0, "%lld elements of pad rows are not 0", (long long)wrong);
}

// N, K, El, E, first
static const int32_t routings[][5] = {{1, 1, 1, 1, 0},    {1, 3, 5, 8, 2},   {3, 2, 4, 4, 0},     {127, 2, 8, 8, 0},
                                      {129, 3, 5, 16, 7}, {300, 4, 7, 7, 0}, {300, 6, 64, 64, 0}, {257, 1, 3, 3, 0}};

#endif
