// Common parts of the grouped GEMM kernels (grouped_gemm.cu, mx/grouped_gemm_mx.cu): the rings between producer and
// consumers, the TMA loads, the stores of the epilogue, and the launch. The kernels differ in their mainloops.
//
// A ring is a few slots in shared memory that are used in turn. A slot has two mbarriers (device/wgmma.cuh):
//
//     producer:   wait for `empty`, write (TMA counts its bytes), arrive at `full`
//     consumer:   wait for `full`, read, arrive at `empty`
//
// A phase of an mbarrier is one turn through the ring; phases have parity 0, 1, 0, .. The producer runs ahead until all
// slots are full, so loads are in flight while the tensor cores work. There are two rings: of four work tiles
// (WorkItem), and of four stages (a k block of A and B). With ping-pong (below) there are six smaller stages.
//
// A stage is six boxes, with ping-pong four. A box is 64 rows of 128 bytes, swizzled. A tile needs two boxes of A for
// each 128 rows and two of B for each 128 columns. A's boxes are at the front of a stage, B's at its end.
//
//     128 x 256   | A | A | B | B | B | B |        256 x 128   | A | A | A | A | B | B |
#pragma once

#include "grouped/grouped_gemm_ptx.cuh"
#include "grouped/tile_scheduler.cuh"

namespace {

enum { BOX = 64, BOX_BYTES = BOX * 128 };        // rows
enum { ITEMS = 4 };                              // work tiles that the producer may be ahead
enum { WARPS = 8, THREADS = 128 + 32 * WARPS };  // a producer warpgroup (one warp works) and two consumer warpgroups
enum { BOTH = (1 << CLUSTER) - 1 };              // multicast mask: a bit for each block of the cluster
enum { STORE_BYTES = 16 * 128 };                 // an output buffer: 16 rows of 128 bytes
enum { QUEUE = 8 };                              // slots

// Queue of work tile numbers in a block's shared memory. Block 0 draws the numbers for both blocks of the cluster.
// Block 0 is at most 6 work tiles ahead, the number of stages, because both blocks release each stage. So 8 slots never
// overflow.
struct Queue {
    uint64_t full_barriers[QUEUE];
    uint32_t numbers[QUEUE];
};

// A block's shared memory, with N stages of BOXES boxes.
template <int N, int BOXES, typename Extra>
struct Memory {
    enum { STAGES = N, STAGE_BYTES = BOXES * BOX_BYTES };
    alignas(1024) uint8_t stages[STAGES][STAGE_BYTES];
    alignas(1024) uint8_t stores[WARPS][2][STORE_BYTES];
    uint64_t full_barriers[STAGES], empty_barriers[STAGES];
    uint64_t item_full_barriers[ITEMS], item_empty_barriers[ITEMS];
    uint64_t turn_barriers[2];  // ping-pong: of each consumer warpgroup
    WorkItem items[ITEMS];
    Queue queue;
    Extra extra;
};
template <typename P>
using Shared = Memory<P::STAGES, P::STAGE_BOXES, typename P::Extra>;

// A slot in a ring of N, and the parity of the phase to wait for there. The producer begins with parity 1, the parity
// of the phase before the first: every slot is empty.
template <int N>
struct RingSlot {
    int index;
    uint32_t phase;

