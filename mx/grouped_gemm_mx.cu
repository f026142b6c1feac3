// Grouped products of MXFP8 bytes on the tensor cores: one persistent kernel over the ragged buffer, built like that of
// grouped/grouped_gemm.cu.
//
// A block per SM: a producer warp finds tiles (256 x 128 of the output), reading the group sizes on the device, and
// feeds chunks 128 deep of both operands by TMA into a ring of 4 stages; two warpgroups multiply them (wgmma
// m64n128k32) and write through shared memory and TMA; a small ring tells them what tile it is. Hopper's tensor cores
// know no scales and keep few bits in fp8 sums, so a chunk is summed by itself and then added to the tile's float32
// sums, times both scales: a multiply-add per element and chunk. While one warpgroup does that, the tensor cores work
// for the other. Groups start at multiples of 128, so no tile holds rows of two experts. Two blocks form a cluster and
// share the operand that is common to their tiles: each loads half of it for both. Tiles go to clusters as they come
// for them; one block owns a tile's whole sum: the same bits on every run. Bound by the tensor cores under the card's
// power limit and by what is issued beside them: a warp's 205 instructions a chunk, 128 of them the multiply-adds, in
// the 512 clocks that its products take.
#include "blackwell/grouped_gemm_lt.cuh"
#include "grouped/grouped_gemm_parts.cuh"
#include "mx/grouped_gemm_mx.h"
#include "mx/mxfp8.h"

namespace {

enum { TILE_M = 256, TILE_N = 128, TILE_K = MX_CHUNK };
enum { PART = 128 };                          // rows of a part of a tile: 64 for each warpgroup
enum { BOX = 64, BOX_BYTES = BOX * TILE_K };  // every load is a box of 64 rows of 128 bytes, swizzled
enum { STAGE_BYTES = (TILE_M + TILE_N) / BOX * BOX_BYTES };
enum { STAGES = 4, RING = 4 };
enum { WARPS = 8, THREADS = 128 + 32 * WARPS };  // a producer warpgroup (one warp works) and two that multiply
enum { BAND = 8 };  // an even number of tiles below each other that are walked before the next columns: reuse in L2

// The output of one expert is its rows x N, the contraction K.
struct Groups {
    const int64_t* start;
    const int32_t* rows;
    const uint8_t *x_scale, *w_scale;
    int64_t x_stride;
    int w_stride_o, w_stride_c;
    int El, N, K;
    uint32_t* counter;  // of units handed out
};

struct Tile {
    int m, n;  // first row (of the ragged buffer) and column
    int expert;
    int steps;    // chunks along the contraction; 0: no more tiles
    int rows;     // from m to the next expert
    int valid;    // from m on that are not pad rows
    int w_scale;  // where its first scale of W is
    int store;    // 0 in a block that keeps its neighbour company
};

struct Shared {
    alignas(1024) uint8_t stage[STAGES][STAGE_BYTES];  // A's boxes, then B's
    alignas(1024) uint8_t out[WARPS][2][PIECE_BYTES];
    uint64_t full[STAGES], empty[STAGES], tile_full[RING], tile_empty[RING];
    Tile tile[RING];
    Queue queue;
};

// --- The producer ---

// A unit of work is one tile for each block of the cluster: two beside each other, which share rows of x; those of an
// odd last column go by twos below each other and share rows of W, the last of an odd number alone.
__device__ __forceinline__ int units_of(int tiles_m, int tiles_n) {
    return tiles_m * (tiles_n / 2) + div_up(tiles_m, 2) * (tiles_n % 2);
}

// Each lane holds one expert of a window of 32, `end` being the number of units up to its end; the window only moves
// forward.
struct Window {
    int first, base, end, start, rows, height;  // height: rows up to the next expert, all of which are written
};

__device__ __forceinline__ void load_window(Window& w, const Groups& g, int tiles_n, int lane) {
    const int e = w.first + lane;
    w.start = w.rows = w.height = 0;
    if (e < g.El) {
        w.start = (int)g.start[e];
        w.rows = g.rows[e];
        w.height = (int)g.start[e + 1] - w.start;
    }
    w.end = units_of(div_up(w.height, TILE_M), tiles_n);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        int before = __shfl_up_sync(0xffffffffu, w.end, d);
        if (lane >= d) w.end += before;
    }
    w.end += w.base;
}

