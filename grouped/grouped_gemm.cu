// Grouped products on the tensor cores: one persistent kernel per pass over the ragged buffer, no transposed copies.
//
// A block per SM: a producer warp finds tiles (128 x 256 of the output), reading the group sizes on the device, and
// feeds 64-deep slices of both operands by TMA into a ring of 4 stages; two warpgroups multiply them (wgmma m64n256k16,
// sums in registers) and write through shared memory and TMA; a small ring tells them what tile it is. wgmma takes
// operands whose rows are the contraction (dgrad's W, both of wgrad) as they lie: the passes differ in coordinates
// only. Groups start at multiples of 128, so no tile holds rows of two experts and nothing behind group_start[El] is
// read. Two blocks form a cluster and share the operand that is common to their tiles: each loads half of it for both.
// Tiles go to clusters as they come for them; one block owns a tile's whole sum: the same bits on every run. wgrad adds
// to dW by TMA. Bound by the tensor cores under the card's power limit; with few rows per expert wgrad by the traffic
// of dW.
#include "blackwell/grouped_gemm_lt.cuh"
#include "grouped/grouped_gemm.h"
#include "grouped/grouped_gemm_parts.cuh"

namespace {

enum { TILE_M = 128, TILE_N = 256, TILE_K = 64 };
enum { BOX = 64, BOX_BYTES = BOX * BOX * 2 };  // every load is a box of 64 x 64 bf16, swizzled over 128 bytes
enum { STAGE_BYTES = (TILE_M + TILE_N) / BOX * BOX_BYTES };
enum { STAGES = 4, RING = 4 };
enum { WARPS = 8, THREADS = 128 + 32 * WARPS };  // a producer warpgroup (one warp works) and two that multiply
enum { BAND = 16 / CLUSTER };  // pairs of tiles below each other that are walked before the next column: reuse in L2
enum { MAX_EXPERTS = 1024 };

enum Pass { FORWARD, DGRAD, WGRAD };

// WIDE: 128 x 256. Of an output whose last 128 columns or fewer stand alone (N = 1408), those are taken by TALL tiles,
// 256 x 128, which cost the same, so that blocks stay even; NARROW, 128 x 128, is what is left of an expert.
enum Kind { WIDE, TALL, NARROW };
template <Kind KIND>
constexpr int COLUMNS = KIND == WIDE ? 256 : 128;
template <Kind KIND>
constexpr int PARTS = KIND == TALL ? 2 : 1;  // of 128 rows; a warpgroup takes 64 rows of each

// The output of one expert is M x N, the contraction K. FORWARD, DGRAD: M is the expert's rows; WGRAD: K is.
struct Groups {
    const int64_t* start;
    const int32_t* rows;
    int El, M, N, K;
    uint32_t* counter;  // of units handed out
};

struct Tile {
    int m, n;    // first row and column in the output; m is a row of the ragged buffer, or of dW_e
    int expert;  // of WGRAD's output
    int steps;   // of TILE_K along the contraction; 0: no more tiles
    int valid;   // rows from m on that are not pad rows
    int kind;
    int store;  // 0 in a block that keeps its neighbour company
    int k;      // the contraction's first coordinate
};

struct Shared {
    alignas(1024) uint8_t stage[STAGES][STAGE_BYTES];  // A's boxes, then B's
    alignas(1024) uint8_t out[WARPS][2][PIECE_BYTES];
    uint64_t full[STAGES], empty[STAGES], tile_full[RING], tile_empty[RING];
    Tile tile[RING];
    Queue queue;
    int16_t order[MAX_EXPERTS];  // WGRAD: largest experts first
};

// --- The producer ---

// Units of work, in order of experts: a unit is one tile for each block of the cluster. Each lane holds one expert of a
// window of 32, `end` being the number of units up to its end; the window only moves forward.
struct Window {
    int first, base, end, expert, start, rows, tiles_m;
};

template <Pass P>
__device__ __forceinline__ void load_window(Window& w, const Groups& g, const int16_t* order, int tiles_n, int wide,
                                            int lane) {
    int i = w.first + lane, units = 0;
    w.expert = w.start = w.rows = w.tiles_m = 0;
    if (i < g.El) {
        w.expert = P == WGRAD ? order[i] : i;
        w.start = (int)g.start[w.expert];
        w.rows = g.rows[w.expert];
        // Forward and dgrad write all rows up to the next start.
        if (P == WGRAD)
            w.tiles_m = w.rows > 0 ? div_up(g.M, TILE_M) : 0;
        else
            w.tiles_m = ((int)g.start[w.expert + 1] - w.start) / TILE_M;
        units = w.tiles_m / CLUSTER * wide + div_up(w.tiles_m / CLUSTER, 2) * (tiles_n - wide) +
                w.tiles_m % CLUSTER * div_up(tiles_n, CLUSTER);
    }
    w.end = units;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        int before = __shfl_up_sync(0xffffffffu, w.end, d);
        if (lane >= d) w.end += before;
    }
    w.end += w.base;
}

