#include "linear/linear.h"

#include "device/check.h"
#include "grouped/grouped_gemm.h"
#include "layers/matmul.h"
#include "layers/swiglu.h"
#include "linear/packed.h"

// --- Memory, and quantization of weights ---

void weight_plan(Arena* a, Weight* w, int linear) {
    const int64_t n = w->count * w->OC * w->IC;
    const Format* packed = format_packed(w->format);
    const char* name = linear ? "dense weights, quantized" : "expert weights, quantized";
    WeightCopy* copies[2] = {&w->forward, &w->back};
    if (!w->format) return;

    // The quantized copies for forward and dgrad.
    for (int i = 0; i < 2; i++)
        if (packed)
            ARENA(a, name, ELEMENT_BYTE, n, 0, &copies[i]->packed.q);
        else
            ARENA(a, name, ELEMENT_X, n, 0, &copies[i]->value);
    if (packed)
        ARENA(a, name, ELEMENT_BYTE, w->count * packed->gemms->weight_scales(w->OC, w->IC), 0,
              &w->forward.packed.scale);

    // The shared workspace grows to the largest need of a weight.
    if (!linear) return;
    GemmWorkspace* workspace = w->workspace;
    workspace->format = w->format;
    workspace->inputs = max_i64(workspace->inputs, max_i64(w->OC, w->IC));
    if (w->wgrad) workspace->wgrad = w->wgrad;
}

// A batch: its tokens as one group of the grouped GEMM, which on the GPU ends at a multiple of 128, beyond the tokens
// (grouped/permute.h); and its random numbers.
typedef struct Batch {
    int64_t start[2];
    int32_t rows;
    BatchDraws draws;
} Batch;

void linear_plan(Arena* a, GemmWorkspace* workspace, int64_t N, int batches) {
    // One quantized operand. Rounded in place, wgrad's values would change dy and x, so they are copies.
    const Format *packed = format_packed(workspace->format), *wgrad = format_packed(workspace->wgrad);
    ARENA(a, "batches of GEMMs", ELEMENT_BYTE, batches * (int64_t)sizeof(Batch), 0, &workspace->batches);
    if (!workspace->format) return;
    rows_plan(a, "operand of a GEMM, quantized", &workspace->input, !packed, packed, round_up(N, row_align(a->backend)),
              workspace->inputs);

    // Quantized wgrad. Packed: the operands of all weights of one linear_wgrads. Values: those of one weight.
    if (!workspace->wgrad) return;
    const char* name = "operand of wgrad, quantized";
    const int64_t rows = grouped_wgrad_rows(workspace->wgrad, N, 1, a->backend);
    rows_plan(a, name, &workspace->dy, !wgrad, wgrad, rows, wgrad ? workspace->of_dy : workspace->inputs);
    rows_plan(a, name, &workspace->x, !wgrad, wgrad, rows, wgrad ? workspace->of_x : workspace->inputs);
}

void linear_batch(GemmWorkspace* workspace, int batch, int64_t N, Ctx* ctx) {
    const Batch it = {
        {0, round_up(N, row_align(BACKEND))}, (int32_t)N, {workspace->key, workspace->before * round_up(N, 8)}};
    if (workspace->batches) device_upload(workspace->batches + batch, &it, sizeof(it), ctx);
}

void weight_quantize(Weight* w, Ctx* ctx) {
    const Format* f = w->format;
    if (!f) return;
    if (f->gemms)
        f->gemms->pack_weight(w, ctx);
    else
        f->round_weight(f, w->forward.value, w->back.value, w->w, w->count, w->OC, w->IC, ctx);
}

void weight_measure(const Weight* w, int operand, const Format* format, const floatX* x, int64_t rows, int64_t columns,
                    Ctx* ctx) {
    if (w->stats && format && format->round) format->measure(format, w->stats + operand, x, NULL, rows, columns, ctx);
}

// The statistics of W for forward. Called with wgrad, which runs once per micro-step, with activation recomputation or
// without.
static void measure_weight(const Weight* w, Ctx* ctx) {
    if (w->stats && w->format) w->format->measure(w->format, w->stats + STATS_W, w->w, w, w->OC, w->IC, ctx);
}

