// RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467), per row:
//
//   y = w * x * rstd,   rstd = (mean_c x_c^2 + eps)^-1/2
//
//   x, dx, y, dy   (N, C)
//   w, dw          (C)
//   rstd           (N), kept for backward
//
// Rows of x and dx are `stride` elements apart (>= C), so that a norm can read a part of a wider tensor (MLA's latent).
// Rows of other tensors are contiguous. Statistics and sums are in real. On the GPU C and stride are multiples of 8,
// and C is at most 16384. Backward takes C > 8192 where a thread block can have 192 KB of shared memory (H100, B200).
#pragma once

#include "device/device.h"

void rmsnorm_forward(floatX* y, real* rstd, const floatX* x, int64_t stride, const floatX* w, double eps, int64_t N,
                     int64_t C, Ctx* ctx);

// Fused residual add and norm: sum = a + b (rounded to floatX), y = rmsnorm(sum), all (N, C). sum may be a.
void residual_rmsnorm_forward(floatX* sum, floatX* y, real* rstd, const floatX* a, const floatX* b, const floatX* w,
                              double eps, int64_t N, int64_t C, Ctx* ctx);

//   g_c = dy_c w_c
//   dx_c = rstd * (g_c - x_c rstd^2 mean_j(g_j x_j))       += with accumulate 1 (the residual stream), = with 0
//   dw_c += sum_n dy_c x_c rstd
void rmsnorm_backward(floatX* dx, real* dw, const floatX* dy, const floatX* x, int64_t stride, const floatX* w,
                      const real* rstd, int64_t N, int64_t C, int accumulate, Ctx* ctx);

// Bytes of workspace that rmsnorm_backward needs (partial sums of dw).
size_t rmsnorm_workspace(int64_t N, int64_t C);