__device__ __forceinline__ void produce(Shared& s, const CUtensorMap* x, const CUtensorMap* weights, const Groups& g) {
    const int lane = threadIdx.x % 32, rank = cluster_rank();
    const int tiles_n = div_up(g.N, TILE_N), pairs = tiles_n / 2, per_band = units_of(BAND, tiles_n);
    int slot = 0, ring = 0;
    uint32_t parity = 1, ring_parity = 1;
    Units units = {s.queue, g.counter, rank, lane, 0, 0};
    units.draw();
    Window w;
    w.first = w.base = 0;
    load_window(w, g, tiles_n, lane);
    for (;;) {
        int unit = units.next(), total;
        while (total = __shfl_sync(0xffffffffu, w.end, 31), unit >= total && w.first + 32 < g.El) {
            w.first += 32, w.base = total;
            load_window(w, g, tiles_n, lane);
        }
        Tile t = {};
        int shared_a = 0, shared_b = 0;
        if (unit < total) {
            units.draw();
            const int owner = __popc(__ballot_sync(0xffffffffu, w.end <= unit));
            const int before = __shfl_sync(0xffffffffu, w.end, (owner + 31) % 32);
            const int start = __shfl_sync(0xffffffffu, w.start, owner), rows = __shfl_sync(0xffffffffu, w.rows, owner);
            const int height = __shfl_sync(0xffffffffu, w.height, owner);
            unit -= owner ? before : w.base;
            const int band = unit / per_band, high = min((int)BAND, div_up(height, TILE_M) - band * BAND);
            int m, n;
            unit -= band * per_band;
            t.store = 1;
            if (unit < high * pairs) {
                m = unit % high;
                n = unit / high * 2 + rank;
                shared_a = 1;
            } else {
                m = (unit - high * pairs) * 2 + rank;
                n = tiles_n - 1;
                shared_b = 1;
                if (m >= high) t.store = 0, m = high - 1;
            }
            m = (band * BAND + m) * TILE_M;
            t.m = start + m;
            t.n = n * TILE_N;
            t.expert = w.first + owner;
            t.steps = div_up(g.K, TILE_K);
            t.rows = height - m;
            t.valid = rows - m;
            t.w_scale = t.expert * tiles_n * t.steps + n * g.w_stride_o;
        }
        barrier_wait(&s.tile_empty[ring], ring_parity);
        if (lane == 0) {
            s.tile[ring] = t;
            barrier_arrive(&s.tile_full[ring]);
            const int a_boxes = min(t.rows, (int)TILE_M) / BOX, b_boxes = TILE_N / BOX;
            for (int step = 0, k = 0; step < t.steps; step++, k += TILE_K) {
                barrier_wait(&s.empty[slot], parity);
                uint64_t* bar = &s.full[slot];
                uint8_t* to = s.stage[slot];
                barrier_expect(bar, (a_boxes + b_boxes) * BOX_BYTES);
#pragma unroll
                for (int i = 0; i < TILE_M / BOX; i++) {
                    if (i >= a_boxes) break;
                    if (!shared_a)
                        tma_load(to + i * BOX_BYTES, x, bar, k, t.m + i * BOX);
                    else if (i % CLUSTER == rank)
                        tma_multicast(to + i * BOX_BYTES, x, bar, k, t.m + i * BOX, BOTH);
                }
                to += TILE_M * TILE_K;
#pragma unroll
                for (int i = 0; i < b_boxes; i++) {
                    if (!shared_b)
                        tma_load(to + i * BOX_BYTES, weights, bar, k, t.n + i * BOX, t.expert);
                    else if (i % CLUSTER == rank)
                        tma_multicast(to + i * BOX_BYTES, weights, bar, k, t.n + i * BOX, t.expert, BOTH);
                }
                if (++slot == STAGES) slot = 0, parity ^= 1;
            }
        }
        __syncwarp();
        if (t.steps == 0) break;
        if (++ring == RING) ring = 0, ring_parity ^= 1;
    }
}

// --- The warpgroups that multiply ---

// The scales a lane reads, for four chunks at a time (16 bytes of x's). Of the four lanes that hold parts of the same
// rows of the sums, each reads x's scales for one: lane % 4 is 2 * part, + 1 for the row 8 below. W's, of the whole
// tile, are read for one chunk each.
struct Scales {
    const uint4* x;
    const uint8_t* w;
    uint4 x_next;  // of the next four chunks: on their way
    uint32_t w_next;
    uint32_t sx;  // of these four chunks, a byte each, the one at hand lowest
    float sw;
};

// Reads for chunks 4 * quad and on. Where a row ends the last ones are read again: nothing here depends on the lane but
// addresses, else the compiler would no longer keep the main loop's descriptors in uniform registers.
__device__ __forceinline__ void load_scales(Scales& c, int quad, int steps, int w_stride, int lane) {
    c.x_next = c.x[min(quad, (steps - 1) / 4)];
    c.w_next = c.w[min(4 * quad + lane % 4, steps - 1) * w_stride];
}

// 2^(s - 127) of the low byte (2^-127, the smallest, has no exponent bits); 255 gives infinity.
__device__ __forceinline__ float power(uint32_t s) { return fmaxf(__uint_as_float(s << 23 & 0x7f800000), 0x1p-127f); }