// x as a GEMM reads it: x itself if it is in that format, else rounded into `to`, which may be x. Gradients have random
// numbers, others in wgrad.
static Rows rounded(floatX* to, Rows x, const Weight* w, int operand, int wgrad, Ragged groups, Ctx* ctx) {
    const Format* f = wgrad ? w->wgrad : w->format;
    const GemmWorkspace* g = operand == STATS_DY ? w->workspace : NULL;
    const Draw draw = {g && g->batches ? &g->batches[g->batch].draws : NULL, w->stream + (wgrad ? WEIGHT_STREAMS : 0)};
    if (!f || !f->round || (x.format == f && !wgrad)) return x;
    f->round(f, to, x.value, groups, x.columns, wgrad, draw, ctx);
    x.value = to;
    x.format = f;
    return x;
}

// --- linear_: GEMMs of all tokens with one matrix ---

// The tokens of the current batch as the only group of a ragged buffer of `rows` rows.
static Ragged tokens_of(const Weight* w, int64_t rows) {
    Batch* batch = w->workspace->batches + w->workspace->batch;
    const Ragged tokens = {1, rows, batch->start, &batch->rows, NULL, NULL, NULL};
    return tokens;
}

// The shared buffer for a quantized operand (N, columns).
static Rows room_for(const Weight* w, int64_t N, int64_t columns) {
    Rows out = w->format ? w->workspace->input : rows_of_values(NULL, N, columns);
    out.count = N;
    out.columns = columns;
    return out;
}

// x (N, columns) in w's format.
static Rows operand_of(const Weight* w, int operand, const floatX* x, int64_t N, int64_t columns, Ctx* ctx) {
    weight_measure(w, operand, w->format, x, N, columns, ctx);
    const Rows out = room_for(w, N, columns), in = rows_as(out, rows_of_values(x, N, columns), w->format, ctx);
    return rounded(out.value, in, w, operand, 0, ragged_matrices(1, N), ctx);
}

void linear_forward(floatX* y, const floatX* x, const Weight* w, int64_t N, Ctx* ctx) {
    const Rows in = operand_of(w, STATS_X, x, N, w->IC, ctx);
    if (in.packed)
        w->format->gemms->gemm(y, in, w, 0, tokens_of(w, N), ctx);
    else
        matmul_forward(y, in.value, w->format ? w->forward.value : w->w, N, w->IC, w->OC, ctx);
}

// 1: the packed dy serves dgrad and wgrad, and one kernel makes both.
static int is_packed_both(const Weight* w) { return format_packed(w->format) && format_packed(w->wgrad); }

void linear_dgrad(floatX* dx, LinearGradient* product, int64_t N, int accumulate, Ctx* ctx) {
    const Weight* w = product->weight;
    Rows in;
    // Quantized GEMMs write dx; only the floatX GEMM can add to it.
    ASSERT(!accumulate || !w->format);
    if (is_packed_both(w)) {
        weight_measure(w, STATS_DY, w->format, product->dy, N, w->OC, ctx);
        in = rows_packed(room_for(w, N, w->OC), w->format);
        w->format->gemms->pack_both(product, in.bytes, N, tokens_of(w, N), ctx);
    } else {
        in = operand_of(w, STATS_DY, product->dy, N, w->OC, ctx);
    }

    if (in.packed)
        w->format->gemms->gemm(dx, in, w, 1, tokens_of(w, N), ctx);
    else if (w->format)
        matmul_forward(dx, in.value, w->back.value, N, w->OC, w->IC, ctx);
    else
        matmul_dgrad(dx, in.value, w->w, N, w->IC, w->OC, accumulate, ctx);
}

void linear_swiglu_backward(floatX* dx, floatX* dh, floatX* a, const floatX* da, const floatX* h,
                            LinearGradient* product, int64_t N, Ctx* ctx) {
    const Weight* w = product->weight;
    // Fused: the backward of SwiGLU packs dh for dgrad and wgrad.
    if (is_packed_both(w) && !w->stats) {
        const Rows in = rows_packed(room_for(w, N, w->OC), w->format);
        if (w->format->gemms->swiglu_backward_both(product, in.bytes, a, da, h, N, tokens_of(w, N), ctx)) {
            w->format->gemms->gemm(dx, in, w, 1, tokens_of(w, N), ctx);
            return;
        }
    }
    swiglu_backward(dh, a, da, h, N, w->OC / 2, ctx);
    linear_dgrad(dx, product, N, 0, ctx);
}

