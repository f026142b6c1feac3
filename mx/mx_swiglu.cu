// SwiGLU fused with the quantization of its result (mxfp8.cuh). All kernels are bound by memory. Bytes per element of
// the activation (F per row):
//
//     kernel                               reads    writes                                      bytes
//     forward                              h        MXFP8 a                                      5.03
//     backward, row-wise and column-wise   h, da'   MXFP8 dh, MXFP8 dh transposed, gate * a     12.1
//
// The backward reaches 71 % of the speed of a copy.
//
// Every input is read once in 16-byte vectors, with 6 or 8 loads in flight per lane.
//
// Forward: a warp takes a span of 1024 columns of a row.
//
// Backward: a thread block takes 128 rows and walks F in steps of 128 columns. `a` is fake-quantized in registers, as
// forward quantizes it. The same lanes hold all elements of gate's and up's gradients that share a row's scale, so
// these are quantized row-wise in registers. They are stored in shared memory (64 KB). The warps then read them in
// patches of 16 rows x 8 columns (mxfp8_patch.cuh) and quantize column-wise. The occupancy is two blocks per SM, so
// that one loads while the other quantizes.
//
// Expert rows need the dot product <da', a>, so one block owns whole rows. Shared-expert and dense rows are fewer and
// need no dot product, so their columns are split over blocks.
#include "mx/mx_swiglu.h"

#include "grouped/experts.cuh"
#include "mx/mxfp8.cuh"
#include "mx/mxfp8_patch.cuh"

// Forward. The row count is read on the device, and the grid walks the rows.
static __global__ void __launch_bounds__(32 * ROW_WARPS, 4)
    swiglu_kernel(uint8_t* q, uint8_t* scale, const floatX* h, Ragged r, int64_t F, int64_t stride,
                  uint32_t rounding_bias) {
    wait_for_previous();
    const uint32_t spans = (uint32_t)ceil_div(F, SPAN), end = (uint32_t)r.group_start[r.El] * spans;
    for (uint32_t span = warp_in_grid(); span < end; span += gridDim.x * ROW_WARPS) {
        const int64_t row = span / spans, c0 = span % spans * (int64_t)SPAN;
        const int64_t given = r.row_token[row] >= 0 ? F : 0;  // columns to read: none of a pad row

        // Issue all loads first.
        uint4 gate[VECTORS], up[VECTORS];
        load_span(gate, h + row * 2 * F, c0, given);
        load_span(up, h + row * 2 * F + F, c0, given);

        // a = silu(g) u, rounded to bf16 before quantization.
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            float g[8], u[8];
            floats_of(g, gate[i]);
            floats_of(u, up[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) g[j] = swiglu(g[j], u[j], sigmoid_fast(g[j]));
            gate[i] = vec8_of(g);
        }
        quantize_span<MX_CHUNK>(q + row * F, scale + row * stride, gate, c0, F, stride, rounding_bias);
    }
}

// Fake-quantizes x in this lane's 8 columns.
static __device__ __forceinline__ void round_piece(float x[8], uint32_t rounding_bias) {
    // Round to bf16 first, as forward does before it quantizes `a`.
    const uint4 p = vec8_of(x);
    const uint32_t s = scale_of(higher_half(largest_of_lanes<MX_CHUNK / 8>(largest(p))), rounding_bias);
    const float value = mx_scale_value(s);
    values_of(x, quantize8(p, mx_scale_inverse(s)), value);
}

// Quantizes a lane's vectors of gate and up. Elements that share a scale are in the same lanes for both. q and scale
// are the outputs of gate; those of up are F columns further.
static __device__ __forceinline__ void quantize_two(uint8_t* q, uint8_t* scale, const uint4& gate, const uint4& up,
                                                    int64_t F, bool inside, uint32_t rounding_bias) {
    // One shuffle serves both: the amax of gate in the lower half, that of up in the upper.
    const uint32_t pair = largest_of_lanes<MX_CHUNK / 8>(higher_half(largest(gate)) | higher_half(largest(up)) << 16);
    const uint32_t of_gate = scale_of(pair & 0xffff, rounding_bias), of_up = scale_of(pair >> 16, rounding_bias);

    // Store q; the first of the four lanes of a block stores the scale.
    if (!inside) return;
    *(uint2*)q = quantize8(gate, mx_scale_inverse(of_gate));
    *(uint2*)(q + F) = quantize8(up, mx_scale_inverse(of_up));
    if (threadIdx.x % 4) return;
    scale[0] = (uint8_t)of_gate;
    scale[F / MX_BLOCK] = (uint8_t)of_up;
}

// The rows of the row-wise and column-wise backward: expert rows with gates, or tokens without, whose `a` is not
// quantized.
struct GatedRows {
    enum { GATED = 1 };
    Ragged r;

