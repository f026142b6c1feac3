// Grouped products of MXFP8 operands (mx/mxfp8.h) whose scales are aligned to 128 along the contraction: the fast way
// on Hopper, whose tensor cores know no block scales. Both operands are K-major, so one function serves the forward
// pass (x, W) and dgrad (dy, W transposed: the same bytes, mx_quantize_tiles).
//
//   y[r][o] = sum over chunks c of 128: 2^(sx[r][c] - 127) 2^(sw[e][o / 128][c] - 127) sum_{k in c} x[r][k] w[e][o][k]
//
// for the rows r of every expert e (grouped/permute.h). IC is a multiple of 32, OC of 8. Rows of y that are pad rows
// are zeros.
//
// Precision: the sum inside a chunk has the tensor cores' short fp8 accumulators; chunks are added in float32. A scale
// of 255 makes NaN of what it reaches. On the GPU the product of the two scales is a float32: from 2^128 on it is NaN,
// below 2^-149 it is 0. (What is lost is below 2^-124, because a chunk's sum is below 2^25.)
//
// On the GPU the last group may end beyond capacity, at the next multiple of 128 (mx/products.c, whose rows are the
// tokens). Of the rows there x and y are neither read nor written; x_scale has room for them, and what it holds there
// does not matter. Workspace: as in grouped/grouped_gemm.h.
#ifndef MX_GROUPED_GEMM_MX_H
#define MX_GROUPED_GEMM_MX_H

#include "device/device.h"
#include "grouped/permute.h"

BEGIN_C

// NULL, or why the device at hand has no such products, in fresh memory.
char* grouped_gemm_mx_missing(Ctx* ctx);

void grouped_gemm_mx(floatX* y,               // (capacity, OC), or NULL
                     real* y_real,            // (capacity, OC): the same before rounding, or NULL (one of the two is)
                     const uint8_t* x,        // (capacity, IC)
                     const uint8_t* x_scale,  // (capacity, mx_stride(IC)): the 4 bytes of a chunk are equal
                     const uint8_t* w,        // (El, OC, IC)
                     const uint8_t* w_scale,  // (El, ceil(OC / 128), ceil(IC / 128)) at strides that follow: of a
                     int64_t w_stride_o, int64_t w_stride_c,  // step in o / 128 and in c (a transposed W reads its
                                                              // tiles the other way round)
                     Ragged ragged, int64_t IC, int64_t OC, Ctx* ctx);

// Weights' gradients, whose contraction runs over an expert's rows: both operands as mx_quantize_channels (mx/mxfp8.h)
// leaves them, a row for each channel and a scale for each chunk of 128 rows and channel; those of x are aligned to
// 512.
//
//   dw[e][o][i]  = sum over chunks c of e: 2^(sdy[c][o] - 127) 2^(sx[c][i] - 127) sum_{k in c} dy[o][k] x[i][k]
//
// 0 for an expert without rows; or += with accumulate 1. IC and OC are multiples of 32. Precision: the sum inside a
// chunk as above. On the GPU a column's sums are in units of x's scale for these 512 rows: a quotient of two scales of
// a channel from 2^128 on makes Inf or NaN, one below 2^-126 zeros of the sums so far.
void grouped_gemm_mx_wgrad(real* dw,                 // (El, OC, IC)
                           const uint8_t* dy,        // (OC, length)
                           const uint8_t* dy_scale,  // (length / 128, OC)
                           const uint8_t* x,         // (IC, length)
                           const uint8_t* x_scale,   // (length / 128, IC): those of a group's four chunks are equal
                           int64_t length, Ragged ragged, int64_t IC, int64_t OC, int accumulate, Ctx* ctx);

// The gradients of several matrices over the rows of one group, in one call: so they fill the GPU where one of them
// would not. A matrix's operands are as above: the bytes of its channels of dy begin at channel `dy` of all, dy + m.dy
// length, their scales at dy_scale + m.dy length / 128; x likewise.
typedef struct MxMatrix {
    real* dw;  // (OC, IC)
    int64_t OC, IC;
    int64_t dy, x;  // its first channels
} MxMatrix;
enum { MX_MATRICES = 4 };
void gemm_mx_wgrads(const MxMatrix* matrices, int count,  // MX_MATRICES at most
                    const uint8_t* dy, const uint8_t* dy_scale, const uint8_t* x, const uint8_t* x_scale,
                    int64_t length, Ragged rows, int accumulate, Ctx* ctx);

// The same, where one kernel for all is not to be had.
static inline void mx_one_by_one(const MxMatrix* list, int count, const uint8_t* dy, const uint8_t* dy_scale,
                                 const uint8_t* x, const uint8_t* x_scale, int64_t length, Ragged rows, int accumulate,
                                 Ctx* ctx) {
    const int64_t chunks = length / 128;
    for (const MxMatrix* m = list; m < list + count; m++)
        grouped_gemm_mx_wgrad(m->dw, dy + m->dy * length, dy_scale + m->dy * chunks, x + m->x * length,
                              x_scale + m->x * chunks, length, rows, m->IC, m->OC, accumulate, ctx);
}

END_C

#endif
