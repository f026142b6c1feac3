// Column-wise quantization kernels of mxfp8.cu. Each lane quantizes a patch in registers (mxfp8_patch.cuh). Shared
// memory has only the amax of chunks and tiles that span warps.
#pragma once

#include "mx/mxfp8_patch.cuh"

enum { COLUMN_WARPS = 4 };

// mx_quantize_tiles. A thread block takes a tile of 128 x 128, with 2 x 2 warps.
static __global__ void __launch_bounds__(32 * COLUMN_WARPS)
    tiles_kernel(uint8_t* q, uint8_t* q_transposed, uint8_t* scale, const floatX* w, int64_t rows, int64_t columns,
                 uint32_t rounding_bias) {
    wait_for_previous();

    // Position of this lane's patch.
    __shared__ uint32_t of_warp[COLUMN_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t r = blockIdx.y * (int64_t)MX_CHUNK + warp / 2 * WARP_ROWS + lane / 8 * PATCH_ROWS;
    const int64_t c = blockIdx.x * (int64_t)MX_CHUNK + warp % 2 * WARP_COLUMNS + lane % 8 * 8, matrix = blockIdx.z;
    const bool inside = r < rows && c < columns;

    // Tile amax: over the patch, over the warp, over the four warps.
    uint4 p[PATCH_ROWS];
    load_patch(p, w + (matrix * rows + r) * columns + c, columns, inside);
    uint32_t pair[4];
    largest_of_columns(pair, p);
    const uint32_t of_lanes =
        higher_half(largest_of_lanes<32>(larger(larger(pair[0], pair[1]), larger(pair[2], pair[3]))));
    if (lane == 0) of_warp[warp] = of_lanes;
    __syncthreads();

    // The tile's scale.
    const uint32_t s = scale_of(max(max(of_warp[0], of_warp[1]), max(of_warp[2], of_warp[3])), rounding_bias);
    if (threadIdx.x == 0) scale[(matrix * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x] = (uint8_t)s;

    // Quantize, and write q and its transpose.
    if (!inside) return;
    const float f = mx_scale_inverse(s), factor[8] = {f, f, f, f, f, f, f, f};
    uint2 bytes[PATCH_ROWS];
    quantize_patch(bytes, p, factor);
#pragma unroll
    for (int i = 0; i < PATCH_ROWS; i++) *(uint2*)(q + (matrix * rows + r + i) * columns + c) = bytes[i];
    store_turned(q_transposed + (matrix * columns + c) * rows + r, rows, bytes);
}

// Sources of channels_kernel and both_kernel, which load a lane's patch: bf16 rows, or MXFP8 rows dequantized to bf16
// (which is exact).
struct ValueRows {
    const floatX* x;
    int64_t row_count;  // row count; rows after it are zeros

    __device__ __forceinline__ void load(uint4 p[PATCH_ROWS], int64_t row, int64_t c, int64_t columns) const {
#pragma unroll
        for (int i = 0; i < PATCH_ROWS; i++)
            p[i] = row + i < row_count ? *(const uint4*)(x + (row + i) * columns + c) : make_uint4(0, 0, 0, 0);
    }
};
struct ByteRows {
    const uint8_t *q, *scale;
    const int32_t* row_token;  // NULL: rows are read without permutation
    int64_t stride;

    // The kernel is bound by instructions, so each address takes one instruction: a multiplication of 32 bits to 64.
    __device__ __forceinline__ void load(uint4 p[PATCH_ROWS], int64_t row, int64_t c, int64_t columns) const {
        int32_t at[PATCH_ROWS];
#pragma unroll
        for (int i = 0; i < PATCH_ROWS; i += 4)
            if (row_token)
                *(int4*)&at[i] = *(const int4*)(row_token + row + i);
            else
                for (int j = i; j < i + 4; j++) at[j] = (int32_t)row + j;

        // Issue all loads first. Pad rows (at < 0) load row 0, and are set to zeros below.
        const uint8_t *from = q + c, *from_scale = scale + c / MX_BLOCK;
        uint2 bytes[PATCH_ROWS];
        uint32_t s[PATCH_ROWS];
#pragma unroll
        for (int i = 0; i < PATCH_ROWS; i++) {
            const uint64_t there = (uint32_t)max(at[i], 0);
            bytes[i] = *(const uint2*)(from + there * (uint32_t)columns);
            s[i] = from_scale[there * (uint32_t)stride];
        }

        // Dequantize to bf16.
#pragma unroll
        for (int i = 0; i < PATCH_ROWS; i++) {
            float out[8];
            if (at[i] < 0) {
                bytes[i] = make_uint2(0, 0);
                s[i] = 0;
            }
            values_of(out, bytes[i], mx_scale_value(s[i]));
            p[i] = vec8_of(out);
        }
    }
};

// mx_quantize_channels and mx_requantize_channels. A thread block has DOWN x ACROSS warps. It walks an expert's rows in
// chunks (2 x 2 warps: 128 rows x 128 columns) or in 512-row scale groups (8 x 1 warps: 512 rows x 64 columns). A chunk
// or a 512-row scale group has one scale per column. As in permute_rows, blocks take the same slice of every expert
// before the next slice.
template <typename Source, int DOWN, int ACROSS>
static __global__ void __launch_bounds__(32 * DOWN * ACROSS, DOWN == 2 ? 5 : 0)
    channels_kernel(uint8_t* q, uint8_t* scale, Source source, Ragged r, int64_t length, int64_t columns,
                    int64_t slices, uint32_t rounding_bias) {
    wait_for_previous();

    // The slice of an expert's rows, and this lane's columns.
    constexpr int ROWS = DOWN * WARP_ROWS;
    __shared__ uint4 of_warp[DOWN * ACROSS][8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t e = blockIdx.y % r.El, slice = blockIdx.y / r.El;
    const int64_t start = r.group_start[e], end = r.group_start[e + 1], count = (end - start + ROWS - 1) / ROWS;
    const int64_t c = (blockIdx.x * (int64_t)ACROSS + warp % ACROSS) * WARP_COLUMNS + lane % 8 * 8;
    for (int64_t i = count * slice / slices; i < count * (slice + 1) / slices; i++) {
        // Load a chunk or a 512-row scale group, which may end early.
        const int64_t row = start + i * ROWS + warp / ACROSS * WARP_ROWS + lane / 8 * PATCH_ROWS;
        const bool inside = row < end && c < columns;
        uint4 p[PATCH_ROWS] = {};
        if (inside) source.load(p, row, c, columns);

        // Column amax, then quantize. The first lanes of every second warp store a chunk's scales.
        uint32_t pair[4];
        largest_of_chunk<DOWN, ACROSS>(pair, p, of_warp);
        if (inside)
            quantize_channels<ROWS>(q, scale, p, pair, warp / ACROSS % 2 == 0 && lane < 8, row, c, length, columns,
                                    rounding_bias);
    }
}

// mx_quantize_both. A thread block takes 128 rows x 128 columns with 2 x 2 warps, and quantizes them row-wise and
// column-wise. A warp finds the row amax of its 64 columns; the neighboring warp has the other half.
static __global__ void __launch_bounds__(32 * COLUMN_WARPS, 4)
    both_kernel(uint8_t* q, uint8_t* scale, uint8_t* q_channels, uint8_t* scale_channels, ValueRows source,
                int64_t length, int64_t columns, int64_t stride, uint32_t rounding_bias) {
    wait_for_previous();

    // Load this lane's patch.
    __shared__ uint4 of_warp[COLUMN_WARPS][8];
    __shared__ uint32_t of_rows[2][MX_CHUNK / 2];  // of each half of the columns; two rows in a word
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int in_chunk = warp / 2 * WARP_ROWS + lane / 8 * PATCH_ROWS;
    const int64_t r0 = grid_row() * MX_CHUNK, c0 = blockIdx.x * (int64_t)MX_CHUNK, row = r0 + in_chunk;
    if (r0 >= source.row_count) return;
    const int64_t c = c0 + warp % 2 * WARP_COLUMNS + lane % 8 * 8;
    uint4 p[PATCH_ROWS] = {};
    if (c < columns) source.load(p, row, c, columns);

#pragma unroll
    for (int i = 0; i < PATCH_ROWS / 2; i++) {
        // Row amax, two rows at a time; each of a row's eight lanes writes two rows. Then column amax. The barriers in
        // largest_of_chunk also cover of_rows.
        const uint32_t two =
            largest_of_lanes<8>(higher_half(largest(p[2 * i])) | higher_half(largest(p[2 * i + 1])) << 16);
        if (lane % 8 == i) of_rows[warp % 2][in_chunk / 2 + i] = two;
    }
    uint32_t pair[4];
    largest_of_chunk<2, 2>(pair, p, of_warp);

    auto scale_of_row = [&](int i) {  // row i of the chunk
        const uint32_t two = larger(of_rows[0][i / 2], of_rows[1][i / 2]);
        return scale_of(i % 2 ? two >> 16 : two & 0xffff, rounding_bias);
    };

    // Row-wise scales, one row per thread: a word with the scale of each existing block of the chunk. The last chunk
    // also zeros the padding after it.
    const int64_t of_thread = r0 + threadIdx.x, blocks = (columns - c0) / MX_BLOCK;
    if (of_thread < source.row_count) {
        uint32_t* to = (uint32_t*)(scale + of_thread * stride + c0 / MX_BLOCK);
        const uint32_t* end = (const uint32_t*)(scale + (of_thread + 1) * stride);
        *to = scale_of_row(threadIdx.x) * 0x01010101u & (blocks < 4 ? (1u << 8 * blocks) - 1 : ~0u);
        while (blocks <= 4 && ++to < end) *to = 0;
    }
    if (c >= columns) return;

    // Row-wise q.
    const int row_count = (int)min(source.row_count - row, (int64_t)PATCH_ROWS);
    q += row * columns + c;
#pragma unroll
    for (int i = 0; i < PATCH_ROWS; i++)
        if (i < row_count) *(uint2*)(q + i * columns) = quantize8(p[i], mx_scale_inverse(scale_of_row(in_chunk + i)));

    // Column-wise scales and q.
    quantize_channels<MX_CHUNK>(q_channels, scale_channels, p, pair, warp < 2 && lane < 8, row, c, length, columns,
                                rounding_bias);
}
