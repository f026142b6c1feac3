#include "moe/moe.h"

#include "layers/matmul.h"
#include "layers/swiglu.h"
#include "moe/moe_buffers.h"

size_t moe_workspace(MoeShape s) {
    size_t bytes = max_size(router_workspace(s.router), matmul_workspace());
    return max_size(bytes, dispatch_workspace(dispatch_shape(s)));
}

void moe_forward(floatX* y, const floatX* x, MoeWeights w, MoeSaved* m, BalanceCounts counts, MoeShape s, Dispatch* d,
                 Pool* pool, Ctx* ctx) {
    const int64_t N = s.router.N, shared = s.shared_F;
    MoeForwardBuffers t;

    // 1. Each token's experts, and the gates that weigh their outputs.
    moe_take_choices(pool, m, s);
    router_forward(m->scores, m->route.expert, m->route.gate, x, w.router, w.bias, s.router, ctx);
    if (counts.load) balance_count(counts, m->scores, m->route.expert, w.bias, s.router, ctx);

    // 2. All-to-all: tokens to the ranks of their experts. The shared MLP's first GEMM and its activation overlap.
    dispatch_counts(d, &m->route, ctx);
    const PoolMark mark = moe_take_forward(pool, &t, m, s);
    dispatch_pack(d, &m->route, &t.exchange, x, &m->x, weight_stats(w.w13, STATS_X), ctx);
    dispatch_pack_choices(d, &m->route, &t.exchange, ctx);
    dispatch_start(d, &m->route, ctx);
    if (shared) linear_forward(m->shared_h, x, w.shared13, N, ctx);
    if (shared) swiglu_forward(t.shared_act, m->shared_h, N, shared, ctx);
    m->x = dispatch_receive(d, &m->route, &t.exchange, ctx);

    // 3. The received tokens into rows, sorted by expert.
    permute_plan(m->ragged, t.exchange.received_expert, t.exchange.received_gate, m->route.received, s.router.K, ctx);
    const Rows rows = rows_permute(t.rows, m->x, format_read(s.expert), m->ragged, ctx);

    // 4. Each expert's MLP: W2 swiglu(W13 x).
    grouped_forward(m->h, rows, w.w13, m->ragged, ctx);
    const Rows act = rows_swiglu(t.act, m->h, m->ragged, s.expert, weight_stats(w.w2, STATS_X), t.rows.value, ctx);
    grouped_forward(t.rows.value, act, w.w2, m->ragged, ctx);

    // 5. Combine: all-to-all of the gate-weighted sums, overlapped with the shared MLP's second GEMM.
    const Sums sums = {t.rows.value, m->ragged, t.exchange.received_gate, NULL};
    combine_send(d, &m->route, &t.exchange, sums, ctx);
    if (shared) linear_forward(y, t.shared_act, w.shared2, N, ctx);
    combine_receive(d, &m->route, &t.exchange, sums, y, shared != 0, NULL, ctx);
    pool_release(pool, mark);
}

static void shared_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeSaved* m,
                            MoeBackwardBuffers t, MoeShape s, Ctx* ctx) {
    const int64_t N = s.router.N;
    if (s.recompute) linear_forward(m->shared_h, x, w.shared13, N, ctx);
    linear_dgrad(t.dact, dy, w.shared2, N, 0, ctx);
    linear_swiglu_backward(dx, t.dh, t.act, t.dact, m->shared_h, w.shared13, N, ctx);
    const LinearGradient gradients[] = {{w.shared2, dy, t.act}, {w.shared13, t.dh, x}};
    linear_wgrads(gradients, 2, N, ctx);
}

void moe_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeSaved* m, float aux, MoeShape s,
                  Dispatch* d, Pool* pool, Ctx* ctx) {
    const Ragged r = m->ragged;
    const Format read = format_read(s.expert);
    const PoolMark mark = pool_mark(pool);
    MoeBackwardBuffers t;
    moe_take_backward(pool, &t, m, s);

    // 5. All-to-all: dy to the ranks of its tokens' experts, without the gates, which come after W2
    // (grouped/experts.h). With activation checkpointing x is sent along. The shared MLP's backward overlaps.
    dispatch_pack(d, &m->route, &t.exchange, dy, NULL, weight_stats(w.w2, STATS_DY), ctx);
    if (s.recompute) dispatch_pack(d, &m->route, &t.again, x, &m->x, NULL, ctx);
    dispatch_start(d, &m->route, ctx);
    if (s.shared_F) shared_backward(dx, dy, x, w, m, t, s, ctx);
    const Rows dy_here = dispatch_receive(d, &m->route, &t.exchange, ctx);

    // 4. and 3. Activation checkpointing: recompute h = W13 x.
    if (s.recompute) {
        m->x = dispatch_receive(d, &m->route, &t.again, ctx);
        grouped_forward(m->h, rows_permute(t.rows, m->x, read, r, ctx), w.w13, r, ctx);
    }

    // 4. da' = dy W2; da = gate da', dgate = <da', a> and dh; dx = dh W13.
    const Rows dy_rows = rows_permute(t.rows, dy_here, read, r, ctx);
    grouped_dgrad(t.dact, dy_rows, w.w2, r, ctx);
    const ExpertsBackward tensors = {t.dh, t.act, t.drow_gate, t.dact, m->h};
    Rows dh_wgrad;
    const Rows dh = rows_swiglu_backward(t.dh_quantized, &dh_wgrad, tensors, r, s.expert, s.wgrad,
                                         weight_stats(w.w13, STATS_DY), ctx);
    grouped_dgrad(t.dact, dh, w.w13, r, ctx);

    // 2. Combine: all-to-all of dx and dgate, overlapped with dW2 = dy^T (gate a) and dW13 = dh^T x.
    const Sums sums = {t.dact, r, NULL, t.drow_gate};
    combine_send(d, &m->route, &t.exchange, sums, ctx);
    const Rows out = format_read(s.wgrad).quantized ? t.channels : t.rows;
    const Rows act = rows_of_values(t.act, r.capacity, s.F);
    grouped_wgrad(rows_for_wgrad(out, dy_rows, WGRAD_DY, 0, s.wgrad, r, ctx),
                  rows_for_wgrad(t.dh_quantized, act, WGRAD_X, 0, s.wgrad, r, ctx), w.w2, r, ctx);
    grouped_wgrad(rows_for_wgrad(t.dh_quantized, dh_wgrad, WGRAD_DY, 0, s.wgrad, r, ctx),
                  rows_for_wgrad(out, m->x, WGRAD_X, 1, s.wgrad, r, ctx), w.w13, r, ctx);
    combine_receive(d, &m->route, &t.exchange, sums, dx, s.shared_F != 0, t.dgate, ctx);

    // 1. The router's part in dx.
    router_backward(dx, w.drouter, t.dgate, m->scores, m->route.expert, m->route.gate, x, w.router, aux, s.router, ctx);
    pool_release(pool, mark);
}
