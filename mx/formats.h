// The table of number formats (mx/format.h): the formats of --precision and their parts.
//
//   name          elements             scale of                          GEMMs read
//   mxfp8         e4m3 (mx/mxfp8.h)    128 elements, weights: a tile     packed (linear/quantized.c)
//   mxfp8-exact   e4m3                 32 elements                       values
//   nvfp4         e2m1 (mx/fp4.h)      16 elements, weights: 16 x 16     values
//   mxfp4         e2m1                 32 elements, weights: 32 x 32     values
//   mxfp4-weights e2m1, weights alone  32 elements                       values
//
// nvfp4 and mxfp4 round gradients (dy) stochastically and all else to nearest. Both operands of wgrad pass a random
// Hadamard transform of 16 rows. With NVFP4 the last 15 % of the blocks stay in floatX (arXiv 2509.25149, section 4).
// The format mxfp4-weights rounds weights alone; gradients of weights pass straight through.
//
// Each format has a row for each rule of rounding a scale (MxScale). NVFP4 ignores the rule.
#pragma once

#include "mx/mxfp8.h"

// The choices of --precision, in the order of the option. Options of a part (--wgrad-precision) have the first of these
// choices.
typedef enum {
    FORMAT_BF16,
    FORMAT_MXFP8,
    FORMAT_NVFP4,
    FORMAT_MXFP4,
    FORMAT_MXFP8_EXACT,
    FORMAT_MXFP4_WEIGHTS,
    FORMATS
} FormatId;
// id: a FormatId; scale_rule: an MxScale. FORMAT_BF16: NULL, which is floatX.
const Format* format_of_id(int64_t id, int64_t scale_rule);
