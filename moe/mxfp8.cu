// MXFP8 casts: bound by memory (3.03 bytes an element, 4.0 for tiles, 5.03 for SwiGLU and 14.06 for its backward, of F
// elements a row). All of an input is read once, in 16-byte pieces of which a lane has 4 to 16 under way, and what
// shares a scale never leaves the warp or the block that read it.
//
// Magnitudes of bf16 compare like their bits, Inf and NaN above all others, so the largest is found two at a time by
// integers and without conversion; lanes that share a block, chunk or column exchange theirs by shuffles. Products with
// 2^(127 - s) are exact in float32 (or so small that they are rounded to 0), and cvt.rn.satfinite rounds them as the
// header says, NaN to 0x7f.
//
// Along rows a warp takes 1024 columns of a row: a piece is 256 of them, a block lies in 4 lanes, a chunk in 16. The 32
// scale bytes go out in one store. SwiGLU's backward gives a warp a whole row, two pieces of gate, up and dA' at a
// time: <dA', A> is one warp's sum in a fixed order.
//
// Down the columns a lane takes 16 rows x 8 columns, a warp 64 x 64: two blocks of rows in two pairs of 8 lanes. The
// bytes are turned in registers, 4 x 4 at a time, and leave in 16-byte pieces that make 64 bytes of a row of the
// result: no shared memory but for the scales of chunks and tiles, which span warps.
#include <cuda_fp8.h>

#include "layers/rows.cuh"
#include "moe/mxfp8.h"

enum { PIECES = 4, UNIT = PIECES * 256, PATCH_ROWS = 16, WARP_ROWS = 4 * PATCH_ROWS, WARP_COLUMNS = 64 };
enum { ROW_WARPS = 8, BACK_PIECES = 2, COLUMN_WARPS = 4 };
enum { STATS_BLOCKS = 512, STATS_SUMS = sizeof(MxStats) / sizeof(double) };

// What RCEIL adds to the bits of a bf16: mantissas above 1.75 = 448 / 2^8 carry into the exponent.
static uint32_t carry_of(int32_t scale_mode) { return scale_mode == MX_RCEIL ? 0x1f : 0; }

// Of pairs of bf16: the magnitudes, and the larger of each.
static __device__ __forceinline__ uint32_t magnitudes(uint32_t pair) { return pair & 0x7fff7fffu; }
static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

static __device__ __forceinline__ uint32_t largest(const uint4& p) {
    return larger(larger(magnitudes(p.x), magnitudes(p.y)), larger(magnitudes(p.z), magnitudes(p.w)));
}

static __device__ __forceinline__ uint32_t higher_half(uint32_t pair) { return max(pair & 0xffff, pair >> 16); }

static __device__ __forceinline__ uint32_t scale_of(uint32_t amax, uint32_t carry) {
    return amax >= 0x7f80 ? MX_NAN : (uint32_t)max((int)((amax + carry) >> 7) - 8, 0);
}

// 2^(127 - s): a normal number, for no finite block has s > 247.
static __device__ __forceinline__ float factor_of(uint32_t s) {
    return __uint_as_float(s == MX_NAN ? 0x7fffffffu : (254 - s) << 23);
}

// 2^(s - 127)
static __device__ __forceinline__ float unit_of(uint32_t s) {
    return __uint_as_float(s == MX_NAN ? 0x7fffffffu : s == 0 ? 0x00400000u : s << 23);
}

static __device__ __forceinline__ uint32_t cast2(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

static __device__ __forceinline__ float2 floats_of_e4m3(uint32_t two) {
    return __half22float2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3));
}

// What the cast of x with scale s stands for.
static __device__ __forceinline__ float back(float x, uint32_t s) {
    return floats_of_e4m3(cast2(x * factor_of(s), 0)).x * unit_of(s);
}

static __device__ __forceinline__ uint2 cast8(const uint4& p, const float factor[8]) {
    float x[8];
    floats_of<8>(x, p);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= factor[i];
    return make_uint2(cast2(x[0], x[1]) | cast2(x[2], x[3]) << 16, cast2(x[4], x[5]) | cast2(x[6], x[7]) << 16);
}

