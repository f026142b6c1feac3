#include "mx/linear.h"

#include "device/check.h"
#include "grouped/grouped_gemm.h"
#include "layers/matmul.h"
#include "layers/swiglu.h"
#include "mx/mx_swiglu.h"

// 1: the GEMMs read MXFP8 (fast). 0: they read floatX, and MXFP8 is dequantized first (exact).
static int is_fast(const Weight* w) { return format_read(w->format).quantized; }

// --- Memory, and quantization of weights ---

void weight_plan(Arena* a, Weight* w, int linear) {
    const int64_t n = w->count * w->OC * w->IC, fast = is_fast(w);
    const char* name = linear ? "dense weights, quantized" : "expert weights, quantized";
    if (!w->format.quantized) return;

    // The quantized copies for forward and dgrad.
    if (fast) {
        ARENA(a, name, ELEMENT_BYTE, n, 0, &w->forward.tiles.q);
        ARENA(a, name, ELEMENT_BYTE, n, 0, &w->back.tiles.q);
        ARENA(a, name, ELEMENT_BYTE, w->count * mx_tiles(w->OC) * mx_tiles(w->IC), 0, &w->forward.tiles.scale);
    } else {
        ARENA(a, name, ELEMENT_X, n, 0, &w->forward.value);
        ARENA(a, name, ELEMENT_X, n, 0, &w->back.value);
    }

    // The shared workspace grows to the largest need of a weight.
    GemmWorkspace* workspace = w->workspace;
    if (linear) {
        workspace->fast |= fast;
        workspace->inputs = max_i64(workspace->inputs, max_i64(w->OC, w->IC));
    }
    // An exact weight passes through the workspace as MXFP8. Its scales are by row for forward, by column for dgrad.
    if (!fast) {
        workspace->bytes = max_i64(workspace->bytes, n);
        workspace->scales =
            max_i64(workspace->scales, w->count * max_i64(w->OC * mx_stride(w->IC), w->IC * mx_stride(w->OC)));
    }
}

// All tokens as one group. On the GPU it ends at a multiple of 128, beyond the tokens (mx/grouped_gemm_mx.h).
typedef struct TokenGroup {
    int64_t start[2];
    int32_t rows;
} TokenGroup;

void linear_plan(Arena* a, GemmWorkspace* workspace, int64_t N, int batches) {
    // One quantized operand, and the token counts.
    const char* name = "operand of a GEMM, quantized";
    const int64_t rows = round_up(N, row_align(a->backend));
    ARENA(a, name, ELEMENT_BYTE, max_i64(N * workspace->inputs, workspace->bytes), 1, &workspace->input.mx.q);
    ARENA(a, name, ELEMENT_BYTE, max_i64(rows * mx_stride(workspace->inputs), workspace->scales), 1,
          &workspace->input.mx.scale);
    if (!workspace->fast) ARENA(a, name, ELEMENT_X, N * workspace->inputs, 1, &workspace->input.value);
    if (workspace->fast || workspace->of_dy)
        ARENA(a, "tokens as a group", ELEMENT_BYTE, batches * (int64_t)sizeof(TokenGroup), 0, &workspace->group);

    // MXFP8 wgrad. Fast: the operands of all weights of one linear_wgrads. Exact: those of one weight.
    if (!workspace->of_dy) return;
    const int64_t length = mx_channel_length(N, 1, a->backend);
    Rows* operand[2] = {&workspace->dy, &workspace->x};
    for (int i = 0; i < 2; i++) {
        const int64_t channels = i == 0 ? workspace->of_dy : workspace->of_x;
        name = "operand of wgrad, quantized";
        if (!workspace->fast) {
            ARENA(a, name, ELEMENT_X, rows * workspace->inputs, 1, &operand[i]->value);
            continue;
        }
        ARENA(a, name, ELEMENT_BYTE, channels * length, 1, &operand[i]->mx.q);
        ARENA(a, name, ELEMENT_BYTE, channels * (length / MX_CHUNK), 1, &operand[i]->mx.scale);
    }
}

void linear_batch(GemmWorkspace* workspace, int batch, int64_t N, Ctx* ctx) {
    const TokenGroup group = {{0, round_up(N, row_align(BACKEND))}, (int32_t)N};
    if (workspace->group) device_upload(workspace->group + batch, &group, sizeof(group), ctx);
}

