// The grouped products of MXFP8 bytes on GPUs whose tensor cores take a scale for every 32 elements (compute capability
// 10.0 and up): one cuBLASLt product per expert. The contract is that of mx/grouped_gemm_mx.h, whose functions call
// these on such a GPU. The host fetches the group sizes, and waits for them once per product. Workspace:
// matmul_workspace() (layers/matmul.h).
#ifndef MX_GROUPED_GEMM_BLACKWELL_CUH
#define MX_GROUPED_GEMM_BLACKWELL_CUH

#include "device/device.h"
#include "grouped/permute.h"

// Sums are not cut short, and any MXFP8 bytes would do. OC is a multiple of 16 here.
void grouped_gemm_lt_mx(floatX* y, real* y_real, const uint8_t* x, const uint8_t* x_scale, const uint8_t* w,
                        const uint8_t* w_scale, int64_t w_stride_o, int64_t w_stride_c, Ragged ragged, int64_t IC,
                        int64_t OC, Ctx* ctx);
void grouped_gemm_lt_mx_wgrad(real* dw, const uint8_t* dy, const uint8_t* dy_scale, const uint8_t* x,
                              const uint8_t* x_scale, int64_t length, Ragged ragged, int64_t IC, int64_t OC,
                              int accumulate, Ctx* ctx);

// Scales as a cast leaves them: that of row r, block b is p[r / rows * row_stride + b / blocks * block_stride].
struct ScaleTiles {
    const uint8_t* p;
    int64_t rows, row_stride, blocks, block_stride;
};
// For `rows` rows of `blocks` blocks: out[mx_blackwell_offset(r, b, blocks)] = the scale of (r, b), and 0 in the
// padding (rows to 128, blocks to 4).
void mx_blackwell_scales(uint8_t* out, ScaleTiles scales, int64_t rows, int64_t blocks, Ctx* ctx);

#endif
