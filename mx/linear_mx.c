#include "mx/linear_mx.h"

#include "layers/matmul.h"
#include "mx/grouped_gemm_mx.h"

// All tokens as one group, which on the GPU ends with a whole tile, beyond the tokens (mx/grouped_gemm_mx.h).
typedef struct TokenGroup {
    int64_t start[2];
    int32_t rows;
} TokenGroup;

void mx_cast_weight(MxWeight* forward, MxWeight* back, const floatX* w, int64_t count, int64_t OC, int64_t IC,
                    MxRows room, int32_t scale_mode, Ctx* ctx) {
    const MxCast cast = {scale_mode, 1};
    if (!forward->value) {  // the same bytes both ways
        back->tiles.scale = forward->tiles.scale;
        forward->stride_o = back->stride_c = mx_tiles(IC);
        forward->stride_c = back->stride_o = 1;
        mx_quantize_tiles(forward->tiles.q, back->tiles.q, forward->tiles.scale, w, count, OC, IC, scale_mode, ctx);
        return;
    }
    mx_quantize(room.q, room.scale, w, count * OC, IC, cast, ctx);
    mx_dequantize(forward->value, room.q, room.scale, count * OC, IC, ctx);
    mx_quantize_transposed(room.q, room.scale, w, count, OC, IC, cast, ctx);
    mx_dequantize(back->value, room.q, room.scale, count * IC, OC, ctx);
}

void mx_weight_stats(MxStats* stats, const MxWeight* forward, const floatX* w, int64_t count, int64_t OC, int64_t IC,
                     int32_t scale_mode, Ctx* ctx) {
    const MxCast cast = {scale_mode, 1};
    if (forward->value)
        mx_stats(stats, w, count * OC, IC, cast, ctx);
    else
        mx_stats_tiles(stats, w, forward->tiles.scale, count, OC, IC, scale_mode, ctx);
}

void linear_mx_plan_weight(Arena* a, LinearWeight* w) {
    const int64_t n = w->OC * w->IC;
    LinearMx* mx = w->mx;
    mx->widest = max_i64(mx->widest, max_i64(w->OC, w->IC));
    mx->largest = max_i64(mx->largest, n);
    mx->most_scales = max_i64(mx->most_scales, max_i64(w->OC * mx_stride(w->IC), w->IC * mx_stride(w->OC)));
    if (mx->fast) {
        arena_add(a, "dense weights, bytes", ELEMENT_BYTE, n, 0, (void**)&w->forward.tiles.q);
        arena_add(a, "dense weights, bytes", ELEMENT_BYTE, n, 0, (void**)&w->back.tiles.q);
        arena_add(a, "dense weights, scales", ELEMENT_BYTE, mx_tiles(w->OC) * mx_tiles(w->IC), 0,
                  (void**)&w->forward.tiles.scale);
    } else {
        arena_add(a, "dense weights, cast", ELEMENT_X, n, 0, (void**)&w->forward.value);
        arena_add(a, "dense weights, cast", ELEMENT_X, n, 0, (void**)&w->back.value);
    }
}

void linear_mx_plan(Arena* a, LinearMx* mx, int64_t N) {
    int64_t bytes = N * mx->widest, scales = round_up(N, row_align(a->backend)) * mx_stride(mx->widest);
    if (!mx->fast) bytes = max_i64(bytes, mx->largest), scales = max_i64(scales, mx->most_scales);
    arena_add(a, "input of a dense product, bytes", ELEMENT_BYTE, bytes, 1, (void**)&mx->input.q);
    arena_add(a, "input of a dense product, scales", ELEMENT_BYTE, scales, 1, (void**)&mx->input.scale);
    if (mx->fast)
        arena_add(a, "tokens as a group", ELEMENT_BYTE, sizeof(TokenGroup), 0, (void**)&mx->group);
    else
        arena_add(a, "input of a dense product, cast", ELEMENT_X, N * mx->widest, 1, (void**)&mx->value);
}

void linear_mx_cast(LinearWeight* w, Ctx* ctx) {
    mx_cast_weight(&w->forward, &w->back, w->w, 1, w->OC, w->IC, w->mx->input, w->mx->scale_mode, ctx);
}

void linear_mx_batch(LinearMx* mx, int64_t N, Ctx* ctx) {
    const TokenGroup group = {{0, round_up(N, row_align(BACKEND))}, (int32_t)N};
    if (mx->fast) device_upload(mx->group, &group, sizeof(group), ctx);
}

// y = cast(x) W^T with W as its direction reads it, (OC, IC).
static void product(floatX* y, const floatX* x, const MxWeight* w, int64_t N, int64_t IC, int64_t OC,
                    const LinearMx* mx, Ctx* ctx) {
    const MxCast cast = {mx->scale_mode, mx->fast ? MX_CHUNK : 1};
    mx_quantize(mx->input.q, mx->input.scale, x, N, IC, cast, ctx);
    if (mx->fast) {
        const Ragged tokens = {1, N, mx->group->start, &mx->group->rows, NULL, NULL, NULL};
        grouped_gemm_mx(y, NULL, mx->input.q, mx->input.scale, w->tiles.q, w->tiles.scale, w->stride_o, w->stride_c,
                        tokens, IC, OC, ctx);
    } else {
        mx_dequantize(mx->value, mx->input.q, mx->input.scale, N, IC, ctx);
        matmul_forward(y, mx->value, w->value, N, IC, OC, ctx);
    }
}

static void input_stats(const LinearWeight* w, int tensor, const floatX* x, int64_t N, int64_t C, Ctx* ctx) {
    const MxCast cast = {w->mx->scale_mode, w->mx->fast ? MX_CHUNK : 1};
    mx_stats(&w->stats[tensor], x, N, C, cast, ctx);
}

void linear_mx_forward(floatX* y, const floatX* x, const LinearWeight* w, int64_t N, Ctx* ctx) {
    if (w->mx && w->stats) {
        input_stats(w, LINEAR_STATS_X, x, N, w->IC, ctx);
        mx_weight_stats(&w->stats[LINEAR_STATS_W], &w->forward, w->w, 1, w->OC, w->IC, w->mx->scale_mode, ctx);
    }
    if (w->mx)
        product(y, x, &w->forward, N, w->IC, w->OC, w->mx, ctx);
    else
        matmul_forward(y, x, w->w, N, w->IC, w->OC, ctx);
}

void linear_mx_dgrad(floatX* dx, const floatX* dy, const LinearWeight* w, int64_t N, Ctx* ctx) {
    if (w->mx && w->stats) input_stats(w, LINEAR_STATS_DY, dy, N, w->OC, ctx);
    if (w->mx)
        product(dx, dy, &w->back, N, w->OC, w->IC, w->mx, ctx);
    else
        matmul_dgrad(dx, dy, w->w, N, w->IC, w->OC, 0, ctx);
}