// x (N, columns) as wgrad reads it: itself, or rounded along the tokens into the workspace's dy or x.
static const floatX* wgrad_values(const Weight* w, int operand, const floatX* x, int64_t N, int64_t columns, Ctx* ctx) {
    if (!w->wgrad) return x;
    floatX* to = operand == STATS_DY ? w->workspace->dy.value : w->workspace->x.value;
    return rounded(to, rows_of_values(x, N, columns), w, operand, 1, ragged_matrices(1, N), ctx).value;
}

void linear_wgrads(LinearGradient* products, int count, int64_t N, Ctx* ctx) {
    const Weight* packed = NULL;  // one of those whose wgrad is packed
    for (LinearGradient* p = products; p < products + count; p++) {
        const Weight* w = p->weight;
        measure_weight(w, ctx);
        if (format_packed(w->wgrad))
            packed = w;
        else
            matmul_wgrad(w->grad, wgrad_values(w, STATS_DY, p->dy, N, w->OC, ctx),
                         wgrad_values(w, STATS_X, p->x, N, w->IC, ctx), N, w->IC, w->OC, w->accumulate, ctx);
    }
    if (packed) packed->wgrad->gemms->wgrads(products, count, N, tokens_of(packed, N), ctx);
}

void linear_backward(floatX* dx, const floatX* dy, const floatX* x, const Weight* w, int64_t N, Ctx* ctx) {
    LinearGradient product = {w, dy, x, 0};
    linear_dgrad(dx, &product, N, 0, ctx);
    linear_wgrads(&product, 1, N, ctx);
}

// --- grouped_: GEMMs of each expert's rows with its matrix ---

void grouped_forward(floatX* y, Rows x, const Weight* w, Ragged r, Ctx* ctx) {
    if (x.packed)
        w->format->gemms->gemm(y, x, w, 0, r, ctx);
    else
        grouped_gemm_forward(y, rounded(x.value, x, w, STATS_X, 0, r, ctx).value, w->format ? w->forward.value : w->w,
                             r, w->IC, w->OC, ctx);
}

void grouped_dgrad(floatX* dx, Rows dy, const Weight* w, Ragged r, Ctx* ctx) {
    if (dy.packed)
        w->format->gemms->gemm(dx, dy, w, 1, r, ctx);
    else if (w->format)
        grouped_gemm_forward(dx, dy.value, w->back.value, r, w->OC, w->IC, ctx);
    else
        grouped_gemm_dgrad(dx, dy.value, w->w, r, w->IC, w->OC, ctx);
}

// a = swiglu(h) in `format`, in out's buffers.
static Rows activation(Rows out, const floatX* h, const Format* format, Ragged r, int64_t F, Ctx* ctx) {
    out.columns = F;
    if (!format_packed(format)) {
        experts_swiglu_forward(out.value, h, r, F, ctx);
        return rows_as(out, rows_of_values(out.value, r.capacity, F), format, ctx);
    }
    format->gemms->swiglu(out.bytes, h, r, F, format->recipe.scale, ctx);
    out.count = r.capacity;
    return rows_packed(out, format);
}

Rows grouped_forward_swiglu(Rows out, floatX* h, Rows x, const Weight* w13, const Weight* w2, Ragged r, Ctx* ctx) {
    const int64_t F = w2->IC;
    if (x.by_token) {
        grouped_gemm_swiglu(h, out.value, x.value, w13->w, r, w13->IC, F, ctx);
        return rows_of_values(out.value, r.capacity, F);
    }
    grouped_forward(h, x, w13, r, ctx);
    // Statistics take values. Unused rows are zeros, which they do not count.
    if (w2->format && w2->stats) {
        device_zero(out.value, (size_t)(r.capacity * F) * sizeof(floatX), ctx);
        experts_swiglu_forward(out.value, h, r, F, ctx);
        weight_measure(w2, STATS_X, w2->format, out.value, r.capacity, F, ctx);
    }
    return activation(out, h, w2->format, r, F, ctx);
}

