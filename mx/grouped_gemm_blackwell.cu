// MXFP8 grouped GEMM as a sequence of cuBLASLt GEMMs. This file slices the ragged buffer, zeros the pad rows, and
// converts the scales to the layout of Blackwell's tensor cores. Many rows per expert: bound by the tensor cores. Few
// rows: bound by the wait for the group sizes and by launches.
//
// MXFP8 operands of lt_multiply (device/lt.cuh): A and B are e4m3 with k along their rows (B transposed), and there is
// a scale for every 32 elements:
//
//   layout    that of Blackwell (mx/mxfp8.h), 16-byte aligned, zeros in the padding
//             (CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0)
//   limits    compute capability 10.0 and up; 16-byte aligned pointers; k a multiple of 32, n of 16, any m
//   source    cuBLAS documentation 13, "Narrow Precision Data Types Usage"
#include "mx/grouped_gemm_blackwell.cuh"

#include "device/lt.cuh"

// The groups, copied to the host, and the capacity of the buffers.
struct HostGroups {
    int64_t start[MAX_EXPERTS + 1], capacity;
    int32_t rows[MAX_EXPERTS];

    // Rows of a GEMM: rounded up to 128 within the buffers. That costs little, and the library searches algorithms for
    // fewer sizes. Outputs of pad rows are overwritten with zeros.
    int64_t taken(int e) const { return min_i64(round_up(rows[e], 128), capacity - start[e]); }
    // Zeros the pad rows of an output.
    void clear_pads(void* out, int e, int64_t row_bytes, Ctx* ctx) const {
        const int64_t from = start[e] + rows[e], to = min_i64(start[e + 1], capacity);
        device_zero((char*)out + from * row_bytes, (size_t)((to - from) * row_bytes), ctx);
    }
};

// Copies the group sizes to the host, and waits for them.
static HostGroups host_groups(Ragged r, Ctx* ctx) {
    ASSERT(r.El <= MAX_EXPERTS);
    HostGroups g;
    g.capacity = r.capacity;
    CUDA_CHECK(cudaMemcpyAsync(g.start, r.group_start, (size_t)(r.El + 1) * sizeof(g.start[0]), cudaMemcpyDeviceToHost,
                               ctx->stream));
    CUDA_CHECK(
        cudaMemcpyAsync(g.rows, r.group_rows, (size_t)r.El * sizeof(g.rows[0]), cudaMemcpyDeviceToHost, ctx->stream));
    ctx_sync(ctx);
    return g;
}

// Inverse of mx_blackwell_offset: a thread writes four adjacent bytes, the scales of four consecutive blocks of a row.
static __global__ void __launch_bounds__(256)
    blackwell_scales_kernel(uint32_t* out, ScaleTiles s, int64_t rows, int64_t blocks, int64_t count) {
    // The row and the four blocks of the output's word i.
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x, quads = ceil_div(blocks, 4);
    if (i >= count) return;
    const int64_t tile = i / 128, row = tile / quads * 128 + i % 4 * 32 + i % 128 / 4, first = tile % quads * 4;

    // Gather their scales, 0 in the padding.
    uint32_t four = 0;
    for (int j = 0; j < 4; j++)
        if (row < rows && first + j < blocks) {
            const uint8_t byte = s.p[row / s.rows * s.row_stride + (first + j) / s.blocks * s.block_stride];
            four |= (uint32_t)byte << 8 * j;
        }
    out[i] = four;
}

static int64_t scales_bytes(int64_t rows, int64_t blocks) { return ceil_div(rows, 128) * ceil_div(blocks, 4) * 512; }

void mx_blackwell_scales(uint8_t* out, ScaleTiles scales, int64_t rows, int64_t blocks, Ctx* ctx) {
    const int64_t count = scales_bytes(rows, blocks) / 4;
    launch(blackwell_scales_kernel, blocks_for(count, 256), 256, 0, ctx, (uint32_t*)out, scales, rows, blocks, count);
}

