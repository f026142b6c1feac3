// Products whose operands are quantized: linear/linear.c calls these functions for a weight with a format. linear_ and
// grouped_, names and shapes are those of linear/linear.h.
//
// A weight has two formats (mx/format.h): one for the operands of forward and dgrad, one for the operands of wgrad.
// Where a format is not floatX, each operand is quantized first, in blocks along the contraction:
//
//   forward  y  = Q(x) Q(W)^T     dgrad  dx = Q(dy) Q(W)     wgrad  dW = Q(dy)^T Q(x)
//
// A weight is quantized once after each update. linear_ quantizes x and dy just before the GEMM, into a workspace that
// all GEMMs share. Rows come to grouped_ quantized if format_of_rows of their format is not NULL; else grouped_ rounds
// the rows. Formats with stochastic rounding round dy with random numbers.
#pragma once

#include "linear/linear.h"

// The GEMMs whose operands are quantized together, by --linear-precision or --expert-precision.
typedef enum { NEVER, LINEAR, EXPERT, QUANTIZED_BYS } QuantizedBy;

// The formats of a model's tensors, NULL where they are floatX.
typedef struct Formats {
    const Format *gemm[QUANTIZED_BYS], *wgrad[QUANTIZED_BYS];  // of the operands of forward and dgrad; of wgrad
    const Format *dispatch, *combine;                          // as in DispatchShape (moe/dispatch.h)
    int any, packed;  // 1: some GEMM has a format; some forward GEMM has a packed format
} Formats;
// The Formats of a FormatId for each kind of tensor, and an MxScale (mx/formats.h).
Formats formats_of(int64_t linear, int64_t expert, int64_t dispatch, int64_t combine, int64_t wgrad,
                   int64_t scale_rule);
// The format in block `layer` (L: the MTP module) of L blocks; NULL in the last blocks that the recipe leaves in
// floatX.
const Format* format_in_block(const Format* format, int64_t layer, int64_t L);

// The workspace that all quantized GEMMs of a model share.
struct GemmWorkspace {
    int64_t inputs;                          // columns of the widest x or dy
    int64_t of_dy, of_x;                     // quantized wgrad: the columns of all operands that are quantized together
    int64_t group, dy_of_group, x_of_group;  // weight_plan: the last weight's group, and this group's columns so far
    const Format *format, *wgrad;            // of the weights of linear_; NULL: floatX
    Rows input;                              // x or dy, quantized
    Rows dy, x;                              // quantized wgrad: operands, quantized along the tokens
    int64_t dy_used;                         // columns of `dy` that hold a gradient for the next linear_wgrads
    struct Batch* batches;                   // in device memory
    uint64_t key;                            // of the step's random numbers
    int64_t before;                          // batches of the step, on all ranks, before the next linear_batch
    int batch;                               // the index of the current batch
    QuantizationStats* stats;  // +=: WEIGHT_STATS for each weight, in the order of streams; NULL: not measured
};

// The operands that --mx-stats measures: x, dy, and W as forward reads it.
enum { STATS_X, STATS_DY, STATS_W, WEIGHT_STATS };

// Streams of random numbers for a weight's dy: a stream for each matrix of all ranks in dgrad, and another in wgrad.
enum { WEIGHT_STREAMS = 1 << 12 };

// --- For models, also of weights without a format ---

// Registers a weight's quantized copies in `arena`. group: 0 for a weight of grouped_; weights of linear_ that follow
// one another with the same group are in one linear_wgrads. After all weights, linear_plan registers the shared
// workspace for GEMMs of up to N tokens, and the token counts of `batches` batches.
void weight_plan(Arena* arena, Weight* weight, int64_t group);
void linear_plan(Arena* arena, GemmWorkspace* workspace, int64_t N, int batches);
// Rows that a buffer for an operand of grouped_wgrad needs: `rows`, the ragged rows of El experts, or more if packed.
int64_t grouped_wgrad_rows(const Format* wgrad, int64_t rows, int32_t El, Backend backend);

// Before the GEMMs: weight_quantize quantizes a weight whose w has changed; linear_batch sets the token count N of a
// batch, and the random numbers of the batch's gradients. workspace->batch is the current batch.
void weight_quantize(Weight* weight, Ctx* ctx);
void linear_batch(GemmWorkspace* workspace, int batch, int64_t N, Ctx* ctx);
// If workspace->stats: += the statistics of x (rows, columns), quantized to `format` as `operand`.
void weight_measure(const Weight* weight, int operand, const Format* format, const floatX* x, int64_t rows,
                    int64_t columns, Ctx* ctx);

// --- For linear/linear.c ---

// y = x W^T; with `back` (not NULL, not 0) dx = dy W, where y is dx and x is dy.
void quantized_linear(floatX* y, const floatX* x, const Weight* weight, LinearGradient* back, int64_t N, Ctx* ctx);
void quantized_grouped(floatX* y, Rows x, const Weight* weight, int back, Ragged ragged, Ctx* ctx);
// Backward of SwiGLU (a, da and h as in layers/swiglu.h), and dgrad of the GEMM before SwiGLU: dx = dh W, where dh is
// the product's dy. Returns 1 if both are done, by a kernel that packs dh and writes no floatX; 0 if nothing is done.
int quantized_swiglu_backward(floatX* dx, floatX* a, const floatX* da, const floatX* h, LinearGradient* product,
                              int64_t N, Ctx* ctx);
// a = swiglu(h) in the format of w2, in out's buffers.
Rows quantized_grouped_swiglu(Rows out, const floatX* h, const Weight* w2, Ragged ragged, Ctx* ctx);
// grouped_dgrad_swiglu, in the format of w13.
Rows quantized_grouped_dgrad_swiglu(Rows out, Rows* for_wgrad, ExpertsBackward tensors, floatX* da, Rows dy,
                                    const Weight* w2, const Weight* w13, Ragged ragged, Ctx* ctx);

// linear_wgrads of the products whose weight has a format in `wgrad`; other products are skipped.
void quantized_wgrads(LinearGradient* products, int count, int64_t N, Ctx* ctx);
// grouped_wgrad of a weight whose `wgrad` is packed.
void quantized_grouped_wgrad(const Weight* weight, Rows dy, Rows dy_memory, Rows x, Rows x_memory, Ragged ragged,
                             Ctx* ctx);
// An operand of grouped_wgrad as values for a floatX GEMM, rounded to weight->wgrad. Rows by token stay unchanged.
Rows quantized_wgrad_rows(const Weight* weight, int operand, Rows x, Rows memory, Ragged ragged, Ctx* ctx);