Rows grouped_dgrad_swiglu(Rows out, Rows* for_wgrad, int32_t* gate_parts, ExpertsBackward t, floatX* da, Rows dy,
                          const Weight* w2, const Weight* w13, Ragged r, Ctx* ctx) {
    const int64_t F = w2->IC;
    const Format* format = w13->format;
    *for_wgrad = rows_of_values(t.dh, r.capacity, 2 * F);
    t.da_ungated = da;

    // SwiGLU in the epilogue.
    if (!format && !dy.packed && grouped_gemm_fuses(ctx)) {
        *gate_parts = grouped_gemm_gate_parts(F);
        grouped_gemm_dgrad_swiglu(t, dy.value, w2->w, dy.by_token ? DY_BY_TOKEN : ALL_BY_ROW, r, w2->OC, F, ctx);
        return *for_wgrad;
    }
    *gate_parts = 1;
    grouped_dgrad(da, rounded(out.value, dy, w2, STATS_DY, 0, r, ctx), w2, r, ctx);

    // Statistics as above.
    if (format && w13->stats) {
        device_zero(t.dh, (size_t)(r.capacity * 2 * F) * sizeof(floatX), ctx);
        experts_swiglu_backward(t, r, F, ctx);
        weight_measure(w13, STATS_DY, format, t.dh, r.capacity, 2 * F, ctx);
    }

    // Fused with packing.
    if (format_packed(format) && format->gemms->swiglu_backward(out.bytes, for_wgrad, t, w13, r, ctx))
        return rows_packed(out, format);

    // The gate's gradient, and gate * a, take `a` as the forward GEMM read it. Where each GEMM rounds its own copy,
    // they take the unrounded `a`.
    experts_swiglu_backward(t, r, F, ctx);
    if (format_of_rows(format)) {
        Rows a = out;
        a.value = t.gated_a;
        rows_as(a, activation(a, t.h, format, r, F, ctx), NULL, ctx);
        experts_gate_backward(t, r, F, ctx);
    }
    return rounded(out.value, rows_as(out, *for_wgrad, format, ctx), w13, STATS_DY, 0, r, ctx);
}

int64_t grouped_wgrad_rows(const Format* wgrad, int64_t rows, int32_t El, Backend backend) {
    return format_packed(wgrad) ? wgrad->gemms->wgrad_rows(rows, El, backend) : rows;
}

// An operand of wgrad as values: by token if the GEMM gathers it, else by row, rounded down the columns of each group.
static Rows wgrad_rows(const Weight* w, int operand, Rows x, Rows memory, Ragged r, Ctx* ctx) {
    if (x.by_token) x = rows_gathered(memory, x, w->wgrad, operand == STATS_X ? w->OC : w->IC, r, ctx);
    if (x.by_token) return x;
    x.count = r.capacity;
    x = rows_as(memory, x, NULL, ctx);
    return rounded(x.value, x, w, operand, 1, r, ctx);
}

void grouped_wgrad(const Weight* w, Rows dy, Rows dy_memory, Rows x, Rows x_memory, Ragged r, Ctx* ctx) {
    measure_weight(w, ctx);
    ASSERT(!w->rounded_grad || !w->accumulate);
    if (format_packed(w->wgrad)) {
        w->wgrad->gemms->grouped_wgrad(w, dy, dy_memory, x, x_memory, r, ctx);
        return;
    }
    dy = wgrad_rows(w, STATS_DY, dy, dy_memory, r, ctx);
    x = wgrad_rows(w, STATS_X, x, x_memory, r, ctx);
    ASSERT(!dy.by_token || !x.by_token);
    const GroupedRows order = dy.by_token ? DY_BY_TOKEN : x.by_token ? X_BY_TOKEN : ALL_BY_ROW;
    if (w->rounded_grad)
        grouped_gemm_wgrad_rounded(w->rounded_grad, dy.value, x.value, order, r, w->IC, w->OC, ctx);
    else
        grouped_gemm_wgrad(w->grad, dy.value, x.value, order, r, w->IC, w->OC, w->accumulate, ctx);
}
