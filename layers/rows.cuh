// What the memory-bound kernels share: rows in 16-byte pieces, or element by element where a width or an address does
// not allow it (W is 8 or 1 throughout).
#ifndef LAYERS_ROWS_CUH
#define LAYERS_ROWS_CUH

#include <type_traits>

#include "device/cuda.cuh"

template <int W>
static __device__ __forceinline__ void load(float out[W], const floatX* p) {
    if constexpr (W == 8)
        unpack(out, *(const Pack8*)p);
    else
        out[0] = __bfloat162float(*p);
}

template <int W>
static __device__ __forceinline__ void store(floatX* p, const float in[W]) {
    if constexpr (W == 8)
        *(Pack8*)p = pack(in);
    else
        *p = __float2bfloat16_rn(in[0]);
}

template <int W>
static __device__ __forceinline__ void load_real(float out[W], const float* p) {
    if constexpr (W == 8) {
        float4 low = ((const float4*)p)[0], high = ((const float4*)p)[1];
        out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
        out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
    } else {
        out[0] = *p;
    }
}

template <int W>
static __device__ __forceinline__ void store_real(float* p, const float in[W]) {
    if constexpr (W == 8) {
        ((float4*)p)[0] = make_float4(in[0], in[1], in[2], in[3]);
        ((float4*)p)[1] = make_float4(in[4], in[5], in[6], in[7]);
    } else {
        *p = in[0];
    }
}

// W elements that are only moved.
template <int W>
using Piece = std::conditional_t<W == 8, uint4, uint16_t>;

// One warp copies a row, or writes zeros where `from` is NULL. All loads of 8 pieces go out before the first store.
template <int W>
static __device__ __forceinline__ void copy_row(floatX* to, const floatX* from, int64_t C) {
    const int64_t step = 32 * W;
    for (int64_t c0 = threadIdx.x % 32 * W; c0 < C; c0 += 8 * step) {
        Piece<W> p[8] = {};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (from && c0 + i * step < C) p[i] = *(const Piece<W>*)(from + c0 + i * step);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (c0 + i * step < C) *(Piece<W>*)(to + c0 + i * step) = p[i];
    }
}

// Whether rows of this many elements (or as far apart) can be taken in pieces of 8 at these addresses.
template <typename... T>
static inline bool wide(int64_t columns, const T*... p) {
    return columns % 8 == 0 && (((uintptr_t)p % 16 == 0) && ...);
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline unsigned blocks_for(int64_t work, int64_t per_block) { return (unsigned)ceil_div(work, per_block); }

// silu(g) * u and what its backward needs. bf16 results: the fast exp and division (2^-21) are exact enough.
static __device__ __forceinline__ float sigmoid_fast(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

#endif
