// Column-wise quantization kernels of mxfp8.cu. Each lane quantizes a patch in registers (mxfp8_patch.cuh). Shared
// memory has only the amax of chunks and tiles that span warps, and the scales of a transposed result, which are stored
// together.
#pragma once

#include "mx/mxfp8_patch.cuh"

enum { COLUMN_WARPS = 4 };

// mx_quantize_transposed. A thread block takes 256 rows x 64 columns, with its warps below each other. Its scales are 8
// bytes for each of 64 output rows. They are gathered in shared memory before they are stored.
template <int ALIGN>
static __global__ void __launch_bounds__(32 * COLUMN_WARPS)
    transposed_kernel(uint8_t* q, uint8_t* scale, const floatX* x, int64_t rows, int64_t columns, int64_t stride,
                      uint32_t rounding_bias) {
    wait_for_previous();

    // Position of this lane's patch.
    __shared__ uint4 of_warp[COLUMN_WARPS][8];
    __shared__ uint2 scales[WARP_COLUMNS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t r = blockIdx.y * (int64_t)(COLUMN_WARPS * WARP_ROWS) + warp * WARP_ROWS + lane / 8 * PATCH_ROWS;
    const int64_t first = blockIdx.x * (int64_t)WARP_COLUMNS, c = first + lane % 8 * 8, matrix = blockIdx.z;
    const bool inside = r < rows && c < columns;

    // Column amax: over the patch, over the lanes that share a block; for chunks also over two warps.
    uint4 p[PATCH_ROWS];
    load_patch(p, x + (matrix * rows + r) * columns + c, columns, inside);
    uint32_t pair[4];
    largest_of_columns(pair, p);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        pair[i] = larger(pair[i], __shfl_xor_sync(0xffffffffu, pair[i], 8));
        if (ALIGN == MX_CHUNK) pair[i] = larger(pair[i], __shfl_xor_sync(0xffffffffu, pair[i], 16));
    }
    if (ALIGN == MX_CHUNK) {  // a chunk is two warps
        if (lane < 8) of_warp[warp][lane] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        __syncthreads();
        keep_larger(pair, of_warp[warp ^ 1][lane % 8]);
    }

    // Scales: each lane of a block writes those of half of its columns to shared memory. The thread block then stores
    // all.
    float factor[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t s = scale_of_column(pair, i, rounding_bias);
        factor[i] = mx_scale_inverse(s);
        if (lane / 8 % 2 == i / 4)
            ((uint8_t*)&scales[lane % 8 * 8 + i])[2 * warp + lane / 16] = (uint8_t)(inside ? s : 0);
    }
    __syncthreads();
    if (threadIdx.x < WARP_COLUMNS && first + threadIdx.x < columns)
        *(uint2*)(scale + (matrix * columns + first + threadIdx.x) * stride + blockIdx.y * 8) = scales[threadIdx.x];

    // Quantize, and write transposed.
    if (!inside) return;
    uint2 bytes[PATCH_ROWS];
    quantize_patch(bytes, p, factor);
    store_turned(q + (matrix * columns + c) * rows + r, rows, bytes);
}

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

// mx_round_columns. A warp takes a chunk of CHUNK rows x 256 columns, 8 columns per lane. Groups start at multiples of
// 128, so a chunk never spans two groups. The second read of the chunk comes from the caches.
template <int CHUNK>
static __global__ void __launch_bounds__(32 * ROW_WARPS)
    round_columns_kernel(floatX* x, const int64_t* used, int64_t columns, uint32_t rounding_bias) {
    wait_for_previous();

    // Position of this lane's 8 columns.
    const int64_t c = (blockIdx.y * (int64_t)32 + threadIdx.x % 32) * 8;
    const int64_t row = (blockIdx.x * (int64_t)ROW_WARPS + threadIdx.x / 32) * CHUNK;
    if (row >= *used || c >= columns) return;
    floatX* top = x + row * columns + c;

    // Column amax and scale.
    uint32_t pair[4] = {};
#pragma unroll 8
    for (int i = 0; i < CHUNK; i++) {
        const uint4 p = *(const uint4*)(top + i * columns);
        keep_larger(pair, magnitudes(p));
    }
    uint32_t s[8];
#pragma unroll
    for (int j = 0; j < 8; j++) s[j] = scale_of_column(pair, j, rounding_bias);

#pragma unroll 8
    for (int i = 0; i < CHUNK; i++) {
        // Fake-quantize every element.
        float f[8];
        load(f, top + i * columns);
#pragma unroll
        for (int j = 0; j < 8; j++) f[j] = value_of(f[j], s[j]);
        store(top + i * columns, f);
    }
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

    // Bound by instructions, so each address takes one: a multiplication of 32 bits to 64.
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
// chunks (2 x 2 warps: 128 rows x 128 columns) or in 512-row scale groups (8 x 1 warps: 512 rows x 64 columns). Each of
// these has one scale per column. As in permute_slice, blocks take the same slice of every expert before the next
// slice.
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
    const int64_t r0 = blockIdx.y * (int64_t)MX_CHUNK, c0 = blockIdx.x * (int64_t)MX_CHUNK, row = r0 + in_chunk;
    const int64_t c = c0 + warp % 2 * WARP_COLUMNS + lane % 8 * 8;
    uint4 p[PATCH_ROWS] = {};
    if (c < columns) source.load(p, row, c, columns);

#pragma unroll
    for (int i = 0; i < PATCH_ROWS / 2; i++) {
        // Row amax, two rows at a time; each of a row's eight lanes writes two rows. Then column amax. Its barriers
        // also cover of_rows.
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
