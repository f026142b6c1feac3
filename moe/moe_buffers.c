#include "moe/moe_buffers.h"

#include <string.h>

#include "device/check.h"

// Bytes and scales of (rows, columns).
static void name_mx(Arena* a, const char* bytes, const char* scales, int64_t rows, int64_t columns, MxRows* mx) {
    arena_add(a, bytes, ELEMENT_BYTE, rows * columns, 1, (void**)&mx->q);
    arena_add(a, scales, ELEMENT_BYTE, rows * mx_stride(columns), 1, (void**)&mx->scale);
}

void moe_name_choices(Arena* a, MoeSaved* m, MoeShape s) {
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
    if (moe_casts(s))
        name_mx(a, "received x, bytes", "received x, scales", m->received, s.router.C, &m->recv_mx);
    else if (s.ep > 1)
        arena_add(a, "received x", ELEMENT_X, m->received * s.router.C, 1, (void**)&m->recv_x);
    arena_add(a, "routed hidden", ELEMENT_X, m->ragged.capacity * 2 * s.F, 1, (void**)&m->h);
    if (s.shared_F) arena_add(a, "shared hidden", ELEMENT_X, s.router.N * 2 * s.shared_F, 1, (void**)&m->shared_h);
}

void moe_name_routed(Arena* a, MoeSaved* m, MoeShape s) {
    int64_t Nr = m->received, K = s.router.K, El = moe_held(s), rows = ragged_rows(m->choices, El, a->backend);
    ASSERT(rows <= INT32_MAX && Nr <= INT32_MAX && m->send.capacity <= INT32_MAX);  // row numbers are int32
    m->ragged.El = moe_held(s);
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

void moe_name_forward(Arena* a, Forward* t, MoeSaved* m, MoeShape s) {
    int64_t N = s.router.N, C = s.router.C, K = s.router.K, rows = m->ragged.capacity, sent = m->send.capacity;
    MoePrecision p = s.precision;
    memset(t, 0, sizeof(*t));
    if (s.recompute) name_hidden(a, m, s);
    arena_add(a, "routed rows", ELEMENT_X, rows * C, 1, (void**)&t->rows);
    if (moe_fast(s)) name_mx(a, "routed rows, bytes", "routed rows, scales", rows, C, &t->rows_mx);
    if (!moe_fast(s)) arena_add(a, "routed activation", ELEMENT_X, rows * s.F, 1, (void**)&t->act);
    if (p.expert) name_mx(a, "activation, bytes", "activation, scales", rows, s.F, &t->act_mx);
    if (s.shared_F) arena_add(a, "shared activation", ELEMENT_X, N * s.shared_F, 1, (void**)&t->shared_act);
    if (s.ep > 1 || p.combine) arena_add(a, "combined outputs", ELEMENT_X, m->received * C, 1, (void**)&t->here);
    if (p.combine) name_mx(a, "combined outputs, bytes", "combined outputs, scales", m->received, C, &t->here_mx);
    if (s.ep == 1) return;
    if (p.dispatch) name_mx(a, "x, bytes", "x, scales", N, C, &t->x_mx);
    arena_add(a, "sent rows", ELEMENT_X, sent * C, 1, (void**)&t->home);
    if (p.dispatch || p.combine) name_mx(a, "sent rows, bytes", "sent rows, scales", sent, C, &t->home_mx);
    arena_add(a, "sent expert ids", ELEMENT_I32, sent * K, 1, (void**)&t->home_expert);
    arena_add(a, "sent gates", ELEMENT_REAL, sent * K, 1, (void**)&t->home_gate);
}

void moe_name_backward(Arena* a, Backward* t, MoeSaved* m, MoeShape s) {
    int64_t N = s.router.N, C = s.router.C, K = s.router.K, F = s.F, sF = s.shared_F, rows = m->ragged.capacity;
    int64_t sent = m->send.capacity, Nr = m->received;
    MoePrecision p = s.precision;
    memset(t, 0, sizeof(*t));
    if (s.recompute) name_hidden(a, m, s);
    arena_add(a, "routed rows", ELEMENT_X, rows * C, 1, (void**)&t->rows);
    arena_add(a, "d activation, d routed rows", ELEMENT_X, max_i64(rows * max_i64(C, F), N * sF), 1, (void**)&t->dact);
    arena_add(a, "activation", ELEMENT_X, max_i64(rows * F, N * sF), 1, (void**)&t->act);
    arena_add(a, "d hidden", ELEMENT_X, max_i64(rows * 2 * F, N * 2 * sF), 1, (void**)&t->dh);
    if (moe_fast(s)) name_mx(a, "routed rows, bytes", "routed rows, scales", rows, C, &t->rows_mx);
    if (s.ep > 1 && p.dispatch) name_mx(a, "x or dy, bytes", "x or dy, scales", N, C, &t->x_mx);
    if (p.expert) {
        name_mx(a, "d hidden, bytes", "d hidden, scales", rows, 2 * F, &t->dh_mx);
        if (!p.fast) arena_add(a, "d hidden, cast", ELEMENT_X, rows * 2 * F, 1, (void**)&t->dh_cast);
    }
    arena_add(a, "d row gates", ELEMENT_REAL, rows, 1, (void**)&t->drow_gate);
    if (s.ep > 1 || p.combine) arena_add(a, "received rows", ELEMENT_X, Nr * C, 1, (void**)&t->here);
    if (moe_casts(s) || p.combine) name_mx(a, "received rows, bytes", "received rows, scales", Nr, C, &t->here_mx);
    if (s.ep > 1) {
        arena_add(a, "sent rows", ELEMENT_X, sent * C, 1, (void**)&t->home);
        if (p.dispatch || p.combine) name_mx(a, "sent rows, bytes", "sent rows, scales", sent, C, &t->home_mx);
        if (s.recompute) {
            arena_add(a, "sent rows of x", ELEMENT_X, sent * C, 1, (void**)&t->home_x);
            if (p.dispatch) name_mx(a, "sent rows of x, bytes", "sent rows of x, scales", sent, C, &t->home_x_mx);
        }
        arena_add(a, "sent d gates", ELEMENT_REAL, sent * K, 1, (void**)&t->home_dgate);
        arena_add(a, "received d gates", ELEMENT_REAL, Nr * K, 1, (void**)&t->here_dgate);
    }
    arena_add(a, "d gates", ELEMENT_REAL, N * K, 1, (void**)&t->dgate);
}

// Mean number of ranks that hold one of a token's K distinct experts: ep (1 - C(E - El, K) / C(E, K)).
static double mean_ranks(MoeShape s) {
    double none = 1;
    for (int32_t k = 0; k < s.router.K; k++)
        none *= (double)max_i64(s.router.E - moe_held(s) - k, 0) / (double)(s.router.E - k);
    return s.ep * (1 - none);
}

void moe_plan(Arena* pool, MoeShape s, int64_t blocks, double capacity) {
    int64_t N = s.router.N, choices = N * s.router.K, first = pool->count;
    double tokens = (double)N * mean_ranks(s);
    MoeSaved m;
    Backward t;
    for (int64_t b = 0; b < blocks; b++) {
        moe_name_choices(pool, &m, s);
        m.received = s.ep > 1 ? (int64_t)(capacity * tokens) : N;
        m.choices = s.ep > 1 ? (int64_t)(capacity * (double)choices) : choices;
        int64_t sent = ragged_rows((int64_t)(capacity * tokens), s.ep, pool->backend);
        if (sent < m.send.capacity) m.send.capacity = sent;
        moe_name_routed(pool, &m, s);
    }
    if (blocks) moe_name_backward(pool, &t, &m, s);  // forward takes less
    if (s.precision.expert && !s.precision.fast) {   // moe_cast_weights
        int64_t OC = 2 * s.F, IC = s.router.C, scales = max_i64(OC * mx_stride(IC), IC * mx_stride(OC));
        arena_add(pool, "expert weights, while cast", ELEMENT_BYTE, moe_held(s) * (OC * IC + scales), 0, NULL);
    }
    for (int64_t i = first; i < pool->count; i++) pool->entries[i].slot = NULL;
}

static void name_weight(Arena* a, MxWeight* w, MoeShape s, int64_t OC, int64_t IC) {
    int64_t El = moe_held(s);
    if (s.precision.fast)
        arena_add(a, "expert weights, bytes", ELEMENT_BYTE, El * OC * IC, 0, (void**)&w->tiles.q);
    else
        arena_add(a, "expert weights, cast", ELEMENT_X, El * OC * IC, 0, (void**)&w->value);
}

void moe_plan_mx(Arena* a, MxExperts* mx, MoeShape s) {
    int64_t C = s.router.C, F = s.F, El = moe_held(s);
    memset(mx, 0, sizeof(*mx));
    name_weight(a, &mx->w13, s, 2 * F, C);
    name_weight(a, &mx->w2, s, C, F);
    name_weight(a, &mx->w13_back, s, C, 2 * F);
    name_weight(a, &mx->w2_back, s, F, C);
    if (!s.precision.fast) return;
    arena_add(a, "expert weights, scales", ELEMENT_BYTE, El * mx_tiles(2 * F) * mx_tiles(C), 0,
              (void**)&mx->w13.tiles.scale);
    arena_add(a, "expert weights, scales", ELEMENT_BYTE, El * mx_tiles(C) * mx_tiles(F), 0,
              (void**)&mx->w2.tiles.scale);
}
