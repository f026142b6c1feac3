// Grouped GEMM: one GEMM per expert over its rows of a ragged buffer (drawn in grouped/permute.h), all in one call.
//
//   forward   y  = x W_e^T      rows of expert e: (rows, IC) (IC, OC)
//   dgrad     dx = dy W_e       rows of expert e: (rows, OC) (OC, IC)
//   wgrad     dW_e = dy^T x     (OC, rows) (rows, IC): the contraction runs over the expert's rows
//
//   x, dx   (capacity, IC)
//   y, dy   (capacity, OC)
//   w, dw   (El, OC, IC): all experts in one tensor
//
// Pad rows of an input are not read, or must be zeros; pad rows of an output are written as zeros. In the CUDA build IC
// and OC are multiples of 8. Group starts and row counts are read on the device. Workspace: at most matmul_workspace()
// (layers/matmul.h), for the order of the experts or the plan of tiles.
#pragma once

#include "device/device.h"
#include "grouped/experts.h"

// y[r] = W_e x[r] for the rows r of every expert e
void grouped_gemm_forward(floatX* y, const floatX* x, const floatX* w, Ragged ragged, int64_t IC, int64_t OC, Ctx* ctx);

// dx[r] = W_e^T dy[r]
void grouped_gemm_dgrad(floatX* dx, const floatX* dy, const floatX* w, Ragged ragged, int64_t IC, int64_t OC, Ctx* ctx);

// 1: the GEMMs below also take an operand x by token, (N, columns), whose row r is x[row_token[r]]. 0: all operands are
// by row, after permute_rows.
int grouped_gemm_gathers(const Ctx* ctx);
typedef enum GroupedRows { ALL_BY_ROW, DY_BY_TOKEN, X_BY_TOKEN } GroupedRows;

// grouped_gemm_swiglu and grouped_gemm_dgrad_swiglu have SwiGLU (grouped/experts.h) in the GEMM's epilogue, or in a
// kernel of its own after the GEMM.
//
// Forward of an expert's first GEMM: h = W13_e x, a = silu(h_gate) * h_up. w13 (El, 2F, C)
void grouped_gemm_swiglu(floatX* h, floatX* a, const floatX* x, const floatX* w13, GroupedRows order, Ragged ragged,
                         int64_t C, int64_t F, Ctx* ctx);
// Dgrad of an expert's second GEMM, da' = W2_e^T dy, and the backward of SwiGLU. Only if SwiGLU is a kernel of its own,
// da' is written, to da_ungated. Shape of w2: (El, C, F). The gate's gradients come in parts: drow_gate is (capacity,
// parts), to be summed. Returns parts, at most grouped_gemm_gate_parts.
int32_t grouped_gemm_dgrad_swiglu(ExpertsBackward tensors, const floatX* dy, const floatX* w2, GroupedRows order,
                                  Ragged ragged, int64_t C, int64_t F, Ctx* ctx);
static inline int32_t grouped_gemm_gate_parts(int64_t F) { return (int32_t)ceil_div(F, 128); }

// dW_e = sum of dy[r] x[r]^T over the rows r of expert e, 0 without rows; += with accumulate 1. If `rounded` is not
// NULL (with accumulate 0 only), the float32 sums are rounded once and written to `rounded` instead of dw.
void grouped_gemm_wgrad(real* dw, floatX* rounded, const floatX* dy, const floatX* x, GroupedRows order, Ragged ragged,
                        int64_t IC, int64_t OC, int accumulate, Ctx* ctx);
