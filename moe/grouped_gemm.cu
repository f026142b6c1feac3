// Grouped products on the tensor cores: one persistent kernel per pass over the ragged buffer, no transposed copies.
//
// Each SM runs one block: a producer warp finds tiles (128 x 256 of the output) and feeds 64-deep slices of both
// operands through TMA into a ring of 4 stages; two warpgroups multiply them (wgmma m64n256k16, float32 accumulators in
// registers) and write through shared memory and TMA. wgmma reads operands whose rows are the contraction (dgrad's W,
// both of wgrad) as they lie, so the passes differ in coordinates only. Starts of groups are multiples of 128: no tile
// holds rows of two experts, and no row behind group_start[El] is ever read. Only the producer reads group sizes, on
// the device; what the warpgroups need of a tile reaches them through a small ring. Two neighbouring blocks form a
// cluster that shares the operand common to their tiles (each loads half and multicasts). Tiles are handed out in a
// fixed order and one block owns a tile for its whole sum: the same bits on every run. Bound by the tensor cores (the
// card's power limit holds them at about 700 TFLOP/s) and, at small contractions, by the write-out of tiles, during
// which a block does not multiply. wgrad writes with TMA's add: W's gradient is not read.
#include "device/wgmma.cuh"
#include "moe/grouped_gemm.h"

#ifndef GROUPED_GEMM_CLUSTER  // bench/grouped_gemm.cu compares
#define GROUPED_GEMM_CLUSTER 2
#endif

namespace {

enum { CLUSTER = GROUPED_GEMM_CLUSTER };
enum { TILE_M = 128, TILE_N = 256, TILE_K = 64 };
enum { BOX = 64, BOX_BYTES = BOX * BOX * 2 };  // every load is a box of 64 x 64 bf16, swizzled over 128 bytes
enum { A_BOXES = TILE_M / BOX, B_BOXES = TILE_N / BOX, STAGE_BYTES = (A_BOXES + B_BOXES) * BOX_BYTES };
enum { STAGES = 4, RING = 4 };
enum { WARPS = 8, THREADS = 128 + 32 * WARPS };  // a producer warpgroup (one warp works) and two that multiply
enum { OUT_BYTES = 16 * 128 };                   // a warp writes out 16 rows of 128 bytes at a time
enum { BAND = 16 / CLUSTER };                    // tiles of M (or pairs) that are walked before the next N: reuse in L2
enum { MAX_EXPERTS = 1024 };

enum Pass { FORWARD, DGRAD, WGRAD };

// The output of one expert is M x N, the contraction K. FORWARD, DGRAD: M is the expert's rows; WGRAD: K is.
struct Groups {
    const int64_t* start;
    const int32_t* rows;
    int El, M, N, K;
};

struct Tile {
    int m, n;    // first row and column in the output; m is a row of the ragged buffer, or of dW_e
    int expert;  // of WGRAD's output
    int steps;   // of TILE_K along the contraction; 0: no more tiles
    int valid;   // rows from m on that are not pad rows
    int narrow;  // 128 columns or fewer: half the work
    int store;   // 0 in a block that keeps its neighbour company
    int k;       // the contraction's first coordinate
};

struct Shared {
    alignas(1024) uint8_t stage[STAGES][STAGE_BYTES];  // A's boxes, then B's
    alignas(1024) uint8_t out[WARPS][2][OUT_BYTES];
    uint64_t full[STAGES], empty[STAGES], tile_full[RING], tile_empty[RING];
    Tile tile[RING];
    int16_t order[MAX_EXPERTS];  // WGRAD: largest experts first
};

// --- Instructions that device/wgmma.cuh does not have: clusters, and a store that adds ---

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Arrives at the same barrier of block `rank` of the cluster. (With .release.cluster it would cost a memory barrier.)
__device__ __forceinline__ void barrier_arrive_at(uint64_t* bar, int rank) {
    asm volatile(
        "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [at];\n}" ::"r"(
            shared_address(bar)),
        "r"(rank)
        : "memory");
}

// To the same place in all blocks of the cluster, each one's own barrier counting the bytes.
__device__ __forceinline__ void tma_multicast(void* to, const CUtensorMap* map, uint64_t* bar, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, "
        "{%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y), "h"((uint16_t)((1 << CLUSTER) - 1))
        : "memory");
}

