// SwiGLU between an expert's two GEMMs, over the ragged rows in use. The row count is read on the device, and the grid
// strides over the rows. Pad rows are written as zeros without being read. Both kernels are bound by memory:
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
    const int64_t used = r.group_start[r.El];
    for (int64_t row = blockIdx.x * (int64_t)8 + threadIdx.x / 32; row < used; row += gridDim.x * (int64_t)8)
        swiglu_backward_row(
            dh, gated_a, drow_gate, da_ungated, h, r, row, F, [](float*) {},
            [](int64_t, const uint4&, const uint4&) {});
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