// Forward and dgrad. Workspace: | cuBLASLt | scales of an expert's weight | scales of its rows |. Experts with more
// rows than fit are processed in slices of `rows_at_once` rows.
void grouped_gemm_lt_mx(floatX* y, MxBytes x, MxTiles w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    ASSERT(OC % 16 == 0);
    // Divide the workspace: the rest after the weight's scales determines the rows of a slice.
    const int64_t blocks = IC / MX_BLOCK, w_bytes = scales_bytes(OC, blocks), tile_bytes = scales_bytes(128, blocks);
    const int64_t rows_at_once = ((int64_t)ctx->workspace_bytes - LT_WORKSPACE - w_bytes) / tile_bytes * 128;
    ASSERT(rows_at_once > 0);
    uint8_t *of_w = (uint8_t*)ctx->workspace + LT_WORKSPACE, *of_x = of_w + w_bytes;
    const int64_t w_tiles = mx_tiles(OC) * mx_tiles(IC);
    const HostGroups g = host_groups(r, ctx);
    for (int e = 0; e < r.El; e++) {
        // Convert the scales of the expert's weight, once.
        const ScaleTiles w_tile = {w.scale + e * w_tiles, MX_CHUNK, w.stride_o, MX_CHUNK / MX_BLOCK, w.stride_c};
        if (g.rows[e]) mx_blackwell_scales(of_w, w_tile, OC, blocks, ctx);
        for (int64_t at = 0; at < g.taken(e); at += rows_at_once) {
            // A slice of its rows: convert the scales, then the GEMM.
            const int64_t row = g.start[e] + at, rows = min_i64(g.taken(e) - at, rows_at_once);
            const int64_t valid = min_i64(g.rows[e] - at, rows);
            const ScaleTiles x_tile = {x.scale + row * mx_stride(IC), 1, mx_stride(IC), 1, 1};
            mx_blackwell_scales(of_x, x_tile, valid, blocks, ctx);
            lt_multiply({y + row * OC, OC}, {x.q + row * IC, IC}, {w.q + e * OC * IC, IC},
                        {.m = rows, .n = OC, .k = IC, .transpose_b = true, .a_scale = of_x, .b_scale = of_w}, ctx);
        }

        // Zero the pad rows.
        g.clear_pads((char*)y, e, OC * (int64_t)sizeof(floatX), ctx);
    }
}

// Wgrad: an expert's rows are a range of every channel. Workspace: | cuBLASLt | scales of dy | scales of x |. Experts
// with more rows than fit are processed in slices of `rows_at_once` rows, which accumulate.
template <typename Out>
void grouped_gemm_lt_mx_wgrad(Out* dw, MxBytes dy, MxBytes x, int64_t length, Ragged r, int64_t IC, int64_t OC,
                              int accumulate, Ctx* ctx) {
    // Divide the workspace: the rows of a slice, and the two buffers of scales.
    const int64_t chunk_bytes = scales_bytes(OC, MX_CHUNK / MX_BLOCK) + scales_bytes(IC, MX_CHUNK / MX_BLOCK);
    const int64_t rows_at_once = ((int64_t)ctx->workspace_bytes - LT_WORKSPACE) / chunk_bytes * MX_CHUNK;
    ASSERT(rows_at_once > 0);
    uint8_t *of_dy = (uint8_t*)ctx->workspace + LT_WORKSPACE, *of_x = of_dy + scales_bytes(OC, rows_at_once / MX_BLOCK);
    HostGroups g = host_groups(r, ctx);
    g.capacity = length;  // channels are padded with zeros to the next 128 (mx/mxfp8.h)
    for (int e = 0; e < r.El; e++) {
        if (!accumulate && g.taken(e) == 0) device_zero(dw + e * OC * IC, (size_t)(OC * IC) * sizeof(Out), ctx);
        for (int64_t at = 0; at < g.taken(e); at += rows_at_once) {
            // A slice of the expert's rows: convert the scales, then the GEMM.
            const int64_t row = g.start[e] + at, rows = min_i64(g.taken(e) - at, rows_at_once);
            const int64_t chunk = row / MX_CHUNK, blocks = rows / MX_BLOCK;
            mx_blackwell_scales(of_dy, {dy.scale + chunk * OC, 1, 1, MX_CHUNK / MX_BLOCK, OC}, OC, blocks, ctx);
            mx_blackwell_scales(of_x, {x.scale + chunk * IC, 1, 1, MX_CHUNK / MX_BLOCK, IC}, IC, blocks, ctx);
            LtProduct product = {.m = OC, .n = IC, .k = rows, .transpose_b = true, .a_scale = of_dy, .b_scale = of_x};
            product.real_out = sizeof(Out) == sizeof(real);
            product.accumulate = accumulate || at > 0;
            lt_multiply({dw + e * OC * IC, IC}, {dy.q + row, length}, {x.q + row, length}, product, ctx);
        }
    }
}
template void grouped_gemm_lt_mx_wgrad(real*, MxBytes, MxBytes, int64_t, Ragged, int64_t, int64_t, int, Ctx*);
template void grouped_gemm_lt_mx_wgrad(floatX*, MxBytes, MxBytes, int64_t, Ragged, int64_t, int64_t, int, Ctx*);
