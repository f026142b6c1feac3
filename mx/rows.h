// Rows: a matrix whose rows are tokens, and the format that its numbers have. The format belongs to the tensor: what
// multiplies, moves or sends rows looks at it, and the code between reads the same for every precision.
#ifndef MX_ROWS_H
#define MX_ROWS_H

#include "device/arena.h"
#include "mx/mx_stats.h"
#include "mx/mxfp8.h"

BEGIN_C

// Values in floatX, or MXFP8 bytes with their scales (mx/mxfp8.h) and how they were cast.
typedef struct Format {
    int32_t bytes;  // 0: values
    MxCast cast;
} Format;

static const Format FORMAT_VALUES = {0, {0, 0}};

// As products read operands of a format: on Hopper bytes whose scales are aligned to 128 are multiplied as they are
// ("fast"); other bytes become values first ("exact").
static inline Format format_read(Format f) { return f.bytes && f.cast.align == MX_CHUNK ? f : FORMAT_VALUES; }

// The memory that is set has room for (count, columns); `format` says which part of it holds the numbers.
typedef struct Rows {
    int64_t count, columns;
    int32_t by_channel;  // 1: q and scale are (columns, count), as mx_quantize_channels leaves them
    Format format;
    floatX* value;
    uint8_t *q, *scale;
} Rows;

// Which memory rows_plan names.
enum { ROWS_VALUES = 1, ROWS_BYTES = 2 };
void rows_plan(Arena* arena, const char* name, Rows* rows, int memory, int64_t count, int64_t columns);

static inline Rows rows_of_values(const floatX* x, int64_t count, int64_t columns) {
    Rows rows = {count, columns, 0, FORMAT_VALUES, (floatX*)x, NULL, NULL};
    return rows;
}

// x in `format`: x itself where it has it, else cast into the memory of `room` (bytes to values, or values to bytes).
Rows rows_as(Rows room, Rows x, Format format, Ctx* ctx);
// x += what rows stand for, or x = with accumulate 0.
void rows_add(floatX* x, Rows rows, int accumulate, Ctx* ctx);

// Tokens to their places among `ragged`'s rows, zeros in pad rows, in the memory of `room`: as they are, or bytes as
// values.
Rows rows_permute(Rows room, Rows tokens, Format format, Ragged ragged, Ctx* ctx);

// dy or x as weights' gradients read them, whose contraction runs over a group's rows: in `format`, whose casts are
// made along the rows. Fast: by channel (mx_quantize_channels; x aligned to 512), in the bytes of `room`; the result's
// count is the length of a channel. Else values, rounded in place where `format` is of bytes; bytes become values in
// the memory of `room`. tokens 1: they are tokens (bytes, where `format` is fast), which go to their rows; 0: rows,
// which stay as they are where they lie by channel already.
enum { WGRAD_DY, WGRAD_X };
Rows rows_for_wgrad(Rows room, Rows rows, int operand, int tokens, Format format, Ragged ragged, Ctx* ctx);

// a = swiglu(h) over ragged rows, cast to `format` and returned as products read it, in `room`. *stats += what the cast
// does, if not NULL; `spare` then has memory for (count, F) values.
Rows rows_swiglu(Rows room, const floatX* h, Ragged ragged, Format format, MxStats* stats, floatX* spare, Ctx* ctx);
// Its backward with the gate (grouped/experts.h): dh cast to `format` and returned as products read it; and in *dh,
// whose memory is of values, for rows_for_wgrad in the format `wgrad`: as values, or by channel where both formats are
// fast and F is a multiple of 128.
Rows rows_swiglu_backward(Rows room, Rows* dh, floatX* gated_a, real* drow_gate, const floatX* da_ungated,
                          const floatX* h, Ragged ragged, Format format, Format wgrad, MxStats* stats, Ctx* ctx);

END_C

#endif
