#include "mx/rows.h"

#include "device/check.h"
#include "grouped/experts.h"
#include "mx/mx_swiglu.h"

// Registers the buffers with the arena, which sets the pointers later.
void rows_plan(Arena* a, const char* name, Rows* rows, int memory, int64_t count, int64_t columns) {
    *rows = rows_of_values(NULL, count, columns);
    if (memory & ROWS_VALUES) arena_add(a, name, ELEMENT_X, count * columns, 1, (void**)&rows->value);
    if (!(memory & ROWS_BYTES)) return;
    arena_add(a, name, ELEMENT_BYTE, count * columns, 1, (void**)&rows->q);
    arena_add(a, name, ELEMENT_BYTE, count * mx_stride(columns), 1, (void**)&rows->scale);
}

Rows rows_as(Rows room, Rows x, Format format, Ctx* ctx) {
    if (x.format.bytes == format.bytes) {
        ASSERT(!format.bytes || x.format.cast.align == format.cast.align);
        return x;
    }
    room.format = format;
    if (format.bytes)
        mx_quantize(room.q, room.scale, x.value, x.count, x.columns, format.cast, ctx);
    else
        mx_dequantize(room.value, x.q, x.scale, x.count, x.columns, ctx);
    return room;
}

void rows_add(floatX* x, Rows rows, int accumulate, Ctx* ctx) {
    ASSERT(rows.format.bytes);
    (accumulate ? mx_dequantize_add : mx_dequantize)(x, rows.q, rows.scale, rows.count, rows.columns, ctx);
}

Rows rows_permute(Rows room, Rows tokens, Format format, Ragged r, Ctx* ctx) {
    const int64_t C = tokens.columns;
    room.format = format;
    room.columns = C;
    if (!tokens.format.bytes) {
        ASSERT(!format.bytes);
        permute_rows(room.value, tokens.value, r, (size_t)C * sizeof(floatX), ctx);
    } else if (!format.bytes) {
        mx_dequantize_rows(room.value, tokens.q, tokens.scale, r, C, ctx);
    } else {
        permute_rows(room.q, tokens.q, r, (size_t)C, ctx);
        permute_rows(room.scale, tokens.scale, r, (size_t)mx_stride(C), ctx);
    }
    return room;
}

// Column-wise quantized Rows: q is (columns, length).
static Rows by_channel(uint8_t* q, uint8_t* scale, int64_t length, int64_t columns, MxCast cast) {
    Rows rows = {length, columns, 1, {1, cast}, NULL, q, scale};
    return rows;
}

Rows rows_for_wgrad(Rows room, Rows rows, int operand, int tokens, Format format, Ragged r, Ctx* ctx) {
    const int64_t C = rows.columns, length = mx_channel_length(r.capacity, r.El, BACKEND);
    if (rows.by_channel) return rows;

    // Fast: quantize column-wise. x has 512-row scale groups, dy has chunks of 128.
    if (format_read(format).bytes) {
        ASSERT(rows.format.bytes || !tokens);
        const MxCast cast = {format.cast.scale, operand == WGRAD_X ? MX_RUN : MX_CHUNK};
        if (rows.format.bytes)
            mx_requantize_channels(room.q, room.scale, rows.q, rows.scale, tokens, length, r, C, cast, ctx);
        else
            mx_quantize_channels(room.q, room.scale, rows.value, length, r, C, cast, ctx);
        return by_channel(room.q, room.scale, length, C, cast);
    }

    // floatX; exact: fake-quantize it in place.
    room = tokens ? rows_permute(room, rows, FORMAT_VALUES, r, ctx) : rows_as(room, rows, FORMAT_VALUES, ctx);
    if (format.bytes) mx_round_columns(room.value, r, C, format.cast, ctx);
    return room;
}

Rows rows_swiglu(Rows room, const floatX* h, Ragged r, Format format, MxStats* stats, floatX* spare, Ctx* ctx) {
    const int64_t F = room.columns;
    if (!format.bytes) {
        experts_swiglu_forward(room.value, h, r, F, ctx);
        return rows_of_values(room.value, room.count, F);
    }

    // Quantization is fused with the activation, so `a` in floatX is never in memory. The statistics compute it once
    // more. Unused rows are zeros, which the statistics do not count.
    if (stats) {
        device_zero(spare, (size_t)(room.count * F) * sizeof(floatX), ctx);
        experts_swiglu_forward(spare, h, r, F, ctx);
        mx_stats(stats, spare, room.count, F, format.cast, ctx);
    }
    mx_swiglu_quantize(room.q, room.scale, h, r, F, format.cast, ctx);

    // Exact: dequantize it.
    room.format = format;
    return rows_as(room, room, format_read(format), ctx);
}

Rows rows_swiglu_backward(Rows room, Rows* dh, floatX* gated_a, real* drow_gate, const floatX* da_ungated,
                          const floatX* h, Ragged r, Format format, Format wgrad, MxStats* stats, Ctx* ctx) {
    const int64_t F = room.columns / 2, length = mx_channel_length(r.capacity, r.El, BACKEND);
    floatX* values = dh->value;
    if (!format.bytes) {
        experts_swiglu_backward(values, gated_a, drow_gate, da_ungated, h, r, F, ctx);
        return *dh;
    }

    // Statistics, as in rows_swiglu.
    if (stats) {
        device_zero(values, (size_t)(room.count * 2 * F) * sizeof(floatX), ctx);
        experts_swiglu_backward(values, gated_a, drow_gate, da_ungated, h, r, F, ctx);
        mx_stats(stats, values, room.count, 2 * F, format.cast, ctx);
    }

    // dgrad and wgrad both fast: one kernel quantizes row-wise and column-wise. The column-wise result is stored in the
    // memory of dh->value.
    if (format_read(format).bytes && format_read(wgrad).bytes && F % MX_CHUNK == 0) {
        ASSERT(wgrad.cast.scale == format.cast.scale);
        uint8_t* q = (uint8_t*)values;
        *dh = by_channel(q, q + length * 2 * F, length, 2 * F, format.cast);
        mx_swiglu_backward_both(room.q, room.scale, dh->q, dh->scale, gated_a, drow_gate, da_ungated, h, length, r, F,
                                format.cast.scale, ctx);
    } else {
        mx_swiglu_backward_quantize(room.q, room.scale, values, gated_a, drow_gate, da_ungated, h, r, F, format.cast,
                                    ctx);
    }
    room.format = format;
    return rows_as(room, room, format_read(format), ctx);
}
