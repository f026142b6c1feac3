#include "linear/rows.h"

#include "device/check.h"
#include "grouped/grouped_gemm.h"
#include "mx/mxfp8.h"

void rows_plan(Arena* a, const char* name, Rows* rows, int values, const Format* packed, int64_t count,
               int64_t columns) {
    *rows = rows_of_values(NULL, count, columns);
    if (values) ARENA(a, name, ELEMENT_X, count * columns, 1, &rows->value);
    if (!packed) return;
    ARENA(a, name, ELEMENT_BYTE, count * columns, 1, &rows->bytes.q);
    ARENA(a, name, ELEMENT_BYTE, count * mx_stride(columns), 1, &rows->bytes.scale);
}

Rows rows_as(Rows out, Rows x, const Format* format, Ctx* ctx) {
    const int packed = format_packed(format) != NULL;
    if (x.format == format && is_packed(x) == packed) return x;

    // Packed rows become values of their format. A GEMM that reads another packed form is a caller's error.
    out.format = is_packed(x) ? x.format : format;
    out.form = rows_form(!is_packed(x) && packed, is_by_token(x));
    if (is_packed(x)) {
        ASSERT(!packed);
        mx_dequantize(out.value, x.bytes, x.count, x.columns, 0, ctx);
    } else if (!format_of_rows(format) || x.format) {
        return x;  // values: rows that were rounded once are not rounded again
    } else if (packed) {
        mx_quantize(out.bytes, x.value, x.count, x.columns, format->recipe, ctx);
    } else {
        const Draw nearest = {NULL, 0};
        format->round(format, out.value, x.value, ragged_matrices(1, x.count), x.columns, 0, nearest, NULL, ctx);
    }
    return out;
}

Rows rows_pack(Rows out, Rows x, const Format* format, Ctx* ctx) {
    if (!format) return x;
    mx_quantize(out.bytes, x.value, x.count, x.columns, format->recipe, ctx);
    return rows_packed(out, format);
}

Rows rows_permute(Rows out, Rows tokens, Ragged r, Ctx* ctx) {
    out.columns = tokens.columns;
    out.format = tokens.format;
    out.form = rows_form(is_packed(tokens), 0);
    if (!is_packed(tokens)) {
        permute_rows(out.value, tokens.value, r, (size_t)tokens.columns * sizeof(floatX), ctx);
    } else {
        permute_rows(out.bytes.q, tokens.bytes.q, r, (size_t)tokens.columns, ctx);
        permute_rows(out.bytes.scale, tokens.bytes.scale, r, (size_t)mx_stride(tokens.columns), ctx);
    }
    return out;
}

Rows rows_gathered(Rows out, Rows tokens, const Format* format, Ragged r, Ctx* ctx) {
    const int gathers = !format && !tokens.format && grouped_gemm_gathers(ctx);
    return gathers ? tokens : rows_permute(out, tokens, r, ctx);
}
