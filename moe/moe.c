// Sizes that depend on the routing are known to the host before a buffer of that size is taken: with ep > 1 the ranks
// exchange counts first, and that is the one time the host waits. Tokens travel on a line of work of their own, always
// from one event of ctx's line to another, so that pool memory has one order of use.
#include "moe/moe_buffers.h"

#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "grouped/experts.h"
#include "grouped/grouped_gemm.h"
#include "layers/matmul.h"
#include "layers/swiglu.h"
#include "moe/dispatch_plan.h"
#include "mx/grouped_gemm_mx.h"
#include "mx/mx_swiglu.h"

struct MoeWays {
    Pool* pool;
    Arena table;  // what is taken from the pool next
    Comm* comm;   // from here on with ep > 1 only
    Ctx* line;
    Event *ready, *there;
    Fetch* counts;
};

static void take(MoeWays* ways) {
    Arena* a = &ways->table;
    for (int i = 0; i < a->count; i++)
        *a->entries[i].slot =
            pool_take(ways->pool, (size_t)a->entries[i].count * element_bytes(a->entries[i].element, BACKEND));
    a->count = 0;
}

// At worst a rank receives every token of the group.
size_t moe_workspace(MoeShape s) {
    size_t bytes = max_size(router_workspace(s.router), matmul_workspace());
    bytes = max_size(bytes, permute_workspace(s.ep * s.router.N, s.router.K, moe_held(s)));
    bytes = max_size(bytes, mx_stats_workspace());
    return max_size(bytes, permute_workspace(s.router.N, s.ep, s.ep));
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
    dispatch_ranks(rank, counts, m->expert, N, s.router.K, s.ep, moe_held(s), ctx);
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
        m->send.capacity += round_up(to[2 * j], align);
        m->recv_start[j] = m->received;
        m->recv_rows[j] = from[2 * j];
        m->received += from[2 * j];
        m->choices += from[2 * j + 1];
    }
}

// --- Casts (all of it nothing where everything is floatX) ---

void moe_cast_weights(MxExperts* mx, const floatX* w13, const floatX* w2, MoeShape s, MoeWays* ways, Ctx* ctx) {
    int64_t C = s.router.C, F = s.F, El = moe_held(s);
    PoolMark mark = pool_mark(ways->pool);
    MxRows room = {NULL, NULL};
    if (!s.precision.fast) {  // for w13, the larger one
        room.q = (uint8_t*)pool_take(ways->pool, (size_t)(El * 2 * F * C));
        room.scale =
            (uint8_t*)pool_take(ways->pool, (size_t)(El * max_i64(2 * F * mx_stride(C), C * mx_stride(2 * F))));
    }
    mx_cast_weight(&mx->w13, &mx->w13_back, w13, El, 2 * F, C, room, s.precision.scale, ctx);
    mx_cast_weight(&mx->w2, &mx->w2_back, w2, El, C, F, room, s.precision.scale, ctx);
    pool_release(ways->pool, mark);
}

static void permute_mx(MxRows rows, MxRows tokens, Ragged r, int64_t C, Ctx* ctx) {
    permute_rows(rows.q, tokens.q, r, (size_t)C, ctx);
    permute_rows(rows.scale, tokens.scale, r, (size_t)mx_stride(C), ctx);
}

// What comes back is read by no product: blocks of 32.
static MxCast combine_cast(MoeShape s) {
    MxCast cast = {s.precision.scale, 1};
    return cast;
}

// What travels of (rows, C): a buffer of values, or two of bytes and scales. Returns how many.
static int carried(ExchangeBuffer* buffers, floatX* to, const floatX* from, MxRows to_mx, MxRows from_mx, int64_t C,
                   int cast) {
    ExchangeBuffer value = {to, from, (size_t)C * sizeof(floatX)}, q = {to_mx.q, from_mx.q, (size_t)C},
                   scale = {to_mx.scale, from_mx.scale, (size_t)mx_stride(C)};
    buffers[0] = cast ? q : value;
    buffers[1] = scale;
    return cast ? 2 : 1;
}

