// What casts to MXFP8 (mx/mxfp8.h) do to tensors, for --mx-stats: sums over blocks of 32, added to *stats (in the
// device's memory). Blocks that are NaN are left out, so that one of them does not hide the rest.
#ifndef MX_MX_STATS_H
#define MX_MX_STATS_H

#include "mx/mxfp8.h"

BEGIN_C

typedef struct MxStats {
    double elements;       // not zero
    double saturated;      // |x| 2^(127 - s) > 448 (FLOOR only)
    double flushed;        // not zero, but q is
    double inexact;        // with align 128 and tiles: bytes whose value is not what align 1 gives
    double signal, noise;  // sums of x^2 and (x - value)^2: SNR = 10 log10(signal / noise) dB
} MxStats;

// As mx_quantize casts x.
void mx_stats(MxStats* stats,
              const floatX* x,  // (rows, columns)
              int64_t rows, int64_t columns, MxCast cast, Ctx* ctx);

// As mx_quantize_tiles casts w, with the scales it made; inexact against blocks of 32 along the columns.
void mx_stats_tiles(MxStats* stats,
                    const floatX* w,       // (count, rows, columns)
                    const uint8_t* scale,  // (count, ceil(rows / 128), ceil(columns / 128))
                    int64_t count, int64_t rows, int64_t columns, int32_t scale_mode, Ctx* ctx);

// The workspace both need, in bytes.
size_t mx_stats_workspace(void);

END_C

#endif