__device__ __forceinline__ void tma_multicast(void* to, const CUtensorMap* map, uint64_t* bar, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, "
        "{%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y), "r"(z), "h"((uint16_t)((1 << CLUSTER) - 1))
        : "memory");
}

__device__ __forceinline__ void tma_add(const CUtensorMap* map, const void* from, int x, int y, int z) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
        "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ __forceinline__ void store_matrices(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

__device__ __forceinline__ int div_up(int a, int b) { return (a + b - 1) / b; }

// --- The producer ---

// Units of work, in order of experts: a unit is one tile for each block of the cluster. Each lane holds one expert of a
// window of 32, `end` being the number of units up to its end; the window only moves forward.
struct Window {
    int first, base, end, expert, start, rows, tiles_m;
};

template <Pass P>
__device__ __forceinline__ void load_window(Window& w, const Groups& g, const int16_t* order, int tiles_n, int lane) {
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
        units = w.tiles_m / CLUSTER * tiles_n + w.tiles_m % CLUSTER * div_up(tiles_n, CLUSTER);
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
        tma_multicast(to, map, bar, x, y);
    else
        tma_load(to, map, bar, x, y);
}

template <Pass P>
__device__ __forceinline__ void load_b(uint8_t* to, const CUtensorMap* map, uint64_t* bar, int n, int k, int expert,
                                       int shared) {
    int x = P == FORWARD ? k : n, y = P == FORWARD ? n : k;
    if (P == WGRAD) {
        if (shared)
            tma_multicast(to, map, bar, x, y);
        else
            tma_load(to, map, bar, x, y);
    } else {
        if (shared)
            tma_multicast(to, map, bar, x, y, expert);
        else
            tma_load(to, map, bar, x, y, expert);
    }
}

