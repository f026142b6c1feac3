// MXFP8 grouped GEMM on GPUs whose tensor cores take a scale for every 32 elements (compute capability 10.0 and up):
// one cuBLASLt GEMM per expert. On these GPUs the functions of mx/grouped_gemm_mx.h call those of this file, with the
// same contract. The host copies the group sizes from the device, and waits for them once per call. Workspace:
// matmul_workspace() (layers/matmul.h).
#pragma once

#include "device/cuda.cuh"
#include "mx/grouped_gemm_mx.h"

// True if the tensor cores take a scale for every 32 elements of MXFP8, through cuBLASLt.
static inline bool has_block_scales(const Ctx* ctx) { return ctx->capability >= 100; }

// Accumulators are not short here, and any MXFP8 scales are allowed. OC is a multiple of 16.
void grouped_gemm_lt_mx(floatX* y, MxBytes x, MxTiles w, Ragged ragged, int64_t IC, int64_t OC, Ctx* ctx);
template <typename Out>  // real, or floatX without accumulation
void grouped_gemm_lt_mx_wgrad(Out* dw, MxBytes dy, MxBytes x, int64_t length, Ragged ragged, int64_t IC, int64_t OC,
                              int accumulate, Ctx* ctx);

// Scales as quantization writes them: p[r / rows * row_stride + b / blocks * block_stride] is that of row r, block b.
struct ScaleTiles {
    const uint8_t* p;
    int64_t rows, row_stride, blocks, block_stride;
};
// Converts scales to Blackwell's layout: out[mx_blackwell_offset(r, b, blocks)] = the scale of (r, b), for `rows` rows
// of `blocks` blocks. The padding (rows to 128, blocks to 4) is 0.
void mx_blackwell_scales(uint8_t* out, ScaleTiles scales, int64_t rows, int64_t blocks, Ctx* ctx);
