// What the steps of the ladder share: which tile a block multiplies, how a tile of an operand lies in shared memory,
// and how the sums of tensor cores leave.
#ifndef LEARN_LEARN_CUH
#define LEARN_LEARN_CUH

#include "device/mma.cuh"
#include "learn/learn.h"

// A block's part of y. All its rows are of one expert: experts begin at multiples of 128, and ROWS divides 128.
struct Tile {
    int64_t row;  // the first, in the ragged buffer
    int column;   // the first
    int expert;   // whose weights multiply
    int valid;    // rows from the first on that are no pad rows; none if negative
};

// False: this block's rows lie after the last expert. Blocks beside each other have the same rows and the next
// columns, so that x comes from memory once and an expert's W stays in the L2 cache.
template <int ROWS, int COLUMNS>
static __device__ __forceinline__ bool find_tile(const Ragged& r, int64_t OC, Tile& t) {
    // The place.
    const unsigned across = (unsigned)ceil_div(OC, COLUMNS);
    t.row = (int64_t)(blockIdx.x / across) * ROWS, t.column = (int)(blockIdx.x % across) * COLUMNS;
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

// Blocks for all tiles that rows up to the capacity can make: the host does not know how many rows are in use.
static inline unsigned tiles_of(const Ragged& r, int64_t IC, int64_t OC, int rows, int columns) {
    ASSERT(IC % 8 == 0 && OC % 8 == 0);
    return (unsigned)(ceil_div(r.capacity, rows) * ceil_div(OC, columns));
}

// From step 3 on a tile of y is SIDE x SIDE, and one of x or W is SIDE rows of BLOCK_K elements: 128 bytes a row.
enum { SIDE = 128, BLOCK_K = 64, TILE_BYTES = SIDE * BLOCK_K * (int)sizeof(floatX) };

// Where 16-byte piece i of a row is. Eight rows below each other have their pieces i in different banks.
static __device__ __forceinline__ int swizzled(int row, int piece) { return row * 128 + (piece ^ row % 8) * 16; }

// Begins to copy a tile of an operand: SIDE rows from `from` on, their elements from k on. Zeros where the operand
// ends.
static __device__ __forceinline__ void load_tile(uint8_t* to, const floatX* from, int64_t rows, int64_t IC, int64_t k) {
    for (int i = threadIdx.x; i < SIDE * 8; i += blockDim.x) {
        const int row = i / 8, piece = i % 8;
        const bool inside = row < rows && k + piece * 8 < IC;
        copy_async_16(to + swizzled(row, piece), inside ? from + row * IC + k + piece * 8 : from, inside ? 16 : 0);
    }
}

// The sums of 16 rows and 8 columns of the tile, from `row` and `column` on, of which a lane holds four (mma_bf16 in
// device/mma.cuh; wgmma leaves them alike). Pad rows become zeros, whatever their sums are.
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

#endif