// Takes up what load_scales read (the four bytes of a chunk are equal) and reads on.
__device__ __forceinline__ void next_scales(Scales& c, int quad, int steps, int w_stride, int lane) {
    c.sx =
        __byte_perm(__byte_perm(c.x_next.x, c.x_next.y, 0x0040), __byte_perm(c.x_next.z, c.x_next.w, 0x0040), 0x5410);
    c.sw = power(c.w_next);
    load_scales(c, quad + 1, steps, w_stride, lane);
}

// Where a warp stands.
struct Consumer {
    uint32_t a, b;   // descriptors of its operands in the first stage (low words; the high ones are constant)
    uint32_t empty;  // address of the first stage's barrier, in one of the two blocks
    int slot, ring;
    uint32_t parity, ring_parity;
    Scales scales;
};

// Of `next`, the tile to come: called before the present one's last part is written, so that they are there in time.
__device__ __forceinline__ void begin_scales(Scales& c, const Tile& next, const Groups& g) {
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, part = next.rows > PART ? lane % 4 / 2 : 0;
    const int row = next.m + part * PART + warp * 16 + lane / 4 + lane % 2 * 8;
    c.x = (const uint4*)(g.x_scale + row * g.x_stride);
    c.w = g.w_scale + next.w_scale;
    load_scales(c, 0, next.steps, g.w_stride_c, lane);
}

// Adds the chunk at hand to d, the tile's sums. `beside` runs while the last products of a tile's LAST chunk do. (That
// chunk is not in the loop of the others: there the compiler would give sums and products registers of the same bank.)
template <int PARTS, bool LAST, typename Beside>
__device__ __forceinline__ void add_chunk(Shared& s, Consumer& c, float (&d)[PARTS][TILE_N / 2], int step, int steps,
                                          int w_stride, int lane, Beside beside) {
    const uint64_t high = wgmma_descriptor<BOX>(0, 0);
    float p[TILE_N / 2], scale = 0;
    barrier_wait(&s.full[c.slot], c.parity);
    const uint32_t a = c.a + c.slot * (STAGE_BYTES / 16), b = c.b + c.slot * (STAGE_BYTES / 16);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILE_K / 32; k++)  // descriptors count in units of 16 bytes
            wgmma_e4m3_n128(p, high | (a + part * (PART * TILE_K / 16) + k * 2), high | (b + k * 2), k > 0);
        wgmma_commit();
        // Meanwhile: this chunk's scale, of the row that this lane reads for.
        if (part == 0) {
            scale = power(c.scales.sx) * __shfl_sync(0xffffffffu, c.scales.sw, step, 4);
            scale = fmaf(scale, 0, scale);  // infinity becomes NaN
            c.scales.sx >>= 8;
        }
        const float near = __shfl_sync(0xffffffffu, scale, part * 2, 4);
        const float far = __shfl_sync(0xffffffffu, scale, part * 2 + 1, 4);
        if (part == PARTS - 1 && !LAST && step % 4 == 3) next_scales(c.scales, step / 4 + 1, steps, w_stride, lane);
        if (part == PARTS - 1 && LAST) beside();
        wgmma_wait<0>();
        wgmma_pin(p);
        // The stage may be overwritten, here and by the neighbour. One arrival per warp and block.
        if (part == PARTS - 1 && lane < CLUSTER) barrier_arrive_cluster(c.empty + c.slot * sizeof(uint64_t));
#pragma unroll
        for (int i = 0; i < TILE_N / 2; i++) d[part][i] = fmaf(p[i], i & 2 ? far : near, d[part][i]);
    }
    if (++c.slot == STAGES) c.slot = 0, c.parity ^= 1;
}

// One tile, from the first chunk to the output; of two parts the first leaves while the second's last products run.
// Leaves the consumer at the next tile.
template <int PARTS, typename Out>
__device__ __forceinline__ void compute(Shared& s, Consumer& c, const Tile& t, const Groups& g, const CUtensorMap* out,
                                        Writer& writer) {
    const int warp = threadIdx.x / 32 - 4, steps = t.steps, lane = writer.lane;
    float d[PARTS][TILE_N / 2];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < TILE_N / 2; i++) d[part][i] = 0;
    auto write_part = [&](int part) {
        if (!t.store) return;
        const int row = part * PART + warp * 16, m = t.m + row;
        write<Out, TILE_N>(writer, d[part], t.n, g.N, t.valid - row,
                           [&](const void* piece, int n) { tma_store(out, piece, n, m); });
    };
    auto first_part = [&] {
        if (PARTS == 2) write_part(0);
    };
    next_scales(c.scales, 0, steps, g.w_stride_c, lane);
    for (int step = 0; step < steps - 1; step++)
        add_chunk<PARTS, false>(s, c, d, step, steps, g.w_stride_c, lane, first_part);
    add_chunk<PARTS, true>(s, c, d, steps - 1, steps, g.w_stride_c, lane, first_part);
    if (++c.ring == RING) c.ring = 0, c.ring_parity ^= 1;
    barrier_wait(&s.tile_full[c.ring], c.ring_parity);
    if (s.tile[c.ring].steps) begin_scales(c.scales, s.tile[c.ring], g);
    write_part(PARTS - 1);
}

