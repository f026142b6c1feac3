#include "moe/moe.h"

#include "layers/linear.h"
#include "layers/swiglu.h"
#include "moe/experts.h"
#include "moe/grouped_gemm.h"

static int64_t capacity_of(const Arena* arena, MoeShape s) {
    return ragged_capacity(s.router.N, s.router.K, s.router.E, arena->backend);
}

void moe_plan_saved(Arena* arena, MoeSaved* saved, MoeShape s) {
    int64_t N = s.router.N, E = s.router.E, K = s.router.K, rows = capacity_of(arena, s);
    saved->ragged.El = (int32_t)E;
    saved->ragged.capacity = rows;
    arena_add(arena, "router scores", ELEMENT_REAL, N * E, 1, (void**)&saved->scores);
    arena_add(arena, "gates", ELEMENT_REAL, N * K, 1, (void**)&saved->gate);
    arena_add(arena, "expert ids", ELEMENT_I32, N * K, 1, (void**)&saved->expert);
    arena_add(arena, "group starts", ELEMENT_I64, E + 1, 0, (void**)&saved->ragged.group_start);
    arena_add(arena, "group rows", ELEMENT_I32, E, 0, (void**)&saved->ragged.group_rows);
    arena_add(arena, "row -> token", ELEMENT_I32, rows, 1, (void**)&saved->ragged.row_token);
    arena_add(arena, "token -> row", ELEMENT_I32, N * K, 1, (void**)&saved->ragged.token_row);
    arena_add(arena, "row gates", ELEMENT_REAL, rows, 1, (void**)&saved->ragged.row_gate);
    arena_add(arena, "routed hidden", ELEMENT_X, rows * 2 * s.F, 1, (void**)&saved->h);
    if (s.shared_F) arena_add(arena, "shared hidden", ELEMENT_X, N * 2 * s.shared_F, 1, (void**)&saved->shared_h);
}

void moe_plan_scratch(Arena* arena, MoeScratch* scratch, MoeShape s) {
    int64_t N = s.router.N, rows = capacity_of(arena, s);
    arena_add(arena, "routed rows", ELEMENT_X, rows * s.router.C, 1, (void**)&scratch->rows_a);
    arena_add(arena, "routed rows (2)", ELEMENT_X, rows * s.router.C, 1, (void**)&scratch->rows_b);
    arena_add(arena, "routed activation", ELEMENT_X, rows * s.F, 1, (void**)&scratch->act_a);
    arena_add(arena, "routed activation (2)", ELEMENT_X, rows * s.F, 1, (void**)&scratch->act_b);
    arena_add(arena, "d routed hidden", ELEMENT_X, rows * 2 * s.F, 1, (void**)&scratch->dh);
    arena_add(arena, "d row gates", ELEMENT_REAL, rows, 1, (void**)&scratch->drow_gate);
    arena_add(arena, "d gates", ELEMENT_REAL, N * s.router.K, 1, (void**)&scratch->dgate);
    if (!s.shared_F) return;
    arena_add(arena, "shared activation", ELEMENT_X, N * s.shared_F, 1, (void**)&scratch->shared_a);
    arena_add(arena, "d shared activation", ELEMENT_X, N * s.shared_F, 1, (void**)&scratch->shared_da);
    arena_add(arena, "d shared hidden", ELEMENT_X, N * 2 * s.shared_F, 1, (void**)&scratch->shared_dh);
}

size_t moe_workspace(MoeShape s) {
    size_t router = router_workspace(s.router), plan = permute_workspace(s.router.N, s.router.K, s.router.E);
    return router > plan ? router : plan;
}

void moe_forward(floatX* y, const floatX* x, MoeWeights w, MoeSaved saved, MoeScratch t, int64_t* load, MoeShape s,
                 Ctx* ctx) {
    int64_t N = s.router.N, C = s.router.C;
    int32_t K = s.router.K, E = s.router.E;
    router_forward(saved.scores, saved.expert, saved.gate, x, w.router, w.bias, s.router, ctx);
    if (load) router_count(load, saved.expert, N * K, E, ctx);
    permute_plan(saved.ragged, saved.expert, saved.gate, N, K, ctx);
    permute_rows(t.rows_a, x, saved.ragged, C, ctx);
    if (s.shared_F) {
        linear_forward(saved.shared_h, x, w.shared13, N, C, 2 * s.shared_F, ctx);
        swiglu_forward(t.shared_a, saved.shared_h, N, s.shared_F, ctx);
        linear_forward(y, t.shared_a, w.shared2, N, s.shared_F, C, ctx);
    }
    grouped_gemm_forward(saved.h, t.rows_a, w.w13, saved.ragged, C, 2 * s.F, ctx);
    experts_swiglu_forward(t.act_a, saved.h, saved.ragged, s.F, ctx);
    grouped_gemm_forward(t.rows_b, t.act_a, w.w2, saved.ragged, s.F, C, ctx);
    unpermute_rows(y, t.rows_b, saved.gate, saved.ragged, N, K, C, s.shared_F != 0, ctx);
}

void moe_backward(floatX* dx, const floatX* dy, const floatX* x, MoeWeights w, MoeGrads dw, MoeSaved saved,
                  MoeScratch t, float aux, MoeShape s, Ctx* ctx) {
    int64_t N = s.router.N, C = s.router.C;
    int32_t K = s.router.K;
    Ragged r = saved.ragged;
    // The combine's backward sends dy to the rows as it is; the gate is applied behind W2 (moe/experts.h).
    floatX *dy_rows = t.rows_a, *dx_rows = t.rows_b, *dap = t.act_a, *gated_a = t.act_b;
    permute_rows(dy_rows, dy, r, C, ctx);
    grouped_gemm_dgrad(dap, dy_rows, w.w2, r, s.F, C, ctx);
    experts_swiglu_backward(t.dh, gated_a, t.drow_gate, dap, saved.h, r, s.F, ctx);
    grouped_gemm_dgrad(dx_rows, t.dh, w.w13, r, C, 2 * s.F, ctx);
    unpermute_rows(dx, dx_rows, NULL, r, N, K, C, 0, ctx);
    unpermute_gates(t.dgate, t.drow_gate, r, N, K, ctx);
    grouped_gemm_wgrad(dw.w2, dy_rows, gated_a, r, s.F, C, ctx);
    permute_rows(t.rows_a, x, r, C, ctx);  // dy_rows are done with
    grouped_gemm_wgrad(dw.w13, t.dh, t.rows_a, r, C, 2 * s.F, ctx);
    router_backward(dx, dw.router, t.dgate, saved.scores, saved.expert, saved.gate, x, w.router, aux, s.router, ctx);
    if (!s.shared_F) return;
    linear_dgrad(t.shared_da, dy, w.shared2, N, s.shared_F, C, 0, ctx);
    swiglu_backward(t.shared_dh, t.shared_a, t.shared_da, saved.shared_h, N, s.shared_F, ctx);
    linear_wgrad(dw.shared2, dy, t.shared_a, N, s.shared_F, C, ctx);
    linear_dgrad(dx, t.shared_dh, w.shared13, N, C, 2 * s.shared_F, 1, ctx);
    linear_wgrad(dw.shared13, t.shared_dh, x, N, C, 2 * s.shared_F, ctx);
}
