// Matrix products (GEMMs) with a weight. linear_: attention, dense and shared MLPs. grouped_: the routed experts. y and
// dy are (rows, OC), x and dx (rows, IC), W is (OC, IC). The rows are N tokens in linear_, and the ragged rows in
// grouped_ (grouped/permute.h).
//
//   forward  y  = x W^T
//   dgrad    dx = dy W
//   wgrad    dW = dy^T x, or +=
//
// A weight has two formats (linear/format.h): that of the operands of forward and dgrad, and that of the operands of
// wgrad. Where a format is not floatX, each operand is quantized first, in blocks along the contraction:
//
//   forward  y  = Q(x) Q(W)^T     dgrad  dx = Q(dy) Q(W)     wgrad  dW = Q(dy)^T Q(x)
//
// A weight is quantized once after each update. linear_ quantizes x and dy just before the GEMM, into a workspace that
// all GEMMs share. The rows of grouped_ come quantized if format_of_rows has their format; else grouped_ rounds them.
// dy has random numbers, for formats that round it stochastically.
#pragma once

#include "linear/rows.h"

// The workspace that all quantized GEMMs of a model share.
typedef struct GemmWorkspace {
    int64_t inputs;                // the widest x or dy
    int64_t of_dy, of_x;           // quantized wgrad: the columns of all operands that are quantized together
    const Format *format, *wgrad;  // of the weights of linear_; NULL: floatX
    Rows input;                    // x or dy, quantized
    Rows dy, x;                    // quantized wgrad: operands, quantized along the tokens
    int64_t dy_used;               // columns of `dy` that hold a gradient for the next linear_wgrads
    struct Batch* batches;         // in device memory
    uint64_t key;                  // of the step's random numbers
    int64_t before;                // batches of the step, on all ranks, before the next linear_batch
    int batch;                     // the current one
} GemmWorkspace;

// The operands that --mx-stats measures: x, dy, and W as forward reads it.
enum { STATS_X, STATS_DY, STATS_W, WEIGHT_STATS };

// Streams of random numbers for a weight's dy. In dgrad each matrix has one, over all ranks; in wgrad another one.
enum { WEIGHT_STREAMS = 1 << 12 };

// A quantized copy of a weight, as values or packed.
typedef struct WeightCopy {
    floatX* value;
    Packed packed;
} WeightCopy;

// One matrix, or those of all local experts.
typedef struct Weight {
    const floatX* w;       // (count, OC, IC)
    real* grad;            // the same
    floatX* rounded_grad;  // grouped_: in place of grad, never added to
    int accumulate;        // 1: wgrad adds to grad, 0: it writes grad
    int64_t count, OC, IC;
    const Format* format;      // of the operands of forward and dgrad; NULL: floatX
    const Format* wgrad;       // of the operands of wgrad
    WeightCopy forward, back;  // if W is quantized: as forward reads it, and transposed, (count, IC, OC), as dgrad does
    GemmWorkspace* workspace;
    uint32_t stream;  // of the random numbers of its first matrix: a multiple of 2 WEIGHT_STREAMS, and its number
    QuantizationStats* stats;  // (WEIGHT_STATS) += statistics of each quantized operand; NULL: not measured
} Weight;

// Registers a weight's quantized copies in `arena`. linear_plan follows after all weights (linear 1: a weight of
// linear_). It registers the shared workspace for GEMMs of up to N tokens, and the token counts of `batches` batches.
void weight_plan(Arena* arena, Weight* weight, int linear);
void linear_plan(Arena* arena, GemmWorkspace* workspace, int64_t N, int batches);

// Before the GEMMs: weight_quantize quantizes a weight whose w has changed; linear_batch sets the token count N of a
// batch, and the random numbers of its gradients. workspace->batch is the current batch.
void weight_quantize(Weight* weight, Ctx* ctx);
void linear_batch(GemmWorkspace* workspace, int batch, int64_t N, Ctx* ctx);
// If weight->stats: += the statistics of x (rows, columns), quantized to `format` as `operand`.
void weight_measure(const Weight* weight, int operand, const Format* format, const floatX* x, int64_t rows,
                    int64_t columns, Ctx* ctx);

// One product in backward. dy must not change from linear_dgrad to linear_wgrads, which may read what linear_dgrad has
// quantized.
typedef struct LinearGradient {
    const Weight* weight;
    const floatX *dy, *x;
    int64_t quantized_dy;  // 1 + the first column of dy in workspace->dy; 0: it is not there
} LinearGradient;

// y = x W^T
void linear_forward(floatX* y, const floatX* x, const Weight* weight, int64_t N, Ctx* ctx);
// dx = dy W, or += with accumulate 1 (floatX only)
void linear_dgrad(floatX* dx, LinearGradient* product, int64_t N, int accumulate, Ctx* ctx);
// Backward of SwiGLU (a, da and h as in layers/swiglu.h) and dgrad of the GEMM before it, whose weight is (2F, IC) and
// whose dy is dh: dx = dh W. dh is written as floatX only if a kernel reads it.
void linear_swiglu_backward(floatX* dx, floatX* dh, floatX* a, const floatX* da, const floatX* h,
                            LinearGradient* product, int64_t N, Ctx* ctx);
// weight->grad = dy^T x, or += with weight->accumulate, of all products since the last call.
void linear_wgrads(LinearGradient* products, int count, int64_t N, Ctx* ctx);
// dgrad, and wgrad of this weight alone.
void linear_backward(floatX* dx, const floatX* dy, const floatX* x, const Weight* weight, int64_t N, Ctx* ctx);

// x and dy are in the weight's format (rows_as), or values that grouped_ rounds, in place in forward. With SwiGLU they
// may come from rows_gathered, else they are by row.
void grouped_forward(floatX* y, Rows x, const Weight* weight, Ragged ragged, Ctx* ctx);
void grouped_dgrad(floatX* dx, Rows dy, const Weight* weight, Ragged ragged, Ctx* ctx);
// An expert's first GEMM and its activation (grouped/experts.h): h = W13 x and a = swiglu(h). The activation has the
// format of the second GEMM's weight w2, and out's buffers. out.value has (capacity, F) where statistics are measured.
Rows grouped_forward_swiglu(Rows out, floatX* h, Rows x, const Weight* w13, const Weight* w2, Ragged ragged, Ctx* ctx);
// Dgrad of the second GEMM, da' = dy W2 into `da`, and the backward of the activation with the gate: dh is the first
// GEMM's dy, in the format of its weight w13. The buffers of `out` are wide enough for dy too. *for_wgrad: dh for
// grouped_wgrad, in the memory of tensors.dh. Where the GEMM has SwiGLU in its epilogue, da is not written, and the
// gates' gradients come in *gate_parts.
Rows grouped_dgrad_swiglu(Rows out, Rows* for_wgrad, int32_t* gate_parts, ExpertsBackward tensors, floatX* da, Rows dy,
                          const Weight* w2, const Weight* w13, Ragged ragged, Ctx* ctx);
// dW = dy^T x over the rows of each expert. An operand by token is permuted first, or gathered. `memory` of dy and of
// x: buffers for an operand that is permuted or changes its form. Values are rounded in place.
void grouped_wgrad(const Weight* weight, Rows dy, Rows dy_memory, Rows x, Rows x_memory, Ragged ragged, Ctx* ctx);
// Rows of a buffer for an operand of wgrad, which may have more than the ragged rows.
int64_t grouped_wgrad_rows(const Format* wgrad, int64_t rows, int32_t El, Backend backend);
