// Statistics of the quantization error of MXFP8 (mx/mxfp8.h), for --mx-stats: sums over blocks of 32, added to *stats
// in device memory. NaN blocks are left out, so that one of them does not hide the rest. Workspace: at most
// matmul_workspace() (layers/matmul.h).
#pragma once

#include "mx/mxfp8.h"

typedef struct MxStats {
    double elements;       // x != 0
    double saturated;      // |x| 2^(127 - s) > 448 (FLOOR only)
    double flushed;        // x != 0, q = 0
    double inexact;        // align 128 and tiles: dequantized value differs from that of align 1
    double signal, noise;  // sums of x^2 and (x - dequantized)^2: SNR = 10 log10(signal / noise) dB
} MxStats;

// Statistics of x (count, rows, columns): of mx_quantize with `tiles` NULL. Else those of mx_quantize_tiles, from the
// scales that it wrote; `inexact` compares with blocks of 32 along the columns.
void mx_stats(MxStats* stats, const floatX* x, const uint8_t* tiles, int64_t count, int64_t rows, int64_t columns,
              MxRecipe recipe, Ctx* ctx);