static __device__ __forceinline__ uint2 cast8(const uint4& p, float factor) {
    const float all[8] = {factor, factor, factor, factor, factor, factor, factor, factor};
    return cast8(p, all);
}

// Of each half, the largest in the LANES lanes around this one (a power of two).
template <int LANES>
static __device__ __forceinline__ uint32_t largest_of_lanes(uint32_t pair) {
#pragma unroll
    for (int lane = LANES / 2; lane; lane /= 2) pair = larger(pair, __shfl_xor_sync(0xffffffffu, pair, lane));
    return pair;
}

// --- Along rows ---

// Casts columns c0 .. c0 + 1023 of a row, of which this lane has p. q and scale are the row's.
template <int ALIGN>
static __device__ __forceinline__ void cast_unit(uint8_t* q, uint8_t* scale, const uint4 p[PIECES], int64_t c0,
                                                 int64_t columns, int64_t stride, uint32_t carry) {
    const int lane = threadIdx.x % 32;
    uint32_t pair[PIECES / 2];  // the largest of two pieces: one shuffle serves both
    uint32_t scales = 0;        // byte i: of this lane's block in piece i
#pragma unroll
    for (int i = 0; i < PIECES / 2; i++)
        pair[i] =
            largest_of_lanes<ALIGN / 8>(higher_half(largest(p[2 * i])) | higher_half(largest(p[2 * i + 1])) << 16);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int64_t c = c0 + i * 256 + lane * 8;
        const uint32_t s = scale_of(pair[i / 2] >> i % 2 * 16 & 0xffff, carry);
        const uint2 bytes = cast8(p[i], factor_of(s));
        if (c < columns) {
            scales |= s << 8 * i;
            *(uint2*)(q + c) = bytes;
        }
    }
    scales = __shfl_sync(0xffffffffu, scales, lane % 8 * 4) >> lane / 8 * 8;
    if (c0 / MX_BLOCK + lane < stride) scale[c0 / MX_BLOCK + lane] = (uint8_t)scales;
}

// This lane's pieces of columns c0 .. c0 + 1023 of a row; zeros outside of it.
static __device__ __forceinline__ void load_unit(uint4 p[PIECES], const floatX* row, int64_t c0, int64_t columns) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int64_t c = c0 + i * 256 + threadIdx.x % 32 * 8;
        p[i] = c < columns ? *(const uint4*)(row + c) : make_uint4(0, 0, 0, 0);
    }
}

// The unit (1024 columns of a row) that this warp takes, or takes first.
static __device__ __forceinline__ uint32_t first_unit(void) { return blockIdx.x * ROW_WARPS + threadIdx.x / 32; }

// The second number of these launch bounds leaves just the registers that hold all loads at once: with none given, the
// compiler waits for the first before it issues the last.
template <int ALIGN>
static __global__ void __launch_bounds__(32 * ROW_WARPS, 6)
    quantize_kernel(uint8_t* q, uint8_t* scale, const floatX* x, int64_t rows, int64_t columns, int64_t stride,
                    uint32_t carry) {
    const uint32_t units = (uint32_t)ceil_div(columns, UNIT), unit = first_unit();
    const int64_t row = unit / units, c0 = unit % units * (int64_t)UNIT;
    if (row >= rows) return;
    uint4 p[PIECES];
    load_unit(p, x + row * columns, c0, columns);
    cast_unit<ALIGN>(q + row * columns, scale + row * stride, p, c0, columns, stride, carry);
}

