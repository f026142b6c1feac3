// The tile scheduler of the grouped products: which tile of which expert's output a block multiplies next.
//
// An expert's output is counted in squares of 128 x 128. Two blocks form a cluster, and a work item is what a cluster
// takes at once: mostly an area of 2 x 2 squares, half for each block. Items have numbers: expert after expert, and
// within an expert's output as drawn here for bf16, 7 rows and 5 columns of squares.
//
//     +-------+-------+---+
//     |       |       |   |   0..5  Areas. The walk goes down a band of at most 8 areas, then one column to the right:
//     |   0   |   3   |   |         the band's rows of A and the column of B stay in the L2 cache.
//     +-------+-------+ 6 |
//     |       |       |   |   6, 7  The last column, if it is one square wide. 4 x 1 squares: a TALL tile for each
//     |   1   |   4   |   |         block. Where 2 x 1 are left, as in 7: a SQUARE tile for each block.
//     +-------+-------+---+
//     |       |       |   |   8, 9  The last row, if it is one square high. 1 x 4 squares: a WIDE tile for each block.
//     |   2   |   5   | 7 |         Where one square is left, as in 9, it is block 0's. Block 1 multiplies it too but
//     +-------+-------+---+         does not store it: block 0 relies on the half of the loads that is block 1's.
//     |       8       | 9 |
//     +---------------+---+
//
// MXFP8 has only items like 0..7. Its last areas may be one square high. Where the last column has one area left, that
// is block 0's, and block 1 keeps it company as in 9.
//
// The two tiles of an item have an operand in common, of which each block loads one half for both. In an area of bf16
// they lie below each other (128 x 256 each, the same columns of B), in one of MXFP8 beside each other (256 x 128 each,
// the same rows of A).
//
// A cluster draws the number of its next item from a counter in device memory: first come, first served. So a cluster
// that starts late takes fewer items, and nothing waits for it. (A transfer between GPUs can hold some SMs for
// milliseconds.) Each cluster ends with one number beyond the last item; the last of all numbers sets the counter back
// to 0. One block owns a tile's whole sum, so the bits do not depend on who takes what.
#ifndef GROUPED_TILE_SCHEDULER_CUH
#define GROUPED_TILE_SCHEDULER_CUH

#include "grouped/grouped_gemm_ptx.cuh"

