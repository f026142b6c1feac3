// Self-test of the MXFP8 GEMM on this machine: a small random case against sums in double. With --precision mxfp8 it
// runs before the first step and takes a few milliseconds. The GEMM depends on the scale layout of the tensor cores or
// of a library. A wrong layout gives a loss that looks almost right.
#pragma once

#include "mx/grouped_gemm_mx.h"

// The type of grouped_gemm_mx (mx/grouped_gemm_mx.h).
typedef void MxProduct(floatX* y, MxBytes x, MxTiles w, Ragged ragged, int64_t IC, int64_t OC, Ctx* ctx);

// Returns the largest relative error of a row, ||y - sums|| / ||sums||, over both orders of W's scales. Infinite if y
// has a number that is not finite, or a pad row that is not zero. Above MX_CHECK_BOUND the GEMM is wrong.
double mx_check_error(MxProduct* product, Ctx* ctx);

// Tensor cores keep sums with 14 bits, which gives errors up to 1e-3 of a row. y is rounded to bf16: at most 2^-9 of an
// element. Both errors together are half of the bound. The case has three chunks along the contraction, and the
// smallest is at least 2^-4 of each other chunk. A scale of the smallest chunk that is wrong by a factor of 2 gives an
// error of 2e-2: half of this chunk.
#define MX_CHECK_BOUND 6e-3

// Ends the program unless this device has a grouped_gemm_mx, and its error is at most MX_CHECK_BOUND.
void mx_check(Ctx* ctx);
