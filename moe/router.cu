// The router. Its three products are small (2 N E C operations) and bound by memory: x (N, C) is read once forward; x
// and dx pass once more backward. They run on the tensor cores (mma.sync m16n8k16: products of bf16 are exact in
// float32) in tiles of 64 x 64 x 64 that cp.async brings into swizzled shared memory stages ahead. Sums of 64 products
// are added to float32 registers outside the tensor cores, whose own long sums truncate. dlogits, float32 by nature,
// enters as a sum of two bf16 (hi + lo, 2^-17).
// Selection: one warp a token; lane l holds experts l, l + 32, ... Scores become integers of the same order, so that
// two warp reductions (redux.sync) find the best score and the lowest index that has it.
// dw sums over tokens: fixed splits of N write partial sums to the workspace, added in order by a last launch.
#include "layers/adamw.h"
#include "layers/rows.cuh"
#include "moe/router.h"

// BYTES: of a tile in shared memory. OUT_WIDTH: a tile's row of floats, 16-byte aligned and off the banks.
enum {
    TILE = 64,
    BYTES = TILE * TILE * 2,
    OUT_WIDTH = TILE + 4,
    DX_STAGES = 3,
    MAX_E = 512,
    MAX_K = 32,
    DW_TILES = 512
};

// A row-major matrix of bf16 in memory.
struct Matrix {
    const floatX* p;
    int64_t rows, columns, stride;
};

// Where 8 elements lie in a tile of 64 rows of 128 bytes: 16-byte columns are swizzled by the row, so that the 8 rows
// of an ldmatrix come from different banks.
static __device__ __forceinline__ uint32_t tile_at(int row, int piece) {
    return row * 128 + ((piece ^ (row & 7)) << 4);
}

// Brings the 64 x 64 tile at (row0, column0) to shared memory, zeros outside of the matrix.
template <bool WIDE>
static __device__ __forceinline__ void load_tile(char* tile, const Matrix& m, int64_t row0, int64_t column0) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = i * 128 + threadIdx.x, r = at / 8, piece = at % 8;
        const int64_t row = row0 + r, column = column0 + piece * 8;
        char* to = tile + tile_at(r, piece);
        if constexpr (WIDE) {
            const bool inside = row < m.rows && column < m.columns;
            const floatX* from = inside ? m.p + row * m.stride + column : m.p;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
                         "l"(from), "r"(inside ? 16 : 0)
                         : "memory");
        } else {
            for (int j = 0; j < 8; j++)
                ((floatX*)to)[j] =
                    row < m.rows && column + j < m.columns ? m.p[row * m.stride + column + j] : (floatX)0.0f;
        }
    }
}

template <bool TRANSPOSE>
static __device__ __forceinline__ void load_fragments(uint32_t f[4], const char* at) {
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(at);
    if constexpr (TRANSPOSE)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                     : "r"(address)
                     : "memory");
}

static __device__ __forceinline__ void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sum += A B for 64 x 64 x 64 tiles in shared memory, this warp's 16 rows: A is (m, k), or (k, m) with A_T, its low
// half in the next tile; B is (n, k), or (k, n) with B_T.
template <bool A_T, bool B_T, int HALVES>
static __device__ __forceinline__ void multiply_tiles(float sum[8][4], const char* tile_a, const char* tile_b) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float part[8][4] = {};
#pragma unroll
    for (int k = 0; k < TILE; k += 16) {
        // ldmatrix takes the row addresses of four 8 x 8 matrices from lanes 0-7, 8-15, 16-23, 24-31.
        const int quarter = lane / 8, within = lane % 8;
        uint32_t fa[HALVES][4], fb[4][4];
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            // Matrices of A: (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows 0-7, k 8-15), (rows 8-15, k 8-15).
            const int m = warp * 16 + quarter % 2 * 8, kk = k + quarter / 2 * 8;
            const uint32_t at = A_T ? tile_at(kk + within, m / 8) : tile_at(m + within, kk / 8);
            load_fragments<A_T>(fa[h], tile_a + h * BYTES + at);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            // Two 8-wide columns of B: (n 0-7, k 0-7), (n 0-7, k 8-15), (n 8-15, k 0-7), (n 8-15, k 8-15).
            const int n = j * 16 + quarter / 2 * 8, kk = k + quarter % 2 * 8;
            const uint32_t at = B_T ? tile_at(kk + within, n / 8) : tile_at(n + within, kk / 8);
            load_fragments<B_T>(fb[j], tile_b + at);
        }
