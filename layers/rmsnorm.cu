// RMSNorm: bound by memory. A row is read once and kept in registers while its statistics are summed: a few pieces of
// 16 bytes a thread, so that a team of 1 to 16 warps, a block of its own, takes a row and an SM holds many teams at
// different stages. Rows that cannot be read in 16-byte pieces, or that are wider than 16384, take the plain path.
//
// backward: a fixed number of blocks walks the rows, each keeping its sum for dw in registers and reading a row ahead;
// the blocks' sums go to the workspace and are added in a fixed order by a second launch. No atomics, so the bits do
// not depend on timing.
#include "layers/rmsnorm.h"
#include "layers/rows.cuh"

// Pieces a thread: the backward keeps four rows' worth of them.
enum { FORWARD_P = 4, BACKWARD_P = 2 };
static const int64_t SMS = 132, PLAIN_BLOCKS = 64,
                     SMALL_ROWS = 4;  // of an H200; the bits do not follow the GPU at hand

// Sum over a team; `turn` alternates from call to call, so that one barrier a sum is enough.
template <int WARPS>
static __device__ __forceinline__ float team_sum(float x, int turn) {
    x = warp_sum(x);
    if constexpr (WARPS > 1) {
        __shared__ float part[2][WARPS];
        if (threadIdx.x % 32 == 0) part[turn][threadIdx.x / 32] = x;
        __syncthreads();
        x = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) x += part[turn][w];
    }
    return x;
}

template <int P>
static __device__ __forceinline__ void load_pieces(Pack8 x[P], const floatX* row, int first, int step, int64_t C) {
#pragma unroll
    for (int i = 0; i < P; i++)
        if (first + i * step < C) x[i] = *(const Pack8*)(row + first + i * step);
}

