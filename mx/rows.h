// Rows: a matrix (tokens, columns) in floatX or in MXFP8 (mx/mxfp8.h). The format is a field of the tensor. GEMMs,
// permutation and communication read it, so the code between them is the same for every precision.
#pragma once

#include "device/arena.h"
#include "grouped/experts.h"
#include "mx/mx_stats.h"
#include "mx/mxfp8.h"

// floatX, or MXFP8 with the recipe of its quantization.
typedef struct Format {
    int32_t quantized;  // 1: MXFP8, 0: floatX
    MxRecipe recipe;
} Format;

static const Format FORMAT_FLOATX = {0, {0, 0}};

// The format in which GEMMs read operands of format f. On Hopper MXFP8 with scales aligned to 128 is multiplied
// directly ("fast"). Other MXFP8 is dequantized first ("exact").
static inline Format format_read(Format f) { return f.quantized && f.recipe.align == MX_CHUNK ? f : FORMAT_FLOATX; }

// The buffers that are set have the capacity (count, columns). `format` selects the one that holds the data.
typedef struct Rows {
    int64_t count, columns;
    int32_t by_channel;  // 1: quantized column-wise: q and scale as mx_quantize_channels writes them
    Format format;
    floatX* value;
    MxBytes mx;
} Rows;

// The buffers that rows_plan registers in the arena: floatX, MXFP8, or both.
enum { ROWS_FLOATX = 1, ROWS_QUANTIZED = 2 };
void rows_plan(Arena* arena, const char* name, Rows* rows, int memory, int64_t count, int64_t columns);

static inline Rows rows_of_values(const floatX* x, int64_t count, int64_t columns) {
    Rows rows = {count, columns, 0, FORMAT_FLOATX, (floatX*)x, {NULL, NULL}};
    return rows;
}

// Returns x in `format`: x itself if that is its format. Otherwise x is quantized or dequantized into out's buffers.
Rows rows_as(Rows out, Rows x, Format format, Ctx* ctx);

// Permutes tokens to their rows of the ragged buffer; pad rows are zeros. Writes to out's buffers: a copy, or
// dequantized if `tokens` is MXFP8 and `format` is floatX.
Rows rows_permute(Rows out, Rows tokens, Format format, Ragged ragged, Ctx* ctx);

// Wgrad operand: dy or x for a GEMM that contracts over a group's rows. `format` is wgrad's format.
//
//   format        result
//   fast MXFP8    quantized column-wise into out's bytes (mx_quantize_channels; x aligned to 512);
//                 the result's count is the length of a channel
//   exact MXFP8   fake-quantized column-wise, in place
//   floatX        floatX
//
// For exact MXFP8 and floatX, an MXFP8 input is first dequantized into out's floatX buffer. tokens 1: the input is by
// token (MXFP8 if `format` is fast) and is permuted to its rows. tokens 0: it is ragged rows; rows that are quantized
// column-wise already are returned unchanged.
enum { WGRAD_DY, WGRAD_X };
Rows rows_for_wgrad(Rows out, Rows rows, int operand, int tokens, Format format, Ragged ragged, Ctx* ctx);

// a = swiglu(h) over ragged rows, quantized to `format` and returned as GEMMs read it (format_read), in out's buffers.
// If stats is not NULL, the quantization statistics are added to *stats, and `spare` is a workspace for (count, F)
// floatX.
Rows rows_swiglu(Rows out, const floatX* h, Ragged ragged, Format format, MxStats* stats, floatX* spare, Ctx* ctx);
// SwiGLU backward with the gate (grouped/experts.h). Returns dh, quantized to `format`, as GEMMs read it. *dh becomes
// the input of rows_for_wgrad in the format `wgrad`, in the memory of tensors.dh. It is quantized column-wise if both
// formats are fast and F is a multiple of 128; otherwise it is floatX.
Rows rows_swiglu_backward(Rows out, Rows* dh, ExpertsBackward tensors, Ragged ragged, Format format, Format wgrad,
                          MxStats* stats, Ctx* ctx);
