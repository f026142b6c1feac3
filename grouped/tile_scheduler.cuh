// Tile scheduler of the grouped GEMMs: finds the work tile of a number, and in it the tile of each of two blocks.
//
// An expert's output is divided into base tiles of 128 x 128 (SQUARE_SIDE). A work tile belongs to two blocks, on
// Hopper a cluster. A work tile is usually a supertile of 2 x 2 base tiles, half of it for each block. Work tiles are
// numbered expert after expert. The order within one output, here for bf16 with 7 rows and 5 columns of base tiles:
//
//     +-------+-------+---+
//     |       |       |   |   0..5  Supertiles. The order goes down a rasterization band of at most 8 supertiles, then
//     |   0   |   3   |   |         one column to the right. L2 reuse: the band's rows of A and the column of B.
//     +-------+-------+ 6 |
//     |       |       |   |   6, 7  The last column, if it is one base tile wide. 4 x 1 base tiles: a TALL tile for
//     |   1   |   4   |   |         each block. Where 2 x 1 are left, as in 7: a SQUARE tile for each block.
//     +-------+-------+---+
//     |       |       |   |   8, 9  The last row, if it is one base tile high. 1 x 4 base tiles: a WIDE tile for each
//     |   2   |   5   | 7 |         block. Where one is left, as in 9, block 0 stores it. Block 1 computes it too
//     +-------+-------+---+         without storing: block 0 needs the half of the loads that block 1 issues.
//     |       8       | 9 |
//     +---------------+---+
//
// The two tiles of a work tile share one operand, which Hopper's blocks multicast (grouped/grouped_gemm_parts.cuh). A
// kernel chooses the places of both tiles in a supertile (Pass::SIDE_BY_SIDE):
//
//     one above the other    128 x 256 each    shared: the columns of B
//     side by side           256 x 128 each    shared: the rows of A
//
// Side by side there are only work tiles of the kinds 0..7: the last row of supertiles may be one base tile high. Where
// the narrow last column has one supertile left, block 0 stores it, and block 1 computes it without storing, as in 9.
//
// Dynamic scheduling: numbers are drawn from a counter in device memory, first come, first served. A block that starts
// late draws fewer work tiles, and no block waits for it. (A transfer between GPUs can occupy some SMs for
// milliseconds.) Each drawer ends with one number past the last work tile. The largest number of a launch resets the
// counter to 0. One block computes a tile's whole sum, so the bits of the result do not depend on the schedule.
#pragma once

#include "device/cuda.cuh"
#include "grouped/permute.h"

namespace {

// The differences between the GEMMs. A GEMM multiplies A (M, K) by B (K, N) for every expert. A kernel derives a type
// for each of its GEMMs, with BLOCK_K, the elements of the contraction in a k block.
struct Pass {
    // For the scheduler.
    static constexpr bool SIDE_BY_SIDE = false;  // how a work tile's two tiles lie (above)
    static constexpr bool OVER_ROWS = false;     // the contraction runs over an expert's rows; all outputs are one size
    static constexpr bool ZERO_EMPTY = false;    // OVER_ROWS: writes zeros for experts without rows, unless it adds

    // For the loads. K_ROWS: the operand's rows in memory are the contraction, which else runs along the rows.
    static constexpr bool K_ROWS_A = false, K_ROWS_B = false;
    static constexpr bool GATHER_A = false, GATHER_B = false;  // the operand's rows are gathered by token
    static constexpr bool GATE_UP = false;                     // a tile's columns of B: half the gate's, half the up's
    static constexpr int EPILOGUE_STAGES = 0;                  // stages of a tile after its k blocks
    static constexpr int HELPERS = 0, HELPER_ARRIVALS = 0;     // more warps that fill a stage, and their arrivals

    // In shared memory: stages, the boxes of a stage, and a kernel's own data.
    static constexpr int STAGES = 4, STAGE_BOXES = 6;
    struct Extra {};

