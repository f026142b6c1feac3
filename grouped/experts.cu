// SwiGLU between an expert's two products, over the ragged rows in use: bound by memory (forward 3 elements moved per
// output, backward 6). How many rows there are is read on the device, and the grid walks them; in the backward one warp
// a row, so that <dA', A> is one warp's sum in a fixed order. Pad rows are written as zeros without being read.
#include "grouped/experts.h"
#include "layers/activation.h"
#include "layers/rows.cuh"

enum { UNROLL = 2 };

// Many more blocks than run at a time, for balance; those past the rows in use end at once.
static unsigned grid_of(int64_t blocks, const Ctx* ctx) { return (unsigned)min_i64(blocks, 256 * (int64_t)ctx->sms); }

// A thread a piece at a time: no sum ties a row together here.
static __global__ void __launch_bounds__(256)
    experts_swiglu_forward_kernel(floatX* a, const floatX* h, Ragged r, int64_t F) {
    const int64_t pieces = F / 8, end = r.group_start[r.El] * pieces;
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < end; i += gridDim.x * (int64_t)256) {
        const int64_t row = i / pieces, c = i % pieces * 8;
        float g[8] = {}, u[8] = {};
        if (r.row_token[row] >= 0) {
            load<8>(g, h + row * 2 * F + c);
            load<8>(u, h + row * 2 * F + F + c);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) g[j] = swiglu(g[j], u[j], sigmoid_fast(g[j]));
        store<8>(a + row * F + c, g);
    }
}

static __global__ void __launch_bounds__(256)
    experts_swiglu_backward_kernel(floatX* dh, floatX* gated_a, float* drow_gate, const floatX* dap, const floatX* h,
                                   Ragged r, int64_t F) {
    const int64_t step = 32 * 8, used = r.group_start[r.El];
    const int lane = threadIdx.x % 32;
    for (int64_t row = blockIdx.x * (int64_t)8 + threadIdx.x / 32; row < used; row += gridDim.x * (int64_t)8) {
        const bool real_row = r.row_token[row] >= 0;
        const float scale = real_row ? r.row_gate[row] : 0;
        const floatX *gate = h + row * 2 * F, *da = dap + row * F;
        floatX* d = dh + row * 2 * F;
        float dot = 0;
        for (int64_t c0 = lane * 8; c0 < F; c0 += UNROLL * step) {
            Piece<8> gs[UNROLL] = {}, us[UNROLL] = {}, ds[UNROLL] = {};
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                const int64_t c = c0 + i * step;
                if (!real_row || c >= F) continue;
                gs[i] = *(const Piece<8>*)(gate + c);
                us[i] = *(const Piece<8>*)(gate + F + c);
                ds[i] = *(const Piece<8>*)(da + c);
            }
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                const int64_t c = c0 + i * step;
                if (c >= F) continue;
                float g[8], u[8], x[8], a[8];
                load<8>(g, (const floatX*)&gs[i]);
                load<8>(u, (const floatX*)&us[i]);
                load<8>(x, (const floatX*)&ds[i]);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float s = sigmoid_fast(g[j]), act = swiglu(g[j], u[j], s);
                    dot += x[j] * act;
                    a[j] = scale * act;
                    x[j] *= scale;
                    const float du = swiglu_du(x[j], g[j], s);
                    g[j] = swiglu_dg(x[j], g[j], u[j], s);
                    u[j] = du;
                }
                store<8>(gated_a + row * F + c, a);
                store<8>(d + c, g);
                store<8>(d + F + c, u);
            }
        }
        dot = warp_sum(dot);
        if (lane == 0) drow_gate[row] = dot;
    }
}

void experts_swiglu_forward(floatX* a, const floatX* h, Ragged r, int64_t F, Ctx* ctx) {
    ASSERT(wide(F, a, h));
    experts_swiglu_forward_kernel<<<grid_of(ceil_div(r.capacity * (F / 8), 256), ctx), 256, 0, ctx->stream>>>(a, h, r,
                                                                                                              F);
    LAUNCH_CHECK();
}

void experts_swiglu_backward(floatX* dh, floatX* gated_a, real* drow_gate, const floatX* dap, const floatX* h, Ragged r,
                             int64_t F, Ctx* ctx) {
    ASSERT(wide(F, dh, gated_a, dap, h));
    experts_swiglu_backward_kernel<<<grid_of(ceil_div(r.capacity, 8), ctx), 256, 0, ctx->stream>>>(
        dh, gated_a, drow_gate, dap, h, r, F);
    LAUNCH_CHECK();
}
