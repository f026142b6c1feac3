// Products whose operands are packed MXFP8 (mx/mxfp8.h), on Hopper and Blackwell. A scale of x and dy is for 128
// elements, one of W for a tile of 128 x 128. One quantization of W serves forward and dgrad. The GEMMs are
// mx/grouped_gemm_mx.h; for linear_ all tokens are one group. Names and shapes are those of linear/linear.h.
#pragma once

#include "linear/linear.h"

// y = x W^T; with back 1 dx = dy W.
void packed_gemm(floatX* y, Rows x, const Weight* weight, int back, Ragged ragged, Ctx* ctx);

// Experts: the backward of SwiGLU, which packs dh for dgrad and for wgrad in one pass (0: not at this width); and
// wgrad, whose operands are packed along the tokens.
int packed_swiglu_backward(Packed dh, Rows* for_wgrad, ExpertsBackward tensors, const Weight* w13, Ragged ragged,
                           Ctx* ctx);
void packed_grouped_wgrad(const Weight* weight, Rows dy, Rows dy_memory, Rows x, Rows x_memory, Ragged ragged,
                          Ctx* ctx);

// linear_: dy packed for dgrad (in out) and for wgrad in one pass, also with the backward of SwiGLU before it (0: not
// at this width); then dW of those products whose wgrad is packed.
void packed_both(Packed out, LinearGradient* product, int64_t N, Ctx* ctx);
int packed_swiglu_backward_both(Packed out, LinearGradient* product, floatX* a, const floatX* da, const floatX* h,
                                int64_t N, Ragged tokens, Ctx* ctx);
void packed_wgrads(LinearGradient* products, int count, int64_t N, Ragged tokens, Ctx* ctx);
