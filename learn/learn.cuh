// Common parts of the ladder's steps: the output tile of a thread block, the layout of an operand's tile in shared
// memory, and the epilogue of the tensor core kernels.
#pragma once

#include "device/mma.cuh"
#include "learn/learn.h"

// A block's tile of y. All its rows are one expert's: experts begin at multiples of 128, and ROWS divides 128.
struct Tile {
    int64_t row;  // first row, in the ragged buffer
    int column;   // first column
    int expert;   // index of the weights
    int valid;    // rows from the first on that are not pad rows; none if negative
};

// Finds the block's tile; false if its rows are past the last expert. Neighbouring blocks have the same rows and the
// next columns. L2 reuse: x is read from memory once, and an expert's W stays in the L2 cache.
template <int ROWS, int COLUMNS>
static __device__ __forceinline__ bool find_tile(const Ragged& r, int64_t OC, Tile& t) {
    // The position, from the block's number.
    const unsigned across = (unsigned)ceil_div(OC, COLUMNS);
    t.row = (int64_t)(blockIdx.x / across) * ROWS;
    t.column = (int)(blockIdx.x % across) * COLUMNS;
    if (t.row >= r.group_start[r.El]) return false;

    // The expert, by halving: start[low] <= row < start[high]. One without rows starts where the next does, and is not
    // found.
    int low = 0, high = r.El;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (r.group_start[middle] <= t.row ? low : high) = middle;
    }
    t.expert = low;
    t.valid = (int)(r.group_start[low] + r.group_rows[low] - t.row);
    return true;
}

// Number of blocks for all rows up to the capacity: the host does not know the number of rows in use.
static inline unsigned tiles_of(const Ragged& r, int64_t IC, int64_t OC, int rows, int columns) {
    ASSERT(IC % 8 == 0 && OC % 8 == 0);
    return (unsigned)(ceil_div(r.capacity, rows) * ceil_div(OC, columns));
}

// From step 3 on a tile of y is SIDE x SIDE. A tile of x or W is SIDE rows of BLOCK_K elements: 128 bytes a row.
enum { SIDE = 128, BLOCK_K = 64, TILE_BYTES = SIDE * BLOCK_K * (int)sizeof(floatX) };

// Swizzle: the offset of 16-byte vector `vector` of a row. In eight consecutive rows, the vectors of the same index are
// in different banks: no bank conflicts.
static __device__ __forceinline__ int swizzled(int row, int vector) { return row * 128 + (vector ^ row % 8) * 16; }

// Starts the copy of an operand's tile: SIDE rows from `from` on, elements from k on. Zeros past the operand's end.
static __device__ __forceinline__ void load_tile(uint8_t* to, const floatX* from, int64_t rows, int64_t IC, int64_t k) {
    for (int i = threadIdx.x; i < SIDE * 8; i += blockDim.x) {
        const int row = i / 8, vector = i % 8;
        const bool inside = row < rows && k + vector * 8 < IC;
        copy_async_16(to + swizzled(row, vector), inside ? from + row * IC + k + vector * 8 : from, inside ? 16 : 0);
    }
}

// Stores the sums of 16 rows and 8 columns of the tile, from `row` and `column` on. A lane holds four of them (mma_bf16
// in device/mma.cuh; wgmma has the same layout). Pad rows become zeros, whatever their sums are.
static __device__ __forceinline__ void store_sums(floatX* y, int64_t OC, const Tile& t, int row, int column,
                                                  const float* d) {
    const int lane = threadIdx.x % 32, n = t.column + column + lane % 4 * 2;
    if (n >= OC) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int m = row + half * 8 + lane / 4;
        __nv_bfloat162 pair = __floats2bfloat162_rn(d[half * 2], d[half * 2 + 1]);
        if (m >= t.valid) pair = __floats2bfloat162_rn(0, 0);
        *(__nv_bfloat162*)(y + (t.row + m) * OC + n) = pair;
    }
}
