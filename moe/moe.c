#include "moe/moe.h"

#include "layers/matmul.h"
#include "moe/moe_buffers.h"

size_t moe_workspace(MoeShape s) {
    const size_t dispatch = dispatch_workspace(s.router.N, s.router.K, s.router.E, s.ep);
    return max_size(max_size(router_workspace(s.router), matmul_workspace()), dispatch);
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
    const size_t mark = moe_take_forward(pool, &t, saved, s);
    weight_measure(w.w13, STATS_X, s.formats.dispatch ? s.formats.dispatch : w.w13->format, x, N, s.router.C, ctx);
    dispatch_pack(d, route, &t.exchange, x, &saved->x, ctx);
    dispatch_start(d, route, &t.exchange, ctx);
    if (shared) linear_mlp_hidden(t.shared_a, saved->shared_h, x, w.shared13, N, ctx);
    saved->x = dispatch_receive(d, route, &t.exchange, ctx);

    // 3. The received tokens into rows, sorted by expert.
    const Ragged ragged = saved->ragged;
    permute_plan(ragged, t.exchange.received_expert, t.exchange.received_gate, route->received, s.router.K, ctx);
    const Rows rows = rows_gathered(t.x_rows, saved->x, w.w13->format, ragged, ctx);

    // 4. Each expert's MLP: W2 swiglu(W13 x).
    const Rows a = grouped_forward_swiglu(t.a, saved->h, rows, w.w13, w.w2, ragged, ctx);
    grouped_forward(t.out_rows, a, w.w2, ragged, ctx);

    // 5. Combine: all-to-all of the gate-weighted sums, overlapped with the shared MLP's second GEMM.
    const Sums sums = {t.out_rows, ragged, t.exchange.received_gate, NULL, 0};
    combine_send(d, route, &t.exchange, sums, ctx);
    if (shared) linear_forward(y, t.shared_a, w.shared2, N, ctx);
    combine_receive(d, route, &t.exchange, sums, y, shared != 0, NULL, ctx);
    pool_release(pool, mark);
}

void moe_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeSaved* saved, float aux, MoeShape s,
                  Dispatch* d, Pool* pool, Ctx* ctx) {
    Route* route = &saved->route;
    const Ragged ragged = saved->ragged;
    const size_t mark = pool_mark(pool);
    const int64_t N = s.router.N;
    MoeBackwardBuffers t;
    moe_take_backward(pool, &t, saved, s);

    // 5. All-to-all: dy to the ranks of its tokens' experts, without the gates, which come after W2
    // (grouped/experts.h). With activation checkpointing x is sent along. The shared MLP's backward overlaps.
    weight_measure(w.w2, STATS_DY, s.formats.dispatch ? s.formats.dispatch : w.w2->format, dy, N, s.router.C, ctx);
    dispatch_pack(d, route, &t.exchange, dy, NULL, ctx);
    if (s.recompute) dispatch_pack(d, route, &t.again, x, &saved->x, ctx);
    dispatch_start(d, route, &t.exchange, ctx);
    if (s.shared_F && s.recompute) linear_forward(saved->shared_h, x, w.shared13, N, ctx);
    if (s.shared_F) linear_mlp_backward(dx, dy, x, saved->shared_h, t.shared, w.shared13, w.shared2, N, ctx);
    const Rows dy_here = dispatch_receive(d, route, &t.exchange, ctx);

    // 4. and 3. Activation checkpointing: recompute h = W13 x.
    if (s.recompute) {
        saved->x = dispatch_receive(d, route, &t.again, ctx);
        grouped_forward(saved->h, rows_permute(t.x_rows, saved->x, ragged, ctx), w.w13, ragged, ctx);
    }

    // 4. da' = dy W2; da = gate da', dgate = <da', a> and dh; dx = dh W13. With several ranks the sums that combine
    // sends overwrite the received dy, so W2's wgrad needs a copy of its rows.
    const Rows dy_rows = s.ep > 1 ? rows_permute(t.dy_rows, dy_here, ragged, ctx)
                                  : rows_gathered(t.dy_rows, dy_here, w.w2->format, ragged, ctx);
    const ExpertsBackward tensors = {t.experts.dh, t.experts.a, t.drow_gate, NULL, saved->h};
    int32_t gate_parts;
    Rows dh_wgrad;
    const Rows dh = grouped_dgrad_swiglu(t.dh_quantized, &dh_wgrad, &gate_parts, tensors, t.experts.da, dy_rows, w.w2,
                                         w.w13, ragged, ctx);
    grouped_dgrad(t.dx_rows, dh, w.w13, ragged, ctx);

    // 2. Combine: all-to-all of dx and dgate, overlapped with dW2 = dy^T (gate a) and dW13 = dh^T x.
    const Sums sums = {t.dx_rows, ragged, NULL, t.drow_gate, gate_parts};
    combine_send(d, route, &t.exchange, sums, ctx);
    const Rows gated_a = rows_of_values(t.experts.a, ragged.capacity, s.F);
    grouped_wgrad(w.w2, dy_rows, t.wgrad_dy, gated_a, t.wgrad_a, ragged, ctx);
    grouped_wgrad(w.w13, dh_wgrad, t.wgrad_dh, saved->x, t.wgrad_x, ragged, ctx);
    combine_receive(d, route, &t.exchange, sums, dx, s.shared_F != 0, t.dgate, ctx);

    // 1. The router's part in dx.
    router_backward(dx, w.drouter, t.dgate, saved->scores, route->expert, route->gate, x, w.router, aux, s.router, ctx);
    pool_release(pool, mark);
}