template <Pass P>
__device__ __forceinline__ void produce(Shared& s, const CUtensorMap* a, const CUtensorMap* b, const Groups& g) {
    const int lane = threadIdx.x % 32, rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER, tiles_n = div_up(g.N, TILE_N);
    int slot = 0, ring = 0;
    uint32_t parity = 1, ring_parity = 1;
    Window w;
    w.first = w.base = 0;
    load_window<P>(w, g, s.order, tiles_n, lane);
    for (int round = 0;; round++) {
        // Back and forth over the clusters: with experts in falling order of size, as WGRAD has them, sums stay even.
        int unit = round * clusters + (P == WGRAD && round % 2 ? clusters - 1 - cluster : cluster), total;
        while (total = __shfl_sync(0xffffffffu, w.end, 31), unit >= total && w.first + 32 < g.El) {
            w.first += 32, w.base = total;
            load_window<P>(w, g, s.order, tiles_n, lane);
        }
        Tile t = {};
        int shared_a = 0, shared_b = 0;
        if (unit < total) {
            int owner = __popc(__ballot_sync(0xffffffffu, w.end <= unit));
            int before = __shfl_sync(0xffffffffu, w.end, (owner + 31) % 32);
            int start = __shfl_sync(0xffffffffu, w.start, owner), rows = __shfl_sync(0xffffffffu, w.rows, owner);
            int tiles_m = __shfl_sync(0xffffffffu, w.tiles_m, owner), high = tiles_m / CLUSTER, m, n;
            unit -= owner ? before : w.base;
            t.expert = __shfl_sync(0xffffffffu, w.expert, owner);
            t.store = 1;
            if (unit < high * tiles_n) {  // tiles below each other: B is common
                int band = unit / (BAND * tiles_n), height = min((int)BAND, high - band * BAND);
                unit -= band * BAND * tiles_n;
                n = unit / height;
                m = (band * BAND + unit % height) * CLUSTER + rank;
                shared_b = CLUSTER > 1;
            } else {  // an odd last row of tiles: tiles beside each other, A is common
                m = tiles_m - 1;
                n = (unit - high * tiles_n) * CLUSTER + rank;
                shared_a = CLUSTER > 1;
                if (n >= tiles_n) t.store = 0, n = tiles_n - 1;
            }
            t.m = m * TILE_M + (P == WGRAD ? 0 : start);
            t.n = n * TILE_N;
            t.k = P == WGRAD ? start : 0;
            t.valid = P == WGRAD ? TILE_M : rows - m * TILE_M;
            t.narrow = g.N - t.n <= TILE_N / 2;
            t.steps = div_up(P == WGRAD ? rows : g.K, TILE_K);
        }
        barrier_wait(&s.tile_empty[ring], ring_parity);
        if (lane == 0) {
            s.tile[ring] = t;
            barrier_arrive(&s.tile_full[ring]);
            const int boxes = t.narrow ? B_BOXES / 2 : B_BOXES;
            for (int step = 0, k = t.k; step < t.steps; step++, k += TILE_K) {
                barrier_wait(&s.empty[slot], parity);
                uint64_t* bar = &s.full[slot];
                uint8_t* to = s.stage[slot];
                barrier_expect(bar, (A_BOXES + boxes) * BOX_BYTES);
#pragma unroll
                for (int i = 0; i < A_BOXES; i++)
                    if (!shared_a || i % CLUSTER == rank)
                        load_a<P>(to + i * BOX_BYTES, a, bar, t.m + i * BOX, k, shared_a);
                to += A_BOXES * BOX_BYTES;
#pragma unroll
                for (int i = 0; i < B_BOXES; i++)
                    if (i < boxes && (!shared_b || i % CLUSTER == rank))
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
    if (CLUSTER == 1) {
        if (lane == 0) barrier_arrive(&s.empty[slot]);
    } else if (lane < CLUSTER)
        barrier_arrive_at(&s.empty[slot], lane);
}

// d = the tile's sums; the tensor cores always have the next slice queued when a stage is given back.
template <Pass P, int N>
__device__ __forceinline__ void multiply(Shared& s, float (&d)[N / 2], int steps, int group, int lane, int& slot,
                                         uint32_t& parity) {
    constexpr int MN_A = P == WGRAD, MN_B = P != FORWARD;
    // k16 in units of 16 bytes: 32 bytes along a row, or 16 rows of 128 bytes
    constexpr int STEP_A = MN_A ? 128 : 2, STEP_B = MN_B ? 128 : 2;
    const uint64_t a = wgmma_descriptor<BOX>(shared_address(s.stage) + group * BOX_BYTES, BOX_BYTES);
    const uint64_t b = wgmma_descriptor<BOX>(shared_address(s.stage) + A_BOXES * BOX_BYTES, BOX_BYTES);
    int before = 0;
    wgmma_pin(d);
    for (int step = 0; step < steps; step++) {
        barrier_wait(&s.full[slot], parity);
        const uint64_t at = slot * (STAGE_BYTES / 16);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++)
            wgmma_ss<N, MN_A, MN_B>(d, a + at + k * STEP_A, b + at + k * STEP_B, step | k);
        wgmma_commit();
        wgmma_wait<1>();
        if (step) release(s, before, lane);
        before = slot;
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    wgmma_pin(d);
    release(s, before, lane);
}

// A warp's 16 rows leave in pieces of 128 bytes a row, through two buffers of its own. TMA drops what lies outside.
struct Writer {
    uint8_t (*buffer)[OUT_BYTES];
    int turn, lane;

    __device__ __forceinline__ uint8_t* begin() {
        if (lane == 0) tma_wait_read<1>();
        __syncwarp();
        turn ^= 1;
        return buffer[turn];
    }
    __device__ __forceinline__ void ready() {
        fence_async();
        __syncwarp();
    }
};

// 64 columns of bf16 at a time; 16-byte units are swizzled as TMA expects them.
__device__ __forceinline__ void write_bf16(Writer& w, const float (&d)[TILE_N / 2], const CUtensorMap* out, int m,
                                           int n, int valid, int N) {
    const int lane = w.lane, row = lane / 4;
    // Pad rows become zeros whatever the sums are. (Writing d itself here would serialize wgmma, C7515.)
    const uint32_t keep = row < valid ? ~0u : 0, keep8 = row + 8 < valid ? ~0u : 0;
#pragma unroll
    for (int c = 0; c < TILE_N / 64; c++) {
        if (n + c * 64 >= N) break;
        uint8_t* to = w.begin();
        // Lanes 0-7, 8-15 address rows 0-7 and 8-15 of 8 columns, lanes 16-31 those of the next 8.
        const uint32_t at = shared_address(to) + lane % 16 * 128;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const float* p = d + c * 32 + j * 4;
            store_matrices(at + ((j + lane / 16) ^ lane % 8) * 16, pack_bf16(p[0], p[1]) & keep,
                           pack_bf16(p[2], p[3]) & keep8, pack_bf16(p[4], p[5]) & keep, pack_bf16(p[6], p[7]) & keep8);
        }
        w.ready();
        if (lane == 0) tma_store(out, to, n + c * 64, m), tma_commit();
    }
}

// 32 columns of float32 at a time. Odd rows go through their columns in another order: no bank conflicts.
__device__ __forceinline__ void add_float(Writer& w, const float (&d)[TILE_N / 2], const CUtensorMap* out, int m, int n,
                                          int expert, int N) {
    const int lane = w.lane, row = lane / 4, odd = row % 2;
#pragma unroll
    for (int c = 0; c < TILE_N / 32; c++) {
        if (n + c * 32 >= N) break;
        uint8_t* to = w.begin() + row * 128 + lane % 2 * 8;
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float* p = d + c * 16 + j * 4 + half * 2;
                float2 near = {p[0], p[1]}, far = {p[8], p[9]};
                const int unit = (j * 2 + lane % 4 / 2) ^ row ^ odd * 4;
                *(float2*)(to + half * 8 * 128 + unit * 16) = odd ? far : near;
                *(float2*)(to + half * 8 * 128 + (unit ^ 4) * 16) = odd ? near : far;
            }
        w.ready();
        if (lane == 0) tma_add(out, w.buffer[w.turn], n + c * 32, m, expert), tma_commit();
    }
}

template <Pass P>
__device__ __forceinline__ void consume(Shared& s, const CUtensorMap* out, int N) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, group = warp / 4;
    Writer writer = {s.out[warp], 0, lane};
    float d[TILE_N / 2];
    int slot = 0, ring = 0;
    uint32_t parity = 0, ring_parity = 0;
    for (;;) {
        barrier_wait(&s.tile_full[ring], ring_parity);
        const Tile t = s.tile[ring];
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.tile_empty[ring]);
        if (++ring == RING) ring = 0, ring_parity ^= 1;
        if (t.steps == 0) break;
        if (t.narrow)
            multiply<P, TILE_N / 2>(s, reinterpret_cast<float(&)[TILE_N / 4]>(d), t.steps, group, lane, slot, parity);
        else
            multiply<P, TILE_N>(s, d, t.steps, group, lane, slot, parity);
        if (!t.store) continue;
        const int row = warp * 16;
        if (P == WGRAD)
            add_float(writer, d, out, t.m + row, t.n, t.expert, N);
        else
            write_bf16(writer, d, out, t.m + row, t.n, t.valid - row, N);
    }
    if (lane == 0) tma_wait_read<0>();
    __syncwarp();
}

