// The products of attention and of the dense and shared MLPs, in floatX or in MXFP8 (--linear-precision):
//
//   forward  y  = cast(x) cast(W)^T     both in blocks along IC
//   dgrad    dx = cast(dy) castT(W)     both in blocks along OC
//
// exact: blocks of 32, so W's bytes in forward and in dgrad are not the same; bytes become floatX, which is multiplied
// as in layers/matmul.h. fast: x and dy in blocks of 128, W in tiles of 128 x 128 whose bytes serve both directions,
// and products on the bytes (mx/grouped_gemm_mx.h) with all tokens as one group. Formats: mx/mxfp8.h. The gradient of
// a weight is matmul_wgrad of x and dy as they were before their casts: backward has both, and nothing is cast for it.
//
// A weight is cast once after each update and its casts are kept; x and dy are cast where they are multiplied, into
// memory that all products share. Widths that meet MXFP8 are multiples of 32; N is any number.
#ifndef MX_LINEAR_MX_H
#define MX_LINEAR_MX_H

#include "device/arena.h"
#include "mx/mx_stats.h"
#include "mx/mxfp8.h"

BEGIN_C

typedef struct MxRows {
    uint8_t *q, *scale;
} MxRows;

// A weight, or those of all experts, as one direction reads it, contraction last: values (exact), or bytes and the
// scales of their tiles (fast).
typedef struct MxWeight {
    floatX* value;
    MxRows tiles;
    int64_t stride_o, stride_c;  // from one tile's scale to the next, as grouped_gemm_mx takes them
} MxWeight;

// Casts w (count, OC, IC) for both directions, of which either `value` or `tiles` have memory. room, for values: count
// OC IC bytes, and as many scales as the larger of the casts along IC and along OC has.
void mx_cast_weight(MxWeight* forward, MxWeight* back, const floatX* w, int64_t count, int64_t OC, int64_t IC,
                    MxRows room, int32_t scale_mode, Ctx* ctx);
// *stats += what its cast for the forward direction did.
void mx_weight_stats(MxStats* stats, const MxWeight* forward, const floatX* w, int64_t count, int64_t OC, int64_t IC,
                     int32_t scale_mode, Ctx* ctx);

// How a model makes its MXFP8 products, and what they share.
typedef struct LinearMx {
    int32_t fast;                          // on the bytes; else on the values, in floatX
    int32_t scale_mode;                    // MxScale
    int64_t widest, largest, most_scales;  // of the weights planned: width, elements, scales of a cast along one axis
    MxRows input;                          // x or dy, cast; with exact products a weight too, while it is cast
    floatX* value;                         // exact: what the bytes of x or dy stand for
    struct TokenGroup* group;              // fast: the tokens as a group of grouped_gemm_mx, in device memory
} LinearMx;

// The casts that --mx-stats measures: those of x and of W as forward reads it, and of dy.
enum { LINEAR_STATS_X, LINEAR_STATS_DY, LINEAR_STATS_W, LINEAR_STATS };

typedef struct LinearWeight {
    const floatX* w;  // (OC, IC)
    int64_t OC, IC;
    LinearMx* mx;            // NULL: products in floatX
    MxWeight forward, back;  // with mx: (OC, IC), (IC, OC)
    MxStats* stats;          // (LINEAR_STATS) += what the casts of each product do; NULL: not measured
} LinearWeight;

// A weight whose products are floatX.
static inline LinearWeight linear_weight(const floatX* w, int64_t OC, int64_t IC) {
    LinearWeight weight = {w, OC, IC, NULL, {NULL, {NULL, NULL}, 0, 0}, {NULL, {NULL, NULL}, 0, 0}, NULL};
    return weight;
}

// Names a weight's casts in `arena`, and, after all weights, what products of up to N tokens share.
void linear_mx_plan_weight(Arena* arena, LinearWeight* weight);
void linear_mx_plan(Arena* arena, LinearMx* mx, int64_t N);

// Before products: the casts of a weight whose w has changed, and the tokens of the batch in work.
void linear_mx_cast(LinearWeight* weight, Ctx* ctx);
void linear_mx_batch(LinearMx* mx, int64_t N, Ctx* ctx);

void linear_mx_forward(floatX* y,        // (N, OC)
                       const floatX* x,  // (N, IC)
                       const LinearWeight* weight, int64_t N, Ctx* ctx);

void linear_mx_dgrad(floatX* dx,        // (N, IC)
                     const floatX* dy,  // (N, OC)
                     const LinearWeight* weight, int64_t N, Ctx* ctx);

END_C

#endif
