// Products in other formats than floatX. Values are rounded for floatX GEMMs. Packed MXFP8 has the GEMMs of
// mx/grouped_gemm_mx.h, on Hopper and Blackwell; for linear_ all tokens are one group. A scale is for 128 elements of x
// or dy, or for a tile of 128 x 128 of W: one quantization of W serves forward and dgrad.
#include "linear/quantized.h"

#include <math.h>

#include "device/check.h"
#include "grouped/grouped_gemm.h"
#include "layers/matmul.h"
#include "mx/formats.h"
#include "mx/grouped_gemm_mx.h"
#include "mx/mx_stats.h"
#include "mx/mx_swiglu.h"

// --- Formats ---

// The format of dispatch or wgrad: if it is MXFP8, that of the GEMMs with the same operands, if these are MXFP8 too.
// Bytes that no GEMM reads have the exact format's blocks of 32.
static const Format* format_like(int64_t id, const Format* gemms, int64_t scale_rule) {
    if (id != FORMAT_MXFP8) return format_of_id(id, scale_rule);
    return format_of_rows(gemms) ? gemms : format_of_id(FORMAT_MXFP8_EXACT, scale_rule);
}

Formats formats_of(int64_t linear, int64_t expert, int64_t dispatch, int64_t combine, int64_t wgrad,
                   int64_t scale_rule) {
    Formats f = {.gemm = {NULL, format_of_id(linear, scale_rule), format_of_id(expert, scale_rule)}};
    f.wgrad[LINEAR] = f.gemm[LINEAR] ? format_like(wgrad, f.gemm[LINEAR], scale_rule) : NULL;
    f.wgrad[EXPERT] = format_like(wgrad, f.gemm[EXPERT], scale_rule);
    f.dispatch = format_like(dispatch, f.gemm[EXPERT], scale_rule);
    f.combine = format_like(combine, NULL, scale_rule);
    f.any = linear || expert || wgrad;
    f.packed = format_packed(f.gemm[LINEAR]) || format_packed(f.gemm[EXPERT]);
    return f;
}

const Format* format_in_block(const Format* f, int64_t layer, int64_t L) {
    return f && f->bf16_blocks > 0 && layer >= L - lround(f->bf16_blocks * (double)L) ? NULL : f;
}

// --- Memory, and quantization of weights ---

