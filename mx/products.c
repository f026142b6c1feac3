#include "mx/products.h"

#include "device/check.h"
#include "grouped/grouped_gemm.h"
#include "layers/matmul.h"
#include "mx/grouped_gemm_mx.h"

static int is_fast(const Weight* w) { return format_read(w->format).bytes; }

// --- Memory and casts ---

void weight_plan(Arena* a, Weight* w, int linear) {
    const int64_t n = w->count * w->OC * w->IC, fast = is_fast(w);
    const char* name = linear ? "dense weights, cast" : "expert weights, cast";
    if (!w->format.bytes) return;
    if (fast) {
        arena_add(a, name, ELEMENT_BYTE, n, 0, (void**)&w->forward.q);
        arena_add(a, name, ELEMENT_BYTE, n, 0, (void**)&w->back.q);
        arena_add(a, name, ELEMENT_BYTE, w->count * mx_tiles(w->OC) * mx_tiles(w->IC), 0, (void**)&w->forward.scale);
    } else {
        arena_add(a, name, ELEMENT_X, n, 0, (void**)&w->forward.value);
        arena_add(a, name, ELEMENT_X, n, 0, (void**)&w->back.value);
    }
    ProductRoom* room = w->room;
    if (linear) {
        room->fast |= fast;
        room->inputs = max_i64(room->inputs, max_i64(w->OC, w->IC));
    }
    if (!fast) {
        room->bytes = max_i64(room->bytes, n);
        room->scales = max_i64(room->scales, w->count * max_i64(w->OC * mx_stride(w->IC), w->IC * mx_stride(w->OC)));
    }
}

// All tokens as one group, which on the GPU ends with a whole tile, beyond the tokens (mx/grouped_gemm_mx.h).
typedef struct TokenGroup {
    int64_t start[2];
    int32_t rows;
} TokenGroup;

void products_plan(Arena* a, ProductRoom* room, int64_t N, int batches) {
    const char* name = "operand of a product, cast";
    const int64_t rows = round_up(N, row_align(a->backend));
    arena_add(a, name, ELEMENT_BYTE, max_i64(N * room->inputs, room->bytes), 1, (void**)&room->input.q);
    arena_add(a, name, ELEMENT_BYTE, max_i64(rows * mx_stride(room->inputs), room->scales), 1,
              (void**)&room->input.scale);
    if (room->fast)
        arena_add(a, "tokens as a group", ELEMENT_BYTE, batches * (int64_t)sizeof(TokenGroup), 0, (void**)&room->group);
    else
        arena_add(a, name, ELEMENT_X, N * room->inputs, 1, (void**)&room->input.value);
}

void products_batch(ProductRoom* room, int batch, int64_t N, Ctx* ctx) {
    const TokenGroup group = {{0, round_up(N, row_align(BACKEND))}, (int32_t)N};
    if (room->group) device_upload(room->group + batch, &group, sizeof(group), ctx);
}

void weight_cast(Weight* w, Ctx* ctx) {
    if (!w->format.bytes) return;
    WeightCast *forward = &w->forward, *back = &w->back;
    if (is_fast(w)) {  // the same bytes both ways
        back->scale = forward->scale;
        forward->stride_o = back->stride_c = mx_tiles(w->IC);
        forward->stride_c = back->stride_o = 1;
        mx_quantize_tiles(forward->q, back->q, forward->scale, w->w, w->count, w->OC, w->IC, w->format.cast.scale, ctx);
        return;
    }
    const Rows* room = &w->room->input;
    mx_quantize(room->q, room->scale, w->w, w->count * w->OC, w->IC, w->format.cast, ctx);
    mx_dequantize(forward->value, room->q, room->scale, w->count * w->OC, w->IC, ctx);
    mx_quantize_transposed(room->q, room->scale, w->w, w->count, w->OC, w->IC, w->format.cast, ctx);
    mx_dequantize(back->value, room->q, room->scale, w->count * w->IC, w->OC, ctx);
}

// *stats += what W's cast for forward did; with wgrad, which every micro-step computes once, recompute or not.
static void cast_stats(const Weight* w, Ctx* ctx) {
    MxStats* stats = weight_stats(w, STATS_W);
    if (!stats || !w->format.bytes) return;
    if (is_fast(w))
        mx_stats_tiles(stats, w->w, w->forward.scale, w->count, w->OC, w->IC, w->format.cast.scale, ctx);
    else
        mx_stats(stats, w->w, w->count * w->OC, w->IC, w->format.cast, ctx);
}