// How many rows there are is read on the device, and the grid walks them.
template <int ALIGN>
static __global__ void __launch_bounds__(32 * ROW_WARPS, 4)
    swiglu_kernel(uint8_t* q, uint8_t* scale, const floatX* h, Ragged r, int64_t F, int64_t stride, uint32_t carry) {
    const uint32_t units = (uint32_t)ceil_div(F, UNIT), end = (uint32_t)r.group_start[r.El] * units;
    for (uint32_t unit = first_unit(); unit < end; unit += gridDim.x * ROW_WARPS) {
        const int64_t row = unit / units, c0 = unit % units * (int64_t)UNIT;
        const bool real_row = r.row_token[row] >= 0;
        uint4 gate[PIECES] = {}, up[PIECES] = {};
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const int64_t c = c0 + i * 256 + threadIdx.x % 32 * 8;
            if (!real_row || c >= F) continue;
            gate[i] = *(const uint4*)(h + row * 2 * F + c);
            up[i] = *(const uint4*)(h + row * 2 * F + F + c);
        }
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            float g[8], u[8];
            floats_of<8>(g, gate[i]);
            floats_of<8>(u, up[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) g[j] *= sigmoid_fast(g[j]) * u[j];  // as experts_swiglu_forward does
            gate[i] = piece_of<8>(g);
        }
        cast_unit<ALIGN>(q + row * F, scale + row * stride, gate, c0, F, stride, carry);
    }
}

// x becomes what its cast stands for, in this lane's 8 columns.
template <int ALIGN>
static __device__ __forceinline__ void round_piece(float x[8], uint32_t carry) {
    const uint4 p = piece_of<8>(x);
    const uint32_t s = scale_of(higher_half(largest_of_lanes<ALIGN / 8>(largest(p))), carry);
    const float factor = factor_of(s), unit = unit_of(s);
    floats_of<8>(x, p);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const float2 two = floats_of_e4m3(cast2(x[j] * factor, x[j + 1] * factor));
        x[j] = two.x * unit, x[j + 1] = two.y * unit;
    }
}

// Casts a lane's pieces of gate and up, whose blocks and chunks the same lanes hold. q and scale: where those of the
// gate go; up's lie F columns behind.
template <int ALIGN>
static __device__ __forceinline__ void cast_two(uint8_t* q, uint8_t* scale, const uint4& gate, const uint4& up,
                                                int64_t F, bool inside, uint32_t carry) {
    const uint32_t pair = largest_of_lanes<ALIGN / 8>(higher_half(largest(gate)) | higher_half(largest(up)) << 16);
    const uint32_t of_gate = scale_of(pair & 0xffff, carry), of_up = scale_of(pair >> 16, carry);
    if (!inside) return;
    *(uint2*)q = cast8(gate, factor_of(of_gate));
    *(uint2*)(q + F) = cast8(up, factor_of(of_up));
    if (threadIdx.x % 4) return;
    scale[0] = (uint8_t)of_gate, scale[F / MX_BLOCK] = (uint8_t)of_up;
}