// P pieces a thread, WARPS warps a row; teams of one warp share a block by four.
template <int P, int WARPS, bool RESIDUAL>
static __global__ void __launch_bounds__(WARPS == 1 ? 128 : 32 * WARPS)
    rmsnorm_forward_kernel(floatX* sum, floatX* y, float* rstd, const floatX* a, const floatX* b, int64_t stride,
                           const floatX* w, int64_t N, int64_t C) {
    const int first = threadIdx.x % (32 * WARPS) * 8, step = 32 * WARPS * 8;
    const int64_t row = WARPS == 1 ? blockIdx.x * SMALL_ROWS + threadIdx.x / 32 : blockIdx.x;
    if (row >= N) return;
    Pack8 x[P];
    load_pieces<P>(x, a + row * stride, first, step, C);
    if constexpr (RESIDUAL) {
        Pack8 other[P];
        load_pieces<P>(other, b + row * C, first, step, C);
#pragma unroll
        for (int i = 0; i < P; i++) {
            const int c = first + i * step;
            if (c >= C) continue;
            float f[8], g[8];
            unpack(f, x[i]);
            unpack(g, other[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) f[j] += g[j];
            x[i] = pack(f);
            *(Pack8*)(sum + row * C + c) = x[i];
        }
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < P; i++) {
        if (first + i * step >= C) continue;
        float f[8];
        unpack(f, x[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) squares += f[j] * f[j];
    }
    Pack8 weight[P];
    load_pieces<P>(weight, w, first, step, C);  // under way during the sum
    const float r = 1 / sqrtf(team_sum<WARPS>(squares, 0) / C + RMSNORM_EPS);
    if (first == 0) rstd[row] = r;
#pragma unroll
    for (int i = 0; i < P; i++) {
        const int c = first + i * step;
        if (c >= C) continue;
        float f[8], scale[8];
        unpack(f, x[i]);
        unpack(scale, weight[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) f[j] *= r * scale[j];
        store<8>(y + row * C + c, f);
    }
}

// One warp a row; sum may be NULL (no residual), else it is a, b added.
static __global__ void rmsnorm_forward_plain_kernel(floatX* sum, floatX* y, float* rstd, const floatX* a,
                                                    const floatX* b, int64_t stride, const floatX* w, int64_t N,
                                                    int64_t C) {
    const int lane = threadIdx.x % 32;
    const int64_t row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= N) return;
    const floatX* x = sum ? sum + row * C : a + row * stride;
    float squares = 0;
    for (int64_t c = lane; c < C; c += 32) {
        if (sum) sum[row * C + c] = (floatX)((float)a[row * C + c] + (float)b[row * C + c]);
        float f = x[c];
        squares += f * f;
    }
    const float r = 1 / sqrtf(warp_sum(squares) / C + RMSNORM_EPS);
    if (lane == 0) rstd[row] = r;
    for (int64_t c = lane; c < C; c += 32) y[row * C + c] = (floatX)((float)x[c] * r * (float)w[c]);
}

template <int N>
using Int = std::integral_constant<int, N>;

// Calls launch(P, WARPS) for rows of this many pieces; false if they are too wide.
template <int P, typename Launch>
static bool by_width(int64_t pieces, Launch launch) {
    if (pieces <= 32)
        launch(Int<1>(), Int<1>());
    else if (pieces <= 32 * P)
        launch(Int<P>(), Int<1>());
    else if (pieces <= 64 * P)
        launch(Int<P>(), Int<2>());
    else if (pieces <= 128 * P)
        launch(Int<P>(), Int<4>());
    else if (pieces <= 256 * P)
        launch(Int<P>(), Int<8>());
    else if (pieces <= 512 * P)
        launch(Int<P>(), Int<16>());
    else if (pieces <= 2048)
        launch(Int<4>(), Int<16>());
    else
        return false;
    return true;
}

static constexpr int threads_of(int warps) { return warps == 1 ? 128 : 32 * warps; }

void rmsnorm_forward(floatX* y, real* rstd, const floatX* x, int64_t stride, const floatX* w, int64_t N, int64_t C,
                     Ctx* ctx) {
    if (N == 0) return;
    bool done = wide(C | stride, y, x, w) && by_width<FORWARD_P>(C / 8, [&](auto p, auto warps) {
                    constexpr int P = decltype(p)::value, WARPS = decltype(warps)::value;
                    rmsnorm_forward_kernel<P, WARPS, false>
                        <<<blocks_for(N, WARPS == 1 ? SMALL_ROWS : 1), threads_of(WARPS), 0, ctx->stream>>>(
                            NULL, y, rstd, x, NULL, stride, w, N, C);
                });
    if (!done)
        rmsnorm_forward_plain_kernel<<<blocks_for(N, 8), 256, 0, ctx->stream>>>(NULL, y, rstd, x, NULL, stride, w, N,
                                                                                C);
    LAUNCH_CHECK();
}

void residual_rmsnorm_forward(floatX* sum, floatX* y, real* rstd, const floatX* a, const floatX* b, const floatX* w,
                              int64_t N, int64_t C, Ctx* ctx) {
    if (N == 0) return;
    bool done = wide(C, sum, y, a, b, w) && by_width<FORWARD_P>(C / 8, [&](auto p, auto warps) {
                    constexpr int P = decltype(p)::value, WARPS = decltype(warps)::value;
                    rmsnorm_forward_kernel<P, WARPS, true>
                        <<<blocks_for(N, WARPS == 1 ? SMALL_ROWS : 1), threads_of(WARPS), 0, ctx->stream>>>(
                            sum, y, rstd, a, b, C, w, N, C);
                });
    if (!done) rmsnorm_forward_plain_kernel<<<blocks_for(N, 8), 256, 0, ctx->stream>>>(sum, y, rstd, a, b, C, w, N, C);
    LAUNCH_CHECK();
}

template <int P, int WARPS>
static __global__ void __launch_bounds__(WARPS == 1 ? 128 : 32 * WARPS)
    rmsnorm_backward_kernel(floatX* dx, float* partial, const floatX* dy, const floatX* x, int64_t stride,
                            const floatX* w, const float* rstd, int64_t N, int64_t C, int accumulate) {
    const int TEAMS = WARPS == 1 ? 4 : 1, step = 32 * WARPS * 8;
    const int t = threadIdx.x % (32 * WARPS), team = threadIdx.x / (32 * WARPS), first = t * 8;
    const int64_t stride_rows = (int64_t)gridDim.x * TEAMS;
    float dw[P][8] = {};
    Pack8 xs[P], gs[P], next_x[P], next_g[P];
    int64_t row = blockIdx.x * (int64_t)TEAMS + team;
    if (row < N) {
        load_pieces<P>(next_x, x + row * stride, first, step, C);
        load_pieces<P>(next_g, dy + row * C, first, step, C);
    }
    for (int turn = 0; row < N; row += stride_rows, turn ^= 1) {
#pragma unroll
        for (int i = 0; i < P; i++) xs[i] = next_x[i], gs[i] = next_g[i];
        Pack8 old[P] = {};
        if (accumulate) load_pieces<P>(old, dx + row * stride, first, step, C);
        if (row + stride_rows < N) {
            load_pieces<P>(next_x, x + (row + stride_rows) * stride, first, step, C);
            load_pieces<P>(next_g, dy + (row + stride_rows) * C, first, step, C);
        }
        const float r = rstd[row];
        float dot = 0;
#pragma unroll
        for (int i = 0; i < P; i++) {
            const int c = first + i * step;
            if (c >= C) continue;
            float f[8], g[8], scale[8];
            unpack(f, xs[i]);
            unpack(g, gs[i]);
            load<8>(scale, w + c);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                dot += g[j] * scale[j] * f[j];
                dw[i][j] += g[j] * f[j] * r;
            }
        }
        const float k = team_sum<WARPS>(dot, turn) / C * r * r;
#pragma unroll
        for (int i = 0; i < P; i++) {
            const int c = first + i * step;
            if (c >= C) continue;
            float f[8], g[8], scale[8], before[8];
            unpack(f, xs[i]);
            unpack(g, gs[i]);
            load<8>(scale, w + c);
            unpack(before, old[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) f[j] = before[j] + r * (g[j] * scale[j] - f[j] * k);
            store<8>(dx + row * stride + c, f);
        }
    }
    if constexpr (WARPS == 1) {  // the block's warps, in order
        __shared__ float sum[P * 256];
        for (int turn = 0; turn < TEAMS; turn++) {
            if (team == turn)
#pragma unroll
                for (int i = 0; i < P; i++)
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        int c = i * 256 + j * 32 + t;  // free of bank conflicts: any one-to-one place will do
                        sum[c] = (turn ? sum[c] : 0) + dw[i][j];
                    }
            __syncthreads();
        }
        for (int i = threadIdx.x; i < P * 256; i += 128) {
            int64_t c = i / 256 * 256 + i % 32 * 8 + i / 32 % 8;
            if (c < C) partial[blockIdx.x * C + c] = sum[i];
        }
    } else {
#pragma unroll
        for (int i = 0; i < P; i++) {
            const int c = first + i * step;
            if (c < C) store_real<8>(partial + blockIdx.x * C + c, dw[i]);
        }
    }
}

static __global__ void rmsnorm_backward_plain_kernel(floatX* dx, const floatX* dy, const floatX* x, int64_t stride,
                                                     const floatX* w, const float* rstd, int64_t N, int64_t C,
                                                     int accumulate) {
    const int lane = threadIdx.x % 32;
    const int64_t row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= N) return;
    const floatX *f = x + row * stride, *g = dy + row * C;
    floatX* d = dx + row * stride;
    float dot = 0, r = rstd[row];
    for (int64_t c = lane; c < C; c += 32) dot += (float)g[c] * (float)w[c] * (float)f[c];
    const float k = warp_sum(dot) / C * r * r;
    for (int64_t c = lane; c < C; c += 32)
        d[c] = (floatX)((accumulate ? (float)d[c] : 0) + r * ((float)g[c] * (float)w[c] - (float)f[c] * k));
}