template <Pass P>
__device__ __forceinline__ void load_a(uint8_t* to, const CUtensorMap* map, uint64_t* bar, int m, int k, int shared) {
    int x = P == WGRAD ? m : k, y = P == WGRAD ? k : m;
    if (shared)
        tma_multicast(to, map, bar, x, y, BOTH);
    else
        tma_load(to, map, bar, x, y);
}

template <Pass P>
__device__ __forceinline__ void load_b(uint8_t* to, const CUtensorMap* map, uint64_t* bar, int n, int k, int expert,
                                       int shared) {
    int x = P == FORWARD ? k : n, y = P == FORWARD ? n : k;
    if (P == WGRAD) {
        if (shared)
            tma_multicast(to, map, bar, x, y, BOTH);
        else
            tma_load(to, map, bar, x, y);
    } else {
        if (shared)
            tma_multicast(to, map, bar, x, y, expert, BOTH);
        else
            tma_load(to, map, bar, x, y, expert);
    }
}

template <Pass P>
__device__ __forceinline__ void produce(Shared& s, const CUtensorMap* a, const CUtensorMap* b, const Groups& g) {
    const int lane = threadIdx.x % 32, rank = cluster_rank();
    const int tiles_n = div_up(g.N, TILE_N);
    const int wide = div_up(g.N - TILE_N / 2, TILE_N);  // columns of WIDE tiles: all, or all but the last
    int slot = 0, ring = 0;
    uint32_t parity = 1, ring_parity = 1;
    Units units = {s.queue, g.counter, rank, lane, 0, 0};
    units.draw();
    Window w;
    w.first = w.base = 0;
    load_window<P>(w, g, s.order, tiles_n, wide, lane);
    for (;;) {
        int unit = units.next(), total;
        while (total = __shfl_sync(0xffffffffu, w.end, 31), unit >= total && w.first + 32 < g.El) {
            w.first += 32, w.base = total;
            load_window<P>(w, g, s.order, tiles_n, wide, lane);
        }
        Tile t = {};
        int shared_a = 0, shared_b = 0;
        if (unit < total) {
            units.draw();
            int owner = __popc(__ballot_sync(0xffffffffu, w.end <= unit));
            int before = __shfl_sync(0xffffffffu, w.end, (owner + 31) % 32);
            int start = __shfl_sync(0xffffffffu, w.start, owner), rows = __shfl_sync(0xffffffffu, w.rows, owner);
            int tiles_m = __shfl_sync(0xffffffffu, w.tiles_m, owner), high = tiles_m / CLUSTER, m, n;
            unit -= owner ? before : w.base;
            t.expert = __shfl_sync(0xffffffffu, w.expert, owner);
            t.store = 1;
            int paired = high * wide + div_up(high, 2) * (tiles_n - wide);
            t.kind = WIDE;
            if (unit < paired) {  // tiles below each other: B is common
                const int band = unit / (BAND * wide + BAND / 2 * (tiles_n - wide)), first = band * BAND;
                const int height = min((int)BAND, high - first);
                unit -= band * (BAND * wide + BAND / 2 * (tiles_n - wide));
                shared_b = 1;
                if (unit < height * wide) {
                    n = unit / height;
                    m = (first + unit % height) * CLUSTER + rank;
                } else {
                    n = wide;
                    m = 2 * (unit - height * wide);
                    t.kind = m + 1 < height ? TALL : NARROW;
                    m = (first + m) * CLUSTER + (t.kind == TALL ? 2 * rank : rank);
                }
            } else {  // an odd last row of tiles: tiles beside each other, A is common
                m = tiles_m - 1;
                n = (unit - paired) * CLUSTER + rank;
                shared_a = 1;
                if (n >= tiles_n) t.store = 0, n = tiles_n - 1;
                if (n == wide) t.kind = NARROW;
            }
            t.m = m * TILE_M + (P == WGRAD ? 0 : start);
            t.n = n * TILE_N;
            t.k = P == WGRAD ? start : 0;
            t.valid = rows - m * TILE_M;
            t.steps = div_up(P == WGRAD ? rows : g.K, TILE_K);
        }
        barrier_wait(&s.tile_empty[ring], ring_parity);
        if (lane == 0) {
            s.tile[ring] = t;
            barrier_arrive(&s.tile_full[ring]);
            const int a_boxes = t.kind == TALL ? 4 : 2, b_boxes = t.kind == WIDE ? 4 : 2;
            for (int step = 0, k = t.k; step < t.steps; step++, k += TILE_K) {
                barrier_wait(&s.empty[slot], parity);
                uint64_t* bar = &s.full[slot];
                uint8_t* to = s.stage[slot];
                barrier_expect(bar, (a_boxes + b_boxes) * BOX_BYTES);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (i < a_boxes && (!shared_a || i % CLUSTER == rank))
                        load_a<P>(to + i * BOX_BYTES, a, bar, t.m + i * BOX, k, shared_a);
                to += a_boxes * BOX_BYTES;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (i < b_boxes && (!shared_b || i % CLUSTER == rank))
                        load_b<P>(to + i * BOX_BYTES, b, bar, t.n + i * BOX, k, t.expert, shared_b);
                if (++slot == STAGES) slot = 0, parity ^= 1;
            }
        }
        __syncwarp();
        if (t.steps == 0) break;
        if (++ring == RING) ring = 0, ring_parity ^= 1;
    }
}

