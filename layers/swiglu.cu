// SwiGLU: bound by memory (forward 3 elements moved per output, backward 6). A thread takes a 16-byte piece of every
// operand. float32 inside.
#include "layers/rows.cuh"
#include "layers/swiglu.h"

enum { THREADS = 256 };

template <int W>
static __global__ void __launch_bounds__(THREADS)
    swiglu_forward_kernel(floatX* a, const floatX* h, int64_t N, int64_t F) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x, pieces = F / W, n = i / pieces, c = i % pieces * W;
    if (n >= N) return;
    const floatX* gate = h + n * 2 * F + c;
    float g[W], u[W];
    load<W>(g, gate);
    load<W>(u, gate + F);
#pragma unroll
    for (int j = 0; j < W; j++) g[j] *= sigmoid_fast(g[j]) * u[j];
    store<W>(a + n * F + c, g);
}

template <int W>
static __global__ void __launch_bounds__(THREADS)
    swiglu_backward_kernel(floatX* dh, floatX* a, const floatX* da, const floatX* h, int64_t N, int64_t F) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x, pieces = F / W, n = i / pieces, c = i % pieces * W;
    if (n >= N) return;
    const floatX* gate = h + n * 2 * F + c;
    float g[W], u[W], d[W], out[W];
    load<W>(g, gate);
    load<W>(u, gate + F);
    load<W>(d, da + n * F + c);
#pragma unroll
    for (int j = 0; j < W; j++) {
        float s = sigmoid_fast(g[j]), silu = g[j] * s;
        out[j] = silu * u[j];
        g[j] = d[j] * u[j] * s * (1 + g[j] * (1 - s));
        u[j] = d[j] * silu;
    }
    store<W>(a + n * F + c, out);
    store<W>(dh + n * 2 * F + c, g);
    store<W>(dh + n * 2 * F + F + c, u);
}

void swiglu_forward(floatX* a, const floatX* h, int64_t N, int64_t F, Ctx* ctx) {
    if (N == 0) return;
    if (wide(F, a, h))
        swiglu_forward_kernel<8><<<blocks_for(N * (F / 8), THREADS), THREADS, 0, ctx->stream>>>(a, h, N, F);
    else
        swiglu_forward_kernel<1><<<blocks_for(N * F, THREADS), THREADS, 0, ctx->stream>>>(a, h, N, F);
    LAUNCH_CHECK();
}

void swiglu_backward(floatX* dh, floatX* a, const floatX* da, const floatX* h, int64_t N, int64_t F, Ctx* ctx) {
    if (N == 0) return;
    if (wide(F, dh, a, da, h))
        swiglu_backward_kernel<8><<<blocks_for(N * (F / 8), THREADS), THREADS, 0, ctx->stream>>>(dh, a, da, h, N, F);
    else
        swiglu_backward_kernel<1><<<blocks_for(N * F, THREADS), THREADS, 0, ctx->stream>>>(dh, a, da, h, N, F);
    LAUNCH_CHECK();
}