namespace {

// The three products in bf16 and those of MXFP8 bytes. Each multiplies A (M, K) by B (K, N) for every expert.
enum Pass { FORWARD, DGRAD, WGRAD, MX, MX_WGRAD };

template <Pass P>
constexpr bool ON_BYTES = P == MX || P == MX_WGRAD;
// The contraction runs over an expert's rows, and all experts have outputs of one size.
template <Pass P>
constexpr bool OVER_ROWS = P == WGRAD || P == MX_WGRAD;

enum { CLUSTER = 2 };  // blocks
enum { SQUARE_SIDE = 128 };
enum { BAND = 8 };  // areas
enum { QUEUE = 8 };

// Elements of the contraction in a stage: 128 bytes.
template <Pass P>
constexpr int BLOCK_K = ON_BYTES<P> ? 128 : 64;

// 128 x 256, 256 x 128 and 128 x 128 of the output.
enum Shape { WIDE, TALL, SQUARE };

// One of several outputs: its sizes, and the first rows of A and of B that are its own.
struct Matrix {
    int M, N, a, b;
};
enum { MOST_MATRICES = 4 };

// The sizes of a product. Where a size is an expert's number of rows (M, OVER_ROWS K), it is not set here; K of
// OVER_ROWS is where the buffer ends, and where an expert without rows reads zeros.
struct Groups {
    const int64_t* start;
    const int32_t* rows;
    int El, M, N, K;
    uint32_t* counter;  // of items that were drawn, the Ctx's
    int16_t* order;     // OVER_ROWS: largest experts first
    int add;            // OVER_ROWS: 1: to what is there; 0: it is written, by WGRAD also for experts without rows
    // MX_WGRAD: if not 0, so many outputs in the place of the experts' (El too), all of the rows of the one group.
    int matrices;
    Matrix list[MOST_MATRICES];
};

// One block's part of a work item.
struct WorkItem {
    int m, n, k;   // the tile's first row and column, and where its contraction begins; rows are those of the ragged
                   // buffer in m (OVER_ROWS: in k)
    int expert;    // whose weights these are
    int map;       // MX_WGRAD: which matrix this is, 0 with experts
    Matrix of;     // MX_WGRAD: the sizes and places of its operands
    int k_blocks;  // of BLOCK_K along the contraction; 0: there is no more work
    int valid;     // rows from m on that are not pad rows
    int shape;     // Shape
    int store;     // 0 in a block that keeps its neighbour company
};

// Where the numbers of a block's items arrive. Block 0 draws for both blocks. It can be no more items ahead than there
// are stages (4), because both blocks release each stage: 8 places never overflow.
struct Queue {
    uint64_t full_barriers[QUEUE];
    uint32_t numbers[QUEUE];
};

__device__ __forceinline__ int div_up(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ int broadcast(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// The scheduler, in all lanes of the warp that loads. It looks at the experts through a window of 32, of which each
// lane knows one. Numbers only grow, so the window only moves forward.
template <Pass P>
struct TileScheduler {
    const Groups& g;
    Queue& queue;
    int rank, lane;                           // of the block in the cluster, of the thread in the warp
    int wide, narrow;                         // columns of two squares; 1 if there is another of one square (MX_WGRAD:
                                              // of this lane's output)
    uint32_t drawn, turn;                     // block 0, lane 0: the number that is on its way; how many were received
    int common_a;                             // of the item at hand: the blocks have A in common, else B
    int first, base;                          // the window's first expert, and the items before it
    int expert, start, rows, squares_m, end;  // this lane's expert, its rows of squares, the number after its last item

    __device__ __forceinline__ TileScheduler(const Groups& g, Queue& queue)
        : g(g), queue(queue), rank(cluster_rank()), lane(threadIdx.x % 32), drawn(0), turn(0) {
        set_columns(g.N);
        draw();
        load_window(0, 0);
    }

    // This block's tile of the cluster's next work item.
    __device__ __forceinline__ WorkItem next() {
        // The item's number, and the window that holds it.
        int number = receive(), total;
        while (total = broadcast(end, 31), number >= total && first + 32 < g.El) load_window(first + 32, total);
        WorkItem item = {};
        if (number >= total) {
            const int last = total + (int)gridDim.x / CLUSTER - 1;
            if (number == last && rank == 0 && lane == 0) *g.counter = 0;
            return item;
        }
        draw();

        // The expert: the first lane whose end lies after the number. From here on the number counts within it.
        const int owner = __popc(__ballot_sync(0xffffffffu, end <= number));
        const int before = broadcast(end, (owner + 31) % 32);
        const int owner_start = broadcast(start, owner), owner_rows = broadcast(rows, owner);
        const int owner_squares = broadcast(squares_m, owner);
        const int wide = P == MX_WGRAD ? broadcast(this->wide, owner) : this->wide;
        const int narrow = P == MX_WGRAD ? broadcast(this->narrow, owner) : this->narrow;
        number -= owner ? before : base;

        // The tile, counted in squares.
        int m, n;
        const int paired = items_of(areas_of(owner_squares), wide, narrow);
        item.shape = WIDE, item.store = 1, common_a = ON_BYTES<P>;
        if (!ON_BYTES<P> && number >= paired) {  // the odd last row: beside each other
            const int column = (number - paired) * CLUSTER + rank, last = wide + narrow - 1;
            m = owner_squares - 1, n = 2 * min(column, last);
            common_a = 1, item.store = column <= last;
            if (n == 2 * wide) item.shape = SQUARE;
        } else {
            const int per_band = items_of(BAND, wide, narrow), band = number / per_band;
            const int height = min((int)BAND, areas_of(owner_squares) - band * BAND);
            number -= band * per_band;
            if (number < height * wide) {  // an area
                m = 2 * (number % height) + (ON_BYTES<P> ? 0 : rank);
                n = 2 * (number / height) + (ON_BYTES<P> ? rank : 0);
            } else {  // two areas of the odd last column: below each other
                const int area = 2 * (number - height * wide), last = area + 1 == height;
                m = 2 * area + rank * (!last ? 2 : ON_BYTES<P> ? 0 : 1);
                n = 2 * wide;
                item.shape = last ? SQUARE : TALL;
                common_a = 0, item.store = !ON_BYTES<P> || !last || rank == 0;
            }
            m += 2 * band * BAND;
        }
        if (ON_BYTES<P>) item.shape = m + 1 < owner_squares ? TALL : SQUARE;

        // The same in elements.
        item.m = m * SQUARE_SIDE + (OVER_ROWS<P> ? 0 : owner_start);
        item.n = n * SQUARE_SIDE;
        item.k = OVER_ROWS<P> ? owner_start : 0;
        item.expert = broadcast(expert, owner);
        if (P == MX_WGRAD) {
            item.of = {g.M, g.N, 0, 0};
            if (g.matrices) item.map = item.expert, item.expert = 0, item.of = g.list[item.map];
        }
        item.k_blocks = div_up(OVER_ROWS<P> ? max(owner_rows, 1) : g.K, BLOCK_K<P>);
        item.valid = owner_rows - m * SQUARE_SIDE;
        return item;
    }

   private:
    __device__ __forceinline__ void set_columns(int N) {
        const int squares_n = div_up(N, SQUARE_SIDE);
        wide = squares_n / 2, narrow = squares_n % 2;
    }

    // Areas below each other in that many rows of squares, and the work items of that many: areas, and the last column.
    __device__ __forceinline__ int areas_of(int squares) const {
        return ON_BYTES<P> ? div_up(squares, 2) : squares / 2;
    }
    __device__ __forceinline__ static int items_of(int areas, int wide, int narrow) {
        return areas * wide + div_up(areas, 2) * narrow;
    }

    // Asks for a number. It is asked for one item ahead, so that the counter answers while stages are filled.
    __device__ __forceinline__ void draw() {
        if (rank == 0 && lane == 0) drawn = draw_number(g.counter);
    }

    // The number that was asked for, in all lanes of both blocks: block 0 sends it into both queues.
    __device__ __forceinline__ int receive() {
        const uint32_t place = turn % QUEUE, phase = turn / QUEUE % 2;
        uint64_t* full = &queue.full_barriers[place];
        if (lane == 0) {
            barrier_expect(full, sizeof(uint32_t));
            if (rank == 0)
                for (int block = 0; block < CLUSTER; block++)
                    send_word(cluster_address(&queue.numbers[place], block), drawn, cluster_address(full, block));
        }
        barrier_wait(full, phase);
        turn++;
        return (int)queue.numbers[place];
    }

    // Moves the window to the 32 experts from `from` on, before which there are `items` items.
    __device__ __forceinline__ void load_window(int from, int items) {
        // This lane's expert. In forward and dgrad all rows up to the next start are written, pad rows as zeros.
        const int i = from + lane;
        first = from, base = items;
        expert = start = rows = squares_m = end = 0;
        if (i < g.El) {
            const bool matrix = P == MX_WGRAD && g.matrices;
            if (matrix) set_columns(g.list[i].N);
            expert = OVER_ROWS<P> && !matrix ? g.order[i] : i;
            const int group = matrix ? 0 : expert, M = matrix ? g.list[i].M : g.M;
            rows = g.rows[group];
            start = OVER_ROWS<P> && rows == 0 ? g.K : (int)g.start[group];
            squares_m = !OVER_ROWS<P>                        ? ((int)g.start[expert + 1] - start) / SQUARE_SIDE
                        : rows > 0 || (P == WGRAD && !g.add) ? div_up(M, SQUARE_SIDE)
                                                             : 0;
            end = items_of(areas_of(squares_m), wide, narrow);
            if (!ON_BYTES<P>) end += squares_m % 2 * div_up(wide + narrow, CLUSTER);
        }

        // A sum over the lanes up to this one makes ends of sizes.
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int before = __shfl_up_sync(0xffffffffu, end, d);
            if (lane >= d) end += before;
        }
        end += base;
    }
};

}  // namespace

#endif
