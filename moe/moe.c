// Sizes that depend on the routing are known to the host before a buffer of that size is taken: with ep > 1 the ranks
// exchange counts first, and that is the one time the host waits. Tokens travel on a line of work of their own, always
// from one event of ctx's line to another, so that pool memory has one order of use.
#include "moe/moe.h"

#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "layers/linear.h"
#include "layers/swiglu.h"
#include "moe/dispatch.h"
#include "moe/experts.h"
#include "moe/grouped_gemm.h"

struct MoeWays {
    Pool* pool;
    Arena table;  // what is taken from the pool next
    Comm* comm;   // from here on with ep > 1 only
    Ctx* line;
    Event *ready, *there;
    Fetch* counts;
};

// Buffers of one pass. "home": tokens in the order of m->send, before they leave and when they are back; "here": tokens
// received from the ranks.
typedef struct Forward {
    floatX *rows, *act;    // (rows, C): x, then the experts' outputs; (rows, F)
    floatX* shared_act;    // (N, shared_F)
    floatX *home, *here;   // (sent rows, C), (Nr, C)
    int32_t* home_expert;  // (sent rows, K)
    real* home_gate;       // (sent rows, K)
} Forward;

// dact, act and dh serve the shared MLP first: (N, shared_F), (N, shared_F), (N, 2 shared_F).
typedef struct Backward {
    floatX* rows;                   // (rows, C): x or dy
    floatX *dact, *act, *dh;        // (rows, max(C, F)): dA', then dx; (rows, F): gate * A; (rows, 2F)
    real *drow_gate, *dgate;        // (rows), (N, K)
    floatX *home, *home_x, *here;   // (sent rows, C), (sent rows, C), (Nr, C)
    real *home_dgate, *here_dgate;  // (sent rows, K), (Nr, K)
} Backward;

// --- Memory: tables that are laid out to plan, and taken from the pool to run ---

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int32_t held(MoeShape s) { return s.router.E / s.ep; }

// Named before the counts are known.
static void name_choices(Arena* a, MoeSaved* m, MoeShape s) {
    int64_t N = s.router.N, E = s.router.E, K = s.router.K;
    memset(m, 0, sizeof(*m));
    arena_add(a, "router scores", ELEMENT_REAL, N * E, 1, (void**)&m->scores);
    arena_add(a, "gates", ELEMENT_REAL, N * K, 1, (void**)&m->gate);
    arena_add(a, "expert ids", ELEMENT_I32, N * K, 1, (void**)&m->expert);
    if (s.ep == 1) return;
    m->send.El = s.ep;
    m->send.capacity = ragged_capacity(N, s.router.K, s.ep, a->backend);
    arena_add(a, "rank starts", ELEMENT_I64, s.ep + 1, 0, (void**)&m->send.group_start);
    arena_add(a, "rank rows", ELEMENT_I32, s.ep, 0, (void**)&m->send.group_rows);
    arena_add(a, "sent row -> token", ELEMENT_I32, m->send.capacity, 1, (void**)&m->send.row_token);
    arena_add(a, "token -> sent row", ELEMENT_I32, N * s.ep, 1, (void**)&m->send.token_row);
}

static void name_hidden(Arena* a, MoeSaved* m, MoeShape s) {
    if (s.ep > 1) arena_add(a, "received x", ELEMENT_X, m->received * s.router.C, 1, (void**)&m->recv_x);
    arena_add(a, "routed hidden", ELEMENT_X, m->ragged.capacity * 2 * s.F, 1, (void**)&m->h);
    if (s.shared_F) arena_add(a, "shared hidden", ELEMENT_X, s.router.N * 2 * s.shared_F, 1, (void**)&m->shared_h);
}