    __device__ __forceinline__ void advance() {
        if (++index == N) {
            index = 0;
            phase ^= 1;
        }
    }
    // Equals `count` calls of advance().
    __device__ __forceinline__ void skip(int count) {
        phase ^= (index + count) / N % 2;
        index = (index + count) % N;
    }
};

// --- The producer ---

// Loads the box at column x and row y (of matrix z if SEVERAL) into this block, or multicasts it to BOTH.
template <bool SEVERAL, bool TO_BOTH>
__device__ __forceinline__ void load_box(uint8_t* to, const CUtensorMap* map, uint64_t* full, int x, int y, int z) {
    if (SEVERAL && TO_BOTH) tma_multicast(to, map, full, x, y, z, BOTH);
    if (SEVERAL && !TO_BOTH) tma_load(to, map, full, x, y, z);
    if (!SEVERAL && TO_BOTH) tma_multicast(to, map, full, x, y, BOTH);
    if (!SEVERAL && !TO_BOTH) tma_load(to, map, full, x, y);
}

// Boxes of a tile's operands in a stage.
__device__ __forceinline__ int boxes_of_a(int shape) { return shape == TALL ? 4 : 2; }
template <typename P>
__device__ __forceinline__ int boxes_of_b(int shape) {
    return !P::SIDE_BY_SIDE && shape == WIDE ? 4 : 2;
}

// Box i of B: its first column, and its matrix. GATE_UP: B is (2 El, F, K), an expert's gate and its up. The first half
// of a tile's columns are columns of the gate, the other half the same columns of the up.
struct BoxOfB {
    int n, matrix;
};
template <typename P>
__device__ __forceinline__ BoxOfB box_of_b(const WorkItem& item, int i, int boxes) {
    if (!P::GATE_UP) return {item.n + i * BOX, item.expert};
    const int up = i >= boxes / 2;
    return {item.n / 2 + (i - up * boxes / 2) * BOX, 2 * item.expert + up};
}

// Ping-pong: the halves of a tile, 128 x 128, are tiles of their own, and the two consumer warpgroups take them in
// turns. So one warpgroup multiplies while the other is in its epilogue. Ping-pong pays for a long epilogue after a
// short contraction. The price of ping-pong is loads: the operand that both halves need is loaded twice.
template <typename P>
__device__ __forceinline__ int tiles_of(const WorkItem& item) {
    return P::PING_PONG && item.shape != SQUARE ? 2 : 1;
}
template <typename P>
__device__ __forceinline__ WorkItem tile_of(const WorkItem& item, int i) {
    WorkItem tile = item;
    if (P::PING_PONG) {
        const int down = item.shape == TALL ? i * SQUARE_SIDE : 0;
        tile.m += down;
        tile.valid -= down;
        tile.n += item.shape == WIDE ? i * SQUARE_SIDE : 0;
        tile.shape = SQUARE;
    }
    return tile;
}

// Loads the k blocks of a tile, one stage for each, but for an operand that helpers gather. The shared operand is
// multicast: this block loads every other box of it for both blocks. A full barrier counts the bytes of all boxes, also
// of boxes that the peer loads.
//
// One thread runs this loop, and must keep ahead of the tensor cores. With fast products the thread's instructions for
// a k block take about as long as the products. So the loop makes no decision that can be made before the loop:
// COMMON_A, which operand is shared, is a template parameter.
template <typename P, bool COMMON_A>
__device__ __forceinline__ void load_blocks(Shared<P>& s, const CUtensorMap* a, const CUtensorMap* b,
                                            const WorkItem& item, int rank, RingSlot<P::STAGES>& stage) {
    const int a_boxes = boxes_of_a(item.shape), b_boxes = boxes_of_b<P>(item.shape);
    const int by_tma = (P::GATHER_A ? 0 : a_boxes) + (P::GATHER_B ? 0 : b_boxes);
    for (int k_block = 0, k = item.k; k_block < item.k_blocks; k_block++, k += P::BLOCK_K) {
        // A free stage, and the bytes to expect.
        barrier_wait(&s.empty_barriers[stage.index], stage.phase);
        uint64_t* full = &s.full_barriers[stage.index];
        uint8_t* to = s.stages[stage.index];
        barrier_expect(full, by_tma * BOX_BYTES);

        // A's boxes at the front.
#pragma unroll
        for (int j = 0; j < (COMMON_A ? 2 : 4); j++) {
            const int i = COMMON_A ? CLUSTER * j + rank : j, m = item.m + i * BOX;
            if (!P::GATHER_A && i < a_boxes)
                load_box<false, COMMON_A>(to + i * BOX_BYTES, a, full, P::K_ROWS_A ? m : k, P::K_ROWS_A ? k : m, 0);
        }

        // B's boxes at the end.
        to += (P::STAGE_BOXES - b_boxes) * BOX_BYTES;
#pragma unroll
        for (int j = 0; j < (COMMON_A ? 4 : 2); j++) {
            const int i = COMMON_A ? j : CLUSTER * j + rank;
            const BoxOfB box = box_of_b<P>(item, i, b_boxes);
            if (!P::GATHER_B && i < b_boxes)
                load_box<!P::OVER_ROWS, !COMMON_A>(to + i * BOX_BYTES, b, full, P::K_ROWS_B ? box.n : k,
                                                   P::K_ROWS_B ? k : box.n, box.matrix);
        }
        stage.advance();
    }
}

// Epilogue stages: after a tile's k blocks its consumers read another tensor, 128 rows and 64 columns at a time. Each
// work tile has P::EPILOGUE_STAGES epilogue stages, whatever its shape, because both blocks of a cluster go through the
// same stages. An EpiloguePiece is the part of the tile's rows, and the first column, of stage i; `exists` is false
// behind the tile or the tensor.
struct EpiloguePiece {
    int part, column;
    bool exists;
};
__device__ __forceinline__ EpiloguePiece epilogue_piece(const WorkItem& item, int shape, int i, int columns) {
    const int pieces = shape == WIDE ? 4 : 2, part = i / pieces, column = item.n + i % pieces * BOX;
    return {part, column, item.store && part < (shape == TALL ? 2 : 1) && column < columns};
}

// Loads the epilogue stages from a tensor (2, rows, columns): two boxes of rows of each matrix.
template <typename P>
__device__ __forceinline__ void load_epilogue(Shared<P>& s, const CUtensorMap* from, const WorkItem& item, int columns,
                                              RingSlot<P::STAGES>& stage) {
    for (int i = 0; i < P::EPILOGUE_STAGES && item.k_blocks; i++) {
        const EpiloguePiece piece = epilogue_piece(item, item.shape, i, columns);
        barrier_wait(&s.empty_barriers[stage.index], stage.phase);
        uint64_t* full = &s.full_barriers[stage.index];
        barrier_expect(full, piece.exists ? 4 * BOX_BYTES : 0);
        for (int box = 0; box < 4 && piece.exists; box++)
            tma_load(s.stages[stage.index] + box * BOX_BYTES, from, full, piece.column,
                     item.m + piece.part * SQUARE_SIDE + box % 2 * BOX, box / 2);
        stage.advance();
    }
}

// The cluster's work tiles, one after another: the same number for both blocks. The whole producer warp calls next().
template <typename Scheduler>
struct ClusterTiles {
    Queue& queue;
    int rank;              // of the block in the cluster
    uint32_t drawn, turn;  // block 0, lane 0: the number in flight; numbers received so far
    Scheduler scheduler;

