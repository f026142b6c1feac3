// RMSNorm: bound by memory.
//
// Forward: a row is read once and kept in registers while its statistics are summed. A thread has a few 16-byte
// vectors, so a team of 1 to 16 warps takes a row. An SM holds many teams at different stages. A team of several warps
// is a block; four teams of one warp share a block.
//
// Backward: a persistent kernel with one block per SM (two for narrow rows). A block has 16 warps, divided into teams
// that walk the rows. While a team computes one row, its threads load their vectors of the next into registers. The
// loads of one row ahead are enough in flight: more rows at once would only scatter the accesses over more pages of
// DRAM.
//
// Each thread keeps its sums of dw in registers. The sums of the blocks go to the workspace, and a second launch adds
// them in a fixed order. No atomics, so the bits do not depend on timing.
#include "layers/rmsnorm.h"

#include "layers/rows.cuh"

// FORWARD_P, BACKWARD_P: 16-byte vectors of a thread.
enum { FORWARD_P = 4, BACKWARD_P = 2, BACKWARD_WARPS = 16, BACKWARD_THREADS = 32 * BACKWARD_WARPS };
static const int64_t WIDEST = 16384;
static const int64_t SMALL_ROWS = 4;  // rows of a block with teams of one warp
static const int64_t SMS = 132;       // of an H200: a constant, so that the bits do not depend on the GPU

// Sum over team `team` of a block. `turn` alternates from call to call, so that one barrier per sum is enough.
template <int WARPS, int TEAMS>
static __device__ __forceinline__ float team_sum(float x, int team, int turn) {
    x = warp_sum(x);
    if constexpr (WARPS > 1) {
        // Each warp's sum, then all of them in order.
        __shared__ float part[2][TEAMS][WARPS];
        if (threadIdx.x % 32 == 0) part[turn][team][threadIdx.x / 32 % WARPS] = x;
        __syncthreads();
        x = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) x += part[turn][team][w];
    }
    return x;
}

template <int P>
static __device__ __forceinline__ void load_vectors(Vec8 x[P], const floatX* row, int first, int step, int64_t C) {
#pragma unroll
    for (int i = 0; i < P; i++)
        if (first + i * step < C) x[i] = *(const Vec8*)(row + first + i * step);
}