    __device__ __forceinline__ int64_t used() const { return r.group_start[r.El]; }
    __device__ __forceinline__ bool valid(int64_t) const { return true; }
    __device__ __forceinline__ bool real(int64_t row) const { return r.row_token[row] >= 0; }
    __device__ __forceinline__ float gate(int64_t row) const { return r.row_gate[row]; }
};
struct TokenRows {
    enum { GATED = 0 };
    int64_t N;

    __device__ __forceinline__ int64_t used() const { return N; }
    __device__ __forceinline__ bool valid(int64_t row) const { return row < N; }
    __device__ __forceinline__ bool real(int64_t row) const { return row < N; }
    __device__ __forceinline__ float gate(int64_t) const { return 1; }
};

// The tile in shared memory: 128 rows, each with 16 vectors of 8 columns of gate's gradient, then 16 of up's.
enum { TILE_WARPS = 8, TILE_PIECES = 2 * MX_CHUNK / 8, TILE_BYTES = MX_CHUNK * TILE_PIECES * 16 };

// Computes one tile and quantizes it row-wise. A warp takes 16 rows, two at a time: 16 lanes hold the chunk of a row.
// c: this lane's column; dots += <da', a> of each row.
template <typename Source>
static __device__ __forceinline__ void swiglu_backward_tile(uint4* tile, float* dots, uint8_t* q, uint8_t* scale,
                                                            floatX* gated_a, const floatX* da_ungated, const floatX* h,
                                                            const Source& rows, int64_t row0, int64_t c, int64_t F,
                                                            int64_t stride, uint32_t rounding_bias) {
    enum { AT_ONCE = 4, ROWS = MX_CHUNK / TILE_WARPS / 2 };
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * (MX_CHUNK / TILE_WARPS) + lane / 16;
#pragma unroll 1
    for (int i0 = 0; i0 < ROWS; i0 += AT_ONCE) {
        // Issue all loads first. Pad rows are not read; they count as zeros.
        uint4 gs[AT_ONCE] = {}, us[AT_ONCE] = {}, ds[AT_ONCE] = {};
        float weight[AT_ONCE] = {};
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int64_t row = row0 + first + 2 * (i0 + i);
            if (!rows.real(row)) continue;
            gs[i] = *(const uint4*)(h + row * 2 * F + c);
            us[i] = *(const uint4*)(h + row * 2 * F + F + c);
            ds[i] = *(const uint4*)(da_ungated + row * F + c);
            weight[i] = rows.gate(row);
        }

#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            // SwiGLU backward of this lane's vector, with `a` fake-quantized for expert rows.
            const int in_tile = first + 2 * (i0 + i);
            const int64_t row = row0 + in_tile;
            float g[8], u[8], x[8], a[8];
            floats_of(g, gs[i]);
            floats_of(u, us[i]);
            floats_of(x, ds[i]);
            const float part = swiglu_backward_piece(a, g, u, x, weight[i], [&](float whole[8]) {
                if (Source::GATED) round_piece(whole, rounding_bias);
            });
            const float dot = Source::GATED ? warp_sum<16>(part) : 0;
            if (Source::GATED && lane % 16 == 0) dots[in_tile] += dot;

            // Store gate * a, the row-wise quantized dh, and dh in shared memory.
            const uint4 gate = vec8_of(g), up = vec8_of(u);
            const bool valid = rows.valid(row);
            if (valid) store(gated_a + row * F + c, a);
            quantize_two(q + row * 2 * F + c, scale + row * stride + c / MX_BLOCK, gate, up, F, valid, rounding_bias);
            tile[in_tile * TILE_PIECES + lane % 16] = gate;
            tile[in_tile * TILE_PIECES + 16 + lane % 16] = up;
        }
    }
}

