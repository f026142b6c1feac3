// Number formats of GEMM operands. A format is floatX (NULL) or a row of the table in mx/formats.c. A quantized operand
// is in one of two forms:
//
//   values   floatX, each element rounded to the format (fake quantization). GEMMs of every GPU read values.
//   packed   the format's own bytes: elements, and a scale for each block of elements. GEMMs of packed operands are
//            faster. Dispatch and combine send packed rows. Only MXFP8 has this form (mx/mxfp8.h).
//
// A new format is a file of functions in mx/ and a row of that table; GEMMs then read the format's values. Blocks run
// along the contraction of a GEMM.
#pragma once

#include "grouped/permute.h"

typedef struct Format Format;

// The readers of a format's packed form: none; dispatch and combine; dispatch, combine and GEMMs.
typedef enum { NOT_PACKED, PACKED_ROWS, PACKED_GEMMS } FormatPacking;

// Widths of quantized operands are multiples of FORMAT_BLOCK.
enum { FORMAT_BLOCK = 32 };

// The packed form: elements and scales.
typedef struct Packed {
    uint8_t *q, *scale;
} Packed;

// scale: the format's rule of rounding a scale. align: the number of elements that share a scale; in MXFP8 align 1
// means a block of 32.
typedef struct Recipe {
    int32_t scale, align;
} Recipe;

// Sums over the elements of quantized tensors (--mx-stats). A value is an element after quantization.
typedef struct QuantizationStats {
    double elements;       // x != 0
    double saturated;      // larger than the format's largest value
    double flushed;        // x != 0, value 0
    double inexact;        // value differs from the value with one scale for each block
    double signal, noise;  // sums of x^2 and (x - value)^2: SNR = 10 log10(signal / noise) dB
} QuantizationStats;

// The random numbers of a batch's gradients, for stochastic rounding: philox(key, stream, element). BatchDraws is in
// device memory, so that a captured CUDA graph reads new numbers.
typedef struct BatchDraws {
    uint64_t key;   // of the seed and the step
    int64_t first;  // rows of the step before those of the batch, each batch rounded up to a multiple of 8
} BatchDraws;

// The random numbers of a tensor. batch NULL: the tensor is rounded to nearest.
typedef struct Draw {
    const BatchDraws* batch;
    uint32_t stream;  // of group 0; group g has stream + g
} Draw;

struct Format {
    Recipe recipe;       // of the functions below
    double bf16_blocks;  // the share of the model's blocks, its last, whose GEMMs stay in floatX; only with NOT_PACKED
    FormatPacking packing;

    // Fake quantization of x (capacity, columns), in place or not: in blocks along the rows, or with by_column 1 down
    // the columns of each group. Without starts (NULL) all rows are one group. A format of weights alone has NULL here.
    // With stats, out is not written: *stats += statistics of the values, all rows as one group, in blocks along the
    // rows.
    void (*round)(const Format* format, floatX* out, const floatX* x, Ragged groups, int64_t columns, int by_column,
                  Draw draw, QuantizationStats* stats, Ctx* ctx);
    // Both copies of a weight w (count, OC, IC): for forward, in blocks along IC; for dgrad, along OC, transposed to
    // (count, IC, OC). With stats, neither copy is written: *stats += statistics of forward's copy.
    void (*round_weight)(const Format* format, floatX* forward, floatX* back, const floatX* w, int64_t count,
                         int64_t OC, int64_t IC, QuantizationStats* stats, Ctx* ctx);
};

// The format if GEMMs read its packed form, else NULL.
static inline const Format* format_packed(const Format* f) { return f && f->packing == PACKED_GEMMS ? f : NULL; }
// The format if rows are quantized once, before all GEMMs that read them. NULL: each GEMM rounds its own copy.
static inline const Format* format_of_rows(const Format* f) { return f && f->packing ? f : NULL; }