// P vectors a thread, WARPS warps a row.
template <int P, int WARPS, bool RESIDUAL>
static __global__ void __launch_bounds__(WARPS == 1 ? 128 : 32 * WARPS)
    rmsnorm_forward_kernel(floatX* sum, floatX* y, float* rstd, const floatX* a, const floatX* b, int64_t stride,
                           const floatX* w, float eps, int64_t N, int64_t C) {
    // The row of the team, and the first column of this thread.
    const int first = threadIdx.x % (32 * WARPS) * 8, step = 32 * WARPS * 8;
    const int64_t row = WARPS == 1 ? blockIdx.x * SMALL_ROWS + threadIdx.x / 32 : blockIdx.x;
    if (row >= N) return;

    // a and b are written by preceding kernels.
    previous_is_done();
    Vec8 x[P];
    load_vectors<P>(x, a + row * stride, first, step, C);

    // x = sum = a + b, rounded before its statistics are taken.
    if constexpr (RESIDUAL) {
        Vec8 other[P];
        load_vectors<P>(other, b + row * C, first, step, C);
#pragma unroll
        for (int i = 0; i < P; i++) {
            const int c = first + i * step;
            if (c >= C) continue;
            float f[8], g[8];
            floats_of(f, x[i]);
            floats_of(g, other[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) f[j] += g[j];
            x[i] = vec8_of(f);
            *(Vec8*)(sum + row * C + c) = x[i];
        }
    }

    // rstd = (mean_c x_c^2 + eps)^-1/2
    float squares = 0;
#pragma unroll
    for (int i = 0; i < P; i++) {
        if (first + i * step >= C) continue;
        float f[8];
        floats_of(f, x[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) squares += f[j] * f[j];
    }
    Vec8 weight[P];
    load_vectors<P>(weight, w, first, step, C);  // in flight during the sum
    const float r = 1 / sqrtf(team_sum<WARPS, 1>(squares, 0, 0) / C + eps);

    // y = w x rstd
    if (first == 0) rstd[row] = r;
#pragma unroll
    for (int i = 0; i < P; i++) {
        const int c = first + i * step;
        if (c >= C) continue;
        float f[8], scale[8];
        floats_of(f, x[i]);
        floats_of(scale, weight[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) f[j] *= r * scale[j];
        store(y + row * C + c, f);
    }
}

// Calls launch_for(P, WARPS) for rows of C elements: the fewest warps that hold a row in P vectors a thread.
template <int P, int WARPS = 1, typename Launch>
static void by_width(int64_t C, Launch launch_for) {
    if (C <= 256)
        launch_for(Int<1>(), Int<1>());
    else if (C <= 256 * P * WARPS)
        launch_for(Int<P>(), Int<WARPS>());
    else if constexpr (WARPS < 16)
        by_width<P, 2 * WARPS>(C, launch_for);
    else
        launch_for(Int<4>(), Int<16>());
}

// y = w x rstd with x = a, or with RESIDUAL x = sum = a + b.
template <bool RESIDUAL>
static void forward(floatX* sum, floatX* y, real* rstd, const floatX* a, const floatX* b, int64_t stride,
                    const floatX* w, double eps, int64_t N, int64_t C, Ctx* ctx) {
    ASSERT(wide(C | stride, sum, y, a, b, w) && C <= WIDEST);
    by_width<FORWARD_P>(C, [&](auto p, auto warps) {
        // One block per row, or four rows of one warp each.
        constexpr int P = decltype(p)::value, WARPS = decltype(warps)::value;
        const int rows = WARPS == 1 ? (int)SMALL_ROWS : 1;  // of a block
        launch_early(rmsnorm_forward_kernel<P, WARPS, RESIDUAL>, blocks_for(N, rows), 32 * WARPS * rows, 0, ctx, sum, y,
                     rstd, a, b, stride, w, (float)eps, N, C);
    });
}

void rmsnorm_forward(floatX* y, real* rstd, const floatX* x, int64_t stride, const floatX* w, double eps, int64_t N,
                     int64_t C, Ctx* ctx) {
    forward<false>(NULL, y, rstd, x, NULL, stride, w, eps, N, C, ctx);
}

void residual_rmsnorm_forward(floatX* sum, floatX* y, real* rstd, const floatX* a, const floatX* b, const floatX* w,
                              double eps, int64_t N, int64_t C, Ctx* ctx) {
    forward<true>(sum, y, rstd, a, b, C, w, eps, N, C, ctx);
}

// A thread's vectors of a row in backward. dx is loaded where it is added to.
template <int P>
struct BackwardRow {
    Vec8 x[P], dy[P], dx[P];
    float rstd;
};

template <int P, int WARPS>
static __global__ void __launch_bounds__(BACKWARD_THREADS, P == 1 ? 2 : 1)
    rmsnorm_backward_kernel(floatX* dx, float* partial, const floatX* dy, const floatX* x, int64_t stride,
                            const floatX* w, const float* rstd, int64_t N, int64_t C, int accumulate) {
    // The shape of the block, and the team of this thread.
    constexpr int TEAMS = BACKWARD_WARPS / WARPS, STEP = 32 * WARPS * 8;
    const int team = threadIdx.x / (32 * WARPS), first = threadIdx.x % (32 * WARPS) * 8;
    const int64_t next = (int64_t)gridDim.x * TEAMS;  // from row to row of a team
    auto load_row = [&](int64_t row) {                // zeros after the last
        const int64_t width = row < N ? C : 0;
        BackwardRow<P> in = {};
        load_vectors<P>(in.x, x + row * stride, first, STEP, width);
        load_vectors<P>(in.dy, dy + row * C, first, STEP, width);
        if (accumulate) load_vectors<P>(in.dx, dx + row * stride, first, STEP, width);
        if (row < N) in.rstd = rstd[row];
        return in;
    };
    wait_for_previous();

    // The first row is loaded before the loop; in the loop always the next one.
    int64_t row = blockIdx.x * (int64_t)TEAMS + team;
    BackwardRow<P> here = load_row(row);
    Vec8 weight[P] = {};
    load_vectors<P>(weight, w, first, STEP, C);
    float dw[P][8] = {};
    for (int turn = 0; row - team < N; row += next, turn ^= 1) {  // same count for all teams (barrier in team_sum)
        const BackwardRow<P> ahead = load_row(row + next);
        const float r = here.rstd;

        // The thread's part of sum_j g_j x_j with g = dy w; dw += dy x rstd
        float dot = 0, f[8], g[8], scale[8];
#pragma unroll
        for (int i = 0; i < P; i++) {
            floats_of(f, here.x[i]);
            floats_of(g, here.dy[i]);
            floats_of(scale, weight[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                dot += g[j] * scale[j] * f[j];
                dw[i][j] += g[j] * f[j] * r;
            }
        }

        // k = rstd^2 mean_j(g_j x_j); dx = rstd (g - x k), or added to dx
        const float k = team_sum<WARPS, TEAMS>(dot, team, turn) / C * r * r;
#pragma unroll
        for (int i = 0; i < P; i++) {
            const int c = first + i * STEP;
            if (row >= N || c >= C) continue;
            float before[8];
            floats_of(f, here.x[i]);
            floats_of(g, here.dy[i]);
            floats_of(scale, weight[i]);
            floats_of(before, here.dx[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) f[j] = before[j] + r * (g[j] * scale[j] - f[j] * k);
            store(dx + row * stride + c, f);
        }
        here = ahead;
    }

    // Epilogue: the block's dw. The teams' sums are added in order.
    extern __shared__ __align__(16) char shared[];
    auto sums = (float(*)[P * STEP]) shared;
#pragma unroll
    for (int i = 0; i < P; i++) store(&sums[team][first + i * STEP], dw[i]);
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += BACKWARD_THREADS) {
        float sum = 0;
#pragma unroll
        for (int t = 0; t < TEAMS; t++) sum += sums[t][c];
        partial[blockIdx.x * C + c] = sum;
    }
}

// dw[c] += sum of the partial sums: 32 columns a block, 32 threads a column, all in a fixed order.
static __global__ void rmsnorm_weight_kernel(float* dw, const float* partial, int count, int64_t C) {
    // A warp adds 32 neighbouring columns over every 32nd block.
    __shared__ float part[32][33];
    const int64_t c = blockIdx.x * 32 + threadIdx.x;
    previous_is_done();
    float sum = 0;
    if (c < C)
#pragma unroll 4
        for (int i = threadIdx.y; i < count; i += 32) sum += partial[i * C + c];

    // Transposed, so that a warp adds up a column.
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_sum(part[threadIdx.x][threadIdx.y]);
    if (threadIdx.x == 0 && blockIdx.x * 32 + threadIdx.y < C) dw[blockIdx.x * 32 + threadIdx.y] += sum;
}

size_t rmsnorm_workspace(int64_t N, int64_t C) { return (size_t)(min_i64(N, 2 * SMS) * C) * sizeof(float); }

void rmsnorm_backward(floatX* dx, real* dw, const floatX* dy, const floatX* x, int64_t stride, const floatX* w,
                      const real* rstd, int64_t N, int64_t C, int accumulate, Ctx* ctx) {
    ASSERT(wide(C | stride, dx, dy, x, w) && C <= WIDEST);
    // Launch 1: dx, and the partial dw of each thread block. Launch 2: their sum.
    float* partial = ctx_workspace<float>(ctx, rmsnorm_workspace(N, C) / sizeof(float));
    int64_t blocks = 0;
    by_width<BACKWARD_P>(C, [&](auto p, auto warps) {
        // One block per SM, whose two rows take the registers. Narrow rows: two blocks, for more loads in flight.
        constexpr int P = decltype(p)::value, WARPS = decltype(warps)::value;
        const size_t shared = P * BACKWARD_THREADS * 8 * sizeof(float);
        blocks = min_i64(ceil_div(N, BACKWARD_WARPS / WARPS), P == 1 ? 2 * SMS : SMS);
        launch_early(rmsnorm_backward_kernel<P, WARPS>, blocks, BACKWARD_THREADS, shared, ctx, dx, partial, dy, x,
                     stride, w, rstd, N, C, accumulate);
    });
    launch_early(rmsnorm_weight_kernel, blocks_for(C, 32), dim3(32, 32), 0, ctx, dw, partial, (int)blocks, C);
}
