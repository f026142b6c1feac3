// MXFP8 casts: bound by memory (3.03 bytes an element, 4.0 for tiles). All of an input is read once, in 16-byte pieces
// of which a lane has 4 to 16 under way, and what shares a scale never leaves the warp or the block that read it; only
// the rounding of columns reads its chunks again, from the caches. How the largest is found, and what a warp takes
// along rows: mxfp8.cuh.
//
// Down the columns a lane takes 16 rows x 8 columns, a warp 64 x 64: two blocks of rows in two pairs of 8 lanes. The
// bytes are turned in registers, 4 x 4 at a time, and leave in 16-byte pieces that make 64 bytes of a row of the
// result: no shared memory but for the scales of chunks and tiles, which span warps.
#include "grouped/permute.cuh"
#include "mx/mxfp8.cuh"

enum { PATCH_ROWS = 16, WARP_ROWS = 4 * PATCH_ROWS, WARP_COLUMNS = 64, COLUMN_WARPS = 4 };

// --- Along rows ---

// The row and first column of this warp's span; false: there is none.
static __device__ __forceinline__ bool place_of_warp(int64_t* row, int64_t* c0, int64_t rows, int64_t columns) {
    const uint32_t spans = (uint32_t)ceil_div(columns, SPAN), span = warp_in_grid();
    *row = span / spans, *c0 = span % spans * (int64_t)SPAN;
    return *row < rows;
}

// The second number of these launch bounds leaves just the registers that hold all loads at once: with none given, the
// compiler waits for the first before it issues the last.
template <int ALIGN>
static __global__ void __launch_bounds__(32 * ROW_WARPS, 6)
    quantize_kernel(uint8_t* q, uint8_t* scale, const floatX* x, int64_t rows, int64_t columns, int64_t stride,
                    uint32_t carry) {
    wait_for_previous();
    int64_t row, c0;
    if (!place_of_warp(&row, &c0, rows, columns)) return;
    // The loads, then the largest, the scales and the bytes.
    uint4 p[PIECES];
    load_span(p, x + row * columns, c0, columns);
    cast_span<ALIGN>(q + row * columns, scale + row * stride, p, c0, columns, stride, carry);
}

// x = (or +=: ADD) what the bytes stand for, in columns c0 .. c0 + 1023 of a row; bytes of a row that is not `given`
// are not read and stand for zeros.
template <bool ADD>
static __device__ __forceinline__ void dequantize_span(floatX* x, const uint8_t* q, const uint8_t* scale, bool given,
                                                       int64_t c0, int64_t columns) {
    c0 += threadIdx.x % 32 * 8;
    if (c0 >= columns) return;

    // All loads go out first.
    uint2 p[PIECES] = {};
    uint32_t s[PIECES] = {};
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int64_t c = c0 + i * 256;
        if (!given || c >= columns) continue;
        p[i] = *(const uint2*)(q + c);
        s[i] = scale[c / MX_BLOCK];
    }

    // q 2^(s - 127), or x + that, rounded once.
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        float out[8];
        values_of(out, p[i], mx_scale_value(s[i]));
        if (c0 + i * 256 >= columns) continue;
        uint4* piece = (uint4*)x + c0 / 8 + i * 32;
        if constexpr (ADD) {
            float before[8];
            floats_of(before, *piece);
#pragma unroll
            for (int j = 0; j < 8; j++) out[j] += before[j];
        }
        *piece = piece_of(out);
    }
}

template <bool ADD>
static __global__ void __launch_bounds__(32 * ROW_WARPS)
    dequantize_kernel(floatX* x, const uint8_t* q, const uint8_t* scale, int64_t rows, int64_t columns,
                      int64_t stride) {
    wait_for_previous();
    int64_t row, c0;
    if (!place_of_warp(&row, &c0, rows, columns)) return;
    dequantize_span<ADD>(x + row * columns, q + row * columns, scale + row * stride, true, c0, columns);
}