template <typename Out>
__device__ __forceinline__ void consume(Shared& s, const Groups& g, const CUtensorMap* out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    Writer writer = {s.out[warp], 0, lane};
    Consumer c = {};
    // The same in all lanes: as a reduction's result the compiler knows it.
    const uint32_t stage = shared_address(s.stage);
    c.a = __reduce_max_sync(0xffffffffu, (uint32_t)wgmma_descriptor<BOX>(stage + warp / 4 * BOX_BYTES, 0));
    c.b = __reduce_max_sync(0xffffffffu, (uint32_t)wgmma_descriptor<BOX>(stage + TILE_M * TILE_K, 0));
    c.empty = cluster_address(s.empty, lane % CLUSTER);
    barrier_wait(&s.tile_full[0], 0);
    if (s.tile[0].steps) begin_scales(c.scales, s.tile[0], g);
    for (;;) {
        const int ring = c.ring;
        const Tile& t = s.tile[ring];  // read again behind the sums: registers are short
        if (t.steps == 0) break;
        if (t.rows > PART)
            compute<2, Out>(s, c, t, g, out, writer);
        else
            compute<1, Out>(s, c, t, g, out, writer);
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.tile_empty[ring]);
    }
    if (lane == 0) tma_wait_read<0>();
    __syncwarp();
}

template <typename Out>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_gemm_mx_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                           const __grid_constant__ CUtensorMap out, const Groups g) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared& s = *(Shared*)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], WARPS * CLUSTER);
        for (int i = 0; i < RING; i++) barrier_init(&s.tile_full[i], 1), barrier_init(&s.tile_empty[i], WARPS);
        queue_init(s.queue);
        barrier_init_fence();
        tma_prefetch(&x), tma_prefetch(&w), tma_prefetch(&out);
    }
    __syncthreads();  // warps whole again
    cluster_sync();
    if (threadIdx.x < 128) {
        registers_fewer<56>();
        if (threadIdx.x < 32) produce(s, &x, &w, g);
    } else {
        registers_more<224>();
        consume<Out>(s, g, &out);
    }
    cluster_sync();  // the neighbour may still write here or arrive here
}

// --- The host's side ---

template <typename Out>
void launch(const CUtensorMap& x, const CUtensorMap& w, const CUtensorMap& out, const Groups& g, Ctx* ctx) {
    CUDA_CHECK(
        cudaFuncSetAttribute(grouped_gemm_mx_kernel<Out>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    grouped_gemm_mx_kernel<Out><<<ctx->sms / CLUSTER * CLUSTER, THREADS, sizeof(Shared), ctx->stream>>>(x, w, out, g);
    LAUNCH_CHECK();
}

}  // namespace

void grouped_gemm_mx(floatX* y, real* y_real, const uint8_t* x, const uint8_t* x_scale, const uint8_t* w,
                     const uint8_t* w_scale, int64_t w_stride_o, int64_t w_stride_c, Ragged r, int64_t IC, int64_t OC,
                     Ctx* ctx) {
    ASSERT(IC > 0 && IC % MX_BLOCK == 0 && OC > 0 && OC % 8 == 0);
    ASSERT(r.capacity <= INT32_MAX && IC <= INT32_MAX && OC <= INT32_MAX);  // coordinates of TMA are int32
    if (r.capacity == 0 || r.El == 0) return;
    if (ctx->blackwell)
        return grouped_gemm_lt_mx(y, y_real, x, x_scale, w, w_scale, w_stride_o, w_stride_c, r, IC, OC, ctx);
    const CUtensorMap from = matrix_map(x, 0, r.capacity, IC, BOX, ctx);
    const CUtensorMap by = matrix_map(w, r.El, OC, IC, BOX, ctx);
    const Groups g = {r.group_start,   r.group_rows, x_scale, w_scale, mx_stride(IC),    (int)w_stride_o,
                      (int)w_stride_c, r.El,         (int)OC, (int)IC, unit_counter(ctx)};
    if (y)
        launch<floatX>(from, by, matrix_map(y, 0, r.capacity, OC, 16, ctx), g, ctx);
    else
        launch<real>(from, by, matrix_map(y_real, 0, r.capacity, OC, 16, ctx), g, ctx);
}