// --- Products of all tokens with one matrix ---

// y (N, OC) = cast(x) W^T, W as its direction reads it.
static void cast_product(floatX* y, const floatX* x, const Weight* w, const WeightCast* cast, int64_t N, int64_t IC,
                         int64_t OC, MxStats* stats, Ctx* ctx) {
    Rows room = w->room->input;
    room.count = N, room.columns = IC;
    if (stats) mx_stats(stats, x, N, IC, w->format.cast, ctx);
    const Rows bytes = rows_as(room, rows_of_values(x, N, IC), w->format, ctx);
    if (is_fast(w)) {
        TokenGroup* group = w->room->group + w->room->batch;
        const Ragged tokens = {1, N, group->start, &group->rows, NULL, NULL, NULL};
        grouped_gemm_mx(y, NULL, bytes.q, bytes.scale, cast->q, cast->scale, cast->stride_o, cast->stride_c, tokens, IC,
                        OC, ctx);
    } else {
        matmul_forward(y, rows_as(room, bytes, format_read(w->format), ctx).value, cast->value, N, IC, OC, ctx);
    }
}

void linear_forward(floatX* y, const floatX* x, const Weight* w, int64_t N, Ctx* ctx) {
    if (w->format.bytes)
        cast_product(y, x, w, &w->forward, N, w->IC, w->OC, weight_stats(w, STATS_X), ctx);
    else
        matmul_forward(y, x, w->w, N, w->IC, w->OC, ctx);
}

void linear_dgrad(floatX* dx, const floatX* dy, const Weight* w, int64_t N, int accumulate, Ctx* ctx) {
    ASSERT(!accumulate || !w->format.bytes);
    if (w->format.bytes)
        cast_product(dx, dy, w, &w->back, N, w->OC, w->IC, weight_stats(w, STATS_DY), ctx);
    else
        matmul_dgrad(dx, dy, w->w, N, w->IC, w->OC, accumulate, ctx);
}

void linear_wgrad(const floatX* dy, const floatX* x, const Weight* w, int64_t N, Ctx* ctx) {
    cast_stats(w, ctx);
    matmul_wgrad(w->grad, dy, x, N, w->IC, w->OC, w->accumulate, ctx);
}

void linear_backward(floatX* dx, const floatX* dy, const floatX* x, const Weight* w, int64_t N, int accumulate,
                     Ctx* ctx) {
    linear_dgrad(dx, dy, w, N, accumulate, ctx);
    linear_wgrad(dy, x, w, N, ctx);
}

// --- Products of each expert's rows with its matrix ---

// Of what casts made: values or bytes, W as its direction reads it.
static void grouped_product(floatX* y, Rows x, const WeightCast* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    if (x.format.bytes)
        grouped_gemm_mx(y, NULL, x.q, x.scale, w->q, w->scale, w->stride_o, w->stride_c, r, IC, OC, ctx);
    else
        grouped_gemm_forward(y, x.value, w->value, r, IC, OC, ctx);
}

void grouped_forward(floatX* y, Rows x, const Weight* w, Ragged r, Ctx* ctx) {
    if (w->format.bytes)
        grouped_product(y, x, &w->forward, r, w->IC, w->OC, ctx);
    else
        grouped_gemm_forward(y, x.value, w->w, r, w->IC, w->OC, ctx);
}

void grouped_dgrad(floatX* dx, Rows dy, const Weight* w, Ragged r, Ctx* ctx) {
    if (w->format.bytes)
        grouped_product(dx, dy, &w->back, r, w->OC, w->IC, ctx);
    else
        grouped_gemm_dgrad(dx, dy.value, w->w, r, w->IC, w->OC, ctx);
}

void grouped_wgrad(Rows dy, Rows x, const Weight* w, Ragged r, Ctx* ctx) {
    cast_stats(w, ctx);
    if (dy.format.bytes) {
        grouped_gemm_mx_wgrad(w->grad, dy.q, dy.scale, x.q, x.scale, dy.count, r, w->IC, w->OC, w->accumulate, ctx);
    } else {
        grouped_gemm_wgrad(w->grad, dy.value, x.value, r, w->IC, w->OC, w->accumulate, ctx);
    }
}