void weight_quantize(Weight* w, Ctx* ctx) {
    if (!w->format.quantized) return;
    QuantizedWeight *forward = &w->forward, *back = &w->back;
    if (is_fast(w)) {  // q and its transpose share the scales of the tiles
        MxTiles *tiles = &forward->tiles, *transposed = &back->tiles;
        transposed->scale = tiles->scale;
        tiles->stride_o = transposed->stride_c = mx_tiles(w->IC);
        tiles->stride_c = transposed->stride_o = 1;
        mx_quantize_tiles(tiles->q, transposed->q, tiles->scale, w->w, w->count, w->OC, w->IC, w->format.recipe.scale,
                          ctx);
        return;
    }

    // Exact: quantize and dequantize for forward, then for dgrad.
    const Rows* out = &w->workspace->input;
    mx_quantize(out->mx, w->w, w->count * w->OC, w->IC, w->format.recipe, ctx);
    mx_dequantize(forward->value, out->mx, w->count * w->OC, w->IC, 0, ctx);
    mx_quantize_transposed(out->mx, w->w, w->count, w->OC, w->IC, w->format.recipe, ctx);
    mx_dequantize(back->value, out->mx, w->count * w->IC, w->OC, 0, ctx);
}

// *stats += statistics of the quantization of W for forward. Called with wgrad, which runs once per micro-step, with
// activation recomputation or without.
static void weight_quantization_stats(const Weight* w, Ctx* ctx) {
    const uint8_t* tiles = is_fast(w) ? w->forward.tiles.scale : NULL;
    if (!w->stats || !w->format.quantized) return;
    mx_stats(w->stats + STATS_W, w->w, tiles, w->count, w->OC, w->IC, w->format.recipe, ctx);
}

// --- linear_: GEMMs of all tokens with one matrix ---

// The tokens of the current batch as the only group of a ragged buffer of `rows` rows.
static Ragged tokens_of(const GemmWorkspace* workspace, int64_t rows) {
    TokenGroup* group = workspace->group + workspace->batch;
    const Ragged tokens = {1, rows, group->start, &group->rows, NULL, NULL, NULL};
    return tokens;
}

// The shared buffer for a quantized operand (N, columns).
static Rows room_for(const Weight* w, int64_t N, int64_t columns) {
    Rows out = w->workspace->input;
    out.count = N;
    out.columns = columns;
    out.format = w->format;
    return out;
}

// x (N, columns), quantized to w's format.
static Rows quantize_rows(const floatX* x, const Weight* w, int64_t N, int64_t columns, Ctx* ctx) {
    return rows_as(room_for(w, N, columns), rows_of_values(x, N, columns), w->format, ctx);
}

// y (N, OC) = x W^T, both quantized. `quantized`: W as forward or dgrad reads it.
static void quantized_gemm(floatX* y, Rows x, const Weight* w, const QuantizedWeight* quantized, int64_t OC, Ctx* ctx) {
    const int64_t N = x.count, IC = x.columns;
    if (is_fast(w))
        grouped_gemm_mx(y, NULL, x.mx, quantized->tiles, tokens_of(w->workspace, N), IC, OC, ctx);
    else
        matmul_forward(y, rows_as(x, x, format_read(w->format), ctx).value, quantized->value, N, IC, OC, ctx);
}

void linear_forward(floatX* y, const floatX* x, const Weight* w, int64_t N, Ctx* ctx) {
    if (w->format.quantized) {
        if (w->stats) mx_stats(w->stats + STATS_X, x, NULL, 1, N, w->IC, w->format.recipe, ctx);
        quantized_gemm(y, quantize_rows(x, w, N, w->IC, ctx), w, &w->forward, w->OC, ctx);
    } else {
        matmul_forward(y, x, w->w, N, w->IC, w->OC, ctx);
    }
}

// The place of w's column-wise dy in the shared buffer: the one it has, or the next free one.
static QuantizedDy* place_of_dy(GemmWorkspace* workspace, const Weight* w) {
    int64_t first = 0;
    QuantizedDy* place = workspace->place;
    for (; place < workspace->place + workspace->dys; place++) {
        if (place->weight == w) return place;
        first += place->weight->OC;
    }
    // No place yet: the next one begins after the channels of the others.
    ASSERT(workspace->dys < MX_MATRICES && first + w->OC <= workspace->of_dy);
    const QuantizedDy next = {w, NULL, 0, first};
    workspace->dys++;
    *place = next;
    return place;
}

