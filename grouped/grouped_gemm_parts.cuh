// What the kernels of the grouped products (grouped_gemm.cu, mx/grouped_gemm_mx.cu) share: the rings between the warp
// that loads and those that multiply, the loads, the way results leave, and the launch. The kernels differ in how they
// multiply.
//
// A ring is a few places in shared memory that are used in turn. A place has two mbarriers (device/wgmma.cuh):
//
//     who fills it:   wait for `empty`, write (loads count themselves as bytes), arrive at `full`
//     who reads it:   wait for `full`, read, arrive at `empty`
//
// A phase is one turn through the ring: a barrier's phases have parity 0, 1, 0, .. The producer runs ahead until all
// places are full, so loads are on their way while the tensor cores work. There are two rings, of work items (which
// tile to multiply) and of stages (a k block of A and B), both of four places.
//
// A stage is six boxes; a box is 64 rows of 128 bytes, swizzled. A tile needs two boxes of A for each 128 rows and two
// of B for each 128 columns: A's stand at the front of a stage, B's at its end.
//
//     128 x 256   | A | A | B | B | B | B |        256 x 128   | A | A | A | A | B | B |
#ifndef GROUPED_GROUPED_GEMM_PARTS_CUH
#define GROUPED_GROUPED_GEMM_PARTS_CUH

#include "grouped/permute.h"
#include "grouped/tile_scheduler.cuh"

namespace {

enum { BOX = 64, BOX_BYTES = BOX * 128 };  // rows
enum { STAGES = 4, STAGE_BOXES = 6, STAGE_BYTES = STAGE_BOXES * BOX_BYTES };
enum { ITEMS = 4 };                              // work items that the producer may be ahead
enum { WARPS = 8, THREADS = 128 + 32 * WARPS };  // a producer warpgroup (one warp works) and two that multiply
enum { BOTH = (1 << CLUSTER) - 1 };              // blocks of a cluster, a bit each
enum { PIECE_BYTES = 16 * 128 };                 // of a result

struct Shared {
    alignas(1024) uint8_t stages[STAGES][STAGE_BYTES];
    alignas(1024) uint8_t pieces[WARPS][2][PIECE_BYTES];
    uint64_t full_barriers[STAGES], empty_barriers[STAGES];
    uint64_t item_full_barriers[ITEMS], item_empty_barriers[ITEMS];
    WorkItem items[ITEMS];
    Queue queue;
    alignas(16) float column_scales[STAGES][SQUARE_SIDE];  // MX_WGRAD: what B's columns are multiplied by
};

// A place in a ring of N, and the parity of the phase to wait for there. The producer begins with 1, the parity of the
// phase before the first: it finds every place empty.
template <int N>
struct Place {
    int index;
    uint32_t phase;