// From here on m->received, m->choices and m->send.capacity say how much.
static void name_routed(Arena* a, MoeSaved* m, MoeShape s) {
    int64_t Nr = m->received, K = s.router.K, El = held(s), rows = ragged_rows(m->choices, held(s), a->backend);
    ASSERT(rows <= INT32_MAX && Nr <= INT32_MAX && m->send.capacity <= INT32_MAX);  // row numbers are int32
    m->ragged.El = held(s);
    m->ragged.capacity = rows;
    if (s.ep > 1) {
        arena_add(a, "received expert ids", ELEMENT_I32, Nr * K, 1, (void**)&m->recv_expert);
        arena_add(a, "received gates", ELEMENT_REAL, Nr * K, 1, (void**)&m->recv_gate);
    }
    arena_add(a, "group starts", ELEMENT_I64, El + 1, 0, (void**)&m->ragged.group_start);
    arena_add(a, "group rows", ELEMENT_I32, El, 0, (void**)&m->ragged.group_rows);
    arena_add(a, "row -> token", ELEMENT_I32, rows, 1, (void**)&m->ragged.row_token);
    arena_add(a, "token -> row", ELEMENT_I32, Nr * K, 1, (void**)&m->ragged.token_row);
    arena_add(a, "row gates", ELEMENT_REAL, rows, 1, (void**)&m->ragged.row_gate);
    if (!s.recompute) name_hidden(a, m, s);
}

static void name_forward(Arena* a, Forward* t, MoeSaved* m, MoeShape s) {
    int64_t C = s.router.C, K = s.router.K, rows = m->ragged.capacity;
    if (s.recompute) name_hidden(a, m, s);
    arena_add(a, "routed rows", ELEMENT_X, rows * C, 1, (void**)&t->rows);
    arena_add(a, "routed activation", ELEMENT_X, rows * s.F, 1, (void**)&t->act);
    if (s.shared_F) arena_add(a, "shared activation", ELEMENT_X, s.router.N * s.shared_F, 1, (void**)&t->shared_act);
    if (s.ep == 1) return;
    arena_add(a, "sent rows", ELEMENT_X, m->send.capacity * C, 1, (void**)&t->home);
    arena_add(a, "sent expert ids", ELEMENT_I32, m->send.capacity * K, 1, (void**)&t->home_expert);
    arena_add(a, "sent gates", ELEMENT_REAL, m->send.capacity * K, 1, (void**)&t->home_gate);
    arena_add(a, "combined outputs", ELEMENT_X, m->received * C, 1, (void**)&t->here);
}

static void name_backward(Arena* a, Backward* t, MoeSaved* m, MoeShape s) {
    int64_t N = s.router.N, C = s.router.C, K = s.router.K, F = s.F, sF = s.shared_F, rows = m->ragged.capacity;
    memset(t, 0, sizeof(*t));
    if (s.recompute) name_hidden(a, m, s);
    arena_add(a, "routed rows", ELEMENT_X, rows * C, 1, (void**)&t->rows);
    arena_add(a, "d activation, d routed rows", ELEMENT_X, larger(rows * larger(C, F), N * sF), 1, (void**)&t->dact);
    arena_add(a, "activation", ELEMENT_X, larger(rows * F, N * sF), 1, (void**)&t->act);
    arena_add(a, "d hidden", ELEMENT_X, larger(rows * 2 * F, N * 2 * sF), 1, (void**)&t->dh);
    arena_add(a, "d row gates", ELEMENT_REAL, rows, 1, (void**)&t->drow_gate);
    if (s.ep > 1) {
        int64_t sent = m->send.capacity, Nr = m->received;
        arena_add(a, "sent rows", ELEMENT_X, sent * C, 1, (void**)&t->home);
        if (s.recompute) arena_add(a, "sent rows of x", ELEMENT_X, sent * C, 1, (void**)&t->home_x);
        arena_add(a, "received rows", ELEMENT_X, Nr * C, 1, (void**)&t->here);
        arena_add(a, "sent d gates", ELEMENT_REAL, sent * K, 1, (void**)&t->home_dgate);
        arena_add(a, "received d gates", ELEMENT_REAL, Nr * K, 1, (void**)&t->here_dgate);
    }
    arena_add(a, "d gates", ELEMENT_REAL, N * K, 1, (void**)&t->dgate);
}

static void take(MoeWays* ways) {
    Arena* a = &ways->table;
    for (int i = 0; i < a->count; i++)
        *a->entries[i].slot =
            pool_take(ways->pool, (size_t)a->entries[i].count * element_bytes(a->entries[i].element, BACKEND));
    a->count = 0;
}