// 1: dgrad and wgrad are both fast.
static int is_fast_both(const Weight* w) { return is_fast(w) && format_read(w->wgrad).quantized; }

// The buffer for w's column-wise dy, in the place from which linear_wgrads reads it.
static Rows room_for_wgrad(const floatX* dy, const Weight* w, int64_t N) {
    Rows out = w->workspace->dy;
    QuantizedDy* place = place_of_dy(w->workspace, w);
    // One kernel quantizes in both directions, so both have the same scale rule.
    ASSERT(w->wgrad.recipe.scale == w->format.recipe.scale);
    place->dy = dy;
    place->N = N;
    out.count = mx_channel_length(N, 1, BACKEND);
    out.mx = mx_from_channel(out.mx, place->first, out.count);
    return out;
}

// Quantizes dy (N, OC) row-wise for dgrad (returned) and column-wise for wgrad.
static Rows quantize_dy_both(const floatX* dy, const Weight* w, int64_t N, Ctx* ctx) {
    const Rows rows = room_for(w, N, w->OC), channels = room_for_wgrad(dy, w, N);
    mx_quantize_both(rows.mx, channels.mx, dy, channels.count, N, w->OC, w->format.recipe.scale, ctx);
    return rows;
}

void linear_dgrad(floatX* dx, const floatX* dy, const Weight* w, int64_t N, int accumulate, Ctx* ctx) {
    // The MXFP8 GEMMs write dx; only the floatX GEMM can add to it.
    ASSERT(!accumulate || !w->format.quantized);
    if (w->format.quantized) {
        if (w->stats) mx_stats(w->stats + STATS_DY, dy, NULL, 1, N, w->OC, w->format.recipe, ctx);
        const Rows rows = is_fast_both(w) ? quantize_dy_both(dy, w, N, ctx) : quantize_rows(dy, w, N, w->OC, ctx);
        quantized_gemm(dx, rows, w, &w->back, w->IC, ctx);
    } else {
        matmul_dgrad(dx, dy, w->w, N, w->IC, w->OC, accumulate, ctx);
    }
}

void linear_swiglu_backward(floatX* dx, floatX* dh, floatX* a, const floatX* da, const floatX* h, const Weight* w,
                            int64_t N, Ctx* ctx) {
    const int64_t F = w->OC / 2;

    // Not fused: dh in floatX, then dgrad quantizes it.
    if (!is_fast_both(w) || F % MX_CHUNK || w->stats) {
        swiglu_backward(dh, a, da, h, N, F, ctx);
        linear_dgrad(dx, dh, w, N, 0, ctx);
        return;
    }

    // Fused: the SwiGLU backward writes dh quantized in both directions.
    const Rows rows = room_for(w, N, w->OC), channels = room_for_wgrad(dh, w, N);
    const ExpertsBackward tensors = {NULL, a, NULL, da, h};
    mx_swiglu_backward_both(rows.mx, channels.mx, tensors, channels.count, tokens_of(w->workspace, N), F,
                            w->format.recipe.scale, ctx);
    quantized_gemm(dx, rows, w, &w->back, w->IC, ctx);
}

// Copies x (N, columns) to `to` and fake-quantizes it along the tokens. On the GPU rows are padded to a multiple of 128
// with zeros.
static const floatX* rounded(floatX* to, const floatX* x, int64_t columns, const Weight* w, int64_t N, Ctx* ctx) {
    const int64_t rows = round_up(N, row_align(BACKEND));
    device_copy(to, x, (size_t)(N * columns) * sizeof(floatX), ctx);
    if (rows > N) device_zero(to + N * columns, (size_t)((rows - N) * columns) * sizeof(floatX), ctx);
    mx_round_columns(to, tokens_of(w->workspace, rows), columns, w->wgrad.recipe, ctx);
    return to;
}

// Quantizes x (N, columns) column-wise into `to`, from channel `first` on.
static void by_channel(Rows to, int64_t first, const floatX* x, int64_t columns, int operand, const Weight* w,
                       int64_t N, Ctx* ctx) {
    to.mx = mx_from_channel(to.mx, first, mx_channel_length(N, 1, BACKEND));
    rows_for_wgrad(to, rows_of_values(x, N, columns), operand, 0, w->wgrad, tokens_of(w->workspace, N), ctx);
}

