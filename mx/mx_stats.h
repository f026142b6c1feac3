// Statistics of the quantization error of MXFP8 (mx/mxfp8.h), for --mx-stats: sums over blocks of 32, added to *stats
// in device memory. NaN blocks are left out, so that one NaN block does not hide the others. Workspace: at most
// matmul_workspace() (layers/matmul.h).
#pragma once

#include "mx/mxfp8.h"

// *stats += statistics of x (count, rows, columns). tiles NULL: quantized as by mx_quantize. Else quantized as by
// mx_quantize_tiles, whose scales are in `tiles`. `inexact` compares with blocks of 32 along the columns.
void mx_stats(QuantizationStats* stats, const floatX* x, const uint8_t* tiles, int64_t count, int64_t rows,
              int64_t columns, MxRecipe recipe, Ctx* ctx);