    template <typename Problem>
    __device__ __forceinline__ ClusterTiles(const Problem& g, Queue& queue)
        : queue(queue), rank(cluster_rank()), drawn(draws() ? draw_number(g.counter) : 0), turn(0), scheduler(g) {}

    // This block's tile of the next work tile. Numbers are drawn one work tile ahead: the atomic's latency overlaps
    // with the loads of the current work tile. The last of all numbers resets the counter.
    __device__ __forceinline__ WorkItem next() {
        const WorkItem item = scheduler.find(receive(), rank);
        if (draws() && item.k_blocks) drawn = draw_number(scheduler.g.counter);
        if (draws() && !item.k_blocks && item.past == (int)gridDim.x / CLUSTER - 1) *scheduler.g.counter = 0;
        return item;
    }

   private:
    __device__ __forceinline__ bool draws() const { return rank == 0 && threadIdx.x % 32 == 0; }

    // The drawn number, in all lanes of both blocks: block 0 sends it into both queues.
    __device__ __forceinline__ int receive() {
        const uint32_t place = turn % QUEUE, phase = turn / QUEUE % 2;
        uint64_t* full = &queue.full_barriers[place];
        if (scheduler.lane == 0) {
            barrier_expect(full, sizeof(uint32_t));
            if (rank == 0)
                for (int block = 0; block < CLUSTER; block++)
                    send_word(cluster_address(&queue.numbers[place], block), drawn, cluster_address(full, block));
        }
        barrier_wait(full, phase);
        turn++;
        return (int)queue.numbers[place];
    }
};

// The producer warp: fills both rings until there is no more work.
template <typename P, typename Scheduler, typename Problem>
__device__ __forceinline__ void produce(Shared<P>& s, const CUtensorMap* a, const CUtensorMap* b,
                                        const CUtensorMap* in_epilogue, const Problem& g) {
    ClusterTiles<Scheduler> tiles(g, s.queue);
    RingSlot<P::STAGES> stage = {0, 1};
    RingSlot<ITEMS> at = {0, 1};
    for (;;) {
        // The work tile, for the consumers: it arrives before the data.
        const WorkItem item = tiles.next();
        barrier_wait(&s.item_empty_barriers[at.index], at.phase);
        if (tiles.scheduler.lane == 0) {
            s.items[at.index] = item;
            barrier_arrive(&s.item_full_barriers[at.index]);
            for (int i = 0; i < tiles_of<P>(item); i++) {
                const WorkItem tile = tile_of<P>(item, i);
                if (tiles.scheduler.common_a)
                    load_blocks<P, true>(s, a, b, tile, tiles.rank, stage);
                else
                    load_blocks<P, false>(s, a, b, tile, tiles.rank, stage);
                if constexpr (P::EPILOGUE_STAGES) load_epilogue<P>(s, in_epilogue, tile, g.N, stage);
            }
        }

        // A work tile with 0 k blocks ends the consumers too.
        __syncwarp();
        if (item.k_blocks == 0) break;
        at.advance();
    }
}

// A block from start to end. consume(s) is the work of a consumer warp. P::HELPERS helper warps run help(s): helpers
// read the list of work tiles and fill stages. in_epilogue: the tensor that the epilogue stages load. Problem is
// Groups, or another argument of the Scheduler.
template <typename P, typename Scheduler = TileScheduler<P>, typename Problem, typename Consume, typename Help>
__device__ __forceinline__ void run_block(const CUtensorMap* a, const CUtensorMap* b, const CUtensorMap* out,
                                          const Problem& g, Consume consume, Help help,
                                          const CUtensorMap* in_epilogue = nullptr) {
    // Barriers, each with the number of arrivals that ends a phase. Producer and helpers fill a stage. The warps of
    // both blocks that read a stage release it, because both blocks may load into it. All warps that read a work tile
    // release its slot.
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared<P>& s = *(Shared<P>*)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < P::STAGES; i++)
            barrier_init(&s.full_barriers[i], 1 + P::HELPER_ARRIVALS),
                barrier_init(&s.empty_barriers[i], (P::PING_PONG ? WARPS / 2 : WARPS) * CLUSTER);
        for (int i = 0; i < ITEMS; i++)
            barrier_init(&s.item_full_barriers[i], 1), barrier_init(&s.item_empty_barriers[i], WARPS + P::HELPERS);
        for (int i = 0; i < 2; i++) barrier_init(&s.turn_barriers[i], WARPS / 2);
        for (int i = 0; i < QUEUE; i++) barrier_init(&s.queue.full_barriers[i], 1);
        barrier_init_fence();
        tma_prefetch(a), tma_prefetch(b), tma_prefetch(out);
    }
    previous_is_done();  // launch_long

    sort_experts<P>(g);
    __syncthreads();  // and reconverges the warps
    cluster_sync();

    // Warp specialization. Registers move from the producer warpgroup to the consumers, which hold the sums.
    if (threadIdx.x < 128) {
        registers_fewer<56>();
        if (threadIdx.x < 32)
            produce<P, Scheduler>(s, a, b, in_epilogue, g);
        else if (threadIdx.x < 32 * (1 + P::HELPERS))
            help(s);
    } else {
        registers_more<224>();
        consume(s);
    }
    cluster_sync();  // the peer may still write or arrive in this block's shared memory
}

