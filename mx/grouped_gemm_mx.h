// Grouped GEMM of MXFP8 operands (mx/mxfp8.h) whose scales are aligned to 128 along the contraction. This is the fast
// path on Hopper, whose tensor cores have no block scales. Both operands are K-major. So one function serves forward
// (x, W) and dgrad (dy, W transposed by mx_quantize_tiles).
//
//   y[r][o] = sum over chunks c of 128: 2^(sx[r][c] - 127) 2^(sw[e][o / 128][c] - 127) sum_{k in c} x[r][k] w[e][o][k]
//
// for the rows r of every expert e (grouped/permute.h). IC is a multiple of 32, OC of 8. Pad rows of y are zeros.
//
// Precision: the sum within a chunk uses the tensor cores' short fp8 accumulators. Chunks are added in float32. A scale
// of 255 gives NaN in all sums that use it. On the GPU the product of the two scales is a float32: NaN from 2^128, 0
// below 2^-149. (The loss is below 2^-124, because a chunk's sum is below 2^25.)
//
// On the GPU the last group may end beyond capacity, at the next multiple of 128 (linear/quantized.c, whose rows are
// the tokens). Rows of x beyond capacity are not read, and rows of y beyond capacity are not written. x.scale must
// include these rows, with any content. Workspace: as in grouped/grouped_gemm.h.
#pragma once

#include "mx/mxfp8.h"

// NULL if this device has these GEMMs; else the reason in newly allocated memory.
char* grouped_gemm_mx_missing(Ctx* ctx);

// The reason why a CUDA graph cannot replay these GEMMs on this device; NULL if it can.
const char* grouped_gemm_mx_unreplayed(Ctx* ctx);

// W quantized in tiles: q (El, OC, IC) and scale (El, ceil(OC / 128), ceil(IC / 128)). stride_o and stride_c are the
// distances between scales of neighbours in o / 128 and in c; a transposed W has the two strides swapped.
typedef struct MxTiles {
    uint8_t *q, *scale;
    int64_t stride_o, stride_c;
} MxTiles;

// y (capacity, OC), and x (capacity, IC), row-wise, whose 4 scale bytes of a chunk are equal.
void grouped_gemm_mx(floatX* y, MxBytes x, MxTiles w, Ragged ragged, int64_t IC, int64_t OC, Ctx* ctx);

// Wgrad, which contracts over an expert's rows: dw (El, OC, IC). Both operands are channels (mx_quantize_channels,
// mx/mxfp8.h), OC and IC of them, of `length` elements. The scales of x are aligned to 512: the four chunks of a
// 512-row scale group have equal scales.
//
//   dw[e][o][i]  = sum over chunks c of e: 2^(sdy[c][o] - 127) 2^(sx[c][i] - 127) sum_{k in c} dy[o][k] x[i][k]
//
// or += with accumulate 1; 0 for an expert without rows. With `rounded` (not NULL, without accumulation) the sums are
// rounded once and written to `rounded`, not to dw. IC and OC are multiples of 32. Precision: within a chunk as in
// grouped_gemm_mx. On the GPU the accumulator is kept relative to x's current scale. At a 512-row boundary the
// accumulator is multiplied by the ratio of the old to the new scale of a channel. A ratio of 2^128 or more gives Inf
// or NaN; one below 2^-126 flushes the accumulator to zero.
void grouped_gemm_mx_wgrad(real* dw, floatX* rounded, MxBytes dy, MxBytes x, int64_t length, Ragged ragged, int64_t IC,
                           int64_t OC, int accumulate, Ctx* ctx);

// Wgrad of several matrices over the rows of one group, in one call. On Hopper this is one launch, which fills the GPU
// where a single matrix would not. The operands of all matrices are stored one after another, each as for
// grouped_gemm_mx_wgrad. Matrix m has the operands:
//
//   mx_from_channel(dy, m.dy, length)    mx_from_channel(x, m.x, length)
typedef struct MxMatrix {
    real* dw;  // (OC, IC)
    int64_t OC, IC;
    int64_t dy, x;  // the matrix's first channels in the operands dy and x
} MxMatrix;
enum { MX_MATRICES = 4 };
void gemm_mx_wgrads(const MxMatrix* matrices, int count,  // at most MX_MATRICES
                    MxBytes dy, MxBytes x, int64_t length, Ragged rows, int accumulate, Ctx* ctx);

// gemm_mx_wgrads with one launch per matrix, for backends without a common kernel.
static inline void mx_one_by_one(const MxMatrix* list, int count, MxBytes dy, MxBytes x, int64_t length, Ragged rows,
                                 int accumulate, Ctx* ctx) {
    for (const MxMatrix* m = list; m < list + count; m++)
        grouped_gemm_mx_wgrad(m->dw, NULL, mx_from_channel(dy, m->dy, length), mx_from_channel(x, m->x, length), length,
                              rows, m->IC, m->OC, accumulate, ctx);
}
