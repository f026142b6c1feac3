// Grouped products of MXFP8 bytes on the tensor cores: one persistent kernel over the ragged buffer, built like that of
// moe/grouped_gemm.cu.
//
// A block per SM: a producer warp finds tiles (256 x 128 of the output), reading the group sizes on the device, and
// feeds chunks 128 deep of both operands by TMA into a ring of 4 stages; two warpgroups multiply them (wgmma
// m64n128k32) and write through shared memory and TMA; a small ring tells them what tile it is. Hopper's tensor cores
// know no scales and keep few bits in fp8 sums, so a chunk is summed by itself and then added to the tile's float32
// sums, times both scales: a multiply-add per element and chunk. While one warpgroup does that, the tensor cores work
// for the other. Groups start at multiples of 128, so no tile holds rows of two experts. Two blocks form a cluster and
// share the operand that is common to their tiles: each loads half of it for both. Tiles are handed out in a fixed
// order and one block owns a tile's whole sum: the same bits on every run. Bound by the tensor cores under the card's
// power limit and by what is issued beside them: a warp's 205 instructions a chunk, 128 of them the multiply-adds, in
// the 512 clocks that its products take.
#include "moe/grouped_gemm_mx.h"
#include "moe/grouped_gemm_ptx.cuh"
#include "moe/mxfp8.h"

namespace {

enum { CLUSTER = 2, BOTH = 3 };  // blocks of a cluster, and their bits
enum { TILE_M = 256, TILE_N = 128, TILE_K = MX_CHUNK };
enum { PART = 128 };                          // rows of a part of a tile: 64 for each warpgroup
enum { BOX = 64, BOX_BYTES = BOX * TILE_K };  // every load is a box of 64 rows of 128 bytes, swizzled
enum { STAGE_BYTES = (TILE_M + TILE_N) / BOX * BOX_BYTES };
enum { STAGES = 4, RING = 4 };
enum { WARPS = 8, THREADS = 128 + 32 * WARPS };  // a producer warpgroup (one warp works) and two that multiply
enum { OUT_BYTES = 16 * 128 };                   // a warp writes out 16 rows of 128 bytes at a time
enum { BAND = 8 };  // tiles below each other that are walked before the next columns: reuse in L2

// The output of one expert is its rows x N, the contraction K.
struct Groups {
    const int64_t* start;
    const int32_t* rows;
    const uint8_t *x_scale, *w_scale;
    int64_t x_stride;
    int w_stride_o, w_stride_c;
    int El, N, K;
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
    alignas(1024) uint8_t out[WARPS][2][OUT_BYTES];
    uint64_t full[STAGES], empty[STAGES], tile_full[RING], tile_empty[RING];
    Tile tile[RING];
};

__device__ __forceinline__ int div_up(int a, int b) { return (a + b - 1) / b; }

// --- The producer ---

// A unit of work is one tile for each block of the cluster: two beside each other, which share rows of x; those of an
// odd last column go by twos below each other and share rows of W, the last of an odd number alone.
__device__ __forceinline__ int units(int tiles_m, int tiles_n) {
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
    w.end = units(div_up(w.height, TILE_M), tiles_n);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        int before = __shfl_up_sync(0xffffffffu, w.end, d);
        if (lane >= d) w.end += before;
    }
    w.end += w.base;
}