// --- The warpgroups that multiply ---

// A stage may be overwritten, here and by the neighbour. One arrival per warp and block.
__device__ __forceinline__ void release(Shared& s, int slot, int lane) {
    if (lane < CLUSTER) barrier_arrive_cluster(cluster_address(&s.empty[slot], lane));
}

// d = the tile's sums; the tensor cores always have the next slice queued when a stage is given back. Each kind of tile
// has its own d, set to zero here: anything else made the compiler serialize wgmma (C7511, C7512).
template <Pass P, Kind KIND>
__device__ __forceinline__ void multiply(Shared& s, float (&d)[PARTS<KIND>][COLUMNS<KIND> / 2], int steps, int group,
                                         int lane, int& slot, uint32_t& parity) {
    constexpr int N = COLUMNS<KIND>;
    constexpr int MN_A = P == WGRAD, MN_B = P != FORWARD;
    // In units of 16 bytes. k16: 32 bytes along a row, or 16 rows of 128 bytes
    constexpr int STEP_A = MN_A ? 128 : 2, STEP_B = MN_B ? 128 : 2, PART = 2 * BOX_BYTES / 16;
    const uint64_t a = wgmma_descriptor<BOX>(shared_address(s.stage) + group * BOX_BYTES, BOX_BYTES);
    const uint64_t b = wgmma_descriptor<BOX>(shared_address(s.stage) + PARTS<KIND> * 2 * BOX_BYTES, BOX_BYTES);
    int before = 0;
#pragma unroll
    for (int part = 0; part < PARTS<KIND>; part++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) d[part][i] = 0;
    for (int step = 0; step < steps; step++) {
        barrier_wait(&s.full[slot], parity);
        const uint64_t at = slot * (STAGE_BYTES / 16);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++)
#pragma unroll
            for (int part = 0; part < PARTS<KIND>; part++)
                wgmma_ss<N, MN_A, MN_B>(d[part], a + at + k * STEP_A + part * PART, b + at + k * STEP_B, 1);
        wgmma_commit();
        wgmma_wait<1>();
        if (step) release(s, before, lane);
        before = slot;
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < PARTS<KIND>; part++) wgmma_pin(d[part]);
    release(s, before, lane);
}

// One tile, from the first slice to the output.
template <Pass P, Kind KIND>
__device__ __forceinline__ void compute(Shared& s, const Tile& t, const CUtensorMap* out, int columns, int& slot,
                                        uint32_t& parity, Writer& writer) {
    const int warp = threadIdx.x / 32 - 4;
    float d[PARTS<KIND>][COLUMNS<KIND> / 2];
    multiply<P, KIND>(s, d, t.steps, warp / 4, writer.lane, slot, parity);
    if (!t.store) return;
#pragma unroll
    for (int part = 0; part < PARTS<KIND>; part++) {
        const int row = part * TILE_M + warp * 16, m = t.m + row, expert = t.expert;
        if (P == WGRAD)
            write<float, COLUMNS<KIND>>(writer, d[part], t.n, columns, 16,
                                        [&](const void* piece, int n) { tma_add(out, piece, n, m, expert); });
        else
            write<floatX, COLUMNS<KIND>>(writer, d[part], t.n, columns, t.valid - row,
                                         [&](const void* piece, int n) { tma_store(out, piece, n, m); });
    }
}

template <Pass P>
__device__ __forceinline__ void consume(Shared& s, const CUtensorMap* out, int N) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    Writer writer = {s.out[warp], 0, lane};
    int slot = 0, ring = 0;
    uint32_t parity = 0, ring_parity = 0;
    for (;;) {
        barrier_wait(&s.tile_full[ring], ring_parity);
        const Tile& t = s.tile[ring];  // read again behind the sums: registers are short
        const int kind = t.kind;
        if (t.steps == 0) break;
        if (kind == WIDE)
            compute<P, WIDE>(s, t, out, N, slot, parity, writer);
        else if (kind == TALL)
            compute<P, TALL>(s, t, out, N, slot, parity, writer);
        else
            compute<P, NARROW>(s, t, out, N, slot, parity, writer);
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.tile_empty[ring]);
        if (++ring == RING) ring = 0, ring_parity ^= 1;
    }
    if (lane == 0) tma_wait_read<0>();
    __syncwarp();
}