// ACROSS: a chunk holds the last of the gate and the first of up, in other lanes and pieces: the row is cast when it is
// complete, and read once more for that (from the caches).
template <int ALIGN, bool ACROSS>
static __global__ void __launch_bounds__(32 * ROW_WARPS, 3)
    swiglu_backward_kernel(uint8_t* q, uint8_t* scale, floatX* dh, floatX* gated_a, float* drow_gate, const floatX* dap,
                           const floatX* h, Ragged r, int64_t F, int64_t stride, uint32_t carry) {
    const int64_t used = r.group_start[r.El];
    const int lane = threadIdx.x % 32;
    for (int64_t row = first_unit(); row < used; row += gridDim.x * (int64_t)ROW_WARPS) {
        const bool real_row = r.row_token[row] >= 0;
        const float weight = real_row ? r.row_gate[row] : 0;
        const floatX *h_row = h + row * 2 * F, *da = dap + row * F;
        floatX* d = dh + row * 2 * F;
        uint8_t *q_row = q + row * 2 * F, *s_row = scale + row * stride;
        float dot = 0;
        for (int64_t c0 = lane * 8; c0 - lane * 8 < F; c0 += BACK_PIECES * 256) {  // all lanes as often, for shuffles
            uint4 gs[BACK_PIECES] = {}, us[BACK_PIECES] = {}, ds[BACK_PIECES] = {};
#pragma unroll
            for (int i = 0; i < BACK_PIECES; i++) {
                const int64_t c = c0 + i * 256;
                if (!real_row || c >= F) continue;
                gs[i] = *(const uint4*)(h_row + c);
                us[i] = *(const uint4*)(h_row + F + c);
                ds[i] = *(const uint4*)(da + c);
            }
#pragma unroll
            for (int i = 0; i < BACK_PIECES; i++) {
                const int64_t c = c0 + i * 256;
                float g[8], u[8], x[8], a[8];
                floats_of<8>(g, gs[i]);
                floats_of<8>(u, us[i]);
                floats_of<8>(x, ds[i]);
#pragma unroll
                for (int j = 0; j < 8; j++) a[j] = g[j] * (sigmoid_fast(g[j]) * u[j]);  // as mx_swiglu_quantize does
                round_piece<ALIGN>(a, carry);
#pragma unroll
                for (int j = 0; j < 8; j++) {  // as experts_swiglu_backward does
                    const float s = sigmoid_fast(g[j]), silu = g[j] * s;
                    dot += x[j] * a[j];
                    a[j] *= weight;
                    x[j] *= weight;
                    g[j] = x[j] * u[j] * s * (1 + g[j] * (1 - s));
                    u[j] = x[j] * silu;
                }
                const uint4 gate = piece_of<8>(g), up = piece_of<8>(u);
                if (c < F) {
                    store<8>(gated_a + row * F + c, a);
                    *(uint4*)(d + c) = gate;
                    *(uint4*)(d + F + c) = up;
                }
                if (!ACROSS) cast_two<ALIGN>(q_row + c, s_row + c / MX_BLOCK, gate, up, F, c < F, carry);
            }
        }
        dot = warp_sum(dot);
        if (lane == 0) drow_gate[row] = dot;
        if (!ACROSS && 2 * F / MX_BLOCK + lane < stride) s_row[2 * F / MX_BLOCK + lane] = 0;
        if (!ACROSS) continue;
        __syncwarp();
        for (int64_t c0 = 0; c0 < 2 * F; c0 += UNIT) {
            uint4 p[PIECES];
            load_unit(p, d, c0, 2 * F);
            cast_unit<ALIGN>(q_row, s_row, p, c0, 2 * F, stride, carry);
        }
    }
}

template <bool ADD>
static __global__ void __launch_bounds__(32 * ROW_WARPS)
    dequantize_kernel(floatX* x, const uint8_t* q, const uint8_t* scale, int64_t rows, int64_t columns,
                      int64_t stride) {
    const uint32_t units = (uint32_t)ceil_div(columns, UNIT), unit = first_unit();
    const int64_t row = unit / units, c0 = unit % units * (int64_t)UNIT + threadIdx.x % 32 * 8;
    if (row >= rows || c0 >= columns) return;
    uint4* to = (uint4*)(x + row * columns);
    uint2 p[PIECES] = {};
    uint32_t s[PIECES] = {};
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int64_t c = c0 + i * 256;
        if (c >= columns) continue;
        p[i] = *(const uint2*)(q + row * columns + c);
        s[i] = scale[row * stride + c / MX_BLOCK];
    }
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const float unit = unit_of(s[i]);
        const uint32_t pairs[4] = {p[i].x, p[i].x >> 16, p[i].y, p[i].y >> 16};
        float out[8];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 two = floats_of_e4m3(pairs[j]);
            out[2 * j] = two.x * unit, out[2 * j + 1] = two.y * unit;
        }
        if (c0 + i * 256 >= columns) continue;
        uint4* piece = to + c0 / 8 + i * 32;
        if constexpr (ADD) {
            float before[8];
            floats_of<8>(before, *piece);
#pragma unroll
            for (int j = 0; j < 8; j++) out[j] += before[j];
        }
        *piece = piece_of<8>(out);
    }
}

// --- Down the columns ---

// A lane's patch: 16 rows x 8 columns, zeros outside of the matrix.
static __device__ __forceinline__ void load_patch(uint4 p[PATCH_ROWS], const floatX* x, int64_t columns, bool inside) {
#pragma unroll
    for (int i = 0; i < PATCH_ROWS; i++) p[i] = inside ? *(const uint4*)(x + i * columns) : make_uint4(0, 0, 0, 0);
}

