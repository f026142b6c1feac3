// Grouped products of e4m3 bytes on Hopper's tensor cores: one persistent kernel over the ragged buffer.
#include "moe/grouped_gemm_mx.h"
#include "moe/grouped_gemm_ptx.cuh"
#include "moe/mxfp8.h"

namespace {

#ifndef V_GROUPS
#define V_GROUPS 2
#define V_WAVES 2
#endif

enum { CLUSTER = 2, BOTH = 3 };  // blocks of a cluster, and their bits
enum { GROUPS = V_GROUPS, WAVES = V_WAVES };
enum { TILE_M = 64 * GROUPS * WAVES, TILE_N = 128, TILE_K = 128 };
enum { BOX = 64, BOX_BYTES = BOX * TILE_K };
enum { STAGE_BYTES = (TILE_M + TILE_N) / BOX * BOX_BYTES };
enum { STAGES = 4, RING = 4 };
enum { WARPS = 4 * GROUPS, THREADS = 128 + 32 * WARPS };
enum { OUT_BYTES = 16 * 128 };
#ifndef V_BAND
#define V_BAND 8
#endif
#ifndef V_SHARE
#define V_SHARE 1
#endif
enum { BAND = V_BAND };

struct Groups {
    const int64_t* start;
    const int32_t* rows;
    const uint8_t *x_scale, *w_scale;
    int64_t x_stride, w_stride_o, w_stride_c;
    int El, N, K;
};

struct Tile {
    int m, n;
    int expert;
    int steps;  // of TILE_K along the contraction; 0: no more tiles
    int rows;   // up to the next expert
    int valid;  // those that are not pad rows
    int w_scale;
    int store;
};

struct Shared {
    alignas(1024) uint8_t stage[STAGES][STAGE_BYTES];  // A's boxes, then B's
    alignas(1024) uint8_t out[WARPS][2][OUT_BYTES];
    uint64_t full[STAGES], empty[STAGES], tile_full[RING], tile_empty[RING];
    Tile tile[RING];
};

__device__ __forceinline__ int div_up(int a, int b) { return (a + b - 1) / b; }

struct Window {
    int first, base, end, start, rows, height;
};

__device__ __forceinline__ int units(int tiles_m, int tiles_n) {
    return tiles_m * (tiles_n / 2) + div_up(tiles_m, 2) * (tiles_n % 2);
}

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
    const int lane = threadIdx.x % 32, rank = cluster_rank(), tiles_n = div_up(g.N, TILE_N), pairs = tiles_n / 2;
    const int per_band = units(BAND, tiles_n);
    int slot = 0, ring = 0;
    uint32_t parity = 1, ring_parity = 1;
    Window w;
    w.first = w.base = 0;
    load_window(w, g, tiles_n, lane);
    for (int unit_at = blockIdx.x / CLUSTER;; unit_at += gridDim.x / CLUSTER) {
        int unit = unit_at, total;
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
            const int height = __shfl_sync(0xffffffffu, w.height, owner), tiles_m = div_up(height, TILE_M);
            unit -= owner ? before : w.base;
            t.expert = w.first + owner;
            t.store = 1;
            t.steps = div_up(g.K, TILE_K);
            const int band = unit / per_band, high = min((int)BAND, tiles_m - band * BAND);
            int m, n;
            unit -= band * per_band;
            if (unit < high * pairs) {
                m = unit % high;
                n = unit / high * 2 + rank;
                shared_a = V_SHARE;
            } else {
                m = (unit - high * pairs) * 2 + rank;
                n = tiles_n - 1;
                shared_b = V_SHARE;
                if (m >= high) t.store = 0, m = high - 1;
            }
            m = (band * BAND + m) * TILE_M;
            t.m = start + m;
            t.n = n * TILE_N;
            t.rows = height - m;
            t.valid = rows - m;
            t.w_scale = (int)(t.expert * tiles_n * t.steps + t.n / TILE_N * g.w_stride_o);
        }
        barrier_wait(&s.tile_empty[ring], ring_parity);
        if (lane == 0) {
            s.tile[ring] = t;
            barrier_arrive(&s.tile_full[ring]);
            const int a_boxes = min(t.rows, (int)TILE_M) / BOX;
            for (int step = 0, k = 0; step < t.steps; step++, k += TILE_K) {
                barrier_wait(&s.empty[slot], parity);
                uint64_t* bar = &s.full[slot];
                uint8_t* to = s.stage[slot];
                barrier_expect(bar, (a_boxes + TILE_N / BOX) * BOX_BYTES);
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
                for (int i = 0; i < TILE_N / BOX; i++) {
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

// 2^(s - 127) of the low byte (the smallest, 2^-127, has no exponent bits); 255 gives infinity.
__device__ __forceinline__ float power(uint32_t s) { return fmaxf(__uint_as_float(s << 23 & 0x7f800000), 0x1p-127f); }

struct Scales {
    const uint4* x;
    const uint8_t* w;
    uint4 x_next;
    uint32_t w_next;
};

__device__ __forceinline__ void load(Scales& c, int quad, int steps, int64_t w_stride, int lane) {
    c.x_next = c.x[min(quad, (steps - 1) / 4)];
    c.w_next = c.w[min(quad * 4 + lane % 4, steps - 1) * w_stride];
}

// Where a warpgroup reads, in registers that the compiler knows to be the same in all lanes, and a lane's scales.
struct Consumer {
    uint32_t a, b;   // descriptors in the first stage
    uint32_t empty;  // barriers of one of the two blocks
    int slot;
    uint32_t parity;
    Scales scales;
};

template <int W>
__device__ __forceinline__ void multiply(Shared& s, Consumer& c, float (&d)[W][64], int64_t w_stride, int steps, int lane) {
    const uint64_t high = wgmma_descriptor<BOX>(0, 0);
#pragma unroll
    for (int v = 0; v < W; v++)
#pragma unroll
        for (int i = 0; i < 64; i++) d[v][i] = 0;
    uint32_t sx = 0, sw = 0;
    if (GROUPS == 3) c.slot = __reduce_max_sync(0xffffffffu, c.slot);
    auto refill = [&](int quad) {
        const uint4& q = c.scales.x_next;
        sx = __byte_perm(__byte_perm(q.x, q.y, 0x0040), __byte_perm(q.z, q.w, 0x0040), 0x5410);
        sw = c.scales.w_next;
        load(c.scales, quad + 1, steps, w_stride, lane);
    };
    refill(0);
    for (int step = 0; step < steps; step++) {
        float p[64], scale = 0;
        barrier_wait(&s.full[c.slot], c.parity);
        const uint32_t a = c.a + c.slot * (STAGE_BYTES / 16), b = c.b + c.slot * (STAGE_BYTES / 16);
#pragma unroll
        for (int v = 0; v < W; v++) {
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < TILE_K / 32; k++)
                wgmma_e4m3<TILE_N>(p, high | (a + v * (GROUPS * BOX_BYTES / 16) + k * 2), high | (b + k * 2), k > 0);
            wgmma_commit();
            if (v == 0) {
                scale = power(sx) * power(__shfl_sync(0xffffffffu, sw, step, 4));
                scale = fmaf(scale, 0, scale);
                sx >>= 8;
            }
            const float near = __shfl_sync(0xffffffffu, scale, v * 2, 4);
            const float far = __shfl_sync(0xffffffffu, scale, v * 2 + 1, 4);
            if (v == W - 1 && step % 4 == 3) refill((step + 1) / 4);
            wgmma_wait<0>();
            wgmma_pin(p);
            if (v == W - 1 && lane < CLUSTER) barrier_arrive_cluster(c.empty + c.slot * 8);
#pragma unroll
            for (int i = 0; i < 64; i++) d[v][i] = fmaf(p[i], i & 2 ? far : near, d[v][i]);
        }
        if (++c.slot == STAGES) c.slot = 0, c.parity ^= 1;
    }
}

__device__ __forceinline__ void begin(Consumer& c, const Tile& t, const Groups& g) {
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
    const int row = t.m + (t.rows > 64 * GROUPS ? lane % 4 / 2 * (64 * GROUPS) : 0) + warp * 16 + lane / 4 + lane % 2 * 8;
    c.scales.x = (const uint4*)(g.x_scale + (GROUPS == 3 ? min(row, t.m + t.rows - 1) : row) * g.x_stride);
    c.scales.w = g.w_scale + t.w_scale;
    load(c.scales, 0, t.steps, g.w_stride_c, lane);
}

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

__device__ __forceinline__ void write(Writer& w, const float (&d)[64], floatX*, const CUtensorMap* out, const Tile& t,
                                      int row, int columns) {
    const int lane = w.lane, m = GROUPS == 2 || row < t.rows ? t.m + row : 1 << 30, n = t.n;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        if (n + c * 64 >= columns) break;
        uint32_t packed[16];
#pragma unroll
        for (int i = 0; i < 16; i++) packed[i] = pack_bf16(d[c * 32 + 2 * i], d[c * 32 + 2 * i + 1]);
        if (row + 16 > t.valid)
#pragma unroll
            for (int i = 0; i < 16; i++)
                if (row + lane / 4 + i % 2 * 8 >= t.valid) packed[i] = 0;
        const uint32_t at = shared_address(w.begin()) + lane % 16 * 128;
#pragma unroll
        for (int j = 0; j < 8; j += 2)
            store_matrices(at + ((j + lane / 16) ^ lane % 8) * 16, packed[2 * j], packed[2 * j + 1], packed[2 * j + 2],
                           packed[2 * j + 3]);
        w.end(out, n + c * 64, m);
    }
}

__device__ __forceinline__ void write(Writer& w, const float (&d)[64], float*, const CUtensorMap* out, const Tile& t,
                                      int row, int columns) {
    const int lane = w.lane, r = lane / 4, odd = r % 2, m = GROUPS == 2 || row < t.rows ? t.m + row : 1 << 30, n = t.n;
    const bool keep[2] = {row + r < t.valid, row + r + 8 < t.valid};
#pragma unroll
    for (int c = 0; c < 4; c++) {
        if (n + c * 32 >= columns) break;
        uint8_t* to = w.begin() + r * 128 + lane % 2 * 8;
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float* p = d + c * 16 + j * 4 + half * 2;
                float2 near = {p[0], p[1]}, far = {p[8], p[9]};
                if (!keep[half]) near = far = {0, 0};
                const int unit = (j * 2 + lane % 4 / 2) ^ r ^ odd * 4;
                *(float2*)(to + half * 8 * 128 + unit * 16) = odd ? far : near;
                *(float2*)(to + half * 8 * 128 + (unit ^ 4) * 16) = odd ? near : far;
            }
        w.end(out, n + c * 32, m);
    }
}

template <int W, typename Out>
__device__ __forceinline__ void compute(Shared& s, Consumer& c, const Tile& t, const Tile& next, uint64_t* next_full,
                                        uint32_t next_parity, const Groups& g, const CUtensorMap* out, Writer& writer) {
    const int warp = threadIdx.x / 32 - 4, lane = writer.lane;
    float d[W][64];
    multiply<W>(s, c, d, g.w_stride_c, t.steps, lane);
    barrier_wait(next_full, next_parity);
    if (next.steps) begin(c, next, g);
    if (!t.store) return;
#pragma unroll
    for (int v = 0; v < W; v++) write(writer, d[v], (Out*)nullptr, out, t, v * (64 * GROUPS) + warp * 16, g.N);
}

template <typename Out>
__device__ __forceinline__ void consume(Shared& s, const Groups& g, const CUtensorMap* out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    Writer writer = {s.out[warp], 0, lane};
    Consumer c = {};
    c.a = __reduce_max_sync(0xffffffffu, (uint32_t)wgmma_descriptor<BOX>(shared_address(s.stage) + warp / 4 * BOX_BYTES, 0));
    c.b = __reduce_max_sync(0xffffffffu, (uint32_t)wgmma_descriptor<BOX>(shared_address(s.stage) + TILE_M * TILE_K, 0));
    c.empty = cluster_address(s.empty, lane % CLUSTER);
    int ring = 0;
    uint32_t ring_parity = 0;
    barrier_wait(&s.tile_full[ring], ring_parity);
    if (s.tile[0].steps) begin(c, s.tile[0], g);
    for (;;) {
        const Tile& t = s.tile[ring];
        if (t.steps == 0) break;
        const int next = (ring + 1) % RING;
        const uint32_t next_parity = ring_parity ^ (next == 0);
#if V_WAVES == 2
        if (t.rows > 64 * GROUPS)
            compute<2, Out>(s, c, t, s.tile[next], &s.tile_full[next], next_parity, g, out, writer);
        else
            compute<1, Out>(s, c, t, s.tile[next], &s.tile_full[next], next_parity, g, out, writer);
#else
        compute<1, Out>(s, c, t, s.tile[next], &s.tile_full[next], next_parity, g, out, writer);
#endif
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.tile_empty[ring]);
        ring = next, ring_parity = next_parity;
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
        registers_more<GROUPS == 2 ? 224 : 152>();
        consume<Out>(s, g, &out);
    }
    cluster_sync();  // the neighbour may still write here or arrive here
}