template <Pass P>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                        const __grid_constant__ CUtensorMap out, const Groups g) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared& s = *(Shared*)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], WARPS * CLUSTER);
        for (int i = 0; i < RING; i++) barrier_init(&s.tile_full[i], 1), barrier_init(&s.tile_empty[i], WARPS);
        queue_init(s.queue);
        barrier_init_fence();
        tma_prefetch(&a), tma_prefetch(&b), tma_prefetch(&out);
    }
    if (P == WGRAD)
        for (int e = threadIdx.x; e < g.El; e += THREADS) {
            int rows = g.rows[e], place = 0;
            for (int i = 0; i < g.El; i++) place += g.rows[i] > rows || (g.rows[i] == rows && i < e);
            s.order[place] = (int16_t)e;
        }
    __syncthreads();  // warps whole again
    cluster_sync();
    if (threadIdx.x < 128) {
        registers_fewer<56>();
        if (threadIdx.x < 32) produce<P>(s, &a, &b, g);
    } else {
        registers_more<224>();
        consume<P>(s, &out, g.N);
    }
    cluster_sync();  // the neighbour may still write here or arrive here
}

// --- The host's side ---

void check_sizes(const Ragged& r, int64_t IC, int64_t OC) {
    if (IC <= 0 || OC <= 0 || IC % 8 != 0 || OC % 8 != 0)
        die(EXIT_USAGE,
            "a grouped product needs dimensions that are multiples of 8 (TMA moves rows of 16 bytes), not IC %lld and "
            "OC %lld; choose --dim and --expert-ffn so",
            (long long)IC, (long long)OC);
    if (r.El > MAX_EXPERTS)
        die(EXIT_USAGE, "%d experts on one GPU are too many: at most %d; raise --ep", (int)r.El, (int)MAX_EXPERTS);
    ASSERT(r.capacity <= INT32_MAX && IC <= INT32_MAX && OC <= INT32_MAX);  // coordinates of TMA are int32
}

template <Pass P>
void launch(const CUtensorMap& a, const CUtensorMap& b, const CUtensorMap& out, const Groups& g, Ctx* ctx) {
    CUDA_CHECK(
        cudaFuncSetAttribute(grouped_gemm_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    grouped_gemm_kernel<P><<<ctx->sms / CLUSTER * CLUSTER, THREADS, sizeof(Shared), ctx->stream>>>(a, b, out, g);
    LAUNCH_CHECK();
}

}  // namespace

void grouped_gemm_forward(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    check_sizes(r, IC, OC);
    if (r.capacity == 0 || r.El == 0) return;
    if (ctx->blackwell) return grouped_gemm_lt_forward(y, x, w, r, IC, OC, ctx);
    launch<FORWARD>(matrix_map(x, 0, r.capacity, IC, BOX, ctx), matrix_map(w, r.El, OC, IC, BOX, ctx),
                    matrix_map(y, 0, r.capacity, OC, 16, ctx),
                    {r.group_start, r.group_rows, r.El, 0, (int)OC, (int)IC, unit_counter(ctx)}, ctx);
}

void grouped_gemm_dgrad(floatX* dx, const floatX* dy, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    check_sizes(r, IC, OC);
    if (r.capacity == 0 || r.El == 0) return;
    if (ctx->blackwell) return grouped_gemm_lt_dgrad(dx, dy, w, r, IC, OC, ctx);
    launch<DGRAD>(matrix_map(dy, 0, r.capacity, OC, BOX, ctx), matrix_map(w, r.El, OC, IC, BOX, ctx),
                  matrix_map(dx, 0, r.capacity, IC, 16, ctx),
                  {r.group_start, r.group_rows, r.El, 0, (int)IC, (int)OC, unit_counter(ctx)}, ctx);
}

// Sums run over whole slices of 64 rows: pad rows at an expert's end are zeros in dy and x and add nothing.
void grouped_gemm_wgrad(real* dw, const floatX* dy, const floatX* x, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    check_sizes(r, IC, OC);
    if (r.capacity == 0 || r.El == 0) return;
    if (ctx->blackwell) return grouped_gemm_lt_wgrad(dw, dy, x, r, IC, OC, ctx);
    launch<WGRAD>(matrix_map(dy, 0, r.capacity, OC, BOX, ctx), matrix_map(x, 0, r.capacity, IC, BOX, ctx),
                  matrix_map(dw, r.El, OC, IC, 16, ctx),
                  {r.group_start, r.group_rows, r.El, (int)OC, (int)IC, 0, unit_counter(ctx)}, ctx);
}
