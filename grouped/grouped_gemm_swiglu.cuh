// SwiGLU (grouped/experts.h) in the epilogues of the experts' grouped GEMMs, so that no kernel of its own reads h
// again.
//
//   forward    The sums of a tile of W13 are h: half of the tile's columns are the gate's, the other half the
//              same columns of the up. Gate, up and their activation are stored.
//   backward   The sums of a tile of dgrad W2 are da'. Epilogue stages follow the k blocks in the ring of stages: the
//              producer loads h there, 128 rows and 64 columns of gate and up each. The tile becomes dh and gate * a.
//              The gate's gradient is a sum over the row: partial sums of 128 columns are stored, in a fixed order.
//
// Values are rounded to bf16 where the kernels of grouped/experts.cu read bf16. So h, a, dh and gate * a have the same
// bits as from those kernels. A gate's gradient is summed in another order, so its last bits differ.
#pragma once

#include "device/mma.cuh"
#include "grouped/experts.h"
#include "grouped/grouped_gemm_parts.cuh"
#include "layers/activation.h"

namespace {

// The epilogue's tensors. `out` is the output; with SwiGLU `out` is h or dh as (2, rows, F): gate and up.
struct Epilogue {
    CUtensorMap out, activation, h;  // activation: a, or gate * a; h: what backward reads
    const float* row_gate;
    float* drow_gate;          // (rows, parts)
    int rows, parts, columns;  // columns: F
};

// The two bf16 of a register, as floats.
__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }

__device__ __forceinline__ uint32_t swiglu_pair(const float* gate, const float* up) {
    const uint32_t g = pack_bf16(gate[0], gate[1]), u = pack_bf16(up[0], up[1]);
    return pack_bf16(swiglu(low_bf16(g), low_bf16(u), sigmoid_fast(low_bf16(g))),
                     swiglu(high_bf16(g), high_bf16(u), sigmoid_fast(high_bf16(g))));
}

// Forward, a warp's 16 rows of N sums: N / 2 of the gate, N / 2 of the up.
template <int N>
__device__ __forceinline__ void write_swiglu(Writer& writer, const float (&d)[N / 2], const Epilogue& to, int n, int m,
                                             int valid) {
    const float *gate = d, *up = d + N / 4;
    const int columns = to.columns;
    write<floatX, N / 2>(writer, gate, n, columns, valid,
                         [&](const void* piece, int c) { tma_store(&to.out, piece, c, m, 0); });
    write<floatX, N / 2>(writer, up, n, columns, valid,
                         [&](const void* piece, int c) { tma_store(&to.out, piece, c, m, 1); });
    write_filled<floatX, N / 2>(
        writer, n, columns,
        [&](uint8_t* piece, int i) {
            put_pairs(piece, valid, writer.lane, [&](int j) { return swiglu_pair(gate + i + j, up + i + j); });
        },
        [&](const void* piece, int c) { tma_store(&to.activation, piece, c, m); });
}

// Gradients of one value: of the gate and of the up, and gate * a; `dot` is da' a.
struct SwigluGradient {
    float dg, du, a, dot;
};
__device__ __forceinline__ SwigluGradient swiglu_gradient(float x, float g, float u, float weight) {
    const float s = sigmoid_fast(g), a = swiglu(g, u, s), da = x * weight;
    return {swiglu_dg(da, g, u, s), swiglu_du(da, g, s), a * weight, x * a};
}

// Backward, a warp's 16 rows of 64 sums of da'. `gate` and `up` have their h: 16 rows of 128 bytes, swizzled. weight:
// the gates of rows lane / 4 and lane / 4 + 8, whose <da', a> go on in `dot`.
__device__ __forceinline__ void write_swiglu_backward(Writer& writer, const float* d, const uint8_t* gate,
                                                      const uint8_t* up, const Epilogue& to, int n, int m, int columns,
                                                      int valid, const float (&weight)[2], float (&dot)[2]) {
    // h in the layout of the sums: a register has two columns of a row.
    const int lane = writer.lane;
    uint32_t dg[16], du[16], a[16];
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        uint32_t g[4], u[4];
        const int at = lane % 16 * 128 + ((j + lane / 16) ^ lane % 8) * 16;
        ldmatrix_x4(g, gate + at);
        ldmatrix_x4(u, up + at);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int i = 2 * j + k, half = k % 2;
            const uint32_t x = pack_bf16(d[2 * i], d[2 * i + 1]);
            const SwigluGradient low = swiglu_gradient(low_bf16(x), low_bf16(g[k]), low_bf16(u[k]), weight[half]),
                                 high = swiglu_gradient(high_bf16(x), high_bf16(g[k]), high_bf16(u[k]), weight[half]);
            dg[i] = pack_bf16(low.dg, high.dg);
            du[i] = pack_bf16(low.du, high.du);
            a[i] = pack_bf16(low.a, high.a);
            if (lane / 4 + 8 * half < valid) dot[half] += low.dot + high.dot;
        }
    }

    // The three outputs.
    auto send = [&](const uint32_t(&pairs)[16], const auto& store) {
        write_filled<floatX, BOX>(
            writer, n, columns,
            [&](uint8_t* piece, int) { put_pairs(piece, valid, lane, [&](int i) { return pairs[i / 2]; }); }, store);
    };
    send(dg, [&](const void* piece, int c) { tma_store(&to.out, piece, c, m, 0); });
    send(du, [&](const void* piece, int c) { tma_store(&to.out, piece, c, m, 1); });
    send(a, [&](const void* piece, int c) { tma_store(&to.activation, piece, c, m); });
}

}  // namespace