void linear_wgrads(const LinearGradient* list, int count, int64_t N, Ctx* ctx) {
    MxMatrix fast[MX_MATRICES];
    const Weight* of_fast = NULL;
    int n = 0;
    // The next free channel of the shared x.
    int64_t of_x = 0;
    for (const LinearGradient* g = list; g < list + count; g++) {
        const Weight* w = g->weight;
        const floatX *dy = g->dy, *x = g->x;
        weight_quantization_stats(w, ctx);

        // Fast: quantize x column-wise, and dy unless dgrad has. The GEMM follows after the loop.
        if (format_read(w->wgrad).quantized) {
            ASSERT(n < MX_MATRICES && (n == 0 || of_fast->accumulate == w->accumulate));
            const QuantizedDy* place = place_of_dy(w->workspace, w);
            if (place->dy != dy || place->N != N)
                by_channel(w->workspace->dy, place->first, dy, w->OC, WGRAD_DY, w, N, ctx);
            by_channel(w->workspace->x, of_x, x, w->IC, WGRAD_X, w, N, ctx);
            const MxMatrix matrix = {w->grad, w->OC, w->IC, place->first, of_x};
            fast[n++] = matrix;
            of_fast = w;
            of_x += w->IC;
            continue;
        }

        // Exact and floatX: a floatX GEMM. Exact fake-quantizes both operands first.
        if (w->wgrad.quantized) {
            dy = rounded(w->workspace->dy.value, dy, w->OC, w, N, ctx);
            x = rounded(w->workspace->x.value, x, w->IC, w, N, ctx);
        }
        matmul_wgrad(w->grad, dy, x, N, w->IC, w->OC, w->accumulate, ctx);
    }

    // All fast weights in one GEMM call.
    if (n == 0) return;
    GemmWorkspace* workspace = of_fast->workspace;
    gemm_mx_wgrads(fast, n, workspace->dy.mx, workspace->x.mx, mx_channel_length(N, 1, BACKEND),
                   tokens_of(workspace, N), of_fast->accumulate, ctx);
    workspace->dys = 0;  // every place in dy is free
}

void linear_backward(floatX* dx, const floatX* dy, const floatX* x, const Weight* w, int64_t N, Ctx* ctx) {
    const LinearGradient gradient = {w, dy, x};
    linear_dgrad(dx, dy, w, N, 0, ctx);
    linear_wgrads(&gradient, 1, N, ctx);
}

// --- grouped_: GEMMs of each expert's rows with its matrix ---

// y = x W^T per expert; both operands are MXFP8, or both are dequantized. w: W as forward or dgrad reads it.
static void grouped_product(floatX* y, Rows x, const QuantizedWeight* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    if (x.format.quantized)
        grouped_gemm_mx(y, NULL, x.mx, w->tiles, r, IC, OC, ctx);
    else
        grouped_gemm_forward(y, x.value, w->value, r, IC, OC, ctx);
}

void grouped_forward(floatX* y, Rows x, const Weight* w, Ragged r, Ctx* ctx) {
    if (w->format.quantized)
        grouped_product(y, x, &w->forward, r, w->IC, w->OC, ctx);
    else
        grouped_gemm_forward(y, x.value, w->w, r, w->IC, w->OC, ctx);
}

void grouped_dgrad(floatX* dx, Rows dy, const Weight* w, Ragged r, Ctx* ctx) {
    if (w->format.quantized)
        grouped_product(dx, dy, &w->back, r, w->OC, w->IC, ctx);
    else
        grouped_gemm_dgrad(dx, dy.value, w->w, r, w->IC, w->OC, ctx);
}

void grouped_wgrad(Rows dy, Rows x, const Weight* w, Ragged r, Ctx* ctx) {
    weight_quantization_stats(w, ctx);
    ASSERT(!w->rounded_grad || !w->accumulate);
    // Fast: both operands are quantized column-wise, and dy.count is the length of a channel.
    if (dy.format.quantized && w->rounded_grad)
        grouped_gemm_mx_wgrad_rounded(w->rounded_grad, dy.mx, x.mx, dy.count, r, w->IC, w->OC, ctx);
    else if (dy.format.quantized)
        grouped_gemm_mx_wgrad(w->grad, dy.mx, x.mx, dy.count, r, w->IC, w->OC, w->accumulate, ctx);
    else if (w->rounded_grad)
        grouped_gemm_wgrad_rounded(w->rounded_grad, dy.value, x.value, r, w->IC, w->OC, ctx);
    else
        grouped_gemm_wgrad(w->grad, dy.value, x.value, r, w->IC, w->OC, w->accumulate, ctx);
}
