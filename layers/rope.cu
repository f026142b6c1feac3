// Rotary embedding in place: bound by memory (each element read and written once). A thread takes 4 pairs of a token
// (16 bytes) and turns them in 2 heads with the same angles; the table itself (T x D floats) stays in L2. Turns in
// float32, rounded once.
#include "layers/rope.h"
#include "layers/rows.cuh"

enum { HEADS = 2 };

// W elements (8, or one pair) of HEADS heads a thread.
template <int W>
static __global__ void rope_kernel(floatX* x, const float* table, RopeShape s, float direction) {
    // 32-bit divisions: 64-bit ones would take as long as the memory.
    const uint32_t i = blockIdx.x * 256 + threadIdx.x, pieces = (uint32_t)s.D / W;
    const int64_t n = i / pieces, d = i % pieces * W;
    if (n >= s.N) return;
    const int64_t h0 = blockIdx.y * (int64_t)HEADS;
    floatX* v = x + n * s.stride + h0 * s.head_stride + d;
    float f[HEADS][W], angle[W];
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        if (h0 + h < s.heads) {
            if constexpr (W == 8) {
                load<8>(f[h], v + h * s.head_stride);
            } else {
                f[h][0] = v[h * s.head_stride];
                f[h][1] = v[h * s.head_stride + 1];
            }
        }
    const float* row = table + (uint32_t)n % (uint32_t)s.T * s.D + d;
    if constexpr (W == 8) {
        load_real<8>(angle, row);
    } else {
        angle[0] = row[0], angle[1] = row[1];
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (h0 + h >= s.heads) continue;
#pragma unroll
        for (int j = 0; j < W; j += 2) {
            float cosine = angle[j], sine = direction * angle[j + 1], even = f[h][j], odd = f[h][j + 1];
            f[h][j] = even * cosine - odd * sine;
            f[h][j + 1] = even * sine + odd * cosine;
        }
        if constexpr (W == 8) {
            store<8>(v + h * s.head_stride, f[h]);
        } else {
            v[h * s.head_stride] = (floatX)f[h][0];
            v[h * s.head_stride + 1] = (floatX)f[h][1];
        }
    }
}

void rope_apply(floatX* x, const real* table, RopeShape s, int direction, Ctx* ctx) {
    if (s.N == 0 || s.heads == 0 || s.D == 0) return;
    ASSERT(s.N * s.D < UINT32_MAX && s.T <= INT32_MAX);
    const unsigned groups = blocks_for(s.heads, HEADS);
    if (wide(s.D | s.stride | s.head_stride, x) && wide(0, table))
        rope_kernel<8>
            <<<dim3(blocks_for(s.N * (s.D / 8), 256), groups), 256, 0, ctx->stream>>>(x, table, s, (float)direction);
    else
        rope_kernel<2>
            <<<dim3(blocks_for(s.N * (s.D / 2), 256), groups), 256, 0, ctx->stream>>>(x, table, s, (float)direction);
    LAUNCH_CHECK();
}