// --- The epilogue's stores ---

// A warp stores its 16 rows through two buffers of its own, 16 x 128 bytes each. While TMA reads one buffer, the warp
// fills the other. TMA clips at the bounds of the output.
struct Writer {
    uint8_t (*buffer)[STORE_BYTES];
    int turn, lane;

    // The next buffer, once TMA has read its old contents.
    __device__ __forceinline__ uint8_t* begin() {
        if (lane == 0) tma_wait_read<1>();
        __syncwarp();
        return buffer[turn ^= 1];
    }
};

// put() fills a buffer from the accumulators of its columns, which are in wgmma's register layout (device/wgmma.cuh).
// The eight 16-byte vectors of a row are swizzled as TMA expects: vector i of row r is at i ^ r % 8. Rows from `valid`
// on become zeros, whatever their sums are.

// 64 columns as bf16: pair(i) packs the values of accumulators i and i + 1. (The packed values are masked: writing to
// the accumulators themselves would serialize wgmma.)
template <typename Pair>
__device__ __forceinline__ void put_pairs(uint8_t* to, int valid, int lane, Pair pair) {
    const uint32_t keep = lane / 4 < valid ? ~0u : 0, keep8 = lane / 4 + 8 < valid ? ~0u : 0;
    // Lanes 0-7, 8-15 address rows 0-7 and 8-15 of 8 columns, lanes 16-31 the same rows of the next 8.
    const uint32_t at = shared_address(to) + lane % 16 * 128;
#pragma unroll
    for (int j = 0; j < 8; j += 2)
        store_matrices(at + ((j + lane / 16) ^ lane % 8) * 16, pair(4 * j) & keep, pair(4 * j + 2) & keep8,
                       pair(4 * j + 4) & keep, pair(4 * j + 6) & keep8);
}