// The tokens' rows, as values.
static void place_values(floatX* rows, const floatX* tokens, MxRows tokens_mx, const MoeSaved* m, MoeShape s,
                         Ctx* ctx) {
    if (moe_casts(s))
        mx_dequantize_rows(rows, tokens_mx.q, tokens_mx.scale, m->ragged, s.router.C, ctx);
    else
        permute_rows(rows, tokens, m->ragged, (size_t)s.router.C * sizeof(floatX), ctx);
}

// The tokens' rows as the experts' products read them: bytes, if those are fast.
static void place(floatX* rows, MxRows rows_mx, const floatX* tokens, MxRows tokens_mx, const MoeSaved* m, MoeShape s,
                  Ctx* ctx) {
    if (moe_fast(s))
        permute_mx(rows_mx, tokens_mx, m->ragged, s.router.C, ctx);
    else
        place_values(rows, tokens, tokens_mx, m, s, ctx);
}

// y = W x per expert.
static void product(floatX* y, const floatX* x, MxRows x_mx, MxWeight w, Ragged r, int64_t IC, int64_t OC, MoeShape s,
                    Ctx* ctx) {
    if (moe_fast(s))
        grouped_gemm_mx(y, NULL, x_mx.q, x_mx.scale, w.tiles.q, w.tiles.scale, w.stride_o, w.stride_c, r, IC, OC, ctx);
    else
        grouped_gemm_forward(y, x, w.value, r, IC, OC, ctx);
}

// --- Statistics ---

const char* moe_stats_name(int tensor, MoePrecision p) {
    static const char* const names[MOE_STATS] = {"x", "act", "dy", "dh", "w13", "w2"};
    int of_tokens = tensor == MOE_STATS_X || tensor == MOE_STATS_DY;
    return p.expert || (of_tokens && p.dispatch) ? names[tensor] : NULL;
}

// Of the rows in use: the others are made zeros, which count nothing.
static void forward_stats(const floatX* x, MoeWeights w, const MoeSaved* m, MoeShape s, MoeWays* ways, Ctx* ctx) {
    int64_t C = s.router.C, F = s.F, El = moe_held(s), rows = m->ragged.capacity;
    mx_stats(&m->stats[MOE_STATS_X], x, s.router.N, C, moe_cast(s), ctx);
    if (!s.precision.expert) return;
    // No other buffer holds the activation before its cast. There is room: backward takes more than forward and this.
    PoolMark mark = pool_mark(ways->pool);
    size_t bytes = (size_t)(rows * F) * sizeof(floatX);
    floatX* act = (floatX*)pool_take(ways->pool, bytes);
    device_zero(act, bytes, ctx);
    experts_swiglu_forward(act, m->h, m->ragged, F, ctx);
    mx_stats(&m->stats[MOE_STATS_ACT], act, rows, F, moe_cast(s), ctx);
    pool_release(ways->pool, mark);
    mx_weight_stats(&m->stats[MOE_STATS_W13], &w.mx->w13, w.w13, El, 2 * F, C, s.precision.scale, ctx);
    mx_weight_stats(&m->stats[MOE_STATS_W2], &w.mx->w2, w.w2, El, C, F, s.precision.scale, ctx);
}

// --- Forward and backward ---

// Sends tokens towards the experts: x as rows `home` of m->send arrive as `here`. With bytes in x_mx, home_mx, here_mx
// where they are cast before.
typedef struct Outward {
    const floatX* x;
    floatX *home, *here;
    MxRows x_mx, home_mx, here_mx;
} Outward;

static int pack(ExchangeBuffer* buffers, Outward o, const MoeSaved* m, MoeShape s, Ctx* ctx) {
    int64_t C = s.router.C;
    if (s.precision.dispatch) {
        mx_quantize(o.x_mx.q, o.x_mx.scale, o.x, s.router.N, C, moe_cast(s), ctx);
        permute_mx(o.home_mx, o.x_mx, m->send, C, ctx);
    } else {
        permute_rows(o.home, o.x, m->send, (size_t)C * sizeof(floatX), ctx);
    }
    return carried(buffers, o.here, o.home, o.here_mx, o.home_mx, C, s.precision.dispatch);
}