    __device__ __forceinline__ void advance() {
        if (++index == N) index = 0, phase ^= 1;
    }
};

// --- The producer ---

// One box at column x and row y (of matrix z, where there are several) into this block, or into BOTH.
template <bool SEVERAL, bool TO_BOTH>
__device__ __forceinline__ void load_box(uint8_t* to, const CUtensorMap* map, uint64_t* full, int x, int y, int z) {
    if (SEVERAL)
        TO_BOTH ? tma_multicast(to, map, full, x, y, z, BOTH) : tma_load(to, map, full, x, y, z);
    else
        TO_BOTH ? tma_multicast(to, map, full, x, y, BOTH) : tma_load(to, map, full, x, y);
}

// An item's k blocks of A and B, a stage for each. Of the operand in common this block loads every other box, for both
// blocks. A full barrier counts the bytes of all boxes, whoever loads them. (One thread, whose instructions for a k
// block take about as long as the products of MXFP8: which operand is common is known to the compiler.)
template <Pass P, bool COMMON_A>
__device__ __forceinline__ void load_blocks(Shared& s, const CUtensorMap* a, const CUtensorMap* b, const WorkItem& item,
                                            int rank, Place<STAGES>& stage) {
    const bool n_along_rows = P == DGRAD || P == WGRAD;  // in B's memory, else k
    const int m0 = item.m + (P == MX_WGRAD ? item.of.a : 0), n0 = item.n + (P == MX_WGRAD ? item.of.b : 0);
    const int a_boxes = item.shape == TALL ? 4 : 2, b_boxes = !ON_BYTES<P> && item.shape == WIDE ? 4 : 2;
    for (int k_block = 0, k = item.k; k_block < item.k_blocks; k_block++, k += BLOCK_K<P>) {
        barrier_wait(&s.empty_barriers[stage.index], stage.phase);
        uint64_t* full = &s.full_barriers[stage.index];
        uint8_t* to = s.stages[stage.index];
        barrier_expect(full, (a_boxes + b_boxes) * BOX_BYTES);

        // A's boxes at the front.
#pragma unroll
        for (int j = 0; j < (COMMON_A ? 2 : 4); j++) {
            const int i = COMMON_A ? CLUSTER * j + rank : j, m = m0 + i * BOX;
            if (i < a_boxes)
                load_box<false, COMMON_A>(to + i * BOX_BYTES, a, full, P == WGRAD ? m : k, P == WGRAD ? k : m, 0);
        }

        // B's boxes at the end.
        to += (STAGE_BOXES - b_boxes) * BOX_BYTES;
#pragma unroll
        for (int j = 0; j < (COMMON_A ? 4 : 2); j++) {
            const int i = COMMON_A ? j : CLUSTER * j + rank, n = n0 + i * BOX;
            if (i < b_boxes)
                load_box<!OVER_ROWS<P>, !COMMON_A>(to + i * BOX_BYTES, b, full, n_along_rows ? n : k,
                                                   n_along_rows ? k : n, item.expert);
        }
        stage.advance();
    }
}

// Fills the rings until there is no more work.
template <Pass P>
__device__ __forceinline__ void produce(Shared& s, const CUtensorMap* a, const CUtensorMap* b, const Groups& g) {
    TileScheduler<P> scheduler(g, s.queue);
    Place<STAGES> stage = {0, 1};
    Place<ITEMS> at = {0, 1};
    for (;;) {
        // The work item, for the warps that multiply: they learn of their tile before its data come.
        const WorkItem item = scheduler.next();
        barrier_wait(&s.item_empty_barriers[at.index], at.phase);
        if (scheduler.lane == 0) {
            s.items[at.index] = item;
            barrier_arrive(&s.item_full_barriers[at.index]);
            if (scheduler.common_a)
                load_blocks<P, true>(s, a, b, item, scheduler.rank, stage);
            else
                load_blocks<P, false>(s, a, b, item, scheduler.rank, stage);
        }

        // The last item, without k blocks, went to the other warps too: they end with it.
        __syncwarp();
        if (item.k_blocks == 0) break;
        at.advance();
    }
}

// A block from start to end. consume(s) is what a warp that multiplies does. In MX_WGRAD a second warp fills places
// beside the one that loads: beside(s).
template <Pass P, typename Consume, typename Beside>
__device__ __forceinline__ void run_block(const CUtensorMap* a, const CUtensorMap* b, const CUtensorMap* out,
                                          const Groups& g, Consume consume, Beside beside) {
    // Barriers: how many arrivals end a phase. A place is filled by one thread (MX_WGRAD: two) and released by every
    // warp that multiplies; a stage by those of both blocks, because both may load into it.
    constexpr int SECOND = P == MX_WGRAD;
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared& s = *(Shared*)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++)
            barrier_init(&s.full_barriers[i], 1 + SECOND), barrier_init(&s.empty_barriers[i], WARPS * CLUSTER);
        for (int i = 0; i < ITEMS; i++)
            barrier_init(&s.item_full_barriers[i], 1), barrier_init(&s.item_empty_barriers[i], WARPS + SECOND);
        for (int i = 0; i < QUEUE; i++) barrier_init(&s.queue.full_barriers[i], 1);
        barrier_init_fence();
        tma_prefetch(a), tma_prefetch(b), tma_prefetch(out);
    }
    previous_is_done();  // launch_long

    // OVER_ROWS: an expert's tiles cost what it has rows. Sorted, largest first, so that none of the largest begins
    // last. (All blocks write the same.)
    if (OVER_ROWS<P> && !g.matrices)
        for (int e = threadIdx.x; e < g.El; e += THREADS) {
            int rows = g.rows[e], place = 0;
            for (int i = 0; i < g.El; i++) place += g.rows[i] > rows || (g.rows[i] == rows && i < e);
            g.order[place] = (int16_t)e;
        }
    __syncthreads();  // warps whole again
    cluster_sync();

    // The roles. Registers go from the warpgroup that loads to those that hold sums.
    if (threadIdx.x < 128) {
        registers_fewer<56>();
        if (threadIdx.x < 32)
            produce<P>(s, a, b, g);
        else if (SECOND && threadIdx.x < 64)
            beside(s);
    } else {
        registers_more<224>();
        consume(s);
    }
    cluster_sync();  // the neighbour may still write here or arrive here
}