// A thread a column, a block row a chunk of tokens.
static __global__ void rmsnorm_weight_plain_kernel(float* partial, const floatX* dy, const floatX* x, int64_t stride,
                                                   const float* rstd, int64_t N, int64_t C) {
    const int64_t c = blockIdx.x * 128 + threadIdx.x, per = ceil_div(N, gridDim.y), first = blockIdx.y * per;
    if (c >= C) return;
    float sum = 0;
    for (int64_t n = first; n < N && n < first + per; n++)
        sum += (float)dy[n * C + c] * (float)x[n * stride + c] * rstd[n];
    partial[blockIdx.y * C + c] = sum;
}

// dw[c] += sum of the partial sums: 32 columns a block, 32 threads a column, all in a fixed order.
static __global__ void rmsnorm_weight_kernel(float* dw, const float* partial, int count, int64_t C) {
    __shared__ float part[32][33];
    const int64_t c = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (c < C)
#pragma unroll 4
        for (int i = threadIdx.y; i < count; i += 32) sum += partial[i * C + c];
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_sum(part[threadIdx.x][threadIdx.y]);
    if (threadIdx.x == 0 && blockIdx.x * 32 + threadIdx.y < C) dw[blockIdx.x * 32 + threadIdx.y] += sum;
}

// Blocks of the backward for teams of this many warps: what the registers of an SM hold, 24 warps or one team of 16.
static int64_t backward_blocks(int64_t N, int warps) {
    if (warps == 1) return smaller(ceil_div(N, SMALL_ROWS), SMS * 24 / SMALL_ROWS);
    return smaller(N, warps == 16 ? SMS : SMS * 24 / warps);
}