// 64 columns as bf16, from the accumulators themselves.
__device__ __forceinline__ void put(uint8_t* to, const float* d, int valid, int lane, floatX*) {
    put_pairs(to, valid, lane, [&](int i) { return pack_bf16(d[i], d[i + 1]); });
}

// 32 columns of float32. Odd rows write their columns in another order, which avoids bank conflicts.
__device__ __forceinline__ void put(uint8_t* to, const float* d, int valid, int lane, float*) {
    const int r = lane / 4, odd = r % 2;
    to += r * 128 + lane % 2 * 8;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float* p = d + j * 4 + half * 2;
            float2 near = {p[0], p[1]}, far = {p[8], p[9]};
            if (r + half * 8 >= valid) near = far = {0, 0};
            const int place = (j * 2 + lane % 4 / 2) ^ r ^ odd * 4;
            *(float2*)(to + half * 8 * 128 + place * 16) = odd ? far : near;
            *(float2*)(to + half * 8 * 128 + (place ^ 4) * 16) = odd ? near : far;
        }
}

// Stores the warp's 16 rows of N columns from n on, up to `columns`, 128 bytes wide at a time. For each buffer:
// fill(buffer, i) fills the buffer, from accumulator i on. A fence makes the buffer visible to TMA. send(buffer,
// column) starts the TMA store at this column.
template <typename Out, int N, typename Fill, typename Send>
__device__ __forceinline__ void write_filled(Writer& w, int n, int columns, Fill fill, Send send) {
    constexpr int WIDTH = 128 / sizeof(Out);
#pragma unroll
    for (int c = 0; c < N / WIDTH; c++) {
        if (n + c * WIDTH >= columns) break;
        uint8_t* piece = w.begin();
        fill(piece, c * WIDTH / 2);
        fence_async();
        __syncwarp();
        if (w.lane == 0) send(piece, n + c * WIDTH), tma_commit();
    }
}

// write_filled from the accumulators d.
template <typename Out, int N, typename Send>
__device__ __forceinline__ void write(Writer& w, const float* d, int n, int columns, int valid, Send send) {
    write_filled<Out, N>(
        w, n, columns, [&](uint8_t* piece, int i) { put(piece, d + i, valid, w.lane, (Out*)nullptr); }, send);
}

// --- The host's side ---

// TMA map of a matrix (rows, cols) in boxes 128 bytes wide. depth > 0: a 3D map of `depth` contiguous matrices. depth
// 0: a 2D map of one matrix.
template <typename T>
CUtensorMap matrix_map(const T* p, int64_t depth, int64_t rows, int64_t cols, int box_rows, Ctx* ctx) {
    const int64_t size[3] = {cols, rows, depth}, stride[2] = {cols, rows * cols};
    const int box[3] = {(int)(128 / sizeof(T)), box_rows, 1};
    return tensor_map(p, depth ? 3 : 2, size, stride, box, ctx);
}

// Persistent launch: one block on every SM, in clusters.
template <typename P, typename Kernel, typename... Params>
void launch(Kernel kernel, Ctx* ctx, const Params&... params) {
    launch_long(kernel, ctx->sms / CLUSTER * CLUSTER, THREADS, sizeof(Shared<P>), ctx, params...);
}

}  // namespace