// --- Results ---

// A warp's 16 rows leave in pieces of 128 bytes a row, through two buffers of its own: while TMA reads one, the warp
// fills the other. TMA drops what lies outside of the output.
struct Writer {
    uint8_t (*buffer)[PIECE_BYTES];
    int turn, lane;

    // The buffer for the next piece, once TMA has read what was there.
    __device__ __forceinline__ uint8_t* begin() {
        if (lane == 0) tma_wait_read<1>();
        __syncwarp();
        return buffer[turn ^= 1];
    }
};

// put() makes a piece of the sums of its columns, which lie in the lanes as wgmma leaves them (device/wgmma.cuh).
// Within a row the eight places of 16 bytes are swizzled as TMA expects them: place i of row r is at i ^ r % 8. Rows
// from `valid` on become zeros, whatever their sums are.

// 64 columns as bf16. (Zeros by the packed values: writing d itself would serialize wgmma.)
__device__ __forceinline__ void put(uint8_t* to, const float* d, int valid, int lane, floatX*) {
    const uint32_t keep = lane / 4 < valid ? ~0u : 0, keep8 = lane / 4 + 8 < valid ? ~0u : 0;
    // Lanes 0-7, 8-15 address rows 0-7 and 8-15 of 8 columns, lanes 16-31 those of the next 8.
    const uint32_t at = shared_address(to) + lane % 16 * 128;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const float* p = d + j * 4;
        store_matrices(at + ((j + lane / 16) ^ lane % 8) * 16, pack_bf16(p[0], p[1]) & keep,
                       pack_bf16(p[2], p[3]) & keep8, pack_bf16(p[4], p[5]) & keep, pack_bf16(p[6], p[7]) & keep8);
    }
}

// 32 columns of float32. Odd rows go through their columns in another order: no bank conflicts.
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

// The warp's 16 rows of the N columns from n on, as far as the output has `columns`, piece after piece: put() fills a
// buffer, the fence lets TMA see it, and send(piece, column) hands it to TMA.
template <typename Out, int N, typename Send>
__device__ __forceinline__ void write(Writer& w, const float (&d)[N / 2], int n, int columns, int valid, Send send) {
    constexpr int WIDTH = 128 / sizeof(Out);
#pragma unroll
    for (int c = 0; c < N / WIDTH; c++) {
        if (n + c * WIDTH >= columns) break;
        uint8_t* piece = w.begin();
        put(piece, d + c * WIDTH / 2, valid, w.lane, (Out*)nullptr);
        fence_async();
        __syncwarp();
        if (w.lane == 0) send(piece, n + c * WIDTH), tma_commit();
    }
}

// --- The host's side ---

// A matrix (rows, cols), or `depth` of them one after another (0: one, in two dimensions), in boxes 128 bytes wide.
template <typename T>
CUtensorMap matrix_map(const T* p, int64_t depth, int64_t rows, int64_t cols, int box_rows, Ctx* ctx) {
    const int64_t size[3] = {cols, rows, depth}, stride[2] = {cols, rows * cols};
    const int box[3] = {(int)(128 / sizeof(T)), box_rows, 1};
    return tensor_map(p, depth ? 3 : 2, size, stride, box, ctx);
}

// The sizes of a product, with a counter of work items, and room for an order of the experts. (They are of the Ctx:
// products of several may run at once.)
Groups groups_of(const Ragged& r, int64_t M, int64_t N, int64_t K, Ctx* ctx) {
    // Coordinates of TMA are int32.
    ASSERT(r.capacity <= INT32_MAX && M <= INT32_MAX && N <= INT32_MAX && K <= INT32_MAX);
    int16_t* order = ctx_workspace<int16_t>(ctx, MAX_EXPERTS);
    return {r.group_start, r.group_rows, r.El, (int)M, (int)N, (int)K, (uint32_t*)ctx->counter, order};
}

// A block on every SM, in clusters.
template <typename Kernel, typename... Params>
void launch(Kernel kernel, Ctx* ctx, const Params&... params) {
    launch_long(kernel, ctx->sms / CLUSTER * CLUSTER, THREADS, sizeof(Shared), ctx, params...);
}

}  // namespace

#endif
