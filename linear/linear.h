// Matrix products (GEMMs) with a weight. linear_: attention, dense and shared MLPs. grouped_: the routed experts. y and
// dy are (rows, OC), x and dx (rows, IC), W is (OC, IC). The rows are N tokens in linear_, and the ragged rows in
// grouped_ (grouped/permute.h).
//
//   forward  y  = x W^T
//   dgrad    dx = dy W
//   wgrad    dW = dy^T x, or +=
//
// A weight may have a format, in which the operands of its products are quantized first (linear/quantized.h).
#pragma once

#include "grouped/experts.h"
#include "linear/rows.h"

typedef struct GemmWorkspace GemmWorkspace;

// A quantized copy of a weight, as values or packed. A weight's two packed copies share the scales of `forward`.
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
    uint32_t stream;  // of the random numbers of its first matrix: a multiple of 2 WEIGHT_STREAMS, plus its number
} Weight;

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
// weight->grad = dy^T x, or += with weight->accumulate, for each of the products: all whose linear_dgrad came after the
// call before.
void linear_wgrads(LinearGradient* products, int count, int64_t N, Ctx* ctx);
// dgrad, and wgrad of this weight alone.
void linear_backward(floatX* dx, const floatX* dy, const floatX* x, const Weight* weight, int64_t N, Ctx* ctx);

// A dense or shared MLP: h = x W13^T, a = swiglu(h), y = a W2^T. Forward keeps h. linear_mlp_hidden computes h and a,
// and linear_forward the second product, so that other work can be queued between the two.
void linear_mlp_hidden(floatX* a, floatX* h, const floatX* x, const Weight* w13, int64_t N, Ctx* ctx);
// The buffers of an MLP's backward: a again and its gradient (N, F), and the gradient of h (N, 2F).
typedef struct MlpBuffers {
    floatX *a, *da, *dh;
} MlpBuffers;
// dx, and the gradients of both weights.
void linear_mlp_backward(floatX* dx, const floatX* dy, const floatX* x, const floatX* h, MlpBuffers buffers,
                         const Weight* w13, const Weight* w2, int64_t N, Ctx* ctx);

// x and dy are in the weight's format (rows_as), or values. Forward rounds values in place. Dgrad takes dy as
// grouped_dgrad_swiglu returned it. With SwiGLU they may come from rows_gathered, else they are by row.
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