// Mean number of ranks that hold one of a token's K distinct experts: ep (1 - C(E - El, K) / C(E, K)).
static double mean_ranks(MoeShape s) {
    double none = 1;
    for (int32_t k = 0; k < s.router.K; k++)
        none *= (double)larger(s.router.E - held(s) - k, 0) / (double)(s.router.E - k);
    return s.ep * (1 - none);
}

void moe_plan(Arena* pool, MoeShape s, int64_t blocks, double capacity) {
    int64_t N = s.router.N, choices = N * s.router.K, first = pool->count;
    double tokens = (double)N * mean_ranks(s);
    MoeSaved m;
    Backward t;
    for (int64_t b = 0; b < blocks; b++) {
        name_choices(pool, &m, s);
        m.received = s.ep > 1 ? (int64_t)(capacity * tokens) : N;
        m.choices = s.ep > 1 ? (int64_t)(capacity * (double)choices) : choices;
        int64_t sent = ragged_rows((int64_t)(capacity * tokens), s.ep, pool->backend);
        if (sent < m.send.capacity) m.send.capacity = sent;
        name_routed(pool, &m, s);
    }
    if (blocks) name_backward(pool, &t, &m, s);  // forward takes less
    for (int64_t i = first; i < pool->count; i++) pool->entries[i].slot = NULL;
}

static size_t larger_size(size_t a, size_t b) { return a > b ? a : b; }

// At worst a rank receives every token of the group.
size_t moe_workspace(MoeShape s) {
    size_t bytes = larger_size(router_workspace(s.router), linear_workspace());
    bytes = larger_size(bytes, permute_workspace(s.ep * s.router.N, s.router.K, held(s)));
    return larger_size(bytes, permute_workspace(s.router.N, s.ep, s.ep));
}

MoeWays* moe_ways_create(Pool* pool, Comm* comm, MoeShape s, Ctx* ctx) {
    MoeWays* ways = (MoeWays*)host_alloc(sizeof(MoeWays));
    ways->pool = pool;
    arena_init(&ways->table, "MoE block", BACKEND);
    if (s.ep == 1) return ways;
    ASSERT(comm_count(comm) == s.ep && s.ep <= MOE_MAX_EP && s.router.E % s.ep == 0);
    ways->comm = comm;
    ways->line = ctx_side(ctx);
    ways->ready = event_create();
    ways->there = event_create();
    ways->counts = fetch_create((size_t)s.ep * 4 * sizeof(int64_t));
    return ways;
}

void moe_ways_destroy(MoeWays* ways) {
    arena_free(&ways->table);
    if (ways->comm) {
        ctx_destroy(ways->line);
        event_destroy(ways->ready);
        event_destroy(ways->there);
        fetch_destroy(ways->counts);
    }
    free(ways);
}

// --- Travel (ep > 1) ---

// Queues a transfer behind all that ctx was given so far; what ctx is given after arrive() finds it done.
static void leave(MoeWays* ways, const ExchangeBuffer* buffers, int count, ExchangeRows rows, Ctx* ctx) {
    event_record(ways->ready, ctx);
    event_wait(ways->ready, ways->line);
    comm_exchange(ways->comm, buffers, count, rows, ways->line);
    event_record(ways->there, ways->line);
}

static void arrive(MoeWays* ways, Ctx* ctx) { event_wait(ways->there, ctx); }

static ExchangeRows outward(const MoeSaved* m) {
    ExchangeRows rows = {m->send_start, m->send_rows, m->recv_start, m->recv_rows};
    return rows;
}

static ExchangeRows homeward(const MoeSaved* m) {
    ExchangeRows rows = {m->recv_start, m->recv_rows, m->send_start, m->send_rows};
    return rows;
}

