#include "moe/moe.h"

#include "layers/matmul.h"
#include "layers/swiglu.h"
#include "linear/quantized.h"
#include "moe/moe_buffers.h"

size_t moe_workspace(MoeShape s) {
    return max_size(max_size(router_workspace(s.router), matmul_workspace()), dispatch_workspace(dispatch_shape(s)));
}

void moe_forward(floatX* y, const floatX* x, MoeWeights w, MoeSaved* saved, BalanceCounts counts, MoeShape s,
                 Dispatch* d, Pool* pool, Ctx* ctx) {
    const int64_t N = s.router.N, shared = s.shared_F;
    Route* route = &saved->route;
    MoeForwardBuffers t;

    // 1. Each token's experts, and the gates that weigh their outputs.
    moe_take_choices(pool, saved, s);
    router_forward(saved->scores, route->expert, route->gate, x, w.router, w.bias, s.router, ctx);
    if (counts.load) balance_count(counts, saved->scores, route->expert, w.bias, s.router, ctx);

    // 2. All-to-all: tokens to the ranks of their experts. The shared MLP's first GEMM and its activation overlap.
    dispatch_counts(d, route, ctx);
    const PoolMark mark = moe_take_forward(pool, &t, saved, s);
    weight_measure(w.w13, STATS_X, s.dispatch ? s.dispatch : w.w13->format, x, N, s.router.C, ctx);
    dispatch_pack(d, route, &t.exchange, x, &saved->x, ctx);
    dispatch_pack_choices(d, route, &t.exchange, ctx);
    dispatch_start(d, route, ctx);
    if (shared) linear_forward(saved->shared_h, x, w.shared13, N, ctx);
    if (shared) swiglu_forward(t.shared_act, saved->shared_h, N, shared, ctx);
    saved->x = dispatch_receive(d, route, &t.exchange, ctx);

    // 3. The received tokens into rows, sorted by expert.
    const Ragged ragged = saved->ragged;
    permute_plan(ragged, t.exchange.received_expert, t.exchange.received_gate, route->received, s.router.K, ctx);
    const Rows rows = rows_gathered(t.rows, saved->x, w.w13->format, 0, ragged, ctx);

    // 4. Each expert's MLP: W2 swiglu(W13 x).
    const Rows act = grouped_forward_swiglu(t.act, saved->h, rows, w.w13, w.w2, ragged, ctx);
    grouped_forward(t.rows.value, act, w.w2, ragged, ctx);

    // 5. Combine: all-to-all of the gate-weighted sums, overlapped with the shared MLP's second GEMM.
    const Sums sums = {t.rows.value, ragged, t.exchange.received_gate, NULL, 0};
    combine_send(d, route, &t.exchange, sums, ctx);
    if (shared) linear_forward(y, t.shared_act, w.shared2, N, ctx);
    combine_receive(d, route, &t.exchange, sums, y, shared != 0, NULL, ctx);
    pool_release(pool, mark);
}

static void shared_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeSaved* saved,
                            MoeBackwardBuffers t, MoeShape s, Ctx* ctx) {
    const int64_t N = s.router.N;
    if (s.recompute) linear_forward(saved->shared_h, x, w.shared13, N, ctx);
    LinearGradient products[] = {{w.shared2, dy, t.act, 0}, {w.shared13, t.dh, x, 0}};
    linear_dgrad(t.dact, &products[0], N, 0, ctx);
    linear_swiglu_backward(dx, t.dh, t.act, t.dact, saved->shared_h, &products[1], N, ctx);
    linear_wgrads(products, 2, N, ctx);
}

// dW = dy^T x. One operand has width C and its memory, the other F or 2F. W13's x comes by token.
static void expert_wgrad(const Weight* w, Rows dy, Rows x, const MoeBackwardBuffers* t, Ragged ragged, Ctx* ctx) {
    const Rows of_C = format_packed(w->wgrad) ? t->channels : t->rows, of_F = t->dh_quantized;
    grouped_wgrad(w, dy, is_by_token(x) ? of_F : of_C, x, is_by_token(x) ? of_C : of_F, ragged, ctx);
}

void moe_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeSaved* saved, float aux, MoeShape s,
                  Dispatch* d, Pool* pool, Ctx* ctx) {
    Route* route = &saved->route;
    const Ragged ragged = saved->ragged;
    const PoolMark mark = pool_mark(pool);
    MoeBackwardBuffers t;
    moe_take_backward(pool, &t, saved, s);

    // 5. All-to-all: dy to the ranks of its tokens' experts, without the gates, which come after W2
    // (grouped/experts.h). With activation checkpointing x is sent along. The shared MLP's backward overlaps.
    weight_measure(w.w2, STATS_DY, s.dispatch ? s.dispatch : w.w2->format, dy, s.router.N, s.router.C, ctx);
    dispatch_pack(d, route, &t.exchange, dy, NULL, ctx);
    if (s.recompute) dispatch_pack(d, route, &t.again, x, &saved->x, ctx);
    dispatch_start(d, route, ctx);
    if (s.shared_F) shared_backward(dx, dy, x, w, saved, t, s, ctx);
    const Rows dy_here = dispatch_receive(d, route, &t.exchange, ctx);

    // 4. and 3. Activation checkpointing: recompute h = W13 x.
    if (s.recompute) {
        saved->x = dispatch_receive(d, route, &t.again, ctx);
        grouped_forward(saved->h, rows_permute(t.rows, saved->x, ragged, ctx), w.w13, ragged, ctx);
    }

    // 4. da' = dy W2; da = gate da', dgate = <da', a> and dh; dx = dh W13. With several ranks the sums that combine
    // sends overwrite the received dy, so W2's wgrad needs a copy of its rows.
    const Rows dy_rows = s.ep > 1 ? rows_permute(t.rows, dy_here, ragged, ctx)
                                  : rows_gathered(t.rows, dy_here, w.w2->format, s.F, ragged, ctx);
    const ExpertsBackward tensors = {t.dh, t.act, t.drow_gate, NULL, saved->h};
    int32_t gate_parts;
    Rows dh_wgrad;
    const Rows dh = grouped_dgrad_swiglu(t.dh_quantized, &dh_wgrad, &gate_parts, tensors, t.dact, dy_rows, w.w2, w.w13,
                                         ragged, ctx);
    grouped_dgrad(t.dact, dh, w.w13, ragged, ctx);

    // 2. Combine: all-to-all of dx and dgate, overlapped with dW2 = dy^T (gate a) and dW13 = dh^T x.
    const Sums sums = {t.dact, ragged, NULL, t.drow_gate, gate_parts};
    combine_send(d, route, &t.exchange, sums, ctx);
    expert_wgrad(w.w2, dy_rows, rows_of_values(t.act, ragged.capacity, s.F), &t, ragged, ctx);
    expert_wgrad(w.w13, dh_wgrad, saved->x, &t, ragged, ctx);
    combine_receive(d, route, &t.exchange, sums, dx, s.shared_F != 0, t.dgate, ctx);

    // 1. The router's part in dx.
    router_backward(dx, w.drouter, t.dgate, saved->scores, route->expert, route->gate, x, w.router, aux, s.router, ctx);
    pool_release(pool, mark);
}
