#include "moe/moe_buffers.h"

#include <math.h>
#include <string.h>

#include "device/check.h"
#include "grouped/grouped_gemm.h"

static void plan_choices(Arena* a, MoeSaved* saved, MoeShape s) {
    const RouterShape r = s.router;
    const Format *dispatch = s.formats.dispatch,
                 *received = dispatch ? dispatch : format_of_rows(s.formats.gemm[EXPERT]);
    const DispatchShape d = {r.N, r.C, r.E, r.K, s.ep, dispatch, received, s.formats.combine, s.capacity, s.windows};
    memset(saved, 0, sizeof(*saved));
    ARENA(a, "router scores", ELEMENT_REAL, r.N * r.E, 1, &saved->scores);
    dispatch_plan_choices(a, &saved->route, d);
}

// With activation checkpointing these tensors are freed after forward, and backward computes them again.
static void plan_hidden(Arena* a, MoeSaved* saved, MoeShape s) {
    dispatch_plan_x(a, &saved->x, &saved->route);
    ARENA(a, "routed hidden", ELEMENT_X, saved->ragged.capacity * 2 * s.F, 1, &saved->h);
    if (s.shared_F) ARENA(a, "shared hidden", ELEMENT_X, s.router.N * 2 * s.shared_F, 1, &saved->shared_h);
}

// The layout of the local experts' rows, from the counts of the route. Without recomputation also the hidden tensors.
static void plan_routed(Arena* a, MoeSaved* saved, MoeShape s) {
    const int32_t El = local_experts(saved->route.shape);
    const int64_t rows = ragged_rows(saved->route.choices, El, a->backend);
    // Row numbers are int32.
    ASSERT(max_i64(rows, max_i64(saved->route.received, saved->route.send.capacity)) <= INT32_MAX);
    saved->ragged.El = El;
    saved->ragged.capacity = rows;
    ARENA(a, "group starts", ELEMENT_I64, El + 1, 0, &saved->ragged.group_start);
    ARENA(a, "group rows", ELEMENT_I32, El, 0, &saved->ragged.group_rows);
    ARENA(a, "row -> token", ELEMENT_I32, rows, 1, &saved->ragged.row_token);
    ARENA(a, "token -> row", ELEMENT_I32, saved->route.received * s.router.K, 1, &saved->ragged.token_row);
    ARENA(a, "row gates", ELEMENT_REAL, rows, 1, &saved->ragged.row_gate);
    if (!s.recompute) plan_hidden(a, saved, s);
}

static void plan_forward(Arena* a, MoeForwardBuffers* t, MoeSaved* saved, MoeShape s) {
    const int64_t rows = saved->ragged.capacity, C = s.router.C;
    memset(t, 0, sizeof(*t));
    // Activation checkpointing: the hidden tensors are freed with the buffers.
    if (s.recompute) plan_hidden(a, saved, s);
    const Format* packed = format_packed(s.formats.gemm[EXPERT]);
    rows_plan(a, "routed rows", &t->x_rows, 1, packed, rows, max_i64(C, s.F));
    rows_plan(a, "routed activation", &t->a, !packed, packed, rows, s.F);
    if (s.shared_F) ARENA(a, "shared activation", ELEMENT_X, s.router.N * s.shared_F, 1, &t->shared_a);
    dispatch_plan_buffers(a, &t->exchange, NULL, &saved->route, 1);
}