template <Pass P>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                   const __grid_constant__ CUtensorMap out, const Groups g) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared& s = *(Shared*)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], WARPS * CLUSTER);
        for (int i = 0; i < RING; i++) barrier_init(&s.tile_full[i], 1), barrier_init(&s.tile_empty[i], WARPS);
        barrier_init_fence();
        tma_prefetch(&a), tma_prefetch(&b), tma_prefetch(&out);
    }
    if (P == WGRAD)
        for (int e = threadIdx.x; e < g.El; e += THREADS) {
            int rows = g.rows[e], place = 0;
            for (int i = 0; i < g.El; i++) place += g.rows[i] > rows || (g.rows[i] == rows && i < e);
            s.order[place] = (int16_t)e;
        }
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();
    if (threadIdx.x < 128) {
        registers_fewer<40>();
        if (threadIdx.x < 32) produce<P>(s, &a, &b, g);
    } else {
        registers_more<232>();
        consume<P>(s, &out, g.N);
    }
    if (CLUSTER > 1) cluster_sync();  // the neighbour may still write here or arrive here
}

// --- The host's side ---

// (depth, rows, cols), or (rows, cols) with depth 0; swizzled boxes 128 bytes wide.
CUtensorMap matrix_map(const void* p, CUtensorMapDataType type, int64_t depth, int64_t rows, int64_t cols, int box_rows,
                       Ctx* ctx) {
    const cuuint64_t bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    cuuint64_t sizes[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)depth};
    cuuint64_t strides[2] = {(cuuint64_t)cols * bytes, (cuuint64_t)(rows * cols) * bytes};
    cuuint32_t box[3] = {(cuuint32_t)(128 / bytes), (cuuint32_t)box_rows, 1}, ones[3] = {1, 1, 1};
    CUtensorMap map;
    CUresult result = ctx->encode_tiled(&map, type, depth ? 3 : 2, (void*)p, sizes, strides, box, ones,
                                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        die(EXIT_FAILED, "%s:%d: cuTensorMapEncodeTiled: error %d (pointer %p, %lld x %lld x %lld)", __FILE__, __LINE__,
            (int)result, p, (long long)depth, (long long)rows, (long long)cols);
    return map;
}

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
    CUDA_CHECK(cudaFuncSetAttribute(grouped_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    grouped_kernel<P><<<ctx->sms / CLUSTER * CLUSTER, THREADS, sizeof(Shared), ctx->stream>>>(a, b, out, g);
    LAUNCH_CHECK();
}

const CUtensorMapDataType BF16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, F32 = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;

}  // namespace

