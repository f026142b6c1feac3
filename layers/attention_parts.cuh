// Common parts of the attention kernels for Hopper (attention.cu) and for every GPU (attention_portable.cu).
#pragma once

#include "device/mma.cuh"
#include "layers/attention.h"
#include "layers/rows.cuh"

namespace {

const float LOG2E = 1.4426950408889634f;
enum { TILE = 128 };  // rows of a work tile

// The order of the work tiles (sequence and head, tile): in sections of heads whose tensors fit in L2 together,
// heaviest tiles first.
struct Order {
    int heads, tiles, section;
    __host__ __device__ int total() const { return heads * tiles; }
    struct HeadTile {
        int head, rank;
    };
    __device__ HeadTile place(int work) const {
        int first = work / (section * tiles) * section, here = min(section, heads - first);
        int r = work - first * tiles;
        return {first + r % here, r / here};
    }
};

Order order_of(AttnShape s, int rows) {  // rows of a tile
    const int64_t l2 = 28 << 20;
    // The tensors of a section's heads fit in 28 MiB of L2.
    int64_t heads = s.B * s.H, head_bytes = s.T * (s.nope + s.rope + s.v) * (int64_t)sizeof(floatX);
    int64_t sections = ceil_div(heads, l2 / head_bytes > 0 ? l2 / head_bytes : 1);
    return {(int)heads, (int)ceil_div(s.T, rows), (int)ceil_div(heads, sections)};
}

// Row t of head `head` of B x H in a (B, T, H) tensor.
__device__ __forceinline__ int64_t row_of(int head, int t, int T, int H) {
    return ((int64_t)(head / H) * T + t) * H + head % H;
}

// *max_logit = max(*max_logit, x over the warp), by an integer atomic. Floats >= 0 are ordered as their bits are,
// negative floats in the opposite order. Few warps find a larger value: the others skip the atomic.
__device__ __forceinline__ void take_in_logit(float* max_logit, float x) {
    x = warp_max(x) + 0.0f;  // not -0
    if (threadIdx.x % 32 != 0 || !max_logit || !(x > __ldcg(max_logit))) return;
    if (x >= 0)
        atomicMax((int*)max_logit, __float_as_int(x));
    else
        atomicMin((unsigned*)max_logit, __float_as_uint(x));
}

// Initializes an accumulator: every row gets the same N / 2 numbers, one per column.
template <int N>
__device__ __forceinline__ void start_columns(float (&d)[N], const float* columns) {
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        float2 x = *(const float2*)(columns + 8 * j + threadIdx.x % 4 * 2);
        d[4 * j] = d[4 * j + 2] = x.x;
        d[4 * j + 1] = d[4 * j + 3] = x.y;
    }
}

// Stores the first COLUMNS columns of an accumulator, times `times`, as a row in memory. Half 0 is row l / 4, half 1 is
// row l / 4 + 8. Neighbouring lanes exchange values, so that each lane writes 8 bytes, and four lanes one sector.
template <int COLUMNS, int N>
__device__ __forceinline__ void store_row(floatX* row, const float (&d)[N], int half, float times, bool inside) {
    // A lane holds two neighbouring columns of each 8. A pair of lanes exchanges halves of 16 columns.
    int lane = threadIdx.x % 32, odd = lane & 1;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2) {
        uint32_t u = pack_bf16(d[4 * j + 2 * half] * times, d[4 * j + 2 * half + 1] * times);
        uint32_t v = pack_bf16(d[4 * j + 4 + 2 * half] * times, d[4 * j + 5 + 2 * half] * times);
        uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? u : v, 1);
        int column = 8 * j + (odd ? 8 : 0) + (lane & 2) * 2;
        if (inside) *(uint2*)(row + column) = odd ? make_uint2(got, v) : make_uint2(u, got);
    }
}

// Calls f(D) with the head size: (nope, rope, v) = D x (2, 1, 2).
template <typename F>
void by_head_size(AttnShape s, F f) {
    s.rope == 64 ? f(Int<64>()) : s.rope == 32 ? f(Int<32>()) : f(Int<16>());
}

}  // namespace
