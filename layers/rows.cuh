// Vectorized access to rows, for the memory-bound kernels: 16-byte vectors of 8 bf16 elements. All widths are multiples
// of 8, and all rows are 16-byte aligned.
#pragma once

#include <type_traits>

#include "device/cuda.cuh"

// 8 elements in memory order: one 16-byte access. (A struct of bf16 pairs would be copied pair by pair.)
typedef uint4 Vec8;

static __device__ __forceinline__ void floats_of(float out[8], const Vec8& p) {
    const uint32_t pair[4] = {p.x, p.y, p.z, p.w};
    // A bf16 is the upper half of a float32.
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = __uint_as_float(pair[i] << 16);
        out[2 * i + 1] = __uint_as_float(pair[i] & 0xffff0000u);
    }
}

static __device__ __forceinline__ Vec8 vec8_of(const float in[8]) {
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        __nv_bfloat162 rounded = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
        pair[i] = *(const uint32_t*)&rounded;
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

static __device__ __forceinline__ void load(float out[8], const floatX* p) { floats_of(out, *(const Vec8*)p); }
static __device__ __forceinline__ void store(floatX* p, const float in[8]) { *(Vec8*)p = vec8_of(in); }

// 8 floats, in two accesses of 16 bytes.
static __device__ __forceinline__ void load(float out[8], const float* p) {
    const float4 halves[2] = {((const float4*)p)[0], ((const float4*)p)[1]};
    memcpy(out, halves, sizeof(halves));
}
static __device__ __forceinline__ void store(float* p, const float in[8]) {
    ((float4*)p)[0] = make_float4(in[0], in[1], in[2], in[3]);
    ((float4*)p)[1] = make_float4(in[4], in[5], in[6], in[7]);
}

// One warp copies a row, or writes zeros if `from` is NULL. The loads of 8 vectors are issued before the first store.
static __device__ __forceinline__ void copy_row(floatX* to, const floatX* from, int64_t C) {
    const int64_t step = 32 * 8;
    for (int64_t c0 = threadIdx.x % 32 * 8; c0 < C; c0 += 8 * step) {
        Vec8 p[8] = {};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (from && c0 + i * step < C) p[i] = *(const Vec8*)(from + c0 + i * step);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (c0 + i * step < C) *(Vec8*)(to + c0 + i * step) = p[i];
    }
}

template <typename... T>
static inline bool aligned(const T*... p) {
    return (((uintptr_t)p % 16 == 0) && ...);
}

// True if rows with this width (or stride) at these addresses allow 16-byte vectors.
template <typename... T>
static inline bool wide(int64_t columns, const T*... p) {
    return columns % 8 == 0 && aligned(p...);
}

template <int N>
using Int = std::integral_constant<int, N>;
