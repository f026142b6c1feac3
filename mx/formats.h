// The table of number formats (linear/format.h): the formats of --precision and their parts.
//
//   name          elements             scale of                          GEMMs read
//   mxfp8         e4m3 (mx/mxfp8.h)    128 elements, weights: a tile     packed (mx/packed_gemms.c)
//   mxfp8-exact   e4m3                 32 elements                       values
//
// Each has a row for both rules of rounding a scale (MxScale).
#pragma once

#include "linear/packed.h"
#include "mx/mxfp8.h"

typedef enum { FORMAT_MXFP8, FORMAT_MXFP8_EXACT, FORMATS } FormatId;
const Format* format_of_id(FormatId id, MxScale scale);

extern const PackedGemms mxfp8_gemms;  // mx/packed_gemms.c