// After arrival: what was not cast before and has to be.
static void unpack(Outward o, const MoeSaved* m, MoeShape s, Ctx* ctx) {
    if (!moe_casts(s) || (s.ep > 1 && s.precision.dispatch)) return;
    mx_quantize(o.here_mx.q, o.here_mx.scale, s.ep > 1 ? o.here : o.x, m->received, s.router.C, moe_cast(s), ctx);
}

void moe_forward(floatX* y, const floatX* x, MoeWeights w, MoeSaved* m, int64_t* load, MxStats* stats, MoeShape s,
                 MoeWays* ways, Ctx* ctx) {
    int64_t N = s.router.N, C = s.router.C, shared = s.shared_F;
    int32_t K = s.router.K;
    Forward t;
    ExchangeBuffer buffers[4];
    moe_name_choices(&ways->table, m, s);
    take(ways);
    m->stats = stats;
    router_forward(m->scores, m->expert, m->gate, x, w.router, w.bias, s.router, ctx);
    if (load) router_count(load, m->expert, N * K, s.router.E, ctx);
    if (s.ep > 1) {
        settle(m, s, ways, ctx);
    } else {
        m->received = N, m->choices = N * K;
        m->recv_expert = m->expert, m->recv_gate = m->gate;
    }
    moe_name_routed(&ways->table, m, s);
    take(ways);
    PoolMark mark = pool_mark(ways->pool);
    moe_name_forward(&ways->table, &t, m, s);
    take(ways);

    Outward out = {x, t.home, m->recv_x ? m->recv_x : t.here, t.x_mx, t.home_mx, m->recv_mx};
    if (s.ep > 1) {
        int count = pack(buffers, out, m, s, ctx);
        dispatch_choices(t.home_expert, t.home_gate, m->expert, m->gate, m->send, N, K, moe_held(s), ctx);
        ExchangeBuffer ids = {m->recv_expert, t.home_expert, (size_t)K * sizeof(int32_t)};
        ExchangeBuffer gates = {m->recv_gate, t.home_gate, (size_t)K * sizeof(real)};
        buffers[count++] = ids;
        buffers[count++] = gates;
        leave(ways, buffers, count, outward(m), ctx);
    }
    if (shared) {  // while tokens travel
        linear_mx_forward(m->shared_h, x, &w.shared13, N, ctx);
        swiglu_forward(t.shared_act, m->shared_h, N, shared, ctx);
    }
    if (s.ep > 1) arrive(ways, ctx);
    unpack(out, m, s, ctx);
    permute_plan(m->ragged, m->recv_expert, m->recv_gate, m->received, K, ctx);
    place(t.rows, t.rows_mx, s.ep > 1 ? m->recv_x : x, m->recv_mx, m, s, ctx);
    if (s.precision.expert) {
        product(m->h, t.rows, t.rows_mx, w.mx->w13, m->ragged, C, 2 * s.F, s, ctx);
        mx_swiglu_quantize(t.act_mx.q, t.act_mx.scale, m->h, m->ragged, s.F, moe_cast(s), ctx);
        if (!moe_fast(s)) mx_dequantize(t.act, t.act_mx.q, t.act_mx.scale, m->ragged.capacity, s.F, ctx);
        product(t.rows, t.act, t.act_mx, w.mx->w2, m->ragged, s.F, C, s, ctx);
    } else {
        grouped_gemm_forward(m->h, t.rows, w.w13, m->ragged, C, 2 * s.F, ctx);
        experts_swiglu_forward(t.act, m->h, m->ragged, s.F, ctx);
        grouped_gemm_forward(t.rows, t.act, w.w2, m->ragged, s.F, C, ctx);
    }
    if (stats) forward_stats(x, w, m, s, ways, ctx);
    if (t.here) {
        unpermute_rows(t.here, t.rows, m->recv_gate, m->ragged, m->received, K, C, 0, ctx);
        if (s.precision.combine)
            mx_quantize(t.here_mx.q, t.here_mx.scale, t.here, m->received, C, combine_cast(s), ctx);
    }
    if (s.ep > 1) {
        int count = carried(buffers, t.home, t.here, t.home_mx, t.here_mx, C, s.precision.combine);
        leave(ways, buffers, count, homeward(m), ctx);
    }
    if (shared) linear_mx_forward(y, t.shared_act, &w.shared2, N, ctx);
    if (s.ep > 1) {
        arrive(ways, ctx);
        if (s.precision.combine) mx_dequantize(t.home, t.home_mx.q, t.home_mx.scale, m->send.capacity, C, ctx);
        unpermute_rows(y, t.home, NULL, m->send, N, s.ep, C, shared != 0, ctx);
    } else if (s.precision.combine) {
        (shared ? mx_dequantize_add : mx_dequantize)(y, t.here_mx.q, t.here_mx.scale, N, C, ctx);
    } else {
        unpermute_rows(y, t.rows, m->gate, m->ragged, N, K, C, shared != 0, ctx);
    }
    pool_release(ways->pool, mark);
}
static void shared_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeGrads dw, MoeSaved* m,
                            Backward t, MoeShape s, Ctx* ctx) {
    int64_t N = s.router.N, C = s.router.C, F = s.shared_F;
    if (s.recompute) linear_mx_forward(m->shared_h, x, &w.shared13, N, ctx);
    linear_mx_dgrad(t.dact, dy, &w.shared2, N, ctx);
    swiglu_backward(t.dh, t.act, t.dact, m->shared_h, N, F, ctx);
    matmul_wgrad(dw.shared2, dy, t.act, N, F, C, ctx);
    linear_mx_dgrad(dx, t.dh, &w.shared13, N, ctx);
    matmul_wgrad(dw.shared13, t.dh, x, N, C, 2 * F, ctx);
}

