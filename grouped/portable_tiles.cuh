// Which tile of which expert's output a block of the portable grouped products multiplies next.
//
// An expert's output is counted in squares of 128 x 128. Tiles have numbers: expert after expert, and within an
// expert's output as drawn here for 5 rows and 5 columns of squares.
//
//     +-------+-------+---+
//     |   0   |   5   |   |   0..9    128 x 256. The walk goes down a band of at most 16 squares, then one column
//     +-------+-------+10 |           to the right: the band's rows of A and the column of B stay in the L2 cache.
//     |   1   |   6   |   |
//     +-------+-------+---+   10, 11  The last column, if it is one square wide: 256 x 128.
//     |   2   |   7   |   |
//     +-------+-------+11 |   12      Where one square is left: that.
//     |   3   |   8   |   |
//     +-------+-------+---+
//     |   4   |   9   |12 |
//     +-------+-------+---+
//
// plan_kernel, which runs before the products, sums up the experts' tiles and sets a counter of tiles to 0. A block
// draws the numbers of its tiles from it: one that starts late takes fewer, and nothing waits for it. One block owns a
// tile's whole sum, so the bits do not depend on who takes what. Groups' sizes are read on the device alone.
#ifndef GROUPED_PORTABLE_TILES_CUH
#define GROUPED_PORTABLE_TILES_CUH

#include "device/cuda.cuh"
#include "grouped/permute.h"

namespace {

enum { BLOCK_K = 32 };
enum { SQUARE = 128, BAND = 16 };  // BAND: squares

// Each multiplies A (M, K) by B (K, N) for every expert. In memory the contraction runs along the rows of A and B, or
// is the rows.
enum Pass { FORWARD, DGRAD, WGRAD };
template <Pass P>
constexpr bool K_ROWS_A = P == WGRAD;
template <Pass P>
constexpr bool K_ROWS_B = P != FORWARD;

// Made by plan_kernel. Experts are counted in the order of their tiles; WGRAD: largest first.
struct Plan {
    int drawn;                    // tiles that were drawn
    int end[MAX_EXPERTS];         // tiles up to this expert's last one
    int16_t expert[MAX_EXPERTS];  // whose weights these are
};

// The sizes of a product. M (WGRAD: K) is an expert's number of rows, and not set here.
struct Groups {
    const int64_t* start;
    const int32_t* rows;
    int El, M, N, K;
    int add;  // WGRAD: 1: to what is there; 0: it is written, also for experts without rows
    Plan* plan;
};

struct Tile {
    int m, n, expert;  // first row and column of the expert's output
    int M, K;          // the expert's sizes
    int boxes_a;       // 2 of 64 rows, or 4 in the last column
    int k_blocks;      // 0: there is no more work
};

__device__ __forceinline__ int div_up(int a, int b) { return (a + b - 1) / b; }

// Tiles of so many rows of squares. A band has the same number of them whatever its place.
__device__ __forceinline__ int tiles_of(int squares_m, int N) {
    const int squares_n = div_up(N, SQUARE);
    return squares_m * (squares_n / 2) + div_up(squares_m, 2) * (squares_n % 2);
}

template <Pass P>
__device__ __forceinline__ int squares_of(const Groups& g, int expert) {
    if (P == WGRAD) return g.rows[expert] > 0 || !g.add ? div_up(g.M, SQUARE) : 0;
    return div_up(g.rows[expert], SQUARE);
}

// A thread an expert, in one block.
template <Pass P>
__global__ void __launch_bounds__(MAX_EXPERTS) plan_kernel(const Groups g) {
    // The expert's place in the order.
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

    // Sums over the places up to each make ends of sizes.
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
    // The expert: the first place whose end lies after the number. From there on the number counts within it.
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
    t.expert = g.plan->expert[low];
    t.M = P == WGRAD ? g.M : g.rows[t.expert];
    t.K = P == WGRAD ? g.rows[t.expert] : g.K;
    t.k_blocks = max(1, div_up(t.K, BLOCK_K));

    // The band, and the tile within it: an area of 1 x 2 squares, or of 2 x 1 in the odd last column.
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
