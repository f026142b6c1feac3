// Backward of layers/attention.cu, four kernels in a row. The delta and sum kernels, for every GPU, are in this file:
//
//   attention_delta_kernel         delta and lse, as initial accumulators
//   attention_backward_dq_kernel   dq (attention_backward_dq.cuh): a block owns queries
//   attention_backward_dkv_kernel  dk, dv (attention_backward_dkv.cuh): a block owns keys
//   attention_sum_rope_kernel      dk_rope, the sum over the heads
//
// In the dq and dkv kernels a block owns 128 rows, 64 for each consumer warpgroup. The rows' gradients stay in
// registers. The dq and dkv kernels are bound by the tensor cores: 4096 and 5120 clocks for 128 x 128 scores. The delta
// and sum kernels are bound by memory.
#pragma once

#include "layers/attention_parts.cuh"

namespace {

// The workspace of backward: its initial accumulators (attention_delta_kernel), padded to whole tiles, and the parts of
// dk_rope per head.
struct Workspace {
    float *lse, *delta, *rope_part;
    int64_t padded;  // tokens
    size_t bytes;
};

Workspace workspace_of(AttnShape s, char* base) {
    Workspace w;
    w.padded = ceil_div(s.T, TILE) * TILE;
    size_t rows = (size_t)(s.B * s.H * w.padded) * sizeof(float), parts = (size_t)(s.B * s.H * s.T * s.rope);
    w.lse = (float*)base;
    w.delta = (float*)(base + rows);
    w.rope_part = (float*)(base + 2 * rows);
    w.bytes = 2 * rows + parts * sizeof(float);
    return w;
}

// Initial accumulators of the backward GEMMs, so that P = exp2(..) and dS = P * acc need no subtraction:
//
//   start_delta = -rowsum(dout * out),   start_lse = -lse / scale
//
// Rows beyond T get 0 and -inf, which make P and dS 0 there.
template <int D>
__global__ void attention_delta_kernel(float* start_delta, float* start_lse, const floatX* dout, const floatX* out,
                                       const float* lse, int64_t B, uint32_t T, uint32_t H, uint32_t padded,
                                       float scale) {
    wait_for_previous();
    constexpr int LANES = 2 * D / 8;  // threads to a row, 8 columns each
    // Row (t, h) of sequence b. 32-bit divisions: 64-bit divisions would take longer than the memory traffic.
    const uint32_t row = blockIdx.x * (256 / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const uint32_t h = row % H, t = row / H;
    const int64_t b = grid_row();
    // Only whole warps leave (padded is a multiple of 128): the shuffles below need that.
    if (t >= padded || b >= B) return;

    // The thread's part of <dout, out>, then the sum over the row. lse is loaded meanwhile.
    float sum = 0, lse_of_row = INFINITY;
    if (t < T) {
        const int64_t at = ((b * T + t) * H + h) * 2 * D + lane * 8;
        float x[8], y[8];
        load(x, dout + at);
        load(y, out + at);
        if (lane == 0) lse_of_row = lse[(b * H + h) * T + t];
#pragma unroll
        for (int i = 0; i < 8; i++) sum += x[i] * y[i];
    }
    sum = warp_sum<LANES>(sum);

    // The initial accumulators of the row.
    if (lane == 0) {
        const int64_t to = (b * H + h) * padded + t;
        start_delta[to] = -sum;
        start_lse[to] = -lse_of_row / scale;
    }
}

// dk_rope = sum of the heads' parts (B, H, T, D) in the order of heads; 8 columns a thread.
template <int D>
__global__ void attention_sum_rope_kernel(floatX* dk_rope, const float* part, int64_t B, int64_t T, int64_t H,
                                          int64_t stride) {
    wait_for_previous();
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, token = i / (D / 8), column = i % (D / 8) * 8;
    if (token >= B * T) return;
    part += (token / T * H * T + token % T) * D + column;

    // The heads in order.
    float sum[8] = {};
#pragma unroll 4
    for (int64_t h = 0; h < H; h++) {
        float x[8];
        load(x, part + h * T * D);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += x[j];
    }
    store(dk_rope + token * stride + column, sum);
}

// Queues the delta kernel. Returns the workspace, which gets delta and lse.
template <int D>
Workspace begin_backward(const floatX* dout, const floatX* out, const real* lse, AttnShape s, Ctx* ctx) {
    const Workspace w = workspace_of(s, ctx_workspace<char>(ctx, (int64_t)attention_workspace(s)));
    const int64_t rows = w.padded * s.H;  // of a sequence
    ASSERT(rows < INT32_MAX);
    launch_early(attention_delta_kernel<D>, grid_of_rows(blocks_for(rows, 256 / (D / 4)), s.B), 256, 0, ctx, w.delta,
                 w.lse, dout, out, lse, s.B, s.T, s.H, w.padded, s.scale);
    return w;
}

// Queues the sum kernel.
template <int D>
void sum_rope(floatX* dk_rope, Workspace w, AttnShape s, Ctx* ctx) {
    launch_early(attention_sum_rope_kernel<D>, blocks_for(s.B * s.T * (D / 8), 256), 256, 0, ctx, dk_rope, w.rope_part,
                 s.B, s.T, s.H, s.k_rope_stride);
}

}  // namespace
