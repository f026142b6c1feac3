// Weights, and the products with them in every precision: of attention, of the dense and shared MLPs (linear_) and of
// the routed experts (grouped_). With y, x, dy rows of tokens and W (OC, IC):
//
//   forward  y  = cast(x) cast(W)^T     both in blocks along IC
//   dgrad    dx = cast(dy) castT(W)     both in blocks along OC
//   wgrad    dW = dy^T x or +=          of linear_: as they were before their casts, or cast along the tokens. Of
//                                       grouped_: what was cast is what the bytes stand for, or that cast anew along
//                                       the tokens (rows_for_wgrad)
//
// A weight's format says what the casts are. Values: none. Exact: blocks of 32, so that W's bytes in forward and in
// dgrad differ; bytes become floatX, which is multiplied as in layers/matmul.h and grouped/grouped_gemm.h. Fast: x and
// dy in blocks of 128, W in tiles of 128 x 128 whose bytes serve both directions; products on the bytes
// (mx/grouped_gemm_mx.h), linear ones with all tokens as one group. Formats: mx/rows.h, mx/mxfp8.h.
//
// A weight is cast once after each update and its casts are kept. x and dy of linear_ are cast where they are
// multiplied, into memory that all products share. Where dgrad and wgrad are both fast, linear_dgrad casts dy for both,
// and the next linear_wgrads finds it: until then dy must stay as it is. Widths that meet MXFP8 are multiples of 32; N
// is any number.
#ifndef MX_PRODUCTS_H
#define MX_PRODUCTS_H

#include "mx/grouped_gemm_mx.h"
#include "mx/rows.h"

BEGIN_C

// A weight as one direction reads it, contraction last: values (exact), or bytes and the scales of their tiles (fast).
typedef struct WeightCast {
    floatX* value;
    uint8_t *q, *scale;
    int64_t stride_o, stride_c;  // from one tile's scale to the next, as grouped_gemm_mx takes them
} WeightCast;

// dy (N, OC) by channel, from channel `first` of the room for dy on; NULL: not there yet.
typedef struct ChannelsOfDy {
    const struct Weight* weight;
    const floatX* dy;
    int64_t N, first;
} ChannelsOfDy;

// What all products of a model share.
typedef struct ProductRoom {
    int64_t inputs, bytes, scales;  // of what was planned: the widest x or dy, and the largest cast of a weight
    int64_t of_dy, of_x;            // wgrad in a format of bytes: channels of the operands that are cast at once
    int32_t fast;                   // 1: some weight of linear_ is fast
    Rows input;                     // x or dy, cast; a weight too, while it is cast for exact products
    Rows dy, x;                     // wgrad in a format of bytes: cast along the tokens
    int dys;                        // fast weights that have a place in dy until the next linear_wgrads is done
    ChannelsOfDy place[MX_MATRICES];
    struct TokenGroup* group;  // the tokens of each batch as a group of grouped_gemm_mx, in device memory
    int batch;                 // the one in work
} ProductRoom;

// The casts that --mx-stats measures: those of x and of W as forward reads it, and of dy.
enum { STATS_X, STATS_DY, STATS_W, WEIGHT_STATS };

// One matrix, or those of all experts held here.
typedef struct Weight {
    const floatX* w;  // (count, OC, IC)
    real* grad;       // the same
    int accumulate;   // 1: products add to grad, 0: they write it
    int64_t count, OC, IC;
    Format format;             // what its products in forward and dgrad cast their operands to
    Format wgrad;              // of linear_: what wgrad casts its operands to
    WeightCast forward, back;  // (count, OC, IC), (count, IC, OC)
    ProductRoom* room;         // with a format of bytes
    MxStats* stats;            // (WEIGHT_STATS) += what the casts of each product do; NULL: not measured
} Weight;

// Where to add what the cast of one operand does; NULL: nowhere.
static inline MxStats* weight_stats(const Weight* w, int operand) { return w->stats ? w->stats + operand : NULL; }

// Names a weight's casts in `arena` (linear 1: of linear_ products, 0: of grouped_ ones), and, after all weights, what
// products of up to N tokens share, of whose numbers `batches` are known at a time.
void weight_plan(Arena* arena, Weight* weight, int linear);
void products_plan(Arena* arena, ProductRoom* room, int64_t N, int batches);

// Before products: the casts of a weight whose w has changed, and the tokens of each batch; room->batch says which is
// in work.
void weight_cast(Weight* weight, Ctx* ctx);
void products_batch(ProductRoom* room, int batch, int64_t N, Ctx* ctx);

void linear_forward(floatX* y,        // (N, OC)
                    const floatX* x,  // (N, IC)
                    const Weight* weight, int64_t N, Ctx* ctx);
// dx = dy W, or += with accumulate 1 (formats of values only)
void linear_dgrad(floatX* dx,        // (N, IC)
                  const floatX* dy,  // (N, OC)
                  const Weight* weight, int64_t N, int accumulate, Ctx* ctx);
// Backward of SwiGLU (layers/swiglu.h) and of the product before it, whose weight is (2F, IC): dx = dh W. The values of
// dh are made only where something reads them: linear_wgrads takes it all the same.
void linear_swiglu_backward(floatX* dx,        // (N, IC)
                            floatX* dh,        // (N, 2F)
                            floatX* a,         // (N, F)
                            const floatX* da,  // (N, F)
                            const floatX* h,   // (N, 2F)
                            const Weight* weight, int64_t N, Ctx* ctx);
// weight->grad = dy^T x, or += with weight->accumulate, of several weights: fast ones are computed together.
typedef struct LinearGradient {
    const Weight* weight;
    const floatX *dy, *x;  // (N, OC), (N, IC)
} LinearGradient;
void linear_wgrads(const LinearGradient* list, int count, int64_t N, Ctx* ctx);  // MX_MATRICES fast ones at most
// dgrad, and the gradient of this weight alone.
void linear_backward(floatX* dx, const floatX* dy, const floatX* x, const Weight* weight, int64_t N, Ctx* ctx);

// x and dy in the format that products of the weight's format read (format_read).
void grouped_forward(floatX* y,  // (capacity, OC)
                     Rows x,     // (capacity, IC)
                     const Weight* weight, Ragged ragged, Ctx* ctx);
void grouped_dgrad(floatX* dx,  // (capacity, IC)
                   Rows dy,     // (capacity, OC)
                   const Weight* weight, Ragged ragged, Ctx* ctx);
// dy and x as rows_for_wgrad leaves them.
void grouped_wgrad(Rows dy, Rows x, const Weight* weight, Ragged ragged, Ctx* ctx);

END_C

#endif