#pragma unroll
        for (int h = HALVES - 1; h >= 0; h--)
#pragma unroll
            for (int j = 0; j < 8; j++) mma(part[j], fa[h], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[j][i] += part[j][i];
}

// A finished tile to shared memory, so that memory sees whole pieces: rows of OUT_WIDTH floats.
static __device__ __forceinline__ void put_tile(float* tile, const float sum[8][4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            tile[(warp * 16 + lane / 4 + i / 2 * 8) * OUT_WIDTH + j * 8 + lane % 4 * 2 + i % 2] = sum[j][i];
}

static __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
static __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// D (splits, M, N) = sum_k A B, the K axis split by blockIdx.z into parts of `per`. Block: one tile of D (x over M, y
// over N). a_lo: the low half of A, or NULL.
template <bool A_T, bool B_T, int HALVES, int STAGES, bool WIDE>
static __global__ void __launch_bounds__(128)
    product(float* out, Matrix a, const floatX* a_lo, Matrix b, int64_t M, int64_t N, int64_t K, int64_t per) {
    extern __shared__ __align__(128) char shared[];
    const int STAGE = (HALVES + 1) * BYTES;
    const int64_t m0 = blockIdx.x * (int64_t)TILE, n0 = blockIdx.y * (int64_t)TILE, first = blockIdx.z * per;
    const int64_t last = first + per < K ? first + per : K;
    const int steps = last > first ? (int)ceil_div(last - first, TILE) : 0;
    Matrix lo = a;
    lo.p = a_lo;

    auto fetch = [&](int step) {
        if (step < steps) {
            char* stage = shared + step % STAGES * STAGE;
            const int64_t k0 = first + step * TILE;
            load_tile<WIDE>(stage, a, A_T ? k0 : m0, A_T ? m0 : k0);
            if (HALVES == 2) load_tile<WIDE>(stage + BYTES, lo, A_T ? k0 : m0, A_T ? m0 : k0);
            load_tile<WIDE>(stage + HALVES * BYTES, b, B_T ? k0 : n0, B_T ? n0 : k0);
        }
        commit();
    };

    float sum[8][4] = {};
    for (int s = 0; s < STAGES - 1; s++) fetch(s);
    for (int step = 0; step < steps; step++) {
        wait<STAGES - 2>();
        __syncthreads();  // this stage is there for all, and all are done with the one fetched next
        fetch(step + STAGES - 1);
        const char* stage = shared + step % STAGES * STAGE;
        multiply_tiles<A_T, B_T, HALVES>(sum, stage, stage + HALVES * BYTES);
    }
    wait<0>();
    __syncthreads();
    float* tile = (float*)shared;
    put_tile(tile, sum);
    __syncthreads();
    for (int at = threadIdx.x; at < TILE * TILE; at += 128) {
        const int64_t m = m0 + at / TILE, n = n0 + at % TILE;
        if (m < M && n < N) out[(blockIdx.z * M + m) * N + n] = tile[at / TILE * OUT_WIDTH + at % TILE];
    }
}

template <bool A_T, bool B_T, int HALVES, int STAGES>
static void launch_product(float* out, Matrix a, const floatX* a_lo, Matrix b, int64_t M, int64_t N, int64_t K,
                           int64_t splits, Ctx* ctx) {
    const size_t bytes = (size_t)STAGES * (HALVES + 1) * BYTES;
    const dim3 grid(blocks_for(M, TILE), blocks_for(N, TILE), (unsigned)splits);
    const int64_t per = ceil_div(ceil_div(K, splits), TILE) * TILE;
    auto kernel = wide(a.stride | b.stride, a.p, a_lo, b.p) ? product<A_T, B_T, HALVES, STAGES, true>
                                                            : product<A_T, B_T, HALVES, STAGES, false>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<grid, 128, bytes, ctx->stream>>>(out, a, a_lo, b, M, N, K, per);
    LAUNCH_CHECK();
}

// dx (N, C) += (hi + lo) w. Block: 64 tokens, whose dlogits stay in shared memory, and `columns` tiles of C, for which
// tiles of w stream through three stages; dx is on its way while the tile is multiplied.
template <bool WIDE>
static __global__ void __launch_bounds__(128)
    add_product(floatX* dx, Matrix hi, const floatX* low, Matrix w, int64_t N, int64_t C, int steps, int columns) {
    extern __shared__ __align__(128) char shared[];
    char *tiles_a = shared, *tiles_b = shared + steps * 2 * BYTES;
    float* tile = (float*)(tiles_b + DX_STAGES * BYTES);
    const int64_t m0 = blockIdx.x * (int64_t)TILE, n_first = blockIdx.y * (int64_t)columns * TILE;
    const int total = (int)(ceil_div(C - n_first, TILE) < columns ? ceil_div(C - n_first, TILE) : columns) * steps;
    Matrix lo = hi;
    lo.p = low;
    auto fetch = [&](int i) {
        if (i < total)
            load_tile<WIDE>(tiles_b + i % DX_STAGES * BYTES, w, i % steps * TILE, n_first + i / steps * TILE);
        commit();
    };
    for (int s = 0; s < steps; s++) {
        load_tile<WIDE>(tiles_a + s * 2 * BYTES, hi, m0, s * TILE);
        load_tile<WIDE>(tiles_a + (s * 2 + 1) * BYTES, lo, m0, s * TILE);
    }
    for (int s = 0; s < DX_STAGES - 1; s++) fetch(s);
    float sum[8][4] = {};
    for (int i = 0; i < total; i++) {
        const int step = i % steps;
        const bool done = step == steps - 1;
        const int64_t n = n_first + i / steps * TILE + threadIdx.x % 8 * 8;
        Piece<8> old[4];
        if (WIDE && done) {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int64_t m = m0 + r * 16 + threadIdx.x / 8;
                if (m < N && n < C) old[r] = *(const Piece<8>*)(dx + m * C + n);
            }
        }
        wait<DX_STAGES - 2>();
        __syncthreads();  // this stage is there for all, all are done with the one fetched next, and with `tile`
        fetch(i + DX_STAGES - 1);
        multiply_tiles<false, true, 2>(sum, tiles_a + step * 2 * BYTES, tiles_b + i % DX_STAGES * BYTES);
        if (!done) continue;
        put_tile(tile, sum);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int64_t m = m0 + r * 16 + threadIdx.x / 8;
            const float* from = tile + (r * 16 + threadIdx.x / 8) * OUT_WIDTH + threadIdx.x % 8 * 8;
            if (m >= N) continue;
            if constexpr (WIDE) {
                if (n >= C) continue;
                float f[8];
                floats_of<8>(f, old[r]);
#pragma unroll
                for (int j = 0; j < 8; j++) f[j] += from[j];
                store<8>(dx + m * C + n, f);
            } else {
                for (int j = 0; j < 8 && n + j < C; j++)
                    dx[m * C + n + j] = (floatX)((float)dx[m * C + n + j] + from[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[j][e] = 0;
    }
}

static void launch_add(floatX* dx, Matrix hi, const floatX* lo, Matrix w, int64_t N, int64_t C, Ctx* ctx) {
    const int steps = (int)ceil_div(hi.columns, TILE), columns = 8;
    const size_t bytes =
        (size_t)(2 * steps + DX_STAGES) * BYTES + TILE * OUT_WIDTH * sizeof(float);  // 169 KiB: E = 512
    auto kernel = wide(hi.stride | w.stride, hi.p, lo, w.p, dx) ? add_product<true> : add_product<false>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<dim3(blocks_for(N, TILE), blocks_for(C, columns * TILE)), 128, bytes, ctx->stream>>>(dx, hi, lo, w, N, C,
                                                                                                  steps, columns);
    LAUNCH_CHECK();
}

// Floats as integers of the same order, all above 1; NaN is 1, below everything; 0 is left for "taken".
static __device__ __forceinline__ uint32_t ordered(float x) {
    if (x != x) return 1;
    uint32_t u = __float_as_uint(x + 0.0f);  // -0 becomes 0: they are equal
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Index of the best of `value`, the lowest of equals; its owner strikes it out. Lane l holds indices l, l + 32, ...
template <int J>
static __device__ __forceinline__ int take_best(uint32_t value[J]) {
    const int lane = threadIdx.x % 32;
    uint32_t best = 0;
    int index = 32 * J;
#pragma unroll
    for (int j = 0; j < J; j++)
        if (value[j] > best) best = value[j], index = lane + 32 * j;
    uint32_t highest = __reduce_max_sync(0xffffffffu, best);
    int taken = (int)__reduce_min_sync(0xffffffffu, best == highest ? (uint32_t)index : 32u * J);
#pragma unroll
    for (int j = 0; j < J; j++)
        if (taken == lane + 32 * j) value[j] = 0;
    return taken;
}

// Scores in place of the logits, then the choice. J: registers for the experts, 32 J >= E. 8 warps a block.
template <int J>
static __global__ void __launch_bounds__(256)
    choose(float* scores, int32_t* expert, float* gate, const float* bias, RouterShape s) {
    __shared__ float held[8][32 * J];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t n = blockIdx.x * (int64_t)8 + warp;
    if (n >= s.N) return;
    float *row = scores + n * s.E, *mine = held[warp], p[J];
#pragma unroll
    for (int j = 0; j < J; j++) p[j] = lane + 32 * j < s.E ? row[lane + 32 * j] : -INFINITY;
    if (s.score == SCORE_SIGMOID) {
#pragma unroll
        for (int j = 0; j < J; j++) p[j] = 1 / (1 + expf(-p[j]));
    } else {
        float top = -INFINITY, sum = 0;
#pragma unroll
        for (int j = 0; j < J; j++) top = fmaxf(top, p[j]);
        top = warp_max(top);
#pragma unroll
        for (int j = 0; j < J; j++) {
            p[j] = expf(p[j] - top);
            if (lane + 32 * j < s.E) sum += p[j];
        }
        sum = warp_sum(sum);
#pragma unroll
        for (int j = 0; j < J; j++) p[j] /= sum;
    }
    uint32_t value[J];
#pragma unroll
    for (int j = 0; j < J; j++) {
        const int e = lane + 32 * j;
        value[j] = 0;
        if (e >= s.E) continue;
        row[e] = p[j];
        float choice = p[j] + bias[e];
        value[j] = ordered(choice);
        mine[e] = choice;
    }
    __syncwarp();
    if (s.groups > 1) {
        const int size = s.E / s.groups;
        uint32_t group[J];
#pragma unroll
        for (int j = 0; j < J; j++) {
            const int g = lane + 32 * j;
            group[j] = 0;
            if (g >= s.groups) continue;
            float best = -INFINITY, second = -INFINITY;
            for (int i = 0; i < size; i++) {
                float x = mine[g * size + (i + lane) % size];  // lanes start apart: no bank conflicts
                if (x > best)
                    second = best, best = x;
                else if (x > second)
                    second = x;
            }
            group[j] = ordered(s.score == SCORE_SIGMOID && size > 1 ? best + second : best);
        }
        for (int i = 0; i < s.top_groups; i++) take_best<J>(group);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < J; j++)
            if (lane + 32 * j < s.groups) mine[lane + 32 * j] = group[j] == 0 ? 1.0f : 0.0f;
        __syncwarp();
#pragma unroll
        for (int j = 0; j < J; j++)
            if (lane + 32 * j < s.E && mine[(lane + 32 * j) / size] == 0) value[j] = ordered(-INFINITY);
        __syncwarp();
    }
#pragma unroll
    for (int j = 0; j < J; j++)
        if (lane + 32 * j < s.E) mine[lane + 32 * j] = p[j];
    __syncwarp();
    float sum = 0, my_gate = 0;
    int my_expert = 0;
    for (int k = 0; k < s.K; k++) {
        const int e = s.force_balance ? (int)((n * s.K + k) % s.E) : take_best<J>(value);
        const float score = mine[e];
        sum += score;
        if (lane == k) my_expert = e, my_gate = score;
    }
    const float factor = s.norm ? s.scale / (sum + 1e-20f) : s.scale;
    if (lane < s.K) {
        expert[n * s.K + lane] = my_expert;
        gate[n * s.K + lane] = my_gate * factor;
    }
}

// Calls launch(J) for the number of experts.
template <typename Launch>
static void by_experts(RouterShape s, Launch launch) {
    if (s.E > MAX_E || s.K > MAX_K || s.K > s.E)
        die(EXIT_FAILED, "router: %d of %d experts; at most %d of %d", s.K, s.E, MAX_K, MAX_E);
    if (s.E <= 32)
        launch(std::integral_constant<int, 1>());
    else if (s.E <= 64)
        launch(std::integral_constant<int, 2>());
    else if (s.E <= 128)
        launch(std::integral_constant<int, 4>());
    else if (s.E <= 256)
        launch(std::integral_constant<int, 8>());
    else
        launch(std::integral_constant<int, 16>());
}

void router_forward(real* scores, int32_t* expert, real* gate, const floatX* x, const floatX* w, const real* bias,
                    RouterShape s, Ctx* ctx) {
    if (s.N == 0) return;
    launch_product<false, false, 1, 6>(scores, Matrix{x, s.N, s.C, s.C}, NULL, Matrix{w, s.E, s.C, s.C}, s.N, s.E, s.C,
                                       1, ctx);
    by_experts(s, [&](auto j) {
        choose<decltype(j)::value><<<blocks_for(s.N, 8), 256, 0, ctx->stream>>>(scores, expert, gate, bias, s);
    });
    LAUNCH_CHECK();
}

// count (sequences, E): how many choices of a sequence fell on an expert. A block a sequence.
static __global__ void count_sequences(float* count, const int32_t* expert, RouterShape s) {
    __shared__ int held[MAX_E];
    for (int e = threadIdx.x; e < s.E; e += blockDim.x) held[e] = 0;
    __syncthreads();
    const int64_t first = blockIdx.x * s.T * s.K, last = first + s.T * s.K < s.N * s.K ? first + s.T * s.K : s.N * s.K;
    for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) atomicAdd(&held[expert[i]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < s.E; e += blockDim.x) count[blockIdx.x * (int64_t)s.E + e] = (float)held[e];
}

// dlogits of a token, split in two bf16; rows are `stride` apart, zeros behind E. count is NULL without auxiliary loss.
template <int J>
static __global__ void __launch_bounds__(256)
    score_backward(floatX* hi, floatX* lo, int64_t stride, const float* dgate, const float* scores,
                   const int32_t* expert, const float* gate, const float* count, float aux, RouterShape s) {
    const int lane = threadIdx.x % 32;
    const int64_t n = blockIdx.x * (int64_t)8 + threadIdx.x / 32;
    if (n >= s.N) return;
    float p[J], d[J] = {};
#pragma unroll
    for (int j = 0; j < J; j++) p[j] = lane + 32 * j < s.E ? scores[n * s.E + lane + 32 * j] : 0;
    // With norm: gate_k = scale s_k / sum, so ds_k = (scale dgate_k - sum_j dgate_j gate_j) / sum.
    float sum = 1e-20f, mean = 0;
    for (int k = 0; k < s.K; k++) {
        sum += scores[n * s.E + expert[n * s.K + k]];
        mean += dgate[n * s.K + k] * gate[n * s.K + k];
    }
    for (int k = 0; k < s.K; k++) {
        const int e = expert[n * s.K + k];
        const float g = s.scale * dgate[n * s.K + k], ds = s.norm ? (g - mean) / sum : g;
#pragma unroll
        for (int j = 0; j < J; j++)
            if (e == lane + 32 * j) d[j] = ds;
    }
    if (count) {  // aux / T * (f_e - sum_j f_j p_j) / sum s, with p = s / sum s
        const float f = (float)s.E / (s.K * s.T), *c = count + n / s.T * s.E;
        float total = 0, dot = 0;
#pragma unroll
        for (int j = 0; j < J; j++) {
            total += p[j];
            if (lane + 32 * j < s.E) dot += f * c[lane + 32 * j] * p[j];
        }
        total = warp_sum(total);
        dot = warp_sum(dot);
#pragma unroll
        for (int j = 0; j < J; j++)
            if (lane + 32 * j < s.E) d[j] += aux / s.T / total * (f * c[lane + 32 * j] - dot / total);
    }
    float dot = 0;
#pragma unroll
    for (int j = 0; j < J; j++) dot += d[j] * p[j];
    dot = warp_sum(dot);
#pragma unroll
    for (int j = 0; j < J; j++) {
        const int e = lane + 32 * j;
        if (e >= stride) continue;
        const float dl = p[j] * (s.score == SCORE_SIGMOID ? d[j] * (1 - p[j]) : d[j] - dot);  // 0 behind E
        const floatX high = (floatX)dl;
        hi[n * stride + e] = high;
        lo[n * stride + e] = (floatX)(dl - (float)high);
    }
}

// dw[i] += sum of the splits' parts, in order.
static __global__ void add_splits(float* dw, const float* part, int64_t count, int splits) {
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (i >= count) return;
    float sum = 0;
#pragma unroll 4
    for (int s = 0; s < splits; s++) sum += part[s * count + i];
    dw[i] += sum;
}

// Splits of the token axis for dw: enough blocks to fill the GPU, at least 256 tokens each.
static int64_t dw_splits(RouterShape s) {
    int64_t tiles = ceil_div(s.E, TILE) * ceil_div(s.C, TILE), splits = DW_TILES / tiles;
    splits = min_i64(splits, ceil_div(s.N, 256));
    return splits < 1 ? 1 : splits;
}

static int64_t padded(RouterShape s) { return ceil_div(s.E, 8) * 8; }

// dlogits in two halves (N, padded E), counts (sequences, E), parts of dw (splits, E, C); each starts at 256 bytes.
static size_t parts_of(RouterShape s, size_t start[4]) {
    const size_t half = (size_t)(s.N * padded(s)) * sizeof(floatX);
    const size_t bytes[4] = {half, half, (size_t)(ceil_div(s.N, s.T) * s.E) * sizeof(float),
                             (size_t)(dw_splits(s) * s.E * s.C) * sizeof(float)};
    size_t at = 0;
    for (int i = 0; i < 4; i++) {
        start[i] = at;
        at += (bytes[i] + 255) / 256 * 256;
    }
    return at;
}

size_t router_workspace(RouterShape s) {
    size_t start[4];
    return parts_of(s, start);
}

void router_backward(floatX* dx, real* dw, const real* dgate, const real* scores, const int32_t* expert,
                     const real* gate, const floatX* x, const floatX* w, float aux, RouterShape s, Ctx* ctx) {
    if (s.N == 0) return;
    size_t start[4];
    char* workspace = ctx_workspace<char>(ctx, (int64_t)parts_of(s, start));
    floatX *hi = (floatX*)(workspace + start[0]), *lo = (floatX*)(workspace + start[1]);
    float *count = aux != 0 ? (float*)(workspace + start[2]) : NULL, *part = (float*)(workspace + start[3]);
    if (count) {
        count_sequences<<<(unsigned)ceil_div(s.N, s.T), 1024, 0, ctx->stream>>>(count, expert, s);
        LAUNCH_CHECK();
    }
    const int64_t stride = padded(s);
    by_experts(s, [&](auto j) {
        score_backward<decltype(j)::value>
            <<<blocks_for(s.N, 8), 256, 0, ctx->stream>>>(hi, lo, stride, dgate, scores, expert, gate, count, aux, s);
    });
    LAUNCH_CHECK();
    const Matrix dlogits = {hi, s.N, stride, stride};
    launch_add(dx, dlogits, lo, Matrix{w, s.E, s.C, s.C}, s.N, s.C, ctx);
    const int64_t splits = dw_splits(s), count_dw = s.E * s.C;
    launch_product<true, true, 2, 4>(part, dlogits, lo, Matrix{x, s.N, s.C, s.C}, s.E, s.C, s.N, splits, ctx);
    add_splits<<<blocks_for(count_dw, 256), 256, 0, ctx->stream>>>(dw, part, count_dw, (int)splits);
    LAUNCH_CHECK();
}

static __global__ void count_choices(unsigned long long* load, const int32_t* expert, int64_t count, int32_t E) {
    extern __shared__ int held[];
    for (int e = threadIdx.x; e < E; e += 256) held[e] = 0;
    __syncthreads();
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < count; i += gridDim.x * (int64_t)256)
        atomicAdd(&held[expert[i]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += 256)
        if (held[e]) atomicAdd(&load[e], (unsigned long long)held[e]);
}

void router_count(int64_t* load, const int32_t* expert, int64_t NK, int32_t E, Ctx* ctx) {
    if (NK == 0) return;
    const unsigned blocks = (unsigned)min_i64(ceil_div(NK, 1024), 4 * (int64_t)ctx->sms);
    count_choices<<<blocks, 256, E * sizeof(int), ctx->stream>>>((unsigned long long*)load, expert, NK, E);
    LAUNCH_CHECK();
}

static __global__ void update_bias(float* bias, const int64_t* load, int32_t E, float rate, const StepState* state) {
    __shared__ unsigned long long total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += 256) atomicAdd(&total, (unsigned long long)load[e]);
    __syncthreads();
    if (!state->ok || total == 0) return;
    for (int e = threadIdx.x; e < E; e += 256) {
        const int64_t below = (int64_t)total - load[e] * E;  // E * (mean load - load), exact
        bias[e] += rate * ((below > 0) - (below < 0));
    }
}

void router_update_bias(real* bias, const int64_t* load, int32_t E, float rate, const StepState* state, Ctx* ctx) {
    update_bias<<<1, 256, 0, ctx->stream>>>(bias, load, E, rate, state);
    LAUNCH_CHECK();
}
