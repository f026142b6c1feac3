// The GEMMs of a format that read its packed form, and what prepares their operands. linear/linear.c calls them; the
// implementation is in mx/. Names and shapes are those of linear/linear.h.
#pragma once

#include "linear/linear.h"

struct PackedGemms {
    void (*check)(Ctx* ctx);  // ends the program if this device does not have these GEMMs, or not right

    // A weight's copies for forward and dgrad share one array of scales: its bytes, and the quantization.
    int64_t (*weight_scales)(int64_t OC, int64_t IC);
    void (*pack_weight)(Weight* weight, Ctx* ctx);

    // y = x W^T; with back 1 dx = dy W.
    void (*gemm)(floatX* y, Rows x, const Weight* weight, int back, Ragged ragged, Ctx* ctx);

    // Fused with SwiGLU; with its backward, where dh is packed for dgrad and for wgrad (0: not at this width).
    void (*swiglu)(Packed a, const floatX* h, Ragged ragged, int64_t F, int32_t scale_rule, Ctx* ctx);
    int (*swiglu_backward)(Packed dh, Rows* for_wgrad, ExpertsBackward tensors, const Weight* w13, Ragged ragged,
                           Ctx* ctx);

    // Wgrad: the operands are packed along the tokens. For experts: rows of an operand, and the product.
    int64_t (*wgrad_rows)(int64_t rows, int32_t El, Backend backend);
    void (*grouped_wgrad)(const Weight* weight, Rows dy, Rows dy_memory, Rows x, Rows x_memory, Ragged ragged,
                          Ctx* ctx);
    // For linear_: dy packed for dgrad (in out) and for wgrad in one pass, also with the backward of SwiGLU before it
    // (0: not at this width); then dW of those products whose wgrad is packed.
    void (*pack_both)(LinearGradient* product, Packed out, int64_t N, Ragged tokens, Ctx* ctx);
    int (*swiglu_backward_both)(LinearGradient* product, Packed out, floatX* a, const floatX* da, const floatX* h,
                                int64_t N, Ragged tokens, Ctx* ctx);
    void (*wgrads)(LinearGradient* products, int count, int64_t N, Ragged tokens, Ctx* ctx);
};