static __global__ void __launch_bounds__(32 * PERMUTE_WARPS)
    dequantize_rows_kernel(floatX* rows, const uint8_t* q, const uint8_t* scale, Ragged r, int64_t columns,
                           int64_t stride, int64_t slices) {
    wait_for_previous();
    permute_slice(r, slices, [&](int64_t row, int64_t token) {
        for (int64_t c0 = 0; c0 < columns; c0 += SPAN)
            dequantize_span<false>(rows + row * columns, q + token * columns, scale + token * stride, token >= 0, c0,
                                   columns);
    });
}

// --- Down the columns ---

// A lane's patch: 16 rows x 8 columns, zeros outside of the matrix.
static __device__ __forceinline__ void load_patch(uint4 p[PATCH_ROWS], const floatX* x, int64_t columns, bool inside) {
#pragma unroll
    for (int i = 0; i < PATCH_ROWS; i++) p[i] = inside ? *(const uint4*)(x + i * columns) : make_uint4(0, 0, 0, 0);
}

// pair = the larger of each column's so far and of p's, columns in pairs.
static __device__ __forceinline__ void keep_larger(uint32_t pair[4], uint4 p) {
    pair[0] = larger(pair[0], p.x), pair[1] = larger(pair[1], p.y);
    pair[2] = larger(pair[2], p.z), pair[3] = larger(pair[3], p.w);
}

static __device__ __forceinline__ uint4 magnitudes(uint4 p) {
    return make_uint4(magnitudes(p.x), magnitudes(p.y), magnitudes(p.z), magnitudes(p.w));
}

// The largest of every column of a patch, in pairs.
static __device__ __forceinline__ void largest_of_columns(uint32_t pair[4], const uint4 p[PATCH_ROWS]) {
    pair[0] = pair[1] = pair[2] = pair[3] = 0;
#pragma unroll
    for (int i = 0; i < PATCH_ROWS; i++) keep_larger(pair, magnitudes(p[i]));
}

// The scale of column i of 8.
static __device__ __forceinline__ uint32_t scale_of_column(const uint32_t pair[4], int i, uint32_t carry) {
    return scale_of(i % 2 ? pair[i / 2] >> 16 : pair[i / 2] & 0xffff, carry);
}

static __device__ __forceinline__ void cast_patch(uint2 bytes[PATCH_ROWS], const uint4 p[PATCH_ROWS],
                                                  const float factor[8]) {
#pragma unroll
    for (int i = 0; i < PATCH_ROWS; i++) bytes[i] = cast8(p[i], factor);
}

// Writes the columns of a patch as rows of q, which are `rows` long.
static __device__ __forceinline__ void store_turned(uint8_t* q, int64_t rows, const uint2 bytes[PATCH_ROWS]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        // Half of the columns: 4 x 4 bytes change places in registers.
        uint32_t column[4][4];  // of columns 4 half .. 4 half + 3, four rows in a word
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t row[4];
#pragma unroll
            for (int i = 0; i < 4; i++) row[i] = half ? bytes[4 * k + i].y : bytes[4 * k + i].x;
            const uint32_t ab01 = __byte_perm(row[0], row[1], 0x5140), cd01 = __byte_perm(row[2], row[3], 0x5140);
            const uint32_t ab23 = __byte_perm(row[0], row[1], 0x7362), cd23 = __byte_perm(row[2], row[3], 0x7362);
            column[0][k] = __byte_perm(ab01, cd01, 0x5410), column[1][k] = __byte_perm(ab01, cd01, 0x7632);
            column[2][k] = __byte_perm(ab23, cd23, 0x5410), column[3][k] = __byte_perm(ab23, cd23, 0x7632);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            *(uint4*)(q + (4 * half + j) * rows) = make_uint4(column[j][0], column[j][1], column[j][2], column[j][3]);
    }
}