size_t rmsnorm_workspace(int64_t N, int64_t C) {
    const int64_t warps = C <= 1024 ? 2 : C <= 2048 ? 4 : 8;  // teams of two make the most blocks, C of 1024 included
    return (size_t)(smaller(N, SMS * 24 / warps) * C) * sizeof(float);
}

void rmsnorm_backward(floatX* dx, real* dw, const floatX* dy, const floatX* x, int64_t stride, const floatX* w,
                      const real* rstd, int64_t N, int64_t C, int accumulate, Ctx* ctx) {
    if (N == 0) return;
    int64_t blocks = 0;
    float* partial = ctx_workspace<float>(ctx, rmsnorm_workspace(N, C) / sizeof(float));
    bool done = wide(C | stride, dx, dy, x, w) && by_width<BACKWARD_P>(C / 8, [&](auto p, auto warps) {
                    constexpr int P = decltype(p)::value, WARPS = decltype(warps)::value;
                    blocks = backward_blocks(N, WARPS);
                    rmsnorm_backward_kernel<P, WARPS><<<(unsigned)blocks, threads_of(WARPS), 0, ctx->stream>>>(
                        dx, partial, dy, x, stride, w, rstd, N, C, accumulate);
                });
    if (!done) {
        blocks = smaller(N, PLAIN_BLOCKS);
        rmsnorm_weight_plain_kernel<<<dim3(blocks_for(C, 128), (unsigned)blocks), 128, 0, ctx->stream>>>(
            partial, dy, x, stride, rstd, N, C);
        LAUNCH_CHECK();
        rmsnorm_backward_plain_kernel<<<blocks_for(N, 8), 256, 0, ctx->stream>>>(dx, dy, x, stride, w, rstd, N, C,
                                                                                 accumulate);
    }
    LAUNCH_CHECK();
    rmsnorm_weight_kernel<<<blocks_for(C, 32), dim3(32, 32), 0, ctx->stream>>>(dw, partial, (int)blocks, C);
    LAUNCH_CHECK();
}
