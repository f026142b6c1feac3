// RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467), per row:
//
//   y = w * x * rstd,   rstd = (mean_c x_c^2 + eps)^-1/2
//
// Rows of x are `stride` elements apart (>= C), so that a norm can read a part of a wider tensor (MLA's latent). Rows
// of y are contiguous. Statistics and sums are in real. On the GPU C and stride are multiples of 8, and C is at most
// 16384. Backward takes C > 8192 where a thread block can have 192 KB of shared memory (H100, B200).
#pragma once

#include "device/device.h"

#define RMSNORM_EPS 1e-6f

void rmsnorm_forward(floatX* y,        // (N, C)
                     real* rstd,       // (N), kept for backward
                     const floatX* x,  // (N, C), rows `stride` apart
                     int64_t stride,
                     const floatX* w,  // (C)
                     int64_t N, int64_t C, Ctx* ctx);

// Fused residual add and norm: sum = a + b (rounded to floatX), then y = rmsnorm(sum). sum may be a.
void residual_rmsnorm_forward(floatX* sum,      // (N, C)
                              floatX* y,        // (N, C)
                              real* rstd,       // (N)
                              const floatX* a,  // (N, C)
                              const floatX* b,  // (N, C)
                              const floatX* w,  // (C)
                              int64_t N, int64_t C, Ctx* ctx);

//   g_c = dy_c w_c
//   dx_c = rstd * (g_c - x_c rstd^2 mean_j(g_j x_j))       += with accumulate 1 (the residual stream), = with 0
//   dw_c += sum_n dy_c x_c rstd
void rmsnorm_backward(floatX* dx,  // (N, C), rows `stride` apart
                      real* dw,    // (C), +=
                      const floatX* dy, const floatX* x, int64_t stride, const floatX* w, const real* rstd, int64_t N,
                      int64_t C, int accumulate, Ctx* ctx);

// Bytes of workspace that rmsnorm_backward needs (partial sums of dw).
size_t rmsnorm_workspace(int64_t N, int64_t C);
