// MXFP8 quantization and dequantization. All kernels are bound by memory. Bytes per element:
//
//     kernel                                    bytes
//     mx_quantize, mx_dequantize                 3.03
//     mx_quantize_channels                       3.01
//     mx_quantize_tiles, mx_quantize_both        4.0
//     mx_dequantize that accumulates             5.03
//     mx_requantize_channels                     2.04
//
// Every input is read once: bf16 in 16-byte vectors, q in 8-byte vectors, with 4 to 16 loads in flight per lane.
// Elements that share a scale stay in the warp or thread block that read them. amax and row-wise quantization:
// mxfp8.cuh. Column-wise kernels: mxfp8_columns.cuh. Fake quantization is for the reference mode, so its kernel is
// plain: a thread takes one block of elements, and reads it twice.
#include "mx/mxfp8.cuh"
#include "mx/mxfp8_columns.cuh"

// --- Row-wise ---

// Sets the row and first column of this warp's span; false: there is none.
static __device__ __forceinline__ bool place_of_warp(int64_t* row, int64_t* c0, int64_t rows, int64_t columns) {
    const uint32_t spans = (uint32_t)ceil_div(columns, SPAN), span = warp_in_grid();
    *row = span / spans, *c0 = span % spans * (int64_t)SPAN;
    return *row < rows;
}

// The launch bounds limit the registers so that all loads just fit. Without the second bound the compiler waits for the
// first load before it issues the last.
template <int ALIGN>
static __global__ void __launch_bounds__(32 * ROW_WARPS, 6)
    quantize_kernel(uint8_t* q, uint8_t* scale, const floatX* x, int64_t rows, int64_t columns, int64_t stride,
                    uint32_t rounding_bias) {
    wait_for_previous();
    int64_t row, c0;
    if (!place_of_warp(&row, &c0, rows, columns)) return;

    // Load, then amax, scales and q.
    uint4 p[VECTORS];
    load_span(p, x + row * columns, c0, columns);
    quantize_span<ALIGN>(q + row * columns, scale + row * stride, p, c0, columns, stride, rounding_bias);
}

// A warp dequantizes columns c0 .. c0 + 1023 of a row: x = q 2^(s - 127), or += with ADD.
template <bool ADD>
static __global__ void __launch_bounds__(32 * ROW_WARPS)
    dequantize_kernel(floatX* x, const uint8_t* q, const uint8_t* scale, int64_t rows, int64_t columns,
                      int64_t stride) {
    wait_for_previous();
    int64_t row, c0;
    if (!place_of_warp(&row, &c0, rows, columns)) return;
    x += row * columns, q += row * columns, scale += row * stride;
    c0 += threadIdx.x % 32 * 8;

    // Issue all loads first.
    uint2 p[VECTORS] = {};
    uint32_t s[VECTORS] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int64_t c = c0 + i * 256;
        if (c >= columns) continue;
        p[i] = *(const uint2*)(q + c);
        s[i] = scale[c / MX_BLOCK];
    }

    // x = q 2^(s - 127), or x + q 2^(s - 127) rounded once.
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
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
        *piece = vec8_of(out);
    }
}

// --- Fake quantization ---

// A thread takes a chunk of x (rows, columns), of `length` elements: along a row, or with `down` down a column.
// `transposed`: matrices with that many rows each, which are written transposed; 0: x is written as it is.
static __global__ void __launch_bounds__(256)
    round_kernel(floatX* out, const floatX* x, int64_t rows, int64_t columns, int64_t length, bool down,
                 int64_t transposed, uint32_t rounding_bias) {
    wait_for_previous();

    // The chunk's first element, and the distance of the next one, in x and in out.
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x, across = down ? columns : ceil_div(columns, length);
    const int64_t r = i / across * (down ? length : 1), c = i % across * (down ? 1 : length);
    if (r >= rows) return;
    const int64_t n = min(length, down ? rows - r : columns - c), step = down ? columns : 1;
    const int64_t out_step = transposed ? 1 : step;
    x += r * columns + c;
    out += transposed ? (r / transposed * columns + c) * transposed + r % transposed : r * columns + c;

    // amax, then every element.
    uint32_t amax = 0;
    for (int64_t k = 0; k < n; k++) amax = max(amax, (uint32_t)__bfloat16_as_ushort(x[k * step]) & 0x7fff);
    const uint32_t s = scale_of(amax, rounding_bias);
    for (int64_t k = 0; k < n; k++) out[k * out_step] = value_of((float)x[k * step], s);
}

// --- Launches ---

void mx_quantize(MxBytes out, const floatX* x, int64_t rows, int64_t columns, MxRecipe recipe, Ctx* ctx) {
    ASSERT(aligned(out.q, x));
    auto kernel = recipe.align == 1 ? quantize_kernel<MX_BLOCK> : quantize_kernel<MX_CHUNK>;
    launch_early(kernel, row_blocks(rows, columns), 32 * ROW_WARPS, 0, ctx, out.q, out.scale, x, rows, columns,
                 mx_stride(columns), rounding_bias_of(recipe.scale));
}

