#include "mx/rows.h"

#include "device/check.h"
#include "mx/mx_swiglu.h"

// Registers the buffers with the arena, which sets the pointers later.
void rows_plan(Arena* a, const char* name, Rows* rows, int memory, int64_t count, int64_t columns) {
    *rows = rows_of_values(NULL, count, columns);
    if (memory & ROWS_FLOATX) ARENA(a, name, ELEMENT_X, count * columns, 1, &rows->value);
    if (!(memory & ROWS_QUANTIZED)) return;
    ARENA(a, name, ELEMENT_BYTE, count * columns, 1, &rows->mx.q);
    ARENA(a, name, ELEMENT_BYTE, count * mx_stride(columns), 1, &rows->mx.scale);
}

Rows rows_as(Rows out, Rows x, Format format, Ctx* ctx) {
    // Already in this format: no copy. Bytes with another alignment of scales are a caller's error.
    if (x.format.quantized == format.quantized) {
        ASSERT(!format.quantized || x.format.recipe.align == format.recipe.align);
        return x;
    }
    out.format = format;
    if (format.quantized)
        mx_quantize(out.mx, x.value, x.count, x.columns, format.recipe, ctx);
    else
        mx_dequantize(out.value, x.mx, x.count, x.columns, 0, ctx);
    return out;
}

Rows rows_permute(Rows out, Rows tokens, Format format, Ragged r, Ctx* ctx) {
    const int64_t C = tokens.columns;
    out.format = format;
    out.columns = C;
    // Three cases: floatX is copied; MXFP8 is dequantized; MXFP8 bytes and their scales are copied.
    if (!tokens.format.quantized) {
        ASSERT(!format.quantized);
        permute_rows(out.value, tokens.value, r, (size_t)C * sizeof(floatX), ctx);
    } else if (!format.quantized) {
        mx_dequantize_rows(out.value, tokens.mx, r, C, ctx);
    } else {
        permute_rows(out.mx.q, tokens.mx.q, r, (size_t)C, ctx);
        permute_rows(out.mx.scale, tokens.mx.scale, r, (size_t)mx_stride(C), ctx);
    }
    return out;
}

// Column-wise quantized Rows: q is (columns, length).
// The scales are (length / 128, columns): one byte for each chunk of a channel.
static Rows by_channel(MxBytes mx, int64_t length, int64_t columns, MxRecipe recipe) {
    Rows rows = {length, columns, 1, {1, recipe}, NULL, mx};
    return rows;
}

Rows rows_for_wgrad(Rows out, Rows rows, int operand, int tokens, Format format, Ragged r, Ctx* ctx) {
    const int64_t C = rows.columns, length = mx_channel_length(r.capacity, r.El, BACKEND);
    if (rows.by_channel) return rows;

    // Fast: quantize column-wise. x has 512-row scale groups, dy has chunks of 128.
    if (format_read(format).quantized) {
        ASSERT(rows.format.quantized || !tokens);
        const MxRecipe recipe = {format.recipe.scale, operand == WGRAD_X ? MX_RUN : MX_CHUNK};
        if (rows.format.quantized)
            mx_requantize_channels(out.mx, rows.mx, tokens, length, r, C, recipe, ctx);
        else
            mx_quantize_channels(out.mx, rows.value, length, r, C, recipe, ctx);
        return by_channel(out.mx, length, C, recipe);
    }

    // floatX; exact: fake-quantize it in place.
    out = tokens ? rows_permute(out, rows, FORMAT_FLOATX, r, ctx) : rows_as(out, rows, FORMAT_FLOATX, ctx);
    if (format.quantized) mx_round_columns(out.value, r, C, format.recipe, ctx);
    return out;
}

Rows rows_swiglu(Rows out, const floatX* h, Ragged r, Format format, MxStats* stats, floatX* spare, Ctx* ctx) {
    const int64_t F = out.columns;
    if (!format.quantized) {
        experts_swiglu_forward(out.value, h, r, F, ctx);
        return rows_of_values(out.value, out.count, F);
    }

    // Quantization is fused with the activation, so `a` in floatX is never in memory. The statistics compute it once
    // more. Unused rows are zeros, which the statistics do not count.
    if (stats) {
        device_zero(spare, (size_t)(out.count * F) * sizeof(floatX), ctx);
        experts_swiglu_forward(spare, h, r, F, ctx);
        mx_stats(stats, spare, NULL, 1, out.count, F, format.recipe, ctx);
    }
    mx_swiglu_quantize(out.mx, h, r, F, format.recipe, ctx);

    // Exact: dequantize it.
    out.format = format;
    return rows_as(out, out, format_read(format), ctx);
}

Rows rows_swiglu_backward(Rows out, Rows* dh, ExpertsBackward t, Ragged r, Format format, Format wgrad, MxStats* stats,
                          Ctx* ctx) {
    const int64_t F = out.columns / 2, length = mx_channel_length(r.capacity, r.El, BACKEND);
    *dh = rows_of_values(t.dh, out.count, 2 * F);
    if (!format.quantized) {
        experts_swiglu_backward(t, r, F, ctx);
        return *dh;
    }

    // Statistics, as in rows_swiglu.
    if (stats) {
        device_zero(t.dh, (size_t)(out.count * 2 * F) * sizeof(floatX), ctx);
        experts_swiglu_backward(t, r, F, ctx);
        mx_stats(stats, t.dh, NULL, 1, out.count, 2 * F, format.recipe, ctx);
    }

    // dgrad and wgrad both fast: one kernel quantizes row-wise and column-wise. The column-wise result is stored in the
    // memory of t.dh.
    if (format_read(format).quantized && format_read(wgrad).quantized && F % MX_CHUNK == 0) {
        ASSERT(wgrad.recipe.scale == format.recipe.scale);
        const MxBytes channels = {(uint8_t*)t.dh, (uint8_t*)t.dh + length * 2 * F};
        *dh = by_channel(channels, length, 2 * F, format.recipe);
        mx_swiglu_backward_both(out.mx, channels, t, length, r, F, format.recipe.scale, ctx);
    } else {
        mx_swiglu_backward_quantize(out.mx, t, r, F, format.recipe, ctx);
    }
    // dh for dgrad; exact dequantizes it.
    out.format = format;
    return rows_as(out, out, format_read(format), ctx);
}
