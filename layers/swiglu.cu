// SwiGLU: bound by memory (elements moved per output: forward 3, backward 6). A thread owns one 16-byte vector of every
// operand. Computation is in float32.
#include "layers/activation.h"
#include "layers/rows.cuh"
#include "layers/swiglu.h"

enum { THREADS = 256 };

static __global__ void __launch_bounds__(THREADS)
    swiglu_forward_kernel(floatX* a, const floatX* h, int64_t N, int64_t F) {
    wait_for_previous();
    // A thread: 8 columns of a token.
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x, vectors = F / 8, n = i / vectors,
                  c = i % vectors * 8;
    if (n >= N) return;
    const floatX* gate = h + n * 2 * F + c;

    // a = silu(g) u
    float g[8], u[8];
    load(g, gate);
    load(u, gate + F);
#pragma unroll
    for (int j = 0; j < 8; j++) g[j] = swiglu(g[j], u[j], sigmoid_fast(g[j]));
    store(a + n * F + c, g);
}

static __global__ void __launch_bounds__(THREADS)
    swiglu_backward_kernel(floatX* dh, floatX* a, const floatX* da, const floatX* h, int64_t N, int64_t F) {
    wait_for_previous();
    // A thread: 8 columns of a token.
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x, vectors = F / 8, n = i / vectors,
                  c = i % vectors * 8;
    if (n >= N) return;
    const floatX* gate = h + n * 2 * F + c;

    // All loads are issued first.
    float g[8], u[8], d[8], out[8];
    load(g, gate);
    load(u, gate + F);
    load(d, da + n * F + c);

    // Recompute a; dg and du overwrite g and u.
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float s = sigmoid_fast(g[j]), du = swiglu_du(d[j], g[j], s);
        out[j] = swiglu(g[j], u[j], s);
        g[j] = swiglu_dg(d[j], g[j], u[j], s);
        u[j] = du;
    }
    store(a + n * F + c, out);
    store(dh + n * 2 * F + c, g);
    store(dh + n * 2 * F + F + c, u);
}

void swiglu_forward(floatX* a, const floatX* h, int64_t N, int64_t F, Ctx* ctx) {
    ASSERT(wide(F, a, h));
    launch_early(swiglu_forward_kernel, blocks_for(N * (F / 8), THREADS), THREADS, 0, ctx, a, h, N, F);
}

void swiglu_backward(floatX* dh, floatX* a, const floatX* da, const floatX* h, int64_t N, int64_t F, Ctx* ctx) {
    ASSERT(wide(F, dh, a, da, h));
    launch_early(swiglu_backward_kernel, blocks_for(N * (F / 8), THREADS), THREADS, 0, ctx, dh, a, da, h, N, F);
}
