// Checks products of MXFP8 bytes on the machine at hand: a small random case against plain sums in double. It runs
// before the first step where --mx-gemm fast is used, and takes a few milliseconds. Such products depend on the layout
// in which tensor cores or a library read scales, and a wrong one gives a loss that looks almost right.
#ifndef MX_MX_CHECK_H
#define MX_MX_CHECK_H

#include "device/device.h"
#include "grouped/permute.h"

BEGIN_C

// As grouped_gemm_mx (mx/grouped_gemm_mx.h).
typedef void MxProduct(floatX* y, real* y_real, const uint8_t* x, const uint8_t* x_scale, const uint8_t* w,
                       const uint8_t* w_scale, int64_t w_stride_o, int64_t w_stride_c, Ragged ragged, int64_t IC,
                       int64_t OC, Ctx* ctx);

// The largest ||y - sums|| / ||sums|| of any row, over both orders of W's scales; infinite where y has a number that is
// not finite, or a pad row that is not zero. Above MX_CHECK_BOUND something is wrong.
double mx_check_error(MxProduct* product, Ctx* ctx);

// Sums that tensor cores keep with 14 bits are off by up to 1e-3 of a row. Of the case's three chunks along the
// contraction a scale that is off by one binade in the smallest is 2e-2: half of it, 2^-4 of each of the others.
#define MX_CHECK_BOUND 4e-3

// Ends the run unless there is a grouped_gemm_mx here and it passes.
void mx_check(Ctx* ctx);

END_C

#endif