// The largest of every column of a patch, in pairs.
static __device__ __forceinline__ void largest_of_columns(uint32_t pair[4], const uint4 p[PATCH_ROWS]) {
    pair[0] = pair[1] = pair[2] = pair[3] = 0;
#pragma unroll
    for (int i = 0; i < PATCH_ROWS; i++) {
        pair[0] = larger(pair[0], magnitudes(p[i].x)), pair[1] = larger(pair[1], magnitudes(p[i].y));
        pair[2] = larger(pair[2], magnitudes(p[i].z)), pair[3] = larger(pair[3], magnitudes(p[i].w));
    }
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
    __shared__ uint4 of_warp[COLUMN_WARPS][8];
    __shared__ uint2 scales[WARP_COLUMNS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t r = blockIdx.y * (int64_t)(COLUMN_WARPS * WARP_ROWS) + warp * WARP_ROWS + lane / 8 * PATCH_ROWS;
    const int64_t first = blockIdx.x * (int64_t)WARP_COLUMNS, c = first + lane % 8 * 8, matrix = blockIdx.z;
    const bool inside = r < rows && c < columns;
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
        const uint4 other = of_warp[warp ^ 1][lane % 8];
        pair[0] = larger(pair[0], other.x), pair[1] = larger(pair[1], other.y);
        pair[2] = larger(pair[2], other.z), pair[3] = larger(pair[3], other.w);
    }
    float factor[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t s = scale_of(i % 2 ? pair[i / 2] >> 16 : pair[i / 2] & 0xffff, carry);
        factor[i] = factor_of(s);
        if (lane / 8 % 2 == i / 4)
            ((uint8_t*)&scales[lane % 8 * 8 + i])[2 * warp + lane / 16] = (uint8_t)(inside ? s : 0);
    }
    __syncthreads();
    if (threadIdx.x < WARP_COLUMNS && first + threadIdx.x < columns)
        *(uint2*)(scale + (matrix * columns + first + threadIdx.x) * stride + blockIdx.y * 8) = scales[threadIdx.x];
    if (!inside) return;
    uint2 bytes[PATCH_ROWS];
    cast_patch(bytes, p, factor);
    store_turned(q + (matrix * columns + c) * rows + r, rows, bytes);
}