void grouped_gemm_forward(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    check_sizes(r, IC, OC);
    if (r.capacity == 0 || r.El == 0) return;
    launch<FORWARD>(matrix_map(x, BF16, 0, r.capacity, IC, BOX, ctx), matrix_map(w, BF16, r.El, OC, IC, BOX, ctx),
                    matrix_map(y, BF16, 0, r.capacity, OC, 16, ctx),
                    {r.group_start, r.group_rows, r.El, 0, (int)OC, (int)IC}, ctx);
}

void grouped_gemm_dgrad(floatX* dx, const floatX* dy, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    check_sizes(r, IC, OC);
    if (r.capacity == 0 || r.El == 0) return;
    launch<DGRAD>(matrix_map(dy, BF16, 0, r.capacity, OC, BOX, ctx), matrix_map(w, BF16, r.El, OC, IC, BOX, ctx),
                  matrix_map(dx, BF16, 0, r.capacity, IC, 16, ctx),
                  {r.group_start, r.group_rows, r.El, 0, (int)IC, (int)OC}, ctx);
}

// Sums run over whole slices of 64 rows: pad rows at an expert's end are zeros in dy and x and add nothing.
void grouped_gemm_wgrad(real* dw, const floatX* dy, const floatX* x, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    check_sizes(r, IC, OC);
    if (r.capacity == 0 || r.El == 0) return;
    launch<WGRAD>(matrix_map(dy, BF16, 0, r.capacity, OC, BOX, ctx), matrix_map(x, BF16, 0, r.capacity, IC, BOX, ctx),
                  matrix_map(dw, F32, r.El, OC, IC, 16, ctx), {r.group_start, r.group_rows, r.El, (int)OC, (int)IC, 0},
                  ctx);
}
