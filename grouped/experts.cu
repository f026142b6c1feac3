// SwiGLU between an expert's two GEMMs, over the ragged rows in use. The row count is read on the device, and the grid
// strides over the rows. Pad rows are written as zeros without being read. All kernels are bound by memory:
//
//     kernel      elements moved per output    work per thread or warp
//     forward     3                            a thread: one 16-byte vector
//     backward    6                            a warp: one row, so that <da', a> is one warp's sum in a fixed order
#include "grouped/experts.cuh"

// Elementwise: each thread handles one 16-byte vector (8 columns) per iteration.
static __global__ void __launch_bounds__(256)
    experts_swiglu_forward_kernel(floatX* a, const floatX* h, Ragged r, int64_t F) {
    wait_for_previous();
    const int64_t vectors = F / 8, end = r.group_start[r.El] * vectors;
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < end; i += gridDim.x * (int64_t)256) {
        // Eight columns of a row; a pad row counts as zeros.
        const int64_t row = i / vectors, c = i % vectors * 8;
        float g[8] = {}, u[8] = {};
        if (r.row_token[row] >= 0) {
            load(g, h + row * 2 * F + c);
            load(u, h + row * 2 * F + F + c);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) g[j] = swiglu(g[j], u[j], sigmoid_fast(g[j]));
        store(a + row * F + c, g);
    }
}

static __global__ void __launch_bounds__(256)
    experts_swiglu_backward_kernel(floatX* dh, floatX* gated_a, float* drow_gate, const floatX* da_ungated,
                                   const floatX* h, Ragged r, int64_t F) {
    wait_for_previous();
    // One warp per row.
    enum { PIECES_AT_ONCE = 2 };
    const int lane = threadIdx.x % 32;
    const int64_t used = r.group_start[r.El];
    for (int64_t row = blockIdx.x * (int64_t)8 + threadIdx.x / 32; row < used; row += gridDim.x * (int64_t)8) {
        // Pointers: the row's gate, up and da', and their gradients.
        const bool real_row = r.row_token[row] >= 0;
        const float weight = real_row ? r.row_gate[row] : 0;
        const floatX *h_row = h + row * 2 * F, *da = da_ungated + row * F;
        floatX* d = dh + row * 2 * F;
        float dot = 0;
        for (int64_t c0 = lane * 8; c0 < F; c0 += PIECES_AT_ONCE * 256) {
            // All loads are issued first. Pad rows are not read: they count as zeros.
            uint4 gs[PIECES_AT_ONCE] = {}, us[PIECES_AT_ONCE] = {}, ds[PIECES_AT_ONCE] = {};
#pragma unroll
            for (int i = 0; i < PIECES_AT_ONCE; i++) {
                const int64_t c = c0 + i * 256;
                if (!real_row || c >= F) continue;
                gs[i] = *(const uint4*)(h_row + c);
                us[i] = *(const uint4*)(h_row + F + c);
                ds[i] = *(const uint4*)(da + c);
            }

#pragma unroll
            for (int i = 0; i < PIECES_AT_ONCE; i++) {
                const int64_t c = c0 + i * 256;
                float g[8], u[8], x[8], a[8];
                floats_of(g, gs[i]);
                floats_of(u, us[i]);
                floats_of(x, ds[i]);
                dot += swiglu_backward_piece(a, g, u, x, weight, [](float*) {});
                if (c >= F) continue;
                store(gated_a + row * F + c, a);
                store(d + c, g);
                store(d + F + c, u);
            }
        }

        // dgate = <da', a> of the row, summed in a fixed order.
        dot = warp_sum(dot);
        if (lane == 0) drow_gate[row] = dot;
    }
}

void experts_swiglu_forward(floatX* a, const floatX* h, Ragged r, int64_t F, Ctx* ctx) {
    ASSERT(wide(F, a, h));
    const unsigned blocks = walking_blocks(ceil_div(r.capacity * (F / 8), 256), ctx);
    launch_early(experts_swiglu_forward_kernel, blocks, 256, 0, ctx, a, h, r, F);
}

void experts_swiglu_backward(ExpertsBackward t, Ragged r, int64_t F, Ctx* ctx) {
    ASSERT(wide(F, t.dh, t.gated_a, t.da_ungated, t.h));
    const unsigned blocks = walking_blocks(ceil_div(r.capacity, 8), ctx);
    launch_early(experts_swiglu_backward_kernel, blocks, 256, 0, ctx, t.dh, t.gated_a, t.drow_gate, t.da_ungated, t.h,
                 r, F);
}