// A block of threads: a tile, two warps by two.
static __global__ void __launch_bounds__(32 * COLUMN_WARPS)
    tiles_kernel(uint8_t* q, uint8_t* q_transposed, uint8_t* scale, const floatX* w, int64_t rows, int64_t columns,
                 uint32_t carry) {
    __shared__ uint32_t of_warp[COLUMN_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t r = blockIdx.y * (int64_t)MX_CHUNK + warp / 2 * WARP_ROWS + lane / 8 * PATCH_ROWS;
    const int64_t c = blockIdx.x * (int64_t)MX_CHUNK + warp % 2 * WARP_COLUMNS + lane % 8 * 8, matrix = blockIdx.z;
    const bool inside = r < rows && c < columns;
    uint4 p[PATCH_ROWS];
    load_patch(p, w + (matrix * rows + r) * columns + c, columns, inside);
    uint32_t pair[4];
    largest_of_columns(pair, p);
    const uint32_t of_lanes =
        higher_half(largest_of_lanes<32>(larger(larger(pair[0], pair[1]), larger(pair[2], pair[3]))));
    if (lane == 0) of_warp[warp] = of_lanes;
    __syncthreads();
    const uint32_t s = scale_of(max(max(of_warp[0], of_warp[1]), max(of_warp[2], of_warp[3])), carry);
    if (threadIdx.x == 0) scale[(matrix * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x] = (uint8_t)s;
    if (!inside) return;
    const float f = factor_of(s), factor[8] = {f, f, f, f, f, f, f, f};
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
    const int64_t c = (blockIdx.y * (int64_t)32 + threadIdx.x % 32) * 8;
    const int64_t row = (blockIdx.x * (int64_t)ROW_WARPS + threadIdx.x / 32) * CHUNK;
    if (row >= *used || c >= columns) return;
    floatX* top = x + row * columns + c;
    uint32_t pair[4] = {};
#pragma unroll 8
    for (int i = 0; i < CHUNK; i++) {
        const uint4 p = *(const uint4*)(top + i * columns);
        pair[0] = larger(pair[0], magnitudes(p.x)), pair[1] = larger(pair[1], magnitudes(p.y));
        pair[2] = larger(pair[2], magnitudes(p.z)), pair[3] = larger(pair[3], magnitudes(p.w));
    }
    uint32_t s[8];
#pragma unroll
    for (int j = 0; j < 8; j++) s[j] = scale_of(j % 2 ? pair[j / 2] >> 16 : pair[j / 2] & 0xffff, carry);
#pragma unroll 8
    for (int i = 0; i < CHUNK; i++) {
        float f[8];
        load<8>(f, top + i * columns);
#pragma unroll
        for (int j = 0; j < 8; j++) f[j] = back(f[j], s[j]);
        store<8>(top + i * columns, f);
    }
}

// --- Statistics ---

// The scales of matrices of `rows` rows in tiles; scale NULL: there are none.
struct Tiles {
    const uint8_t* scale;
    int64_t rows;
};

// Sums of a fixed number of blocks, then of those in order: the same bits on every run.
template <int ALIGN>
static __global__ void __launch_bounds__(32 * ROW_WARPS)
    stats_kernel(MxStats* partial, const floatX* x, Tiles tiles, int64_t rows, int64_t columns, uint32_t carry) {
    __shared__ double of_warp[ROW_WARPS][STATS_SUMS];
    const int64_t pieces = ceil_div(columns, 256);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double sums[STATS_SUMS] = {};
    for (int64_t i = first_unit(); i < rows * pieces; i += gridDim.x * ROW_WARPS) {
        const int64_t row = i / pieces, c = i % pieces * 256 + lane * 8;
        const uint4 p = c < columns ? *(const uint4*)(x + row * columns + c) : make_uint4(0, 0, 0, 0);
        const uint32_t s_alone = scale_of(higher_half(largest_of_lanes<MX_BLOCK / 8>(largest(p))), carry);
        uint32_t s = scale_of(higher_half(largest_of_lanes<ALIGN / 8>(largest(p))), carry);
        if (tiles.scale && c < columns) {
            const int64_t above = row / tiles.rows * ceil_div(tiles.rows, MX_CHUNK) + row % tiles.rows / MX_CHUNK;
            s = tiles.scale[above * ceil_div(columns, MX_CHUNK) + c / MX_CHUNK];
        }
        if (s == MX_NAN) continue;
        float exact[8];
        floats_of<8>(exact, p);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float value = back(exact[j], s);
            const double off = (double)exact[j] - value;
            sums[0] += exact[j] != 0;
            sums[1] += fabsf(exact[j] * factor_of(s)) > 448;
            sums[2] += exact[j] != 0 && value == 0;
            sums[3] += value != back(exact[j], s_alone);
            sums[4] += (double)exact[j] * exact[j];
            sums[5] += off * off;
        }
    }
#pragma unroll
    for (int k = 0; k < STATS_SUMS; k++) {
        for (int i = 16; i; i /= 2) sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], i);
        if (lane == 0) of_warp[warp][k] = sums[k];
    }
    __syncthreads();
    if (threadIdx.x >= STATS_SUMS) return;
    double sum = 0;
    for (int k = 0; k < ROW_WARPS; k++) sum += of_warp[k][threadIdx.x];
    ((double*)&partial[blockIdx.x])[threadIdx.x] = sum;
}

static __global__ void add_stats_kernel(MxStats* stats, const MxStats* partial) {
    double sum = 0;
    for (int i = 0; i < STATS_BLOCKS; i++) sum += ((const double*)&partial[i])[threadIdx.x];
    ((double*)stats)[threadIdx.x] += sum;
}

// --- Launches ---

static bool aligned(const void* p) { return (uintptr_t)p % 16 == 0; }