void mx_quantize_tiles(uint8_t* q, uint8_t* q_transposed, uint8_t* scale, const floatX* w, int64_t count, int64_t rows,
                       int64_t columns, int32_t scale_mode, Ctx* ctx) {
    ASSERT(aligned(q, q_transposed, w) && rows % MX_BLOCK == 0 && columns % MX_BLOCK == 0);
    const dim3 grid(blocks_for(columns, MX_CHUNK), blocks_for(rows, MX_CHUNK), (unsigned)count);
    launch_early(tiles_kernel, grid, 32 * COLUMN_WARPS, 0, ctx, q, q_transposed, scale, w, rows, columns,
                 rounding_bias_of(scale_mode));
}

void mx_dequantize(floatX* x, MxBytes from, int64_t rows, int64_t columns, int accumulate, Ctx* ctx) {
    ASSERT(aligned(x, from.q));
    launch_early(accumulate ? dequantize_kernel<true> : dequantize_kernel<false>, row_blocks(rows, columns),
                 32 * ROW_WARPS, 0, ctx, x, from.q, from.scale, rows, columns, mx_stride(columns));
}

static void round_chunks(floatX* out, const floatX* x, int64_t rows, int64_t columns, MxRecipe recipe, bool down,
                         int64_t transposed, Ctx* ctx) {
    const int64_t length = recipe.align == 1 ? MX_BLOCK : MX_CHUNK;
    const int64_t chunks = down ? ceil_div(rows, length) * columns : rows * ceil_div(columns, length);
    launch_early(round_kernel, blocks_for(chunks, 256), 256, 0, ctx, out, x, rows, columns, length, down, transposed,
                 rounding_bias_of(recipe.scale));
}

void mx_round_rows(floatX* out, const floatX* x, int64_t rows, int64_t columns, MxRecipe recipe, Ctx* ctx) {
    round_chunks(out, x, rows, columns, recipe, false, 0, ctx);
}

void mx_round_columns(floatX* out, const floatX* x, Ragged r, int64_t columns, MxRecipe recipe, Ctx* ctx) {
    // Groups start at multiples of 128, so a chunk never spans two groups. Rows that no group has may be rounded too.
    ASSERT(!r.group_start || r.capacity % MX_CHUNK == 0);
    round_chunks(out, x, r.capacity, columns, recipe, true, 0, ctx);
}

void mx_round_weight(floatX* out, floatX* transposed, const floatX* w, int64_t count, int64_t rows, int64_t columns,
                     int32_t scale_mode, Ctx* ctx) {
    const MxRecipe recipe = {scale_mode, 1};
    ASSERT(rows % MX_BLOCK == 0);
    round_chunks(out, w, count * rows, columns, recipe, false, 0, ctx);
    round_chunks(transposed, w, count * rows, columns, recipe, true, rows, ctx);
}

template <typename Source>
static void channels(MxBytes out, Source source, int64_t length, Ragged r, int64_t columns, MxRecipe recipe, Ctx* ctx) {
    ASSERT(aligned(out.q, out.scale) && columns % MX_BLOCK == 0 && length % MX_CHUNK == 0 && length >= r.capacity);
    const bool run = recipe.align == MX_RUN;
    // A grid has at most 65,535 rows. For more rows of x, slices are longer.
    const int64_t slices = min_i64(ceil_div(r.capacity, r.El * (int64_t)recipe.align), 65535 / r.El);
    const dim3 grid(blocks_for(columns, (run ? 1 : 2) * WARP_COLUMNS), (unsigned)(slices * r.El));
    auto kernel = run ? channels_kernel<Source, 8, 1> : channels_kernel<Source, 2, 2>;
    launch_early(kernel, grid, 32 * (run ? 8 : 4), 0, ctx, out.q, out.scale, source, r, length, columns, slices,
                 rounding_bias_of(recipe.scale));
}

void mx_quantize_channels(MxBytes out, const floatX* x, int64_t length, Ragged r, int64_t columns, MxRecipe recipe,
                          Ctx* ctx) {
    ASSERT(aligned(x));
    channels(out, ValueRows{x, r.capacity}, length, r, columns, recipe, ctx);
}

void mx_requantize_channels(MxBytes out, MxBytes from, int tokens, int64_t length, Ragged r, int64_t columns,
                            MxRecipe recipe, Ctx* ctx) {
    ASSERT(aligned(from.q, r.row_token));
    const ByteRows rows = {from.q, from.scale, tokens ? r.row_token : NULL, mx_stride(columns)};
    channels(out, rows, length, r, columns, recipe, ctx);
}

void mx_quantize_both(MxBytes out, MxBytes channels, const floatX* x, int64_t length, int64_t rows, int64_t columns,
                      int32_t scale_mode, Ctx* ctx) {
    ASSERT(aligned(out.q, out.scale, channels.q, channels.scale, x) && columns % MX_BLOCK == 0);
    ASSERT(length % MX_CHUNK == 0 && length >= rows);
    const dim3 grid = grid_of_rows(blocks_for(columns, MX_CHUNK), ceil_div(rows, MX_CHUNK));
    launch_early(both_kernel, grid, 32 * COLUMN_WARPS, 0, ctx, out.q, out.scale, channels.q, channels.scale,
                 ValueRows{x, rows}, length, columns, mx_stride(columns), rounding_bias_of(scale_mode));
}