// Between an expert's two products backward: dh and gate * A, and the activation's gradient in t.dact turned into that
// of x in the same place.
static void experts_backward(MoeWeights w, MoeSaved* m, Backward t, MoeShape s, Ctx* ctx) {
    int64_t C = s.router.C, F = s.F;
    Ragged r = m->ragged;
    if (!s.precision.expert) {
        grouped_gemm_dgrad(t.dact, t.rows, w.w2, r, F, C, ctx);
        experts_swiglu_backward(t.dh, t.act, t.drow_gate, t.dact, m->h, r, F, ctx);
        grouped_gemm_dgrad(t.dact, t.dh, w.w13, r, C, 2 * F, ctx);
        return;
    }
    product(t.dact, t.rows, t.rows_mx, w.mx->w2_back, r, C, F, s, ctx);
    mx_swiglu_backward_quantize(t.dh_mx.q, t.dh_mx.scale, t.dh, t.act, t.drow_gate, t.dact, m->h, r, F, moe_cast(s),
                                ctx);
    if (!s.precision.fast) mx_dequantize(t.dh_cast, t.dh_mx.q, t.dh_mx.scale, r.capacity, 2 * F, ctx);
    product(t.dact, t.dh_cast, t.dh_mx, w.mx->w13_back, r, 2 * F, C, s, ctx);
}

// dW += dy^T x over each expert's rows; both are rounded in place first where wgrad is MXFP8. The product stays bf16:
// on bytes every row and every column of dW would have a scale of its own for each 128 tokens, and Hopper's partial
// sums would take two multiplications each, for which its tensor cores would wait.
static void weight_gradient(real* dw, floatX* dy, floatX* x, Ragged r, int64_t IC, int64_t OC, MoeShape s, Ctx* ctx) {
    if (s.precision.wgrad) {
        mx_round_columns(dy, r, OC, moe_cast(s), ctx);
        mx_round_columns(x, r, IC, moe_cast(s), ctx);
    }
    grouped_gemm_wgrad(dw, dy, x, r, IC, OC, ctx);
}

