// Device functions of the quantization kernels (mxfp8.cu, mx_swiglu.cu, mx_stats.cu).
//
// amax: magnitudes of bf16 compare like their bits, with Inf and NaN above all others. So amax is found with integer
// instructions, two elements at a time and without conversion. Lanes that share a block, chunk or column reduce by
// shuffles.
//
// Rounding: x 2^(127 - s) is exact in float32, or so small that it is rounded to 0. The instruction cvt.rn.satfinite
// rounds it to e4m3 exactly as mxfp8.h defines, NaN to 0x7f.
//
// Row-wise, a warp takes a span: 1024 columns of a row, as 4 groups of 256. In each group a lane has one 16-byte vector
// of 8 columns, so a block is in 4 lanes and a chunk in 16. The span's 32 scale bytes are written in one store.
#pragma once

#include <cuda_fp8.h>

#include "layers/rows.cuh"
#include "mx/mx_values.h"
#include "mx/mxfp8.h"

// Vectors of a lane in a span; columns of a span; warps per thread block.
enum { VECTORS = 4, SPAN = VECTORS * 256, ROW_WARPS = 8 };

// Pairs of bf16: the magnitudes, and the element-wise maximum.
static __device__ __forceinline__ uint32_t magnitudes(uint32_t pair) { return pair & 0x7fff7fffu; }
static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

// The amax of even and of odd elements of a vector.
static __device__ __forceinline__ uint32_t largest(const uint4& p) {
    return larger(larger(magnitudes(p.x), magnitudes(p.y)), larger(magnitudes(p.z), magnitudes(p.w)));
}

static __device__ __forceinline__ uint32_t higher_half(uint32_t pair) { return max(pair & 0xffff, pair >> 16); }

// The scale byte of a block. amax: the bits of its largest magnitude; rounding_bias: of rounding_bias_of.
static __device__ __forceinline__ uint32_t scale_of(uint32_t amax, uint32_t rounding_bias) {
    return amax >= 0x7f80 ? MX_NAN : (uint32_t)max((int)((amax + rounding_bias) >> 7) - 8, 0);
}

static __device__ __forceinline__ uint32_t cast2(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

static __device__ __forceinline__ float2 e4m3_values(uint32_t two) {
    return __half22float2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3));
}

// Fake quantization of x with scale s: quantized, then dequantized.
static __device__ __forceinline__ float value_of(float x, uint32_t s) {
    return e4m3_values(cast2(x * mx_scale_inverse(s), 0)).x * mx_scale_value(s);
}

// Quantizes a vector: 8 elements times a factor each, rounded to e4m3.
static __device__ __forceinline__ uint2 quantize8(const uint4& p, const float factor[8]) {
    float x[8];
    floats_of(x, p);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= factor[i];
    return make_uint2(cast2(x[0], x[1]) | cast2(x[2], x[3]) << 16, cast2(x[4], x[5]) | cast2(x[6], x[7]) << 16);
}

static __device__ __forceinline__ uint2 quantize8(const uint4& p, float factor) {
    const float all[8] = {factor, factor, factor, factor, factor, factor, factor, factor};
    return quantize8(p, all);
}

// Dequantizes 8 elements; scale_value is 2^(s - 127).
static __device__ __forceinline__ void values_of(float out[8], uint2 p, float scale_value) {
    const uint32_t pairs[4] = {p.x, p.x >> 16, p.y, p.y >> 16};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 two = e4m3_values(pairs[j]);
        out[2 * j] = two.x * scale_value;
        out[2 * j + 1] = two.y * scale_value;
    }
}

// Maximum of each half over an aligned group of LANES lanes (a power of two).
template <int LANES>
static __device__ __forceinline__ uint32_t largest_of_lanes(uint32_t pair) {
#pragma unroll
    for (int lane = LANES / 2; lane; lane /= 2) pair = larger(pair, __shfl_xor_sync(0xffffffffu, pair, lane));
    return pair;
}

// --- Row-wise ---

// Quantizes columns c0 .. c0 + 1023 of a row. p: this lane's vectors; q, scale: the row's outputs.
template <int ALIGN>
static __device__ __forceinline__ void quantize_span(uint8_t* q, uint8_t* scale, const uint4 p[VECTORS], int64_t c0,
                                                     int64_t columns, int64_t stride, uint32_t rounding_bias) {
    const int lane = threadIdx.x % 32;

    // The amax of each block or chunk.
    uint32_t pair[VECTORS / 2];  // of two vectors: one shuffle serves both
    uint32_t scales = 0;         // byte i: the scale of this lane's block in vector i
#pragma unroll
    for (int i = 0; i < VECTORS / 2; i++)
        pair[i] =
            largest_of_lanes<ALIGN / 8>(higher_half(largest(p[2 * i])) | higher_half(largest(p[2 * i + 1])) << 16);

#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        // Scale and q of each vector.
        const int64_t c = c0 + i * 256 + lane * 8;
        const uint32_t s = scale_of(pair[i / 2] >> i % 2 * 16 & 0xffff, rounding_bias);
        const uint2 bytes = quantize8(p[i], mx_scale_inverse(s));
        if (c < columns) {
            scales |= s << 8 * i;
            *(uint2*)(q + c) = bytes;
        }
    }

    // One lane per block gets the block's scale byte by a shuffle, and stores it.
    scales = __shfl_sync(0xffffffffu, scales, lane % 8 * 4) >> lane / 8 * 8;
    if (c0 / MX_BLOCK + lane < stride) scale[c0 / MX_BLOCK + lane] = (uint8_t)scales;
}

// Loads this lane's vectors of columns c0 .. c0 + 1023 of a row; zeros past its end.
static __device__ __forceinline__ void load_span(uint4 p[VECTORS], const floatX* row, int64_t c0, int64_t columns) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int64_t c = c0 + i * 256 + threadIdx.x % 32 * 8;
        p[i] = c < columns ? *(const uint4*)(row + c) : make_uint4(0, 0, 0, 0);
    }
}

// This warp's index in the grid: the index of its (first) span or row.
static __device__ __forceinline__ uint32_t warp_in_grid(void) { return blockIdx.x * ROW_WARPS + threadIdx.x / 32; }

// --- Launches ---

// RCEIL's rounding bias, added to the bits of a bf16: mantissas above 1.75 = 448 / 2^8 carry into the exponent.
static uint32_t rounding_bias_of(int32_t scale_mode) { return scale_mode == MX_RCEIL ? 0x1f : 0; }

// Grid size of the row-wise kernels, which count spans in 32 bits.
static unsigned row_blocks(int64_t rows, int64_t columns) {
    const int64_t blocks = ceil_div(rows * ceil_div(columns, SPAN), ROW_WARPS);
    ASSERT(columns % MX_BLOCK == 0 && blocks <= INT32_MAX / ROW_WARPS);
    return (unsigned)blocks;
}