// Backward, row-wise and column-wise. The y axis of the grid splits the columns of tokens.
template <typename Source>
static __global__ void __launch_bounds__(32 * TILE_WARPS, 2)
    swiglu_backward_both_kernel(uint8_t* q, uint8_t* scale, uint8_t* q_channels, uint8_t* scale_channels,
                                floatX* gated_a, float* drow_gate, const floatX* da_ungated, const floatX* h,
                                Source rows, int64_t F, int64_t length, int64_t stride, uint32_t rounding_bias) {
    wait_for_previous();
    extern __shared__ uint4 tile[];
    __shared__ uint4 of_warp[TILE_WARPS][8];
    __shared__ float dots[MX_CHUNK];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // This lane's patch for the column-wise phase: the tile is 256 columns wide, two warps down, four across.
    const int top = warp / 4 * WARP_ROWS + lane / 8 * PATCH_ROWS, piece = warp % 4 * (WARP_COLUMNS / 8) + lane % 8;
    const int64_t column = piece / 16 * F + piece % 16 * 8;  // of dh, in the first tile
    const int64_t used = rows.used();
    for (int64_t row0 = blockIdx.x * (int64_t)MX_CHUNK; row0 < used; row0 += gridDim.x * (int64_t)MX_CHUNK) {
        if (lane < 16) dots[warp * 16 + lane] = 0;  // of this warp's rows
        __syncwarp();
        for (int64_t c0 = blockIdx.y * (int64_t)MX_CHUNK; c0 < F; c0 += gridDim.y * (int64_t)MX_CHUNK) {
            // Row-wise phase: compute dh, quantize it, and store it in shared memory.
            swiglu_backward_tile(tile, dots, q, scale, gated_a, da_ungated, h, rows, row0, c0 + lane % 16 * 8, F,
                                 stride, rounding_bias);
            __syncthreads();

            // Column-wise phase: read the patch, find each column's amax, quantize.
            uint4 p[PATCH_ROWS];
#pragma unroll
            for (int i = 0; i < PATCH_ROWS; i++) p[i] = tile[(top + i) * TILE_PIECES + piece];
            uint32_t pair[4];
            largest_of_chunk<2, 4>(pair, p, of_warp);  // after its barriers the tile may be overwritten
            quantize_channels<MX_CHUNK>(q_channels, scale_channels, p, pair, warp < 4 && lane < 8, row0 + top,
                                        column + c0, length, 2 * F, rounding_bias);
        }

        // Write <da', a> of each row, and zero the padding after its last scale.
        __syncwarp();
        const int64_t row = row0 + warp * 16 + lane;
        if (lane >= 16 || !rows.valid(row) || blockIdx.y > 0) continue;
        if (Source::GATED) drow_gate[row] = dots[warp * 16 + lane];
        for (int64_t c = 2 * F / MX_BLOCK; c < stride; c += 8) *(uint2*)(scale + row * stride + c) = make_uint2(0, 0);
    }
}

// The backward of the gate. One warp per row, summed as in experts.cu.
static __global__ void __launch_bounds__(256)
    experts_gate_backward_kernel(floatX* gated_a, float* drow_gate, const floatX* da_ungated, Ragged r, int64_t F) {
    wait_for_previous();
    const int lane = threadIdx.x % 32;
    const int64_t used = r.group_start[r.El];
    for (int64_t row = blockIdx.x * (int64_t)8 + threadIdx.x / 32; row < used; row += gridDim.x * (int64_t)8) {
        const bool real_row = r.row_token[row] >= 0;
        float dot = 0;
        for (int64_t c = row * F + lane * 8; real_row && c < (row + 1) * F; c += 256) {
            float a[8], x[8], part = 0;
            load(a, gated_a + c);
            load(x, da_ungated + c);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                part += x[j] * a[j];
                a[j] *= r.row_gate[row];
            }
            dot += part;
            store(gated_a + c, a);
        }
        dot = warp_sum(dot);
        if (lane == 0) drow_gate[row] = dot;
    }
}

void mx_swiglu_quantize(MxBytes out, const floatX* h, Ragged r, int64_t F, int32_t scale_mode, Ctx* ctx) {
    ASSERT(aligned(out.q, h));
    launch_early(swiglu_kernel, walking_blocks(row_blocks(r.capacity, F), ctx), 32 * ROW_WARPS, 0, ctx, out.q,
                 out.scale, h, r, F, mx_stride(F), rounding_bias_of(scale_mode));
}

void mx_swiglu_backward_both(MxBytes out, MxBytes channels, ExpertsBackward t, int64_t length, Ragged r, int64_t F,
                             int32_t scale_mode, Ctx* ctx) {
    ASSERT(aligned(out.q, out.scale, channels.q, channels.scale, t.gated_a, t.da_ungated, t.h) && F % MX_CHUNK == 0);
    ASSERT(length % MX_CHUNK == 0 && length >= r.capacity && (!r.row_gate || r.capacity % MX_CHUNK == 0));
    const unsigned down = walking_blocks(ceil_div(r.capacity, MX_CHUNK), ctx);
    auto run = [&](auto rows, unsigned across) {
        launch_early(swiglu_backward_both_kernel<decltype(rows)>, dim3(down, across), 32 * TILE_WARPS, TILE_BYTES, ctx,
                     out.q, out.scale, channels.q, channels.scale, t.gated_a, t.drow_gate, t.da_ungated, t.h, rows, F,
                     length, mx_stride(2 * F), rounding_bias_of(scale_mode));
    };
    if (r.row_gate)
        run(GatedRows{r}, 1);
    else
        run(TokenRows{r.capacity}, (unsigned)(F / MX_CHUNK));
}

void experts_gate_backward(ExpertsBackward t, Ragged r, int64_t F, Ctx* ctx) {
    ASSERT(wide(F, t.gated_a, t.da_ungated));
    const unsigned blocks = walking_blocks(ceil_div(r.capacity, 8), ctx);
    launch_early(experts_gate_backward_kernel, blocks, 256, 0, ctx, t.gated_a, t.drow_gate, t.da_ungated, r, F);
}