    static constexpr bool PING_PONG = false;  // each consumer warpgroup has tiles of its own
};

enum { CLUSTER = 2 };  // thread blocks
enum { SQUARE_SIDE = 128 };
enum { BAND = 8 };  // supertiles

// Tile shapes: 128 x 256, 256 x 128 and 128 x 128 of the output.
enum Shape { WIDE, TALL, SQUARE };

// Problem sizes of a grouped GEMM. Each expert's number of rows takes the place of M, or of K if OVER_ROWS. With
// ZERO_EMPTY, K is the end of the ragged buffer, where an expert without rows reads zeros.
struct Groups {
    const int64_t* start;
    const int32_t* rows;
    int El, M, N, K;
    uint32_t* counter;  // work tiles drawn so far; owned by the Ctx
    int16_t* order;     // OVER_ROWS: experts by rows, largest first
    int add;            // OVER_ROWS: 1 accumulates; 0 overwrites
};

// One block's tile of a work tile. (Aligned, so that it is copied through shared memory in pairs of words.)
struct alignas(8) WorkItem {
    int m, n, k;   // the tile's first row and column, and the start of its contraction; m (OVER_ROWS: k) is a row of
                   // the ragged buffer
    int expert;    // index of the weights
    int k_blocks;  // of BLOCK_K along the contraction; 0: no more work
    int past;      // no more work: the number, counted from the end of the work tiles
    int valid;     // rows from m on that are not pad rows (OVER_ROWS: rows of the output)
    int shape;     // Shape
    int store;     // 0: the block only loads and multiplies, for its peer in the cluster
};

__device__ __forceinline__ int div_up(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ int broadcast(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// The next number of a counter. (The compiler aggregates atomicAdd, or inc without a limit, over the lanes: one
// request, and a shuffle that waits for the result at once.)
__device__ __forceinline__ uint32_t draw_number(uint32_t* counter) {
    uint32_t number;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(number) : "l"(counter) : "memory");
    return number;
}

// OVER_ROWS: the cost of a tile grows with its expert's rows. Experts are sorted by rows, largest first, so that no
// expensive tile starts last. All threads of a block call sort_experts, and then synchronize. (Blocks write equal
// orders.)
template <typename P>
__device__ __forceinline__ void sort_experts(const Groups& g) {
    if constexpr (P::OVER_ROWS)
        for (int e = threadIdx.x; e < g.El; e += blockDim.x) {
            int rows = g.rows[e], place = 0;
            for (int i = 0; i < g.El; i++) place += g.rows[i] > rows || (g.rows[i] == rows && i < e);
            g.order[place] = (int16_t)e;
        }
}

// The tile scheduler, run by all lanes of a warp, after sort_experts. The scheduler holds a window of 32 experts, one
// in each lane. The numbers only grow, so the window only moves forward.
template <typename P>
struct TileScheduler {
    const Groups& g;
    int lane;
    int M, wide, narrow;                      // rows; columns of two base tiles; 1 if a column of one base tile follows
    int common_a;                             // of the current work tile: 1: the blocks share A; 0: they share B
    int first, base;                          // the window's first expert; work tiles before it
    int expert, start, rows, squares_m, end;  // this lane's expert; its rows of base tiles; the end of its numbers

    __device__ __forceinline__ explicit TileScheduler(const Groups& g) : g(g), lane(threadIdx.x % 32) {
        restart(g.M, g.N);
    }

    // From here on outputs are (M, N), and numbers begin at 0.
    __device__ __forceinline__ void restart(int M, int N) {
        const int squares_n = div_up(N, SQUARE_SIDE);
        this->M = M;
        wide = squares_n / 2;
        narrow = squares_n % 2;
        load_window(0, 0);
    }

    // The tile of block `rank` of the work tile with this number.
    __device__ __forceinline__ WorkItem find(int number, int rank) {
        // The window that contains the number.
        int total = broadcast(end, 31);
        while (number >= total && first + 32 < g.El) {
            load_window(first + 32, total);
            total = broadcast(end, 31);
        }
        WorkItem item = {};
        item.past = number - total;
        if (number >= total) return item;

        // The expert: the first lane whose end is past the number. From here on the number counts within this expert.
        const int owner = __popc(__ballot_sync(0xffffffffu, end <= number));
        const int before = broadcast(end, (owner + 31) % 32);
        const int owner_start = broadcast(start, owner), owner_rows = broadcast(rows, owner);
        const int owner_squares = broadcast(squares_m, owner);
        number -= owner ? before : base;

        // The tile, in base tiles.
        int m, n;
        const int paired = items_of(areas_of(owner_squares));
        item.shape = WIDE;
        item.store = 1;
        common_a = P::SIDE_BY_SIDE;
        if (!P::SIDE_BY_SIDE && number >= paired) {  // the odd last row: tiles side by side
            const int column = (number - paired) * CLUSTER + rank, last = wide + narrow - 1;
            m = owner_squares - 1;
            n = 2 * min(column, last);
            common_a = 1;
            item.store = column <= last;
            // With ping-pong a lone narrow tile stays WIDE, so that both blocks go through the same number of stages.
            if (n == 2 * wide && !(P::PING_PONG && wide)) item.shape = SQUARE;
        } else {
            const int per_band = items_of(BAND), band = number / per_band;
            const int height = min((int)BAND, areas_of(owner_squares) - band * BAND);
            number -= band * per_band;
            if (number < height * wide) {  // a supertile
                m = 2 * (number % height) + (P::SIDE_BY_SIDE ? 0 : rank);
                n = 2 * (number / height) + (P::SIDE_BY_SIDE ? rank : 0);
            } else {  // two supertiles of the odd last column: tiles one above the other
                const int area = 2 * (number - height * wide), last = area + 1 == height;
                m = 2 * area + rank * (!last ? 2 : P::SIDE_BY_SIDE ? 0 : 1);
                n = 2 * wide;
                item.shape = last ? SQUARE : TALL;
                common_a = 0;
                item.store = !P::SIDE_BY_SIDE || !last || rank == 0;
            }
            m += 2 * band * BAND;
        }
        if (P::SIDE_BY_SIDE) item.shape = m + 1 < owner_squares ? TALL : SQUARE;

        // The tile, in elements.
        item.m = m * SQUARE_SIDE + (P::OVER_ROWS ? 0 : owner_start);
        item.n = n * SQUARE_SIDE;
        item.k = P::OVER_ROWS ? owner_start : 0;
        item.expert = broadcast(expert, owner);
        item.k_blocks = div_up(P::OVER_ROWS ? max(owner_rows, 1) : g.K, P::BLOCK_K);
        item.valid = (P::OVER_ROWS ? M : owner_rows) - m * SQUARE_SIDE;
        return item;
    }

   private:
    // areas_of: supertiles in one column, for the given rows of base tiles. items_of: work tiles of `areas` rows of
    // supertiles: the supertiles themselves and the narrow last column.
    __device__ __forceinline__ int areas_of(int squares) const {
        return P::SIDE_BY_SIDE ? div_up(squares, 2) : squares / 2;
    }
    __device__ __forceinline__ int items_of(int areas) const { return areas * wide + div_up(areas, 2) * narrow; }

    // Moves the window to the 32 experts from `from` on. `items` is the number of work tiles before them.
    __device__ __forceinline__ void load_window(int from, int items) {
        // This lane's expert. In forward and dgrad all rows up to the next start are written, pad rows as zeros.
        const int i = from + lane;
        first = from;
        base = items;
        expert = start = rows = squares_m = end = 0;
        if (i < g.El) {
            expert = P::OVER_ROWS ? g.order[i] : i;
            rows = g.rows[expert];
            start = P::OVER_ROWS && rows == 0 ? g.K : (int)g.start[expert];
            squares_m = !P::OVER_ROWS                           ? ((int)g.start[expert + 1] - start) / SQUARE_SIDE
                        : rows > 0 || (P::ZERO_EMPTY && !g.add) ? div_up(M, SQUARE_SIDE)
                                                                : 0;
            end = items_of(areas_of(squares_m));
            if (!P::SIDE_BY_SIDE) end += squares_m % 2 * div_up(wide + narrow, CLUSTER);
        }

        // Inclusive prefix sum over the lanes: counts become ends.
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int before = __shfl_up_sync(0xffffffffu, end, d);
            if (lane >= d) end += before;
        }
        end += base;
    }
};

// The problem sizes, with the counter of work tiles and workspace for the order of the experts. (Counter and workspace
// belong to the Ctx: grouped GEMMs of several Ctx may run at once.)
Groups groups_of(const Ragged& r, int64_t M, int64_t N, int64_t K, Ctx* ctx) {
    // Rows and columns are int32, as TMA coordinates are.
    ASSERT(r.capacity <= INT32_MAX && M <= INT32_MAX && N <= INT32_MAX && K <= INT32_MAX);
    int16_t* order = ctx_workspace<int16_t>(ctx, MAX_EXPERTS);
    return {r.group_start, r.group_rows, r.El, (int)M, (int)N, (int)K, (uint32_t*)ctx->counter, order};
}

}  // namespace