// Settles who sends what: plans m->send and waits for the others' counts.
static void settle(MoeSaved* m, MoeShape s, MoeWays* ways, Ctx* ctx) {
    int64_t N = s.router.N, P = s.ep, one_each[MOE_MAX_EP], place[MOE_MAX_EP];
    PoolMark mark = pool_mark(ways->pool);
    int32_t* rank = (int32_t*)pool_take(ways->pool, (size_t)(N * P) * sizeof(int32_t));
    int64_t* counts = (int64_t*)pool_take(ways->pool, (size_t)P * 4 * sizeof(int64_t));  // (2, P, 2): to, from
    dispatch_ranks(rank, counts, m->expert, N, s.router.K, s.ep, held(s), ctx);
    for (int64_t j = 0; j < P; j++) one_each[j] = 1, place[j] = j;
    ExchangeBuffer both = {counts + 2 * P, counts, 2 * sizeof(int64_t)};
    ExchangeRows rows = {place, one_each, place, one_each};
    leave(ways, &both, 1, rows, ctx);
    fetch_begin(ways->counts, counts, ways->line);
    permute_plan(m->send, rank, NULL, N, s.ep, ctx);
    const int64_t *to = (const int64_t*)fetch_end(ways->counts), *from = to + 2 * P;
    pool_release(ways->pool, mark);

    m->send.capacity = 0;
    for (int64_t j = 0, align = row_align(BACKEND); j < P; j++) {
        m->send_start[j] = m->send.capacity;
        m->send_rows[j] = to[2 * j];
        m->send.capacity += (to[2 * j] + align - 1) / align * align;
        m->recv_start[j] = m->received;
        m->recv_rows[j] = from[2 * j];
        m->received += from[2 * j];
        m->choices += from[2 * j + 1];
    }
}

// --- Forward and backward ---

void moe_forward(floatX* y, const floatX* x, MoeWeights w, MoeSaved* m, int64_t* load, MoeShape s, MoeWays* ways,
                 Ctx* ctx) {
    int64_t N = s.router.N, C = s.router.C, shared = s.shared_F;
    int32_t K = s.router.K;
    size_t row = (size_t)C * sizeof(floatX);
    Forward t;
    name_choices(&ways->table, m, s);
    take(ways);
    router_forward(m->scores, m->expert, m->gate, x, w.router, w.bias, s.router, ctx);
    if (load) router_count(load, m->expert, N * K, s.router.E, ctx);
    if (s.ep > 1) {
        settle(m, s, ways, ctx);
    } else {
        m->received = N, m->choices = N * K;
        m->recv_expert = m->expert, m->recv_gate = m->gate;
    }
    name_routed(&ways->table, m, s);
    take(ways);
    PoolMark mark = pool_mark(ways->pool);
    name_forward(&ways->table, &t, m, s);
    take(ways);

    if (s.ep > 1) {
        permute_rows(t.home, x, m->send, row, ctx);
        dispatch_choices(t.home_expert, t.home_gate, m->expert, m->gate, m->send, N, K, held(s), ctx);
        ExchangeBuffer buffers[3] = {{m->recv_x, t.home, row},
                                     {m->recv_expert, t.home_expert, (size_t)K * sizeof(int32_t)},
                                     {m->recv_gate, t.home_gate, (size_t)K * sizeof(real)}};
        leave(ways, buffers, 3, outward(m), ctx);
    }
    if (shared) {  // while tokens travel
        linear_forward(m->shared_h, x, w.shared13, N, C, 2 * shared, ctx);
        swiglu_forward(t.shared_act, m->shared_h, N, shared, ctx);
    }
    if (s.ep > 1) arrive(ways, ctx);
    permute_plan(m->ragged, m->recv_expert, m->recv_gate, m->received, K, ctx);
    permute_rows(t.rows, s.ep > 1 ? m->recv_x : x, m->ragged, row, ctx);
    grouped_gemm_forward(m->h, t.rows, w.w13, m->ragged, C, 2 * s.F, ctx);
    experts_swiglu_forward(t.act, m->h, m->ragged, s.F, ctx);
    grouped_gemm_forward(t.rows, t.act, w.w2, m->ragged, s.F, C, ctx);
    if (s.ep > 1) {
        unpermute_rows(t.here, t.rows, m->recv_gate, m->ragged, m->received, K, C, 0, ctx);
        ExchangeBuffer buffer = {t.home, t.here, row};
        leave(ways, &buffer, 1, homeward(m), ctx);
    }
    if (shared) linear_forward(y, t.shared_act, w.shared2, N, shared, C, ctx);
    if (s.ep > 1) {
        arrive(ways, ctx);
        unpermute_rows(y, t.home, NULL, m->send, N, s.ep, C, shared != 0, ctx);
    } else {
        unpermute_rows(y, t.rows, m->gate, m->ragged, N, K, C, shared != 0, ctx);
    }
    pool_release(ways->pool, mark);
}