// A block of threads: 256 rows x 64 columns, a warp under the other. Its scales, 8 bytes of 64 rows, are gathered
// first.
template <int ALIGN>
static __global__ void __launch_bounds__(32 * COLUMN_WARPS)
    transposed_kernel(uint8_t* q, uint8_t* scale, const floatX* x, int64_t rows, int64_t columns, int64_t stride,
                      uint32_t carry) {
    wait_for_previous();
    // Where this lane's patch lies.
    __shared__ uint4 of_warp[COLUMN_WARPS][8];
    __shared__ uint2 scales[WARP_COLUMNS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t r = blockIdx.y * (int64_t)(COLUMN_WARPS * WARP_ROWS) + warp * WARP_ROWS + lane / 8 * PATCH_ROWS;
    const int64_t first = blockIdx.x * (int64_t)WARP_COLUMNS, c = first + lane % 8 * 8, matrix = blockIdx.z;
    const bool inside = r < rows && c < columns;

    // The largest of each column: in the patch, in the lanes that share a block, for chunks in two warps.
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

    // Scales: each lane of a block writes half of its columns', for the whole block of threads to send.
    float factor[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t s = scale_of_column(pair, i, carry);
        factor[i] = mx_scale_inverse(s);
        if (lane / 8 % 2 == i / 4)
            ((uint8_t*)&scales[lane % 8 * 8 + i])[2 * warp + lane / 16] = (uint8_t)(inside ? s : 0);
    }
    __syncthreads();
    if (threadIdx.x < WARP_COLUMNS && first + threadIdx.x < columns)
        *(uint2*)(scale + (matrix * columns + first + threadIdx.x) * stride + blockIdx.y * 8) = scales[threadIdx.x];

    // The bytes, turned.
    if (!inside) return;
    uint2 bytes[PATCH_ROWS];
    cast_patch(bytes, p, factor);
    store_turned(q + (matrix * columns + c) * rows + r, rows, bytes);
}

// A block of threads: a tile, two warps by two.
static __global__ void __launch_bounds__(32 * COLUMN_WARPS)
    tiles_kernel(uint8_t* q, uint8_t* q_transposed, uint8_t* scale, const floatX* w, int64_t rows, int64_t columns,
                 uint32_t carry) {
    wait_for_previous();
    // Where this lane's patch lies.
    __shared__ uint32_t of_warp[COLUMN_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t r = blockIdx.y * (int64_t)MX_CHUNK + warp / 2 * WARP_ROWS + lane / 8 * PATCH_ROWS;
    const int64_t c = blockIdx.x * (int64_t)MX_CHUNK + warp % 2 * WARP_COLUMNS + lane % 8 * 8, matrix = blockIdx.z;
    const bool inside = r < rows && c < columns;

    // The largest of the tile: in the patch, in the warp, in the four warps.
    uint4 p[PATCH_ROWS];
    load_patch(p, w + (matrix * rows + r) * columns + c, columns, inside);
    uint32_t pair[4];
    largest_of_columns(pair, p);
    const uint32_t of_lanes =
        higher_half(largest_of_lanes<32>(larger(larger(pair[0], pair[1]), larger(pair[2], pair[3]))));
    if (lane == 0) of_warp[warp] = of_lanes;
    __syncthreads();

    // The tile's scale.
    const uint32_t s = scale_of(max(max(of_warp[0], of_warp[1]), max(of_warp[2], of_warp[3])), carry);
    if (threadIdx.x == 0) scale[(matrix * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x] = (uint8_t)s;

    // The bytes, as they lie and turned.
    if (!inside) return;
    const float f = mx_scale_inverse(s), factor[8] = {f, f, f, f, f, f, f, f};
    uint2 bytes[PATCH_ROWS];
    cast_patch(bytes, p, factor);
#pragma unroll
    for (int i = 0; i < PATCH_ROWS; i++) *(uint2*)(q + (matrix * rows + r + i) * columns + c) = bytes[i];
    store_turned(q_transposed + (matrix * columns + c) * rows + r, rows, bytes);
}

// A warp a chunk of CHUNK rows and 256 columns, 8 a lane; groups start at multiples of 128, so no chunk has rows of
// two. What was read for the largest comes from the caches for the casts.
template <int CHUNK>
static __global__ void __launch_bounds__(32 * ROW_WARPS)
    round_columns_kernel(floatX* x, const int64_t* used, int64_t columns, uint32_t carry) {
    wait_for_previous();
    // A lane: 8 columns of a chunk.
    const int64_t c = (blockIdx.y * (int64_t)32 + threadIdx.x % 32) * 8;
    const int64_t row = (blockIdx.x * (int64_t)ROW_WARPS + threadIdx.x / 32) * CHUNK;
    if (row >= *used || c >= columns) return;
    floatX* top = x + row * columns + c;

    // The largest of each column, and its scale.
    uint32_t pair[4] = {};
#pragma unroll 8
    for (int i = 0; i < CHUNK; i++) {
        const uint4 p = *(const uint4*)(top + i * columns);
        keep_larger(pair, magnitudes(p));
    }
    uint32_t s[8];
#pragma unroll
    for (int j = 0; j < 8; j++) s[j] = scale_of_column(pair, j, carry);

#pragma unroll 8
    // Every element becomes what its cast stands for.
    for (int i = 0; i < CHUNK; i++) {
        float f[8];
        load(f, top + i * columns);
#pragma unroll
        for (int j = 0; j < 8; j++) f[j] = value_of(f[j], s[j]);
        store(top + i * columns, f);
    }
}

// Eight columns of a row: values, or what bytes stand for, rounded to bf16 (which is exact).
struct ValueRows {
    const floatX* x;
    int64_t held;  // rows; those after it are zeros

    __device__ __forceinline__ void load(uint4 p[PATCH_ROWS], int64_t row, int64_t c, int64_t columns) const {
#pragma unroll
        for (int i = 0; i < PATCH_ROWS; i++)
            p[i] = row + i < held ? *(const uint4*)(x + (row + i) * columns + c) : make_uint4(0, 0, 0, 0);
    }
};
struct ByteRows {
    const uint8_t *q, *scale;
    const int32_t* row_token;  // NULL: rows are read as they lie
    int64_t stride;

    __device__ __forceinline__ void load(uint4 p[PATCH_ROWS], int64_t row, int64_t c, int64_t columns) const {
        // All loads go out first; a pad row counts as zeros.
        uint2 bytes[PATCH_ROWS] = {};
        uint32_t s[PATCH_ROWS] = {};
#pragma unroll
        for (int i = 0; i < PATCH_ROWS; i++) {
            const int64_t at = row_token ? row_token[row + i] : row + i;
            if (at < 0) continue;
            bytes[i] = *(const uint2*)(q + at * columns + c);
            s[i] = scale[at * stride + c / MX_BLOCK];
        }
#pragma unroll
        for (int i = 0; i < PATCH_ROWS; i++) {
            float out[8];
            values_of(out, bytes[i], mx_scale_value(s[i]));
            p[i] = piece_of(out);
        }
    }
};

// A block of threads: DOWN x ACROSS warps, which take chunks of an expert (2 x 2: 128 rows and columns) or runs (8 x 1:
// 512 rows, 64 columns), each with one scale a column. As in permute_slice, blocks take the same slice of every expert
// before the next slice.
template <typename Source, int DOWN, int ACROSS>
static __global__ void __launch_bounds__(32 * DOWN * ACROSS, DOWN == 2 ? 4 : 0)
    channels_kernel(uint8_t* q, uint8_t* scale, Source source, Ragged r, int64_t length, int64_t columns,
                    int64_t slices, uint32_t carry) {
    wait_for_previous();
    // The slice, and this lane's columns.
    constexpr int ROWS = DOWN * WARP_ROWS;
    __shared__ uint4 of_warp[DOWN * ACROSS][8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t e = blockIdx.y % r.El, slice = blockIdx.y / r.El;
    const int64_t start = r.group_start[e], end = r.group_start[e + 1], count = (end - start + ROWS - 1) / ROWS;
    const int64_t c = (blockIdx.x * (int64_t)ACROSS + warp % ACROSS) * WARP_COLUMNS + lane % 8 * 8;
    for (int64_t i = count * slice / slices; i < count * (slice + 1) / slices; i++) {
        // The largest of each column: in the patch, in the lanes below each other, in all warps. A run may end early.
        const int64_t row = start + i * ROWS + warp / ACROSS * WARP_ROWS + lane / 8 * PATCH_ROWS;
        const bool inside = row < end && c < columns;
        uint4 p[PATCH_ROWS] = {};
        if (inside) source.load(p, row, c, columns);
        uint32_t pair[4];
        largest_of_columns(pair, p);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            pair[j] = larger(pair[j], __shfl_xor_sync(0xffffffffu, pair[j], 8));
            pair[j] = larger(pair[j], __shfl_xor_sync(0xffffffffu, pair[j], 16));
        }
        __syncthreads();  // of_warp was read
        if (lane < 8) of_warp[warp][lane] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        __syncthreads();
        for (int j = warp % ACROSS; j < DOWN * ACROSS; j += ACROSS) keep_larger(pair, of_warp[j][lane % 8]);
        if (!inside) continue;

        // Their scales; the first lanes of every second warp send those of a chunk, eight in one store.
        float factor[8];
        uint32_t s[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            s[j] = scale_of_column(pair, j, carry), factor[j] = mx_scale_inverse(s[j]);
            if (ROWS == MX_RUN && s[j] < MX_RUN_LEAST) s[j] = 0, factor[j] = 0;
        }
        if (warp / ACROSS % 2 == 0 && lane < 8)
            *(uint2*)(scale + row / MX_CHUNK * columns + c) =
                make_uint2(s[0] | s[1] << 8 | s[2] << 16 | s[3] << 24, s[4] | s[5] << 8 | s[6] << 16 | s[7] << 24);

        // The bytes, turned.
        uint2 bytes[PATCH_ROWS];
        cast_patch(bytes, p, factor);
        store_turned(q + c * length + row, length, bytes);
    }
}

// --- Launches ---

void mx_quantize(uint8_t* q, uint8_t* scale, const floatX* x, int64_t rows, int64_t columns, MxCast cast, Ctx* ctx) {
    ASSERT(aligned(q, x));
    auto kernel = cast.align == 1 ? quantize_kernel<MX_BLOCK> : quantize_kernel<MX_CHUNK>;
    launch_early(kernel, row_blocks(rows, columns), 32 * ROW_WARPS, 0, ctx, q, scale, x, rows, columns,
                 mx_stride(columns), carry_of(cast.scale));
}

void mx_quantize_transposed(uint8_t* q, uint8_t* scale, const floatX* x, int64_t count, int64_t rows, int64_t columns,
                            MxCast cast, Ctx* ctx) {
    ASSERT(aligned(q, scale, x) && rows % MX_BLOCK == 0 && columns % MX_BLOCK == 0);
    auto kernel = cast.align == 1 ? transposed_kernel<MX_BLOCK> : transposed_kernel<MX_CHUNK>;
    // The columns first, so that blocks at work at one time read whole rows. Down, blocks for all bytes of a row of
    // scales, those after the last one too.
    const int64_t stride = mx_stride(rows);
    const dim3 grid(blocks_for(columns, WARP_COLUMNS), (unsigned)(stride / (2 * COLUMN_WARPS)), (unsigned)count);
    launch_early(kernel, grid, 32 * COLUMN_WARPS, 0, ctx, q, scale, x, rows, columns, stride, carry_of(cast.scale));
}

void mx_quantize_tiles(uint8_t* q, uint8_t* q_transposed, uint8_t* scale, const floatX* w, int64_t count, int64_t rows,
                       int64_t columns, int32_t scale_mode, Ctx* ctx) {
    ASSERT(aligned(q, q_transposed, w) && rows % MX_BLOCK == 0 && columns % MX_BLOCK == 0);
    const dim3 grid(blocks_for(columns, MX_CHUNK), blocks_for(rows, MX_CHUNK), (unsigned)count);
    launch_early(tiles_kernel, grid, 32 * COLUMN_WARPS, 0, ctx, q, q_transposed, scale, w, rows, columns,
                 carry_of(scale_mode));
}

template <bool ADD>
static void dequantize(floatX* x, const uint8_t* q, const uint8_t* scale, int64_t rows, int64_t columns, Ctx* ctx) {
    ASSERT(aligned(x, q));
    launch_early(dequantize_kernel<ADD>, row_blocks(rows, columns), 32 * ROW_WARPS, 0, ctx, x, q, scale, rows, columns,
                 mx_stride(columns));
}

void mx_dequantize(floatX* x, const uint8_t* q, const uint8_t* scale, int64_t rows, int64_t columns, Ctx* ctx) {
    dequantize<false>(x, q, scale, rows, columns, ctx);
}

void mx_dequantize_add(floatX* x, const uint8_t* q, const uint8_t* scale, int64_t rows, int64_t columns, Ctx* ctx) {
    dequantize<true>(x, q, scale, rows, columns, ctx);
}

void mx_dequantize_rows(floatX* rows, const uint8_t* q, const uint8_t* scale, Ragged r, int64_t columns, Ctx* ctx) {
    ASSERT(aligned(rows, q) && columns % MX_BLOCK == 0);
    const int64_t slices = permute_slices(r);
    launch_early(dequantize_rows_kernel, slices * r.El, 32 * PERMUTE_WARPS, 0, ctx, rows, q, scale, r, columns,
                 mx_stride(columns), slices);
}

void mx_round_columns(floatX* x, Ragged r, int64_t columns, MxCast cast, Ctx* ctx) {
    ASSERT(aligned(x) && columns % MX_BLOCK == 0 && r.capacity % MX_CHUNK == 0);
    const int chunk = cast.align == 1 ? MX_BLOCK : MX_CHUNK;
    auto kernel = cast.align == 1 ? round_columns_kernel<MX_BLOCK> : round_columns_kernel<MX_CHUNK>;
    const dim3 grid(blocks_for(r.capacity / chunk, ROW_WARPS), blocks_for(columns, 256));
    launch_early(kernel, grid, 32 * ROW_WARPS, 0, ctx, x, r.group_start + r.El, columns, carry_of(cast.scale));
}

template <typename Source>
static void channels(uint8_t* q, uint8_t* scale, Source source, int64_t length, Ragged r, int64_t columns, MxCast cast,
                     Ctx* ctx) {
    ASSERT(aligned(q, scale) && columns % MX_BLOCK == 0 && length % MX_CHUNK == 0 && length >= r.capacity);
    const bool run = cast.align == MX_RUN;
    const int64_t slices = ceil_div(r.capacity, r.El * (int64_t)cast.align);
    const dim3 grid(blocks_for(columns, (run ? 1 : 2) * WARP_COLUMNS), (unsigned)(slices * r.El));
    auto kernel = run ? channels_kernel<Source, 8, 1> : channels_kernel<Source, 2, 2>;
    launch_early(kernel, grid, 32 * (run ? 8 : 4), 0, ctx, q, scale, source, r, length, columns, slices,
                 carry_of(cast.scale));
}

void mx_quantize_channels(uint8_t* q, uint8_t* scale, const floatX* x, int64_t length, Ragged r, int64_t columns,
                          MxCast cast, Ctx* ctx) {
    ASSERT(aligned(x));
    channels(q, scale, ValueRows{x, r.capacity}, length, r, columns, cast, ctx);
}

void mx_requantize_channels(uint8_t* q, uint8_t* scale, const uint8_t* from, const uint8_t* from_scale, int tokens,
                            int64_t length, Ragged r, int64_t columns, MxCast cast, Ctx* ctx) {
    ASSERT(aligned(from));
    const ByteRows rows = {from, from_scale, tokens ? r.row_token : NULL, mx_stride(columns)};
    channels(q, scale, rows, length, r, columns, cast, ctx);
}