// --- The host's side ---

CUtensorMap matrix_map(const void* p, CUtensorMapDataType type, int64_t bytes, int64_t depth, int64_t rows,
                       int64_t cols, int box_rows, Ctx* ctx) {
    cuuint64_t sizes[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)depth};
    cuuint64_t strides[2] = {(cuuint64_t)(cols * bytes), (cuuint64_t)(rows * cols * bytes)};
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
    grouped_gemm_mx_kernel<Out>
        <<<ctx->sms / CLUSTER * CLUSTER, THREADS, sizeof(Shared), ctx->stream>>>(x, w, out, g);
    LAUNCH_CHECK();
}

}  // namespace

void grouped_gemm_mx(floatX* y, real* y_real, const uint8_t* x, const uint8_t* x_scale, const uint8_t* w,
                     const uint8_t* w_scale, int64_t w_stride_o, int64_t w_stride_c, Ragged r, int64_t IC, int64_t OC,
                     Ctx* ctx) {
    ASSERT(r.capacity <= INT32_MAX && IC <= INT32_MAX && OC <= INT32_MAX);  // coordinates of TMA are int32
    if (r.capacity == 0 || r.El == 0) return;
    const CUtensorMapDataType BYTES = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    CUtensorMap from = matrix_map(x, BYTES, 1, 0, r.capacity, IC, BOX, ctx);
    CUtensorMap by = matrix_map(w, BYTES, 1, r.El, OC, IC, BOX, ctx);
    Groups g = {r.group_start, r.group_rows, x_scale, w_scale, mx_stride(IC), w_stride_o, w_stride_c, r.El, (int)OC, (int)IC};
    if (y)
        launch<floatX>(from, by, matrix_map(y, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, 0, r.capacity, OC, 16, ctx), g, ctx);
    else
        launch<float>(from, by, matrix_map(y_real, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, 0, r.capacity, OC, 16, ctx), g,
                      ctx);
}
