// The GEMMs that read packed MXFP8 (linear/packed.h), on Hopper and Blackwell. A scale of x and dy is for 128 elements,
// one of W for a tile of 128 x 128. One quantization of W serves forward and dgrad. The GEMMs are mx/grouped_gemm_mx.h;
// for linear_ all tokens are one group.
#include "device/check.h"
#include "mx/formats.h"
#include "mx/grouped_gemm_mx.h"
#include "mx/mx_check.h"
#include "mx/mx_swiglu.h"

// --- Weights, forward and dgrad ---

static int64_t weight_scales(int64_t OC, int64_t IC) { return mx_tiles(OC) * mx_tiles(IC); }

static void pack_weight(Weight* w, Ctx* ctx) {
    w->back.packed.scale = w->forward.packed.scale;
    mx_quantize_tiles(w->forward.packed.q, w->back.packed.q, w->forward.packed.scale, w->w, w->count, w->OC, w->IC,
                      w->format->recipe.scale, ctx);
}

static void gemm(floatX* y, Rows x, const Weight* w, int back, Ragged r, Ctx* ctx) {
    // W transposed has the same tiles, with the steps swapped.
    const int64_t steps = mx_tiles(w->IC);
    const MxTiles forward = {w->forward.packed.q, w->forward.packed.scale, steps, 1};
    const MxTiles transposed = {w->back.packed.q, w->back.packed.scale, 1, steps};
    if (back)
        grouped_gemm_mx(y, x.bytes, transposed, r, w->OC, w->IC, ctx);
    else
        grouped_gemm_mx(y, x.bytes, forward, r, w->IC, w->OC, ctx);
}

// --- Experts ---

static int64_t wgrad_rows(int64_t rows, int32_t El, Backend backend) { return mx_channel_length(rows, El, backend); }

// Column-wise packed: q is (columns, length), and there is one scale byte for each chunk of a channel.
static Rows by_column(Packed bytes, const Format* f, int64_t length, int64_t columns) {
    Rows rows = {length, columns, f, 1, 0, 1, NULL, bytes};
    return rows;
}

static int swiglu_backward_packed(Packed dh, Rows* for_wgrad, ExpertsBackward t, const Weight* w13, Ragged r,
                                  Ctx* ctx) {
    const int64_t F = w13->OC / 2, length = mx_channel_length(r.capacity, r.El, BACKEND);
    // A chunk must not have both gate and up.
    if (!format_packed(w13->wgrad) || F % MX_CHUNK) return 0;
    // One kernel packs row-wise and column-wise. The column-wise result is in the memory of t.dh.
    ASSERT(w13->wgrad->recipe.scale == w13->format->recipe.scale);
    const Packed channels = {(uint8_t*)t.dh, (uint8_t*)t.dh + length * 2 * F};
    *for_wgrad = by_column(channels, w13->wgrad, length, 2 * F);
    mx_swiglu_backward_both(dh, channels, t, length, r, F, w13->format->recipe.scale, ctx);
    return 1;
}

// An operand of wgrad, column-wise. x has 512-row scale groups, dy chunks of 128.
static Rows operand_by_column(Rows x, Rows memory, const Format* f, int32_t align, Ragged r, Ctx* ctx) {
    const int64_t length = mx_channel_length(r.capacity, r.El, BACKEND);
    const MxRecipe recipe = {f->recipe.scale, align};
    if (x.by_column) return x;
    ASSERT(x.packed || !x.by_token);
    if (x.packed)
        mx_requantize_channels(memory.bytes, x.bytes, x.by_token, length, r, x.columns, recipe, ctx);
    else
        mx_quantize_channels(memory.bytes, x.value, length, r, x.columns, recipe, ctx);
    return by_column(memory.bytes, f, length, x.columns);
}

static void grouped_wgrad_packed(const Weight* w, Rows dy, Rows dy_memory, Rows x, Rows x_memory, Ragged r, Ctx* ctx) {
    dy = operand_by_column(dy, dy_memory, w->wgrad, MX_CHUNK, r, ctx);
    x = operand_by_column(x, x_memory, w->wgrad, MX_RUN, r, ctx);
    if (w->rounded_grad)
        grouped_gemm_mx_wgrad_rounded(w->rounded_grad, dy.bytes, x.bytes, dy.count, r, w->IC, w->OC, ctx);
    else
        grouped_gemm_mx_wgrad(w->grad, dy.bytes, x.bytes, dy.count, r, w->IC, w->OC, w->accumulate, ctx);
}

// --- linear_: wgrad of several weights in one launch ---

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

static void pack_both(LinearGradient* product, Packed out, int64_t N, Ragged tokens, Ctx* ctx) {
    const Weight* w = product->weight;
    const int64_t length = mx_channel_length(N, 1, BACKEND);
    ASSERT(w->wgrad->recipe.scale == w->format->recipe.scale);
    mx_quantize_both(out, place_of_dy(product, length), product->dy, length, N, w->OC, w->format->recipe.scale, ctx);
}

static int swiglu_backward_both(LinearGradient* product, Packed out, floatX* a, const floatX* da, const floatX* h,
                                int64_t N, Ragged tokens, Ctx* ctx) {
    const Weight* w = product->weight;
    const int64_t F = w->OC / 2, length = mx_channel_length(N, 1, BACKEND);
    const ExpertsBackward tensors = {NULL, a, NULL, da, h};
    if (F % MX_CHUNK) return 0;
    ASSERT(w->wgrad->recipe.scale == w->format->recipe.scale);
    mx_swiglu_backward_both(out, place_of_dy(product, length), tensors, length, tokens, F, w->format->recipe.scale,
                            ctx);
    return 1;
}

static void wgrads(LinearGradient* products, int count, int64_t N, Ragged tokens, Ctx* ctx) {
    const int64_t length = mx_channel_length(N, 1, BACKEND);
    GemmWorkspace* workspace = products->weight->workspace;
    MxMatrix matrices[MX_MATRICES];
    int n = 0, accumulate = 0;
    int64_t of_x = 0;  // the next free channel of the shared x
    for (LinearGradient* p = products; p < products + count; p++) {
        const Weight* w = p->weight;
        if (!format_packed(w->wgrad)) continue;
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
    gemm_mx_wgrads(matrices, n, workspace->dy.bytes, workspace->x.bytes, length, tokens, accumulate, ctx);
    workspace->dy_used = 0;
}

const PackedGemms mxfp8_gemms = {mx_check,           weight_scales,          pack_weight, gemm,
                                 mx_swiglu_quantize, swiglu_backward_packed, wgrad_rows,  grouped_wgrad_packed,
                                 pack_both,          swiglu_backward_both,   wgrads};