void weight_plan(Arena* a, Weight* w, int64_t group) {
    const int64_t n = w->count * w->OC * w->IC;
    const Format* packed = format_packed(w->format);
    const char* name = group ? "dense weights, quantized" : "expert weights, quantized";
    WeightCopy* copies[2] = {&w->forward, &w->back};
    if (!w->format) return;

    // The quantized copies for forward and dgrad.
    for (int i = 0; i < 2; i++)
        if (packed)
            ARENA(a, name, ELEMENT_BYTE, n, 0, &copies[i]->packed.q);
        else
            ARENA(a, name, ELEMENT_X, n, 0, &copies[i]->value);
    if (packed) ARENA(a, name, ELEMENT_BYTE, w->count * mx_tiles(w->OC) * mx_tiles(w->IC), 0, &w->forward.packed.scale);

    // The shared workspace grows to the largest need of a weight.
    if (!group) return;
    GemmWorkspace* workspace = w->workspace;
    workspace->format = w->format;
    workspace->inputs = max_i64(workspace->inputs, max_i64(w->OC, w->IC));
    if (!w->wgrad) return;
    workspace->wgrad = w->wgrad;
    const int64_t same = workspace->group == group;
    workspace->group = group;
    workspace->dy_of_group = w->OC + same * workspace->dy_of_group;
    workspace->x_of_group = w->IC + same * workspace->x_of_group;
    workspace->of_dy = max_i64(workspace->of_dy, workspace->dy_of_group);
    workspace->of_x = max_i64(workspace->of_x, workspace->x_of_group);
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

int64_t grouped_wgrad_rows(const Format* wgrad, int64_t rows, int32_t El, Backend backend) {
    return format_packed(wgrad) ? mx_channel_length(rows, El, backend) : rows;
}

void linear_batch(GemmWorkspace* workspace, int batch, int64_t N, Ctx* ctx) {
    const Batch it = {
        {0, round_up(N, row_align(BACKEND))}, (int32_t)N, {workspace->key, workspace->before * round_up(N, 8)}};
    if (workspace->batches) device_upload(workspace->batches + batch, &it, sizeof(it), ctx);
}

void weight_quantize(Weight* w, Ctx* ctx) {
    const Format* f = w->format;
    if (!f) return;
    if (format_packed(f))
        mx_quantize_tiles(w->forward.packed.q, w->back.packed.q, w->forward.packed.scale, w->w, w->count, w->OC, w->IC,
                          f->recipe.scale, ctx);
    else
        f->round_weight(f, w->forward.value, w->back.value, w->w, w->count, w->OC, w->IC, NULL, ctx);
}

// The statistics of a weight's operand.
static QuantizationStats* stats_of(const Weight* w, int operand) {
    return w->workspace->stats + w->stream / (2 * WEIGHT_STREAMS) * WEIGHT_STATS + operand;
}

void weight_measure(const Weight* w, int operand, const Format* format, const floatX* x, int64_t rows, int64_t columns,
                    Ctx* ctx) {
    const Draw nearest = {NULL, 0};
    if (format && format->round && w->workspace->stats)
        format->round(format, NULL, x, ragged_matrices(1, rows), columns, 0, nearest, stats_of(w, operand), ctx);
}

// The statistics of W for forward. Called with dgrad, which runs once per micro-step, with activation recomputation or
// without.
static void measure_weight(const Weight* w, Ctx* ctx) {
    const Format* f = w->format;
    if (!w->workspace->stats) return;
    if (format_packed(f))
        mx_stats(stats_of(w, STATS_W), w->w, w->forward.packed.scale, w->count, w->OC, w->IC, f->recipe, ctx);
    else
        f->round_weight(f, NULL, NULL, w->w, w->count, w->OC, w->IC, stats_of(w, STATS_W), ctx);
}

// x as a GEMM reads it: x itself if it is in that format, else rounded into `to`, which may be x. Gradients have random
// numbers, others in wgrad.
static Rows rounded(floatX* to, Rows x, const Weight* w, int operand, int wgrad, Ragged groups, Ctx* ctx) {
    const Format* f = wgrad ? w->wgrad : w->format;
    const GemmWorkspace* g = operand == STATS_DY ? w->workspace : NULL;
    const Draw draw = {g && g->batches ? &g->batches[g->batch].draws : NULL, w->stream + (wgrad ? WEIGHT_STREAMS : 0)};
    if (!f || !f->round || (x.format == f && !wgrad)) return x;
    f->round(f, to, x.value, groups, x.columns, wgrad, draw, NULL, ctx);
    x.value = to;
    x.format = f;
    return x;
}

// y = x W^T, or with `back` dx = dy W. Values without starts of groups are rows of one matrix.
static void gemm(floatX* y, Rows x, const Weight* w, int back, Ragged r, Ctx* ctx) {
    // W transposed has the same tiles, with the steps swapped.
    const WeightCopy copy = back ? w->back : w->forward;
    const int64_t IC = back ? w->OC : w->IC, OC = back ? w->IC : w->OC, steps = mx_tiles(w->IC);
    const MxTiles tiles = {copy.packed.q, w->forward.packed.scale, back ? 1 : steps, back ? steps : 1};
    if (is_packed(x))
        grouped_gemm_mx(y, x.bytes, tiles, r, IC, OC, ctx);
    else if (r.group_start)
        grouped_gemm_forward(y, x.value, copy.value, r, IC, OC, ctx);
    else
        matmul_forward(y, x.value, copy.value, r.capacity, IC, OC, ctx);
}

// 1: one kernel packs dy for dgrad and for wgrad.
static int packs_both(const Weight* w) { return format_packed(w->format) && w->wgrad == w->format; }

// --- linear_ ---

// The tokens of the current batch as the only group of a ragged buffer of `rows` rows.
static Ragged tokens_of(const Weight* w, int64_t rows) {
    Batch* batch = w->workspace->batches + w->workspace->batch;
    const Ragged tokens = {1, rows, batch->start, &batch->rows, NULL, NULL, NULL};
    return tokens;
}

// The place of a product's dy in the shared buffer: after those of the other products since the last wgrads.
static MxBytes place_of_dy(LinearGradient* product, int64_t length) {
    const Weight* w = product->weight;
    GemmWorkspace* workspace = w->workspace;
    if (!product->quantized_dy) {
        ASSERT(workspace->dy_used + w->OC <= workspace->of_dy);
        product->quantized_dy = 1 + workspace->dy_used;
        workspace->dy_used += w->OC;
    }
    return mx_from_channel(workspace->dy.bytes, product->quantized_dy - 1, length);
}

void quantized_linear(floatX* y, const floatX* x, const Weight* w, LinearGradient* back, int64_t N, Ctx* ctx) {
    const int operand = back ? STATS_DY : STATS_X;
    const int64_t length = mx_channel_length(N, 1, BACKEND);
    const Ragged tokens = ragged_matrices(1, N);
    const Rows to = w->workspace->input;
    Rows in = rows_of_values(x, N, back ? w->OC : w->IC);
    weight_measure(w, operand, w->format, x, N, in.columns, ctx);
    if (back) measure_weight(w, ctx);
    if (back && packs_both(w)) {
        in = rows_packed(to, w->format);
        mx_quantize_both(in.bytes, place_of_dy(back, length), x, length, N, w->OC, w->format->recipe.scale, ctx);
    } else {
        in = rounded(to.value, rows_as(to, in, w->format, ctx), w, operand, 0, tokens, ctx);
    }
    gemm(y, in, w, back != NULL, is_packed(in) ? tokens_of(w, N) : tokens, ctx);
}

int quantized_swiglu_backward(floatX* dx, floatX* a, const floatX* da, const floatX* h, LinearGradient* product,
                              int64_t N, Ctx* ctx) {
    const Weight* w = product->weight;
    const int64_t F = w->OC / 2, length = mx_channel_length(N, 1, BACKEND);
    const Rows in = rows_packed(w->workspace->input, w->format);
    const ExpertsBackward tensors = {NULL, a, NULL, da, h};
    const Ragged tokens = tokens_of(w, N);
    // A chunk must not have both gate and up.
    if (!packs_both(w) || w->workspace->stats || F % MX_CHUNK) return 0;
    mx_swiglu_backward_both(in.bytes, place_of_dy(product, length), tensors, length, tokens, F, w->format->recipe.scale,
                            ctx);
    gemm(dx, in, w, 1, tokens, ctx);
    return 1;
}

// x (N, columns) as wgrad reads it, rounded along the tokens into the workspace's dy or x.
static const floatX* wgrad_values(const Weight* w, int operand, const floatX* x, int64_t N, int64_t columns, Ctx* ctx) {
    floatX* to = operand == STATS_DY ? w->workspace->dy.value : w->workspace->x.value;
    return rounded(to, rows_of_values(x, N, columns), w, operand, 1, ragged_matrices(1, N), ctx).value;
}

void quantized_wgrads(LinearGradient* products, int count, int64_t N, Ctx* ctx) {
    const int64_t length = mx_channel_length(N, 1, BACKEND);
    GemmWorkspace* workspace = products->weight->workspace;
    const Ragged tokens = tokens_of(products->weight, N);
    MxMatrix matrices[MX_MATRICES];
    int n = 0, accumulate = 0;
    int64_t of_x = 0;  // the next free channel of the shared x
    for (LinearGradient* p = products; p < products + count; p++) {
        const Weight* w = p->weight;
        if (!format_packed(w->wgrad)) {
            if (w->wgrad)
                matmul_wgrad(w->grad, wgrad_values(w, STATS_DY, p->dy, N, w->OC, ctx),
                             wgrad_values(w, STATS_X, p->x, N, w->IC, ctx), N, w->IC, w->OC, w->accumulate, ctx);
            continue;
        }
        ASSERT(n < MX_MATRICES && (n == 0 || w->accumulate == accumulate));
        accumulate = w->accumulate;

        // dy is packed already if dgrad has done it.
        const int packed = p->quantized_dy > 0;
        const MxBytes dy = place_of_dy(p, length), x = mx_from_channel(workspace->x.bytes, of_x, length);
        const MxRecipe chunks = {w->wgrad->recipe.scale, MX_CHUNK}, runs = {w->wgrad->recipe.scale, MX_RUN};
        if (!packed) mx_quantize_channels(dy, p->dy, length, tokens, w->OC, chunks, ctx);
        mx_quantize_channels(x, p->x, length, tokens, w->IC, runs, ctx);
        const MxMatrix matrix = {w->grad, w->OC, w->IC, p->quantized_dy - 1, of_x};
        matrices[n++] = matrix;
        of_x += w->IC;
        p->quantized_dy = 0;
    }
    // The packed ones in one launch.
    if (n) gemm_mx_wgrads(matrices, n, workspace->dy.bytes, workspace->x.bytes, length, tokens, accumulate, ctx);
    workspace->dy_used = 0;
}

// --- grouped_ ---

void quantized_grouped(floatX* y, Rows x, const Weight* w, int back, Ragged r, Ctx* ctx) {
    if (back)
        measure_weight(w, ctx);
    else
        x = rounded(x.value, x, w, STATS_X, 0, r, ctx);
    gemm(y, x, w, back, r, ctx);
}

// a = swiglu(h) in `format`, in out's buffers.
static Rows activation(Rows out, const floatX* h, const Format* format, Ragged r, int64_t F, Ctx* ctx) {
    out.columns = F;
    if (!format_packed(format)) {
        experts_swiglu_forward(out.value, h, r, F, ctx);
        return rows_as(out, rows_of_values(out.value, r.capacity, F), format, ctx);
    }
    mx_swiglu_quantize(out.bytes, h, r, F, format->recipe.scale, ctx);
    out.count = r.capacity;
    return rows_packed(out, format);
}

Rows quantized_grouped_swiglu(Rows out, const floatX* h, const Weight* w2, Ragged r, Ctx* ctx) {
    const int64_t F = w2->IC;
    // Statistics take values. Unused rows are zeros, which they do not count.
    if (w2->workspace->stats) {
        device_zero(out.value, (size_t)(r.capacity * F) * sizeof(floatX), ctx);
        experts_swiglu_forward(out.value, h, r, F, ctx);
        weight_measure(w2, STATS_X, w2->format, out.value, r.capacity, F, ctx);
    }
    return activation(out, h, w2->format, r, F, ctx);
}

// Column-wise packed: q is (columns, length), and there is one scale byte for each chunk of a channel.
static Rows by_column(Packed bytes, const Format* f, int64_t length, int64_t columns) {
    Rows rows = {length, columns, f, ROWS_PACKED_BY_COLUMN, NULL, bytes};
    return rows;
}

Rows quantized_grouped_dgrad_swiglu(Rows out, Rows* for_wgrad, ExpertsBackward t, floatX* da, Rows dy, const Weight* w2,
                                    const Weight* w13, Ragged r, Ctx* ctx) {
    const int64_t F = w2->IC, length = mx_channel_length(r.capacity, r.El, BACKEND);
    const Format* format = w13->format;
    quantized_grouped(da, rounded(out.value, dy, w2, STATS_DY, 0, r, ctx), w2, 1, r, ctx);

    // Statistics as above.
    if (w13->workspace->stats) {
        device_zero(t.dh, (size_t)(r.capacity * 2 * F) * sizeof(floatX), ctx);
        experts_swiglu_backward(t, r, F, ctx);
        weight_measure(w13, STATS_DY, format, t.dh, r.capacity, 2 * F, ctx);
    }

    // One kernel packs dh row-wise and column-wise. The column-wise result is in the memory of t.dh.
    if (packs_both(w13) && F % MX_CHUNK == 0) {
        const Packed channels = {(uint8_t*)t.dh, (uint8_t*)t.dh + length * 2 * F};
        *for_wgrad = by_column(channels, format, length, 2 * F);
        mx_swiglu_backward_both(out.bytes, channels, t, length, r, F, format->recipe.scale, ctx);
        return rows_packed(out, format);
    }

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

// An operand of wgrad, column-wise. x has 512-row scale groups, dy chunks of 128.
static Rows operand_by_column(Rows x, Rows memory, const Format* f, int32_t align, Ragged r, Ctx* ctx) {
    const int64_t length = mx_channel_length(r.capacity, r.El, BACKEND);
    const MxRecipe recipe = {f->recipe.scale, align};
    if (x.form == ROWS_PACKED_BY_COLUMN) return x;
    ASSERT(x.form != ROWS_VALUES_BY_TOKEN);
    if (is_packed(x))
        mx_requantize_channels(memory.bytes, x.bytes, is_by_token(x), length, r, x.columns, recipe, ctx);
    else
        mx_quantize_channels(memory.bytes, x.value, length, r, x.columns, recipe, ctx);
    return by_column(memory.bytes, f, length, x.columns);
}

void quantized_grouped_wgrad(const Weight* w, Rows dy, Rows dy_memory, Rows x, Rows x_memory, Ragged r, Ctx* ctx) {
    dy = operand_by_column(dy, dy_memory, w->wgrad, MX_CHUNK, r, ctx);
    x = operand_by_column(x, x_memory, w->wgrad, MX_RUN, r, ctx);
    grouped_gemm_mx_wgrad(w->grad, w->rounded_grad, dy.bytes, x.bytes, dy.count, r, w->IC, w->OC, w->accumulate, ctx);
}

Rows quantized_wgrad_rows(const Weight* w, int operand, Rows x, Rows memory, Ragged r, Ctx* ctx) {
    if (is_by_token(x)) return x;
    x.count = r.capacity;
    x = rows_as(memory, x, NULL, ctx);
    return rounded(x.value, x, w, operand, 1, r, ctx);
}
