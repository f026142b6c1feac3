// Device functions of column-wise quantization. A lane takes a patch of 16 rows x 8 columns, a warp 64 x 64. Eight
// lanes are side by side, and four of these rows of lanes cover two blocks of 32 rows. The result q is transposed in
// registers, 4 x 4 bytes at a time. Stores are 16-byte vectors, so that a warp writes 64 adjacent bytes of a row of q.
#pragma once

#include "mx/mxfp8.cuh"

enum { PATCH_ROWS = 16, WARP_ROWS = 4 * PATCH_ROWS, WARP_COLUMNS = 64 };

// Loads a lane's patch: 16 rows x 8 columns, zeros outside of the matrix.
static __device__ __forceinline__ void load_patch(uint4 p[PATCH_ROWS], const floatX* x, int64_t columns, bool inside) {
#pragma unroll
    for (int i = 0; i < PATCH_ROWS; i++) p[i] = inside ? *(const uint4*)(x + i * columns) : make_uint4(0, 0, 0, 0);
}

// pair = max(pair, p) per column; a word has two columns.
static __device__ __forceinline__ void keep_larger(uint32_t pair[4], uint4 p) {
    pair[0] = larger(pair[0], p.x);
    pair[1] = larger(pair[1], p.y);
    pair[2] = larger(pair[2], p.z);
    pair[3] = larger(pair[3], p.w);
}

static __device__ __forceinline__ uint4 magnitudes(uint4 p) {
    return make_uint4(magnitudes(p.x), magnitudes(p.y), magnitudes(p.z), magnitudes(p.w));
}

// The amax of each column of a patch; a word has two columns.
static __device__ __forceinline__ void largest_of_columns(uint32_t pair[4], const uint4 p[PATCH_ROWS]) {
    pair[0] = pair[1] = pair[2] = pair[3] = 0;
#pragma unroll
    for (int i = 0; i < PATCH_ROWS; i++) keep_larger(pair, magnitudes(p[i]));
}

// The scale of column i of 8.
static __device__ __forceinline__ uint32_t scale_of_column(const uint32_t pair[4], int i, uint32_t rounding_bias) {
    return scale_of(i % 2 ? pair[i / 2] >> 16 : pair[i / 2] & 0xffff, rounding_bias);
}

// Quantizes a patch with a factor per column.
static __device__ __forceinline__ void quantize_patch(uint2 bytes[PATCH_ROWS], const uint4 p[PATCH_ROWS],
                                                      const float factor[8]) {
#pragma unroll
    for (int i = 0; i < PATCH_ROWS; i++) bytes[i] = quantize8(p[i], factor);
}

// Writes a patch transposed: its columns become rows of q, which have the length `rows`.
static __device__ __forceinline__ void store_turned(uint8_t* q, int64_t rows, const uint2 bytes[PATCH_ROWS]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        // Half of the columns: transpose 4 x 4 bytes in registers.
        uint32_t column[4][4];  // of columns 4 half .. 4 half + 3, four rows in a word
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t row[4];
#pragma unroll
            for (int i = 0; i < 4; i++) row[i] = half ? bytes[4 * k + i].y : bytes[4 * k + i].x;
            const uint32_t ab01 = __byte_perm(row[0], row[1], 0x5140), cd01 = __byte_perm(row[2], row[3], 0x5140);
            const uint32_t ab23 = __byte_perm(row[0], row[1], 0x7362), cd23 = __byte_perm(row[2], row[3], 0x7362);
            column[0][k] = __byte_perm(ab01, cd01, 0x5410);
            column[1][k] = __byte_perm(ab01, cd01, 0x7632);
            column[2][k] = __byte_perm(ab23, cd23, 0x5410);
            column[3][k] = __byte_perm(ab23, cd23, 0x7632);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            *(uint4*)(q + (4 * half + j) * rows) = make_uint4(column[j][0], column[j][1], column[j][2], column[j][3]);
    }
}

// Column amax over a thread block of DOWN x ACROSS warps; a word has two columns. The amax is reduced over the lane's
// patch, then its column of lanes (shuffles), then the DOWN warps (shared memory). All threads of the block must call
// this.
template <int DOWN, int ACROSS>
static __device__ __forceinline__ void largest_of_chunk(uint32_t pair[4], const uint4 p[PATCH_ROWS],
                                                        uint4 (&of_warp)[DOWN * ACROSS][8]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    largest_of_columns(pair, p);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        pair[j] = larger(pair[j], __shfl_xor_sync(0xffffffffu, pair[j], 8));
        pair[j] = larger(pair[j], __shfl_xor_sync(0xffffffffu, pair[j], 16));
    }
    __syncthreads();  // of_warp has been read by all
    if (lane < 8) of_warp[warp][lane] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    __syncthreads();
    for (int j = warp % ACROSS; j < DOWN * ACROSS; j += ACROSS) keep_larger(pair, of_warp[j][lane % 8]);
}

// Quantizes a patch column-wise, columns c .. c + 7. pair: the columns' amax over ROWS rows, a chunk or a 512-row scale
// group. `first`: this lane writes the chunk's scales, eight in one store.
template <int ROWS>
static __device__ __forceinline__ void quantize_channels(uint8_t* q, uint8_t* scale, const uint4 p[PATCH_ROWS],
                                                         const uint32_t pair[4], bool first, int64_t row, int64_t c,
                                                         int64_t length, int64_t columns, uint32_t rounding_bias) {
    // The scales. A 512-row scale group below MX_RUN_LEAST is flushed to zeros.
    float factor[8];
    uint32_t s[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        s[j] = scale_of_column(pair, j, rounding_bias);
        factor[j] = mx_scale_inverse(s[j]);
        if (ROWS == MX_RUN && s[j] < MX_RUN_LEAST) {
            s[j] = 0;
            factor[j] = 0;
        }
    }
    if (first)
        *(uint2*)(scale + row / MX_CHUNK * columns + c) =
            make_uint2(s[0] | s[1] << 8 | s[2] << 16 | s[3] << 24, s[4] | s[5] << 8 | s[6] << 16 | s[7] << 24);

    // Quantize, and write transposed.
    uint2 bytes[PATCH_ROWS];
    quantize_patch(bytes, p, factor);
    store_turned(q + c * length + row, length, bytes);
}
