// Rows: a matrix (count, columns) in floatX, or in a quantized format (mx/format.h). GEMMs, permutation and
// communication read the format from the tensor, so the code between them is the same for every precision.
#pragma once

#include "device/arena.h"
#include "mx/format.h"

// Values are in `value`, in floatX or rounded to a format; packed rows are in `bytes`. By token: a row for each token,
// else sorted by expert (grouped/permute.h). By column: packed for wgrad, along the tokens.
typedef enum { ROWS_VALUES, ROWS_VALUES_BY_TOKEN, ROWS_PACKED, ROWS_PACKED_BY_TOKEN, ROWS_PACKED_BY_COLUMN } RowsForm;

typedef struct Rows {
    int64_t count, columns;
    const Format* format;  // NULL: floatX
    RowsForm form;
    floatX* value;
    Packed bytes;
} Rows;

static inline int is_packed(Rows rows) { return rows.form >= ROWS_PACKED; }
// In RowsForm, forms by row and by token alternate.
static inline int is_by_token(Rows rows) { return rows.form % 2; }
static inline RowsForm rows_form(int packed, int by_token) { return (RowsForm)(2 * packed + by_token); }

static inline Rows rows_of_values(const floatX* x, int64_t count, int64_t columns) {
    Rows rows = {count, columns, NULL, ROWS_VALUES, (floatX*)x, {NULL, NULL}};
    return rows;
}

// `rows` after its bytes were packed in `format`.
static inline Rows rows_packed(Rows rows, const Format* format) {
    rows.format = format;
    rows.form = ROWS_PACKED;
    return rows;
}

// Registers buffers of (count, columns) in the arena: of values, and of the packed form of a format (NULL: none).
void rows_plan(Arena* arena, const char* name, Rows* rows, int values, const Format* packed, int64_t count,
               int64_t columns);

// x in `format`, in the form that GEMMs read: x itself if x has format and form already, else in out's buffers. If each
// GEMM rounds its own copy of values (format_of_rows is NULL), the result is x itself too.
Rows rows_as(Rows out, Rows x, const Format* format, Ctx* ctx);
// x packed in `format`, to be sent: x itself if `format` is NULL, else in out's buffers.
Rows rows_pack(Rows out, Rows x, const Format* format, Ctx* ctx);

// Copies tokens into the rows of the ragged buffer (permute_rows), in the format of the tokens, in out's buffers.
Rows rows_permute(Rows out, Rows tokens, Ragged ragged, Ctx* ctx);
// Rows for GEMMs in `format`: `tokens` itself if these GEMMs gather (grouped_gemm_gathers), else rows_permute.
Rows rows_gathered(Rows out, Rows tokens, const Format* format, Ragged ragged, Ctx* ctx);