// Blocks of the kernels along rows. Units are counted in 32 bits.
static unsigned row_blocks(int64_t rows, int64_t columns) {
    const int64_t blocks = ceil_div(rows * ceil_div(columns, UNIT), ROW_WARPS);
    ASSERT(columns % MX_BLOCK == 0 && blocks <= INT32_MAX / ROW_WARPS);
    return (unsigned)blocks;
}

void mx_quantize(uint8_t* q, uint8_t* scale, const floatX* x, int64_t rows, int64_t columns, MxCast cast, Ctx* ctx) {
    if (rows == 0) return;
    ASSERT(aligned(q) && aligned(x));
    auto kernel = cast.align == 1 ? quantize_kernel<MX_BLOCK> : quantize_kernel<MX_CHUNK>;
    kernel<<<row_blocks(rows, columns), 32 * ROW_WARPS, 0, ctx->stream>>>(q, scale, x, rows, columns,
                                                                          mx_stride(columns), carry_of(cast.scale));
    LAUNCH_CHECK();
}

void mx_quantize_transposed(uint8_t* q, uint8_t* scale, const floatX* x, int64_t count, int64_t rows, int64_t columns,
                            MxCast cast, Ctx* ctx) {
    if (count == 0 || rows == 0) return;
    ASSERT(aligned(q) && aligned(scale) && aligned(x) && rows % MX_BLOCK == 0 && columns % MX_BLOCK == 0);
    auto kernel = cast.align == 1 ? transposed_kernel<MX_BLOCK> : transposed_kernel<MX_CHUNK>;
    // The columns first, so that blocks at work at one time read whole rows. Down, blocks for all bytes of a row of
    // scales, those behind the last one too.
    const int64_t stride = mx_stride(rows);
    const dim3 grid(blocks_for(columns, WARP_COLUMNS), (unsigned)(stride / (2 * COLUMN_WARPS)), (unsigned)count);
    kernel<<<grid, 32 * COLUMN_WARPS, 0, ctx->stream>>>(q, scale, x, rows, columns, stride, carry_of(cast.scale));
    LAUNCH_CHECK();
}

void mx_quantize_tiles(uint8_t* q, uint8_t* q_transposed, uint8_t* scale, const floatX* w, int64_t count, int64_t rows,
                       int64_t columns, int32_t scale_mode, Ctx* ctx) {
    if (count == 0 || rows == 0) return;
    ASSERT(aligned(q) && aligned(q_transposed) && aligned(w) && rows % MX_BLOCK == 0 && columns % MX_BLOCK == 0);
    const dim3 grid(blocks_for(columns, MX_CHUNK), blocks_for(rows, MX_CHUNK), (unsigned)count);
    tiles_kernel<<<grid, 32 * COLUMN_WARPS, 0, ctx->stream>>>(q, q_transposed, scale, w, rows, columns,
                                                              carry_of(scale_mode));
    LAUNCH_CHECK();
}

void mx_swiglu_quantize(uint8_t* q, uint8_t* scale, const floatX* h, Ragged r, int64_t F, MxCast cast, Ctx* ctx) {
    ASSERT(aligned(q) && aligned(h));
    auto kernel = cast.align == 1 ? swiglu_kernel<MX_BLOCK> : swiglu_kernel<MX_CHUNK>;
    // Many more blocks than run at a time, for balance; those past the rows in use end at once.
    const unsigned blocks = (unsigned)smaller(row_blocks(r.capacity, F), 256 * (int64_t)ctx->sms);
    kernel<<<blocks, 32 * ROW_WARPS, 0, ctx->stream>>>(q, scale, h, r, F, mx_stride(F), carry_of(cast.scale));
    LAUNCH_CHECK();
}