static void plan_backward(Arena* a, MoeBackwardBuffers* t, MoeSaved* saved, MoeShape s) {
    const int64_t N = s.router.N, C = s.router.C, F = s.F, sF = s.shared_F, rows = saved->ragged.capacity;
    const Format *format = s.formats.gemm[EXPERT], *packed = format_packed(format);
    const Format* wgrad = format_packed(s.formats.wgrad[EXPERT]);
    const int64_t wgrad_rows = grouped_wgrad_rows(wgrad, rows, saved->ragged.El, a->backend);
    ASSERT(!wgrad || packed);
    memset(t, 0, sizeof(*t));
    if (s.recompute) plan_hidden(a, saved, s);
    // A packed wgrad reads its own copy of x and dy, so these need no values.
    rows_plan(a, "routed rows", &t->dy_rows, !wgrad, packed, rows, C);
    rows_plan(a, "routed rows by channel", &t->wgrad_dy, 0, wgrad, wgrad_rows, C);
    // The shared MLP uses these buffers first, so each has the larger size.
    ARENA(a, "d activation, d routed rows", ELEMENT_X, max_i64(rows * max_i64(C, F), N * sF), 1, &t->experts.da);
    ARENA(a, "activation", ELEMENT_X, max_i64(rows * F, N * sF), 1, &t->experts.a);
    ARENA(a, "d hidden", ELEMENT_X, max_i64(wgrad_rows * 2 * F, N * 2 * sF), 1, &t->experts.dh);
    // Where a GEMM rounds its own copy: of dy, then of dh.
    rows_plan(a, "d hidden, quantized", &t->dh_quantized, format && !packed, packed, wgrad_rows,
              format_of_rows(format) ? 2 * F : max_i64(2 * F, C));
    ARENA(a, "d row gates", ELEMENT_REAL, rows * grouped_gemm_gate_parts(F), 1, &t->drow_gate);
    ARENA(a, "d gates", ELEMENT_REAL, N * s.router.K, 1, &t->dgate);
    dispatch_plan_buffers(a, &t->exchange, s.recompute ? &t->again : NULL, &saved->route, 0);
}

void moe_take_choices(Pool* pool, MoeSaved* saved, MoeShape s) {
    plan_choices(pool_table(pool), saved, s);
    pool_take_table(pool);
}

size_t moe_take_forward(Pool* pool, MoeForwardBuffers* t, MoeSaved* saved, MoeShape s) {
    // Saved tensors come before the mark, and the buffers of forward after it.
    pool_load(pool, (double)saved->route.choices / (double)(s.router.N * s.router.K));
    plan_routed(pool_table(pool), saved, s);
    pool_take_table(pool);
    const size_t mark = pool_mark(pool);
    plan_forward(pool_table(pool), t, saved, s);
    pool_take_table(pool);
    t->out_rows = t->x_rows.value;
    if (!t->a.value) t->a.value = t->x_rows.value;  // for statistics, before the outputs
    return mark;
}

void moe_take_backward(Pool* pool, MoeBackwardBuffers* t, MoeSaved* saved, MoeShape s) {
    plan_backward(pool_table(pool), t, saved, s);
    pool_take_table(pool);
    // These have the memory of others. Each is written after the last use of the buffer that had the memory before.
    t->shared = t->experts;                                                 // shared, experts
    t->dx_rows = t->experts.da;                                             // da', dx
    t->x_rows = t->dy_rows;                                                 // x for W13 again, dy
    if (!format_packed(s.formats.wgrad[EXPERT])) t->wgrad_dy = t->dy_rows;  // dy, x for wgrad
    t->wgrad_x = t->wgrad_dy;
    t->wgrad_a = t->wgrad_dh = t->dh_quantized;  // dh for dgrad, gate * a, dh for wgrad
}

void moe_plan(Arena* pool, MoeShape s, int64_t blocks) {
    const int64_t first = pool->count;
    MoeSaved saved;
    MoeBackwardBuffers t;
    // Each block keeps its own saved tensors.
    for (int64_t b = 0; b < blocks; b++) {
        plan_choices(pool, &saved, s);
        dispatch_expect(&saved.route, pool->backend);
        plan_routed(pool, &saved, s);
    }
    // All blocks share the buffers of one backward.
    if (blocks) plan_backward(pool, &t, &saved, s);  // forward takes less
    // The slots point into saved and t, which end with this function.
    for (int64_t i = first; i < pool->count; i++) pool->entries[i].slot = NULL;
}

size_t moe_bytes(MoeShape s, int64_t blocks, double capacity, Backend backend) {
    Arena plan;
    arena_init(&plan, "", backend);
    s.capacity = fmin(capacity, DISPATCH_MOST_CAPACITY * (double)s.ep);
    moe_plan(&plan, s, blocks);
    const size_t bytes = arena_bytes(&plan);
    arena_free(&plan);
    return bytes;
}
