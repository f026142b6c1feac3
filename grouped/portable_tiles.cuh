// Tile scheduler of the portable grouped GEMM: gives each thread block its next output tile.
//
// An expert's output is divided into base tiles of 128 x 128 (SQUARE). Tiles are numbered expert after expert. The
// order within one output, here with 5 rows and 5 columns of base tiles:
//
//     +-------+-------+---+
//     |   0   |   5   |   |   0..9    128 x 256. The order goes down a rasterization band of at most 16 tiles, then
//     +-------+-------+10 |           one column to the right. L2 reuse: the band's rows of A and the column of B.
//     |   1   |   6   |   |
//     +-------+-------+---+   10, 11  The last column, if it is one base tile wide: 256 x 128.
//     |   2   |   7   |   |
//     +-------+-------+11 |   12      The last base tile of an odd number: 128 x 128.
//     |   3   |   8   |   |
//     +-------+-------+---+
//     |   4   |   9   |12 |
//     +-------+-------+---+
//
// plan_kernel runs before the GEMM. It computes the prefix sum of the experts' tiles and resets the tile counter.
// Blocks draw the numbers of their tiles from this counter: a block that starts late draws fewer, and no block waits
// for it. One block computes a tile's whole sum, so the bits of the result do not depend on the schedule. Group sizes
// are read only on the device.
#ifndef GROUPED_PORTABLE_TILES_CUH
#define GROUPED_PORTABLE_TILES_CUH

#include "device/cuda.cuh"
#include "grouped/permute.h"

namespace {

enum { BLOCK_K = 32 };
enum { SQUARE = 128, BAND = 16 };  // BAND: base tiles

// Each pass multiplies A (M, K) by B (K, N) for every expert. K_ROWS_A, K_ROWS_B: in memory the operand's rows are the
// contraction. Else the contraction runs along the rows.
enum Pass { FORWARD, DGRAD, WGRAD };
template <Pass P>
constexpr bool K_ROWS_A = P == WGRAD;
template <Pass P>
constexpr bool K_ROWS_B = P != FORWARD;

// Written by plan_kernel. Entries are in the order of the tiles: that of the experts, or in WGRAD most rows first.
struct Plan {
    int drawn;                    // counter: tiles drawn so far
    int end[MAX_EXPERTS];         // prefix sum: the end of this entry's tile numbers
    int16_t expert[MAX_EXPERTS];  // the entry's expert
};

// Problem sizes of a grouped GEMM. M (WGRAD: K) is an expert's number of rows, and not set here.
struct Groups {
    const int64_t* start;
    const int32_t* rows;
    int El, M, N, K;
    int add;  // WGRAD: 1 accumulates; 0 overwrites, also for experts without rows
    Plan* plan;
};

struct Tile {
    int m, n, expert;  // first row and column of the expert's output
    int M, K;          // the expert's sizes
    int boxes_a;       // boxes of 64 rows of A: 2, or 4 in the last column
    int k_blocks;      // 0: no more work
};

__device__ __forceinline__ int div_up(int a, int b) { return (a + b - 1) / b; }

// Tiles in squares_m rows of base tiles. All full bands have the same number of tiles.
__device__ __forceinline__ int tiles_of(int squares_m, int N) {
    const int squares_n = div_up(N, SQUARE);
    return squares_m * (squares_n / 2) + div_up(squares_m, 2) * (squares_n % 2);
}

template <Pass P>
__device__ __forceinline__ int squares_of(const Groups& g, int expert) {
    if (P == WGRAD) return g.rows[expert] > 0 || !g.add ? div_up(g.M, SQUARE) : 0;
    return div_up(g.rows[expert], SQUARE);
}

// One block, one thread per expert.
template <Pass P>
__global__ void __launch_bounds__(MAX_EXPERTS) plan_kernel(const Groups g) {
    // The expert's entry, by its rank in the order, and its number of tiles.
    __shared__ int tiles[MAX_EXPERTS];
    const int e = threadIdx.x;
    int place = e;
    if (P == WGRAD && e < g.El) {
        place = 0;
        const int rows = g.rows[e];
        for (int i = 0; i < g.El; i++) place += g.rows[i] > rows || (g.rows[i] == rows && i < e);
    }
    if (e < g.El) {
        tiles[place] = tiles_of(squares_of<P>(g, e), g.N);
        g.plan->expert[place] = (int16_t)e;
    }
    if (e == 0) g.plan->drawn = 0;

    // Inclusive prefix sum: tile counts become ends.
    for (int d = 1; d < g.El; d *= 2) {
        __syncthreads();
        const int before = e >= d && e < g.El ? tiles[e - d] : 0;
        __syncthreads();
        if (e < g.El) tiles[e] += before;
    }
    if (e < g.El) g.plan->end[e] = tiles[e];
}

template <Pass P>
__device__ __forceinline__ Tile find_tile(const Groups& g, int number) {
    // Binary search for the expert: the first entry whose end is past the number. The number then counts within it.
    int low = 0, high = g.El;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (g.plan->end[middle] > number)
            high = middle;
        else
            low = middle + 1;
    }
    Tile t = {};
    if (low == g.El) return t;
    if (low > 0) number -= g.plan->end[low - 1];

    // The expert's sizes.
    t.expert = g.plan->expert[low];
    t.M = P == WGRAD ? g.M : g.rows[t.expert];
    t.K = P == WGRAD ? g.rows[t.expert] : g.K;
    t.k_blocks = max(1, div_up(t.K, BLOCK_K));

    // The band, and the tile within it: 1 x 2 base tiles, or 2 x 1 in the odd last column.
    const int wide = div_up(g.N, SQUARE) / 2, per_band = tiles_of(BAND, g.N), band = number / per_band;
    const int height = min((int)BAND, squares_of<P>(g, t.expert) - band * BAND);
    number -= band * per_band;
    const bool last_column = number >= height * wide;
    t.m = last_column ? 2 * (number - height * wide) : number % height;
    t.n = 2 * (last_column ? wide : number / height) * SQUARE;
    t.boxes_a = last_column && t.m + 1 < height ? 4 : 2;
    t.m = (t.m + band * BAND) * SQUARE;
    return t;
}

}  // namespace

#endif
