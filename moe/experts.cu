// SwiGLU between an expert's two products, over the ragged rows in use: bound by memory (forward 3 elements moved per
// output, backward 6). One warp a row, so that <dA', A> is one warp's sum in a fixed order; how many rows there are is
// read on the device, and the grid walks them. Pad rows are written as zeros without being read.
#include "layers/rows.cuh"
#include "moe/experts.h"

enum { UNROLL = 2 };

// A row a warp at moderate capacities; blocks past the rows in use end at once.
static unsigned grid_of(const Ragged& r, const Ctx* ctx) {
    return (unsigned)smaller(ceil_div(r.capacity, 8), 128 * (int64_t)ctx->sms);
}

template <int W>
static __global__ void __launch_bounds__(256) forward(floatX* a, const floatX* h, Ragged r, int64_t F) {
    const int64_t step = 32 * W, used = r.group_start[r.El];
    const int lane = threadIdx.x % 32;
    for (int64_t row = blockIdx.x * (int64_t)8 + threadIdx.x / 32; row < used; row += gridDim.x * (int64_t)8) {
        const bool real_row = r.row_token[row] >= 0;
        const floatX* gate = h + row * 2 * F;
        for (int64_t c0 = lane * W; c0 < F; c0 += UNROLL * step) {
            float g[UNROLL][W] = {}, u[UNROLL][W] = {};
#pragma unroll
            for (int i = 0; i < UNROLL; i++)
                if (real_row && c0 + i * step < F) {
                    load<W>(g[i], gate + c0 + i * step);
                    load<W>(u[i], gate + F + c0 + i * step);
                }
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                if (c0 + i * step >= F) continue;
#pragma unroll
                for (int j = 0; j < W; j++) g[i][j] *= sigmoid_fast(g[i][j]) * u[i][j];
                store<W>(a + row * F + c0 + i * step, g[i]);
            }
        }
    }
}

template <int W>
static __global__ void __launch_bounds__(256)
    backward(floatX* dh, floatX* gated_a, float* drow_gate, const floatX* dap, const floatX* h, Ragged r, int64_t F) {
    const int64_t step = 32 * W, used = r.group_start[r.El];
    const int lane = threadIdx.x % 32;
    for (int64_t row = blockIdx.x * (int64_t)8 + threadIdx.x / 32; row < used; row += gridDim.x * (int64_t)8) {
        const bool real_row = r.row_token[row] >= 0;
        const float scale = real_row ? r.row_gate[row] : 0;
        const floatX *gate = h + row * 2 * F, *da = dap + row * F;
        floatX* d = dh + row * 2 * F;
        float dot = 0;
        for (int64_t c0 = lane * W; c0 < F; c0 += UNROLL * step) {
            Piece<W> gs[UNROLL] = {}, us[UNROLL] = {}, ds[UNROLL] = {};
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                const int64_t c = c0 + i * step;
                if (!real_row || c >= F) continue;
                gs[i] = *(const Piece<W>*)(gate + c);
                us[i] = *(const Piece<W>*)(gate + F + c);
                ds[i] = *(const Piece<W>*)(da + c);
            }
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                const int64_t c = c0 + i * step;
                if (c >= F) continue;
                float g[W], u[W], x[W], a[W];
                load<W>(g, (const floatX*)&gs[i]);
                load<W>(u, (const floatX*)&us[i]);
                load<W>(x, (const floatX*)&ds[i]);
#pragma unroll
                for (int j = 0; j < W; j++) {
                    float s = sigmoid_fast(g[j]), silu = g[j] * s, act = silu * u[j];
                    dot += x[j] * act;
                    a[j] = scale * act;
                    x[j] *= scale;
                    g[j] = x[j] * u[j] * s * (1 + g[j] * (1 - s));
                    u[j] = x[j] * silu;
                }
                store<W>(gated_a + row * F + c, a);
                store<W>(d + c, g);
                store<W>(d + F + c, u);
            }
        }
        dot = warp_sum(dot);
        if (lane == 0) drow_gate[row] = dot;
    }
}

void experts_swiglu_forward(floatX* a, const floatX* h, Ragged r, int64_t F, Ctx* ctx) {
    if (wide(F, a, h))
        forward<8><<<grid_of(r, ctx), 256, 0, ctx->stream>>>(a, h, r, F);
    else
        forward<1><<<grid_of(r, ctx), 256, 0, ctx->stream>>>(a, h, r, F);
    LAUNCH_CHECK();
}

void experts_swiglu_backward(floatX* dh, floatX* gated_a, real* drow_gate, const floatX* dap, const floatX* h, Ragged r,
                             int64_t F, Ctx* ctx) {
    if (wide(F, dh, gated_a, dap, h))
        backward<8><<<grid_of(r, ctx), 256, 0, ctx->stream>>>(dh, gated_a, drow_gate, dap, h, r, F);
    else
        backward<1><<<grid_of(r, ctx), 256, 0, ctx->stream>>>(dh, gated_a, drow_gate, dap, h, r, F);
    LAUNCH_CHECK();
}