__device__ __forceinline__ void produce(Shared& s, const CUtensorMap* x, const CUtensorMap* weights, const Groups& g) {
    const int lane = threadIdx.x % 32, rank = cluster_rank();
    const int tiles_n = div_up(g.N, TILE_N), pairs = tiles_n / 2, per_band = units(BAND, tiles_n);
    int slot = 0, ring = 0;
    uint32_t parity = 1, ring_parity = 1;
    Window w;
    w.first = w.base = 0;
    load_window(w, g, tiles_n, lane);
    for (int at = blockIdx.x / CLUSTER;; at += gridDim.x / CLUSTER) {
        int unit = at, total;
        while (total = __shfl_sync(0xffffffffu, w.end, 31), unit >= total && w.first + 32 < g.El) {
            w.first += 32, w.base = total;
            load_window(w, g, tiles_n, lane);
        }
        Tile t = {};
        int shared_a = 0, shared_b = 0;
        if (unit < total) {
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

// Of `next`, the tile to come: called before the present one is written, so that they are there in time.
__device__ __forceinline__ void begin_scales(Scales& c, const Tile& next, const Groups& g) {
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, part = next.rows > PART ? lane % 4 / 2 : 0;
    const int row = next.m + part * PART + warp * 16 + lane / 4 + lane % 2 * 8;
    c.x = (const uint4*)(g.x_scale + row * g.x_stride);
    c.w = g.w_scale + next.w_scale;
    load_scales(c, 0, next.steps, g.w_stride_c, lane);
}

// d = the tile's sums.
template <int PARTS>
__device__ __forceinline__ void multiply(Shared& s, Consumer& c, float (&d)[PARTS][TILE_N / 2], int steps, int w_stride,
                                         int lane) {
    const uint64_t high = wgmma_descriptor<BOX>(0, 0);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < TILE_N / 2; i++) d[part][i] = 0;
    next_scales(c.scales, 0, steps, w_stride, lane);
    for (int step = 0; step < steps; step++) {
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
            if (part == PARTS - 1 && step % 4 == 3) next_scales(c.scales, step / 4 + 1, steps, w_stride, lane);
            wgmma_wait<0>();
            wgmma_pin(p);
            // The stage may be overwritten, here and by the neighbour. One arrival per warp and block.
            if (part == PARTS - 1 && lane < CLUSTER) barrier_arrive_cluster(c.empty + c.slot * sizeof(uint64_t));
#pragma unroll
            for (int i = 0; i < TILE_N / 2; i++) d[part][i] = fmaf(p[i], i & 2 ? far : near, d[part][i]);
        }
        if (++c.slot == STAGES) c.slot = 0, c.parity ^= 1;
    }
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
    __device__ __forceinline__ void end(const CUtensorMap* out, int x, int y) {
        fence_async();
        __syncwarp();
        if (lane == 0) tma_store(out, buffer[turn], x, y), tma_commit();
    }
};

// 64 columns of bf16 at a time, `row` being the warp's first row in the tile; 16-byte units are swizzled as TMA expects
// them. Pad rows become zeros whatever their sums are.
__device__ __forceinline__ void write(Writer& w, const float (&d)[TILE_N / 2], floatX*, const CUtensorMap* out,
                                      const Tile& t, int row, int columns) {
    const int lane = w.lane, m = t.m + row, n = t.n, valid = t.valid - row;
#pragma unroll
    for (int c = 0; c < TILE_N / 64; c++) {
        if (n + c * 64 >= columns) break;
        uint32_t packed[16];
#pragma unroll
        for (int i = 0; i < 16; i++) packed[i] = pack_bf16(d[c * 32 + 2 * i], d[c * 32 + 2 * i + 1]);
        if (valid < 16)
#pragma unroll
            for (int i = 0; i < 16; i++)
                if (lane / 4 + i % 2 * 8 >= valid) packed[i] = 0;
        // Lanes 0-7, 8-15 address rows 0-7 and 8-15 of 8 columns, lanes 16-31 those of the next 8.
        const uint32_t at = shared_address(w.begin()) + lane % 16 * 128;
#pragma unroll
        for (int j = 0; j < 8; j += 2)
            store_matrices(at + ((j + lane / 16) ^ lane % 8) * 16, packed[2 * j], packed[2 * j + 1], packed[2 * j + 2],
                           packed[2 * j + 3]);
        w.end(out, n + c * 64, m);
    }
}

// 32 columns of float32 at a time. Odd rows go through their columns in another order: no bank conflicts.
__device__ __forceinline__ void write(Writer& w, const float (&d)[TILE_N / 2], float*, const CUtensorMap* out,
                                      const Tile& t, int row, int columns) {
    const int lane = w.lane, r = lane / 4, odd = r % 2, m = t.m + row, n = t.n, valid = t.valid - row;
#pragma unroll
    for (int c = 0; c < TILE_N / 32; c++) {
        if (n + c * 32 >= columns) break;
        uint8_t* to = w.begin() + r * 128 + lane % 2 * 8;
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float* p = d + c * 16 + j * 4 + half * 2;
                float2 near = {p[0], p[1]}, far = {p[8], p[9]};
                if (r + half * 8 >= valid) near = far = {0, 0};
                const int unit = (j * 2 + lane % 4 / 2) ^ r ^ odd * 4;
                *(float2*)(to + half * 8 * 128 + unit * 16) = odd ? far : near;
                *(float2*)(to + half * 8 * 128 + (unit ^ 4) * 16) = odd ? near : far;
            }
        w.end(out, n + c * 32, m);
    }
}

