// Matrix products (GEMMs) with a weight, in every precision. linear_: attention, dense and shared MLPs. grouped_: the
// routed experts. y and dy are (rows, OC), x and dx (rows, IC), W is (OC, IC). The rows are N tokens in linear_, and
// the ragged rows in grouped_. Q quantizes and dequantizes:
//
//   forward  y  = Q(x) Q(W)^T           blocks along IC
//   dgrad    dx = Q(dy) Q(W)            blocks along OC
//   wgrad    dW = dy^T x or +=          linear_: the unquantized operands, or quantized along the tokens;
//                                       grouped_: the dequantized MXFP8 operands, or these requantized along the
//                                       tokens (rows_for_wgrad)
//
// Formats of a weight (mx/rows.h, mx/mxfp8.h):
//
//   floatX        Q(x) = x
//   exact MXFP8   blocks of 32. W is quantized twice, because the blocks of forward and dgrad differ. The GEMM reads
//                 dequantized floatX (layers/matmul.h, grouped/grouped_gemm.h).
//   fast MXFP8    x and dy in blocks of 128, W in tiles of 128 x 128. One quantization of W serves forward and dgrad.
//                 The GEMM reads MXFP8 (mx/grouped_gemm_mx.h); for linear_ all tokens are one group.
//
// A weight is quantized once after each update, and the result is kept. linear_ quantizes x and dy just before the
// GEMM. Their workspace is shared by all GEMMs. If dgrad and wgrad are both fast, linear_dgrad quantizes dy for both.
// The next linear_wgrads reads that result, so dy must not change until then. Widths of MXFP8 operands are multiples of
// 32; N is any number.
#pragma once

#include "mx/grouped_gemm_mx.h"
#include "mx/rows.h"

// A weight as forward or dgrad reads it, contraction last: dequantized (exact), or MXFP8 with a scale per tile (fast).
typedef struct QuantizedWeight {
    floatX* value;
    MxTiles tiles;
} QuantizedWeight;

// dy (N, OC) quantized column-wise. Its first channel is channel `first` of the shared buffer GemmWorkspace.dy. dy
// NULL: not quantized yet.
typedef struct QuantizedDy {
    const struct Weight* weight;
    const floatX* dy;
    int64_t N, first;
} QuantizedDy;

// The workspace that all GEMMs of a model share.
typedef struct GemmWorkspace {
    int64_t inputs, bytes, scales;  // over all planned weights: the widest x or dy, and the largest quantized weight
    int64_t of_dy, of_x;            // MXFP8 wgrad: channels of all operands that are quantized together
    int32_t fast;                   // 1: a weight of linear_ is fast
    Rows input;                     // x or dy, quantized; also a weight while it is quantized for exact GEMMs
    Rows dy, x;                     // MXFP8 wgrad: operands quantized along the tokens
    int dys;                        // fast weights with a place in `dy`; linear_wgrads resets it to 0
    QuantizedDy place[MX_MATRICES];
    struct TokenGroup* group;  // each batch's tokens as one group of grouped_gemm_mx, in device memory
    int batch;                 // the current one
} GemmWorkspace;

// The operands that --mx-stats measures: x, dy, and W as forward reads it.
enum { STATS_X, STATS_DY, STATS_W, WEIGHT_STATS };

// One matrix, or those of all local experts.
typedef struct Weight {
    const floatX* w;       // (count, OC, IC)
    real* grad;            // the same
    floatX* rounded_grad;  // grouped_: in place of grad, never added to
    int accumulate;        // 1: wgrad adds to grad, 0: it writes grad
    int64_t count, OC, IC;
    Format format;                  // of the operands of forward and dgrad
    Format wgrad;                   // linear_: of the operands of wgrad
    QuantizedWeight forward, back;  // (count, OC, IC), (count, IC, OC)
    GemmWorkspace* workspace;       // for MXFP8 formats
    MxStats* stats;                 // (WEIGHT_STATS) += quantization statistics of each GEMM; NULL: not measured
} Weight;

// The statistics of one operand; NULL: not measured.
static inline MxStats* weight_stats(const Weight* w, int operand) { return w->stats ? w->stats + operand : NULL; }

// weight_plan registers a weight's quantized copies in `arena` (linear 1: linear_, 0: grouped_). linear_plan follows
// after all weights. It registers the shared workspace for GEMMs of up to N tokens, and the token counts of `batches`
// batches.
void weight_plan(Arena* arena, Weight* weight, int linear);
void linear_plan(Arena* arena, GemmWorkspace* workspace, int64_t N, int batches);

// Before the GEMMs: weight_quantize quantizes a weight whose w has changed; linear_batch sets the token count N of a
// batch. workspace->batch is the current batch.
void weight_quantize(Weight* weight, Ctx* ctx);
void linear_batch(GemmWorkspace* workspace, int batch, int64_t N, Ctx* ctx);

// y = x W^T
void linear_forward(floatX* y, const floatX* x, const Weight* weight, int64_t N, Ctx* ctx);
// dx = dy W, or += with accumulate 1 (floatX only)
void linear_dgrad(floatX* dx, const floatX* dy, const Weight* weight, int64_t N, int accumulate, Ctx* ctx);
// Backward of SwiGLU (dh, a, da and h as in layers/swiglu.h) and dgrad of the GEMM before it, whose weight is (2F, IC):
// dx = dh W. dh is written as floatX only if a kernel reads it. Pass dh to linear_wgrads in both cases.
void linear_swiglu_backward(floatX* dx, floatX* dh, floatX* a, const floatX* da, const floatX* h, const Weight* weight,
                            int64_t N, Ctx* ctx);
// Wgrad of several weights: weight->grad = dy^T x, or += with weight->accumulate. Fast ones run in one gemm_mx_wgrads.
typedef struct LinearGradient {
    const Weight* weight;
    const floatX *dy, *x;
} LinearGradient;
void linear_wgrads(const LinearGradient* list, int count, int64_t N, Ctx* ctx);  // at most MX_MATRICES fast ones
// dgrad, and wgrad of this weight alone.
void linear_backward(floatX* dx, const floatX* dy, const floatX* x, const Weight* weight, int64_t N, Ctx* ctx);

// x and dy are in the format format_read(weight->format).
void grouped_forward(floatX* y, Rows x, const Weight* weight, Ragged ragged, Ctx* ctx);
void grouped_dgrad(floatX* dx, Rows dy, const Weight* weight, Ragged ragged, Ctx* ctx);
// dy and x as rows_for_wgrad returns them.
void grouped_wgrad(Rows dy, Rows x, const Weight* weight, Ragged ragged, Ctx* ctx);