void mx_swiglu_backward_quantize(uint8_t* q, uint8_t* scale, floatX* dh, floatX* gated_a, real* drow_gate,
                                 const floatX* dap, const floatX* h, Ragged r, int64_t F, MxCast cast, Ctx* ctx) {
    ASSERT(aligned(q) && aligned(dh) && aligned(gated_a) && aligned(dap) && aligned(h) && F % MX_BLOCK == 0);
    auto kernel = cast.align == 1     ? swiglu_backward_kernel<MX_BLOCK, false>
                  : F % MX_CHUNK == 0 ? swiglu_backward_kernel<MX_CHUNK, false>
                                      : swiglu_backward_kernel<MX_CHUNK, true>;
    const unsigned blocks = (unsigned)smaller(ceil_div(r.capacity, ROW_WARPS), 256 * (int64_t)ctx->sms);
    if (blocks == 0) return;
    kernel<<<blocks, 32 * ROW_WARPS, 0, ctx->stream>>>(q, scale, dh, gated_a, drow_gate, dap, h, r, F, mx_stride(2 * F),
                                                       carry_of(cast.scale));
    LAUNCH_CHECK();
}

void mx_dequantize(floatX* x, const uint8_t* q, const uint8_t* scale, int64_t rows, int64_t columns, Ctx* ctx) {
    if (rows == 0) return;
    ASSERT(aligned(x) && aligned(q));
    dequantize_kernel<false>
        <<<row_blocks(rows, columns), 32 * ROW_WARPS, 0, ctx->stream>>>(x, q, scale, rows, columns, mx_stride(columns));
    LAUNCH_CHECK();
}

void mx_dequantize_add(floatX* x, const uint8_t* q, const uint8_t* scale, int64_t rows, int64_t columns, Ctx* ctx) {
    if (rows == 0) return;
    ASSERT(aligned(x) && aligned(q));
    dequantize_kernel<true>
        <<<row_blocks(rows, columns), 32 * ROW_WARPS, 0, ctx->stream>>>(x, q, scale, rows, columns, mx_stride(columns));
    LAUNCH_CHECK();
}

void mx_round_columns(floatX* x, Ragged r, int64_t columns, MxCast cast, Ctx* ctx) {
    if (r.capacity == 0) return;
    ASSERT(aligned(x) && columns % MX_BLOCK == 0 && r.capacity % MX_CHUNK == 0);
    const int chunk = cast.align == 1 ? MX_BLOCK : MX_CHUNK;
    auto kernel = cast.align == 1 ? round_columns_kernel<MX_BLOCK> : round_columns_kernel<MX_CHUNK>;
    const dim3 grid(blocks_for(r.capacity / chunk, ROW_WARPS), blocks_for(columns, 256));
    kernel<<<grid, 32 * ROW_WARPS, 0, ctx->stream>>>(x, r.group_start + r.El, columns, carry_of(cast.scale));
    LAUNCH_CHECK();
}

size_t mx_stats_workspace(void) { return STATS_BLOCKS * sizeof(MxStats); }

static void add_stats(MxStats* stats, const floatX* x, Tiles tiles, int64_t rows, int64_t columns, MxCast cast,
                      Ctx* ctx) {
    ASSERT(aligned(x) && columns % MX_BLOCK == 0);
    MxStats* partial = ctx_workspace<MxStats>(ctx, STATS_BLOCKS);
    auto kernel = cast.align == 1 ? stats_kernel<MX_BLOCK> : stats_kernel<MX_CHUNK>;
    kernel<<<STATS_BLOCKS, 32 * ROW_WARPS, 0, ctx->stream>>>(partial, x, tiles, rows, columns, carry_of(cast.scale));
    LAUNCH_CHECK();
    add_stats_kernel<<<1, STATS_SUMS, 0, ctx->stream>>>(stats, partial);
    LAUNCH_CHECK();
}

void mx_stats(MxStats* stats, const floatX* x, int64_t rows, int64_t columns, MxCast cast, Ctx* ctx) {
    add_stats(stats, x, {NULL, rows}, rows, columns, cast, ctx);
}

void mx_stats_tiles(MxStats* stats, const floatX* w, const uint8_t* scale, int64_t count, int64_t rows, int64_t columns,
                    int32_t scale_mode, Ctx* ctx) {
    add_stats(stats, w, {scale, rows}, count * rows, columns, {scale_mode, MX_CHUNK}, ctx);
}