static void shared_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeGrads dw, MoeSaved* m,
                            Backward t, MoeShape s, Ctx* ctx) {
    int64_t N = s.router.N, C = s.router.C, F = s.shared_F;
    if (s.recompute) linear_forward(m->shared_h, x, w.shared13, N, C, 2 * F, ctx);
    linear_dgrad(t.dact, dy, w.shared2, N, F, C, 0, ctx);
    swiglu_backward(t.dh, t.act, t.dact, m->shared_h, N, F, ctx);
    linear_wgrad(dw.shared2, dy, t.act, N, F, C, ctx);
    linear_dgrad(dx, t.dh, w.shared13, N, C, 2 * F, 0, ctx);
    linear_wgrad(dw.shared13, t.dh, x, N, C, 2 * F, ctx);
}

void moe_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeGrads dw, MoeSaved* m, float aux,
                  MoeShape s, MoeWays* ways, Ctx* ctx) {
    int64_t N = s.router.N, C = s.router.C, Nr = m->received;
    int32_t K = s.router.K;
    Ragged r = m->ragged;
    size_t row = (size_t)C * sizeof(floatX);
    Backward t;
    PoolMark mark = pool_mark(ways->pool);
    name_backward(&ways->table, &t, m, s);
    take(ways);
    const floatX *dy_here = s.ep > 1 ? t.here : dy, *x_here = s.ep > 1 ? m->recv_x : x;

    if (s.ep > 1) {
        permute_rows(t.home, dy, m->send, row, ctx);
        if (s.recompute) permute_rows(t.home_x, x, m->send, row, ctx);
        ExchangeBuffer buffers[2] = {{t.here, t.home, row}, {m->recv_x, t.home_x, row}};
        leave(ways, buffers, s.recompute ? 2 : 1, outward(m), ctx);
    }
    if (s.shared_F) shared_backward(dx, dy, x, w, dw, m, t, s, ctx);  // while tokens travel
    if (s.ep > 1) arrive(ways, ctx);
    if (s.recompute) {
        permute_rows(t.rows, x_here, r, row, ctx);
        grouped_gemm_forward(m->h, t.rows, w.w13, r, C, 2 * s.F, ctx);
    }
    // The combine's backward sends dy to the rows as it is; the gate is applied behind W2 (moe/experts.h).
    permute_rows(t.rows, dy_here, r, row, ctx);
    grouped_gemm_dgrad(t.dact, t.rows, w.w2, r, s.F, C, ctx);
    experts_swiglu_backward(t.dh, t.act, t.drow_gate, t.dact, m->h, NULL, r, s.F, ctx);
    floatX* dx_rows = t.dact;  // dA' is done with
    grouped_gemm_dgrad(dx_rows, t.dh, w.w13, r, C, 2 * s.F, ctx);
    if (s.ep > 1) {
        unpermute_rows(t.here, dx_rows, NULL, r, Nr, K, C, 0, ctx);
        unpermute_gates(t.here_dgate, t.drow_gate, r, Nr, K, ctx);
        ExchangeBuffer buffers[2] = {{t.home, t.here, row}, {t.home_dgate, t.here_dgate, (size_t)K * sizeof(real)}};
        leave(ways, buffers, 2, homeward(m), ctx);
    }
    grouped_gemm_wgrad(dw.w2, t.rows, t.act, r, s.F, C, ctx);  // while dx travels
    permute_rows(t.rows, x_here, r, row, ctx);
    grouped_gemm_wgrad(dw.w13, t.dh, t.rows, r, C, 2 * s.F, ctx);
    if (s.ep > 1) {
        arrive(ways, ctx);
        unpermute_rows(dx, t.home, NULL, m->send, N, s.ep, C, s.shared_F != 0, ctx);
        dispatch_choices_backward(t.dgate, t.home_dgate, m->expert, m->send, N, K, held(s), ctx);
    } else {
        unpermute_rows(dx, dx_rows, NULL, r, N, K, C, s.shared_F != 0, ctx);
        unpermute_gates(t.dgate, t.drow_gate, r, N, K, ctx);
    }
    router_backward(dx, dw.router, t.dgate, m->scores, m->expert, m->gate, x, w.router, aux, s.router, ctx);
    pool_release(ways->pool, mark);
}