void moe_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeGrads dw, MoeSaved* m, float aux,
                  MoeShape s, MoeWays* ways, Ctx* ctx) {
    int64_t N = s.router.N, C = s.router.C, Nr = m->received;
    int32_t K = s.router.K;
    Ragged r = m->ragged;
    Backward t;
    ExchangeBuffer buffers[4];
    PoolMark mark = pool_mark(ways->pool);
    moe_name_backward(&ways->table, &t, m, s);
    take(ways);

    Outward of_dy = {dy, t.home, t.here, t.x_mx, t.home_mx, t.here_mx};
    Outward of_x = {x, t.home_x, m->recv_x ? m->recv_x : t.rows, t.x_mx, t.home_x_mx, m->recv_mx};
    if (s.ep > 1) {
        int count = pack(buffers, of_dy, m, s, ctx);
        if (s.recompute) count += pack(buffers + count, of_x, m, s, ctx);
        leave(ways, buffers, count, outward(m), ctx);
    }
    if (s.shared_F) shared_backward(dx, dy, x, w, dw, m, t, s, ctx);  // while tokens travel
    if (s.ep > 1) arrive(ways, ctx);
    unpack(of_dy, m, s, ctx);
    const floatX* x_here = s.ep > 1 ? m->recv_x : x;
    if (s.recompute) {
        unpack(of_x, m, s, ctx);
        place(t.rows, t.rows_mx, x_here, m->recv_mx, m, s, ctx);
        if (s.precision.expert)
            product(m->h, t.rows, t.rows_mx, w.mx->w13, r, C, 2 * s.F, s, ctx);
        else
            grouped_gemm_forward(m->h, t.rows, w.w13, r, C, 2 * s.F, ctx);
    }
    // The combine's backward sends dy to the rows as it is; the gate is applied behind W2 (grouped/experts.h).
    place(t.rows, t.rows_mx, s.ep > 1 ? t.here : dy, t.here_mx, m, s, ctx);
    if (m->stats) device_zero(t.dh, (size_t)(r.capacity * 2 * s.F) * sizeof(floatX), ctx);  // as in forward_stats
    experts_backward(w, m, t, s, ctx);
    if (m->stats) {
        mx_stats(&m->stats[MOE_STATS_DY], dy, N, C, moe_cast(s), ctx);
        if (s.precision.expert) mx_stats(&m->stats[MOE_STATS_DH], t.dh, r.capacity, 2 * s.F, moe_cast(s), ctx);
    }
    floatX* dx_rows = t.dact;
    if (t.here) {
        unpermute_rows(t.here, dx_rows, NULL, r, Nr, K, C, 0, ctx);
        if (s.precision.combine) mx_quantize(t.here_mx.q, t.here_mx.scale, t.here, Nr, C, combine_cast(s), ctx);
    }
    if (s.ep > 1) {
        unpermute_gates(t.here_dgate, t.drow_gate, r, Nr, K, ctx);
        int count = carried(buffers, t.home, t.here, t.home_mx, t.here_mx, C, s.precision.combine);
        ExchangeBuffer dgates = {t.home_dgate, t.here_dgate, (size_t)K * sizeof(real)};
        buffers[count++] = dgates;
        leave(ways, buffers, count, homeward(m), ctx);
    }
    // While dx travels.
    if (moe_fast(s)) mx_dequantize(t.rows, t.rows_mx.q, t.rows_mx.scale, r.capacity, C, ctx);
    weight_gradient(dw.w2, t.rows, t.act, r, s.F, C, s, ctx);
    place_values(t.rows, x_here, m->recv_mx, m, s, ctx);
    weight_gradient(dw.w13, t.dh, t.rows, r, C, 2 * s.F, s, ctx);
    if (s.ep > 1) {
        arrive(ways, ctx);
        if (s.precision.combine) mx_dequantize(t.home, t.home_mx.q, t.home_mx.scale, m->send.capacity, C, ctx);
        unpermute_rows(dx, t.home, NULL, m->send, N, s.ep, C, s.shared_F != 0, ctx);
        dispatch_choices_backward(t.dgate, t.home_dgate, m->expert, m->send, N, K, moe_held(s), ctx);
    } else {
        if (s.precision.combine)
            (s.shared_F ? mx_dequantize_add : mx_dequantize)(dx, t.here_mx.q, t.here_mx.scale, N, C, ctx);
        else
            unpermute_rows(dx, dx_rows, NULL, r, N, K, C, s.shared_F != 0, ctx);
        unpermute_gates(t.dgate, t.drow_gate, r, N, K, ctx);
    }
    router_backward(dx, dw.router, t.dgate, m->scores, m->expert, m->gate, x, w.router, aux, s.router, ctx);
    pool_release(ways->pool, mark);
}
