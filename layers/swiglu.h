// SwiGLU (Shazeer 2020, arXiv 2002.05202): a = silu(g) * u, where h = [g ; u] is the output of one GEMM with the gate
// and up weights. On the GPU F is a multiple of 8.
//
//   a, da   (N, F)
//   h, dh   (N, 2F): gate, then up
#pragma once

#include "device/device.h"

void swiglu_forward(floatX* a, const floatX* h, int64_t N, int64_t F, Ctx* ctx);

//   s = sigmoid(g),  du = da silu(g),  dg = da u s (1 + g (1 - s))
//
// Also recomputes the forward output a = silu(g) u, which was not saved and which wgrad of the down projection needs.
void swiglu_backward(floatX* dh, floatX* a, const floatX* da, const floatX* h, int64_t N, int64_t F, Ctx* ctx);