// One tile, from the first chunk to the output. Leaves the consumer at the next one.
template <int PARTS, typename Out>
__device__ __forceinline__ void compute(Shared& s, Consumer& c, const Tile& t, const Groups& g, const CUtensorMap* out,
                                        Writer& writer) {
    const int warp = threadIdx.x / 32 - 4;
    float d[PARTS][TILE_N / 2];
    multiply<PARTS>(s, c, d, t.steps, g.w_stride_c, writer.lane);
    if (++c.ring == RING) c.ring = 0, c.ring_parity ^= 1;
    barrier_wait(&s.tile_full[c.ring], c.ring_parity);
    if (s.tile[c.ring].steps) begin_scales(c.scales, s.tile[c.ring], g);
    if (!t.store) return;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        write(writer, d[part], (Out*)nullptr, out, t, part * PART + warp * 16, g.N);
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

// (depth, rows, cols), or (rows, cols) with depth 0; swizzled boxes 128 bytes wide.
CUtensorMap matrix_map(const void* p, CUtensorMapDataType type, int64_t depth, int64_t rows, int64_t cols, int box_rows,
                       Ctx* ctx) {
    const cuuint64_t bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                             : type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1
                                                                     : 2;
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

template <typename Out>
void launch(const CUtensorMap& x, const CUtensorMap& w, const CUtensorMap& out, const Groups& g, Ctx* ctx) {
    CUDA_CHECK(
        cudaFuncSetAttribute(grouped_gemm_mx_kernel<Out>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    grouped_gemm_mx_kernel<Out><<<ctx->sms / CLUSTER * CLUSTER, THREADS, sizeof(Shared), ctx->stream>>>(x, w, out, g);
    LAUNCH_CHECK();
}

const CUtensorMapDataType BYTES = CU_TENSOR_MAP_DATA_TYPE_UINT8, BF16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                          F32 = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;

}  // namespace

void grouped_gemm_mx(floatX* y, real* y_real, const uint8_t* x, const uint8_t* x_scale, const uint8_t* w,
                     const uint8_t* w_scale, int64_t w_stride_o, int64_t w_stride_c, Ragged r, int64_t IC, int64_t OC,
                     Ctx* ctx) {
    ASSERT(IC > 0 && IC % MX_BLOCK == 0 && OC > 0 && OC % 8 == 0);
    ASSERT(r.capacity <= INT32_MAX && IC <= INT32_MAX && OC <= INT32_MAX);  // coordinates of TMA are int32
    if (r.capacity == 0 || r.El == 0) return;
    const CUtensorMap from = matrix_map(x, BYTES, 0, r.capacity, IC, BOX, ctx);
    const CUtensorMap by = matrix_map(w, BYTES, r.El, OC, IC, BOX, ctx);
    const Groups g = {r.group_start,   r.group_rows,    x_scale, w_scale, mx_stride(IC),
                      (int)w_stride_o, (int)w_stride_c, r.El,    (int)OC, (int)IC};
    if (y)
        launch<floatX>(from, by, matrix_map(y, BF16, 0, r.capacity, OC, 16, ctx), g, ctx);
    else
        launch<real>(from, by, matrix_map(y_real, F32, 0, r.capacity, OC, 16, ctx), g, ctx);
}
