// Dense GEMMs of a linear layer, y = x W^T, without bias. The weight is stored (OC, IC), as in Hugging Face models.
//
//   x, dx   (N, IC)
//   y, dy   (N, OC)
//   w, dw   (OC, IC)
#pragma once

#include "device/device.h"

// y = x W^T
void matmul_forward(floatX* y, const floatX* x, const floatX* w, int64_t N, int64_t IC, int64_t OC, Ctx* ctx);

// y = x W^T, not rounded (real)
void matmul_forward_real(real* y, const floatX* x, const floatX* w, int64_t N, int64_t IC, int64_t OC, Ctx* ctx);

// dgrad: dx = dy W, or dx += dy W with accumulate 1
void matmul_dgrad(floatX* dx, const floatX* dy, const floatX* w, int64_t N, int64_t IC, int64_t OC, int accumulate,
                  Ctx* ctx);

// wgrad: dW = dy^T x in real, or dW += dy^T x with accumulate 1. N may be 0.
void matmul_wgrad(real* dw, const floatX* dy, const floatX* x, int64_t N, int64_t IC, int64_t OC, int accumulate,
                  Ctx* ctx);

// Bytes of workspace that the GEMMs may use (split-K sums of the library).
size_t matmul_workspace(void);
