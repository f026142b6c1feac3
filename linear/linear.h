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

// One weight matrix, or the matrices of all local experts.
typedef struct Weight {
    const floatX* w;       // (count, OC, IC)
    real* grad;            // (count, OC, IC)
    floatX* rounded_grad;  // grouped_: wgrad writes it in place of grad, with accumulate 0 only; NULL: none
    int accumulate;        // 1: wgrad adds to grad, 0: it writes grad
    int64_t count, OC, IC;
    const Format* format;      // of the operands of forward and dgrad; NULL: floatX
    const Format* wgrad;       // of the operands of wgrad; NULL: floatX
    WeightCopy forward, back;  // W quantized: for forward; for dgrad, transposed to (count, IC, OC)
    GemmWorkspace* workspace;
    uint32_t stream;  // of the first matrix's random numbers: a multiple of 2 WEIGHT_STREAMS, plus the matrix's number
} Weight;

// One product in backward. dy must not change from linear_dgrad to linear_wgrads, which may read the dy that
// linear_dgrad has quantized.
typedef struct LinearGradient {
    const Weight* weight;
    const floatX *dy, *x;
    int64_t quantized_dy;  // 1 + the first column of dy in workspace->dy; 0: dy is not there
} LinearGradient;

// y = x W^T
void linear_forward(floatX* y, const floatX* x, const Weight* weight, int64_t N, Ctx* ctx);
// dx = dy W, or += with accumulate 1 (floatX only)
void linear_dgrad(floatX* dx, LinearGradient* product, int64_t N, int accumulate, Ctx* ctx);
// weight->grad = dy^T x, or += with weight->accumulate, for each of the products. `products` has every product whose
// linear_dgrad came after the last linear_wgrads.
void linear_wgrads(LinearGradient* products, int count, int64_t N, Ctx* ctx);
// linear_dgrad with accumulate 0, then linear_wgrads of this product alone.
void linear_backward(floatX* dx, const floatX* dy, const floatX* x, const Weight* weight, int64_t N, Ctx* ctx);

// A dense or shared MLP: h = x W13^T, a = swiglu(h), y = a W2^T. Forward keeps h (N, 2F). linear_mlp_hidden computes h
// and a (N, F). linear_forward computes the second product, after other work that the caller may queue.
void linear_mlp_hidden(floatX* a, floatX* h, const floatX* x, const Weight* w13, int64_t N, Ctx* ctx);
// The buffers of an MLP's backward: a again and its gradient (N, F), and the gradient of h (N, 2F).
typedef struct MlpBuffers {
    floatX *a, *da, *dh;
} MlpBuffers;
// dx, and w13->grad and w2->grad as in linear_wgrads; `a` is computed again from h.
void linear_mlp_backward(floatX* dx, const floatX* dy, const floatX* x, const floatX* h, MlpBuffers buffers,
                         const Weight* w13, const Weight* w2, int64_t N, Ctx* ctx);

// x and dy are in the weight's format (rows_as), or values. grouped_forward rounds values in place. grouped_dgrad takes
// dy as grouped_dgrad_swiglu returned it. In the two functions with SwiGLU, x and dy may come from rows_gathered; all
// other rows are by row.
void grouped_forward(floatX* y, Rows x, const Weight* weight, Ragged ragged, Ctx* ctx);
void grouped_dgrad(floatX* dx, Rows dy, const Weight* weight, Ragged ragged, Ctx* ctx);
// An expert's first GEMM and its activation (grouped/experts.h): h = W13 x and a = swiglu(h). Returns `a` in the format
// of the second GEMM's weight w2, in out's buffers. out.value has (capacity, F) where statistics are measured.
Rows grouped_forward_swiglu(Rows out, floatX* h, Rows x, const Weight* w13, const Weight* w2, Ragged ragged, Ctx* ctx);
// Dgrad of an expert's second GEMM, da' = dy W2 into `da`, and the backward of the activation with the gate. Returns
// dh, which is the first GEMM's dy, in the format of the first GEMM's weight w13. The buffers of `out` are wide enough
// for dh and for dy. In *for_wgrad comes dh for grouped_wgrad, in the memory of tensors.dh. A GEMM with SwiGLU in its
// epilogue does not write da. The gates' gradients come in *gate_parts parts (unpermute_gates).
Rows grouped_dgrad_swiglu(Rows out, Rows* for_wgrad, int32_t* gate_parts, ExpertsBackward tensors, floatX* da, Rows dy,
                          const Weight* w2, const Weight* w13, Ragged ragged, Ctx* ctx);
// dW = dy^T x over the rows of each expert. An operand by token is permuted first, or gathered. dy_memory and x_memory
// are buffers for an operand that is permuted or changes its form. Values are rounded in place.
void grouped_wgrad(const Weight* weight, Rows dy, Rows dy_memory, Rows x, Rows x_memory, Ragged ragged, Ctx* ctx);
