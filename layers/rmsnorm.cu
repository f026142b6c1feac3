// RMSNorm: bound by memory. A row is read once and kept in registers while its statistics are summed: one warp a row up
// to C = 2048 (8 pieces of 16 bytes a lane), a block of 8 warps a row beyond. Rows that cannot be read in 16-byte
// pieces, or that are wider than 16384, take the plain path, which reads them twice.
//
// backward: a fixed number of blocks walks the rows, each keeping its sum for dw in registers; the blocks' sums go to
// the workspace and are added in a fixed order by a second launch. No atomics, so the bits do not depend on timing.
#include "layers/rmsnorm.h"
#include "layers/rows.cuh"

// Blocks of the backward at most: 3 and 2 an SM of an H200.
static const int64_t WARP_BLOCKS = 396, TEAM_BLOCKS = 264, PLAIN_CHUNKS = 64;

template <int WARPS>
static __device__ __forceinline__ float team_sum(float x) {
    x = warp_sum(x);
    if constexpr (WARPS > 1) {
        __shared__ float part[WARPS];
        __syncthreads();  // the last sum was read
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
        __syncthreads();
        x = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) x += part[w];
    }
    return x;
}

// P pieces a thread, WARPS warps a row, 8 / WARPS rows a block.
template <int P, int WARPS, bool RESIDUAL>
static __global__ void __launch_bounds__(256)
    forward(floatX* sum, floatX* y, float* rstd, const floatX* a, const floatX* b, int64_t stride, const floatX* w,
            int64_t N, int64_t C) {
    const int t = threadIdx.x % (32 * WARPS), step = 32 * WARPS * 8;
    const int64_t row = blockIdx.x * (int64_t)(8 / WARPS) + threadIdx.x / (32 * WARPS);
    if (row >= N) return;
    Pack8 x[P];
#pragma unroll
    for (int i = 0; i < P; i++) {
        int64_t c = t * 8 + i * step;
        if (c < C) x[i] = *(const Pack8*)(a + row * stride + c);
    }
    if constexpr (RESIDUAL) {
        Pack8 other[P];
#pragma unroll
        for (int i = 0; i < P; i++) {
            int64_t c = t * 8 + i * step;
            if (c < C) other[i] = *(const Pack8*)(b + row * C + c);
        }
#pragma unroll
        for (int i = 0; i < P; i++) {
            int64_t c = t * 8 + i * step;
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
        if (t * 8 + i * step >= C) continue;
        float f[8];
        unpack(f, x[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) squares += f[j] * f[j];
    }
    const float r = 1 / sqrtf(team_sum<WARPS>(squares) / C + RMSNORM_EPS);
    if (t == 0) rstd[row] = r;
#pragma unroll
    for (int i = 0; i < P; i++) {
        int64_t c = t * 8 + i * step;
        if (c >= C) continue;
        float f[8], scale[8];
        unpack(f, x[i]);
        load<8>(scale, w + c);
#pragma unroll
        for (int j = 0; j < 8; j++) f[j] *= r * scale[j];
        store<8>(y + row * C + c, f);
    }
}

// One warp a row; sum may be NULL (no residual), else it is a, b added.
static __global__ void forward_plain(floatX* sum, floatX* y, float* rstd, const floatX* a, const floatX* b,
                                     int64_t stride, const floatX* w, int64_t N, int64_t C) {
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

// Calls launch(P, WARPS) for rows of this many pieces; false if none is wide enough.
template <typename Launch>
static bool by_width(int64_t pieces, Launch launch) {
    if (pieces <= 32) launch(Int<1>(), Int<1>());
    else if (pieces <= 64) launch(Int<2>(), Int<1>());
    else if (pieces <= 128) launch(Int<4>(), Int<1>());
    else if (pieces <= 256) launch(Int<8>(), Int<1>());
    else if (pieces <= 512) launch(Int<2>(), Int<8>());
    else if (pieces <= 1024) launch(Int<4>(), Int<8>());
    else if (pieces <= 2048) launch(Int<8>(), Int<8>());
    else return false;
    return true;
}

void rmsnorm_forward(floatX* y, real* rstd, const floatX* x, int64_t stride, const floatX* w, int64_t N, int64_t C,
                     Ctx* ctx) {
    if (N == 0) return;
    bool done = wide(C | stride, y, x, w) && by_width(C / 8, [&](auto p, auto warps) {
                    constexpr int P = decltype(p)::value, WARPS = decltype(warps)::value;
                    forward<P, WARPS, false><<<blocks_for(N, 8 / WARPS), 256, 0, ctx->stream>>>(
                        NULL, y, rstd, x, NULL, stride, w, N, C);
                });
    if (!done)
        forward_plain<<<blocks_for(N, 8), 256, 0, ctx->stream>>>(NULL, y, rstd, x, NULL, stride, w, N, C);
    LAUNCH_CHECK();
}

void residual_rmsnorm_forward(floatX* sum, floatX* y, real* rstd, const floatX* a, const floatX* b, const floatX* w,
                              int64_t N, int64_t C, Ctx* ctx) {
    if (N == 0) return;
    bool done = wide(C, sum, y, a, b, w) && by_width(C / 8, [&](auto p, auto warps) {
                    constexpr int P = decltype(p)::value, WARPS = decltype(warps)::value;
                    forward<P, WARPS, true><<<blocks_for(N, 8 / WARPS), 256, 0, ctx->stream>>>(sum, y, rstd, a, b, C, w,
                                                                                               N, C);
                });
    if (!done) forward_plain<<<blocks_for(N, 8), 256, 0, ctx->stream>>>(sum, y, rstd, a, b, C, w, N, C);
    LAUNCH_CHECK();
}

// One warp a row and 4 rows a block, or 8 warps for one row.
template <int P, int WARPS>
static __global__ void __launch_bounds__(WARPS == 1 ? 128 : 256, WARPS == 1 ? 3 : 2)
    backward(floatX* dx, float* partial, const floatX* dy, const floatX* x, int64_t stride, const floatX* w,
             const float* rstd, int64_t N, int64_t C, int accumulate) {
    const int TEAMS = WARPS == 1 ? 4 : 1, step = 32 * WARPS * 8;
    const int t = threadIdx.x % (32 * WARPS), team = threadIdx.x / (32 * WARPS);
    float dw[P][8] = {};
    for (int64_t row = blockIdx.x * TEAMS + team; row < N; row += (int64_t)gridDim.x * TEAMS) {
        Pack8 xs[P], gs[P];
#pragma unroll
        for (int i = 0; i < P; i++) {
            int64_t c = t * 8 + i * step;
            if (c >= C) continue;
            xs[i] = *(const Pack8*)(x + row * stride + c);
            gs[i] = *(const Pack8*)(dy + row * C + c);
        }
        const float r = rstd[row];
        float dot = 0;
#pragma unroll
        for (int i = 0; i < P; i++) {
            int64_t c = t * 8 + i * step;
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
        const float k = team_sum<WARPS>(dot) / C * r * r;
#pragma unroll
        for (int i = 0; i < P; i++) {
            int64_t c = t * 8 + i * step;
            if (c >= C) continue;
            float f[8], g[8], scale[8], old[8] = {};
            unpack(f, xs[i]);
            unpack(g, gs[i]);
            load<8>(scale, w + c);
            if (accumulate) load<8>(old, dx + row * stride + c);
#pragma unroll
            for (int j = 0; j < 8; j++) f[j] = old[j] + r * (g[j] * scale[j] - f[j] * k);
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
            int64_t c = t * 8 + i * step;
            if (c < C) store_real<8>(partial + blockIdx.x * C + c, dw[i]);
        }
    }
}

static __global__ void backward_plain(floatX* dx, const floatX* dy, const floatX* x, int64_t stride, const floatX* w,
                                      const float* rstd, int64_t N, int64_t C, int accumulate) {
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
static __global__ void weight_plain(float* partial, const floatX* dy, const floatX* x, int64_t stride,
                                    const float* rstd, int64_t N, int64_t C) {
    const int64_t c = blockIdx.x * 128 + threadIdx.x, per = ceil_div(N, gridDim.y), first = blockIdx.y * per;
    if (c >= C) return;
    float sum = 0;
    for (int64_t n = first; n < N && n < first + per; n++)
        sum += (float)dy[n * C + c] * (float)x[n * stride + c] * rstd[n];
    partial[blockIdx.y * C + c] = sum;
}

// dw[c] += sum of the partial sums: 32 columns a block, 32 threads a column, all in a fixed order.
static __global__ void add_partials(float* dw, const float* partial, int count, int64_t C) {
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

size_t rmsnorm_workspace(int64_t N, int64_t C) {
    return (size_t)(smaller(N, WARP_BLOCKS) * C) * sizeof(float);
}

void rmsnorm_backward(floatX* dx, real* dw, const floatX* dy, const floatX* x, int64_t stride, const floatX* w,
                      const real* rstd, int64_t N, int64_t C, int accumulate, Ctx* ctx) {
    if (N == 0) return;
    int64_t blocks = 0;
    float* partial = ctx_workspace<float>(ctx, rmsnorm_workspace(N, C) / sizeof(float));
    bool done = wide(C | stride, dx, dy, x, w) && by_width(C / 8, [&](auto p, auto warps) {
                    constexpr int P = decltype(p)::value, WARPS = decltype(warps)::value;
                    blocks = WARPS == 1 ? smaller(ceil_div(N, 4), WARP_BLOCKS) : smaller(N, TEAM_BLOCKS);
                    backward<P, WARPS><<<(unsigned)blocks, WARPS == 1 ? 128 : 256, 0, ctx->stream>>>(
                        dx, partial, dy, x, stride, w, rstd, N, C, accumulate);
                });
    if (!done) {
        blocks = smaller(N, PLAIN_CHUNKS);
        weight_plain<<<dim3(blocks_for(C, 128), (unsigned)blocks), 128, 0, ctx->stream>>>(partial, dy, x, stride, rstd,
                                                                                          N, C);
        LAUNCH_CHECK();
        backward_plain<<<blocks_for(N, 8), 256, 0, ctx->stream>>>(dx, dy, x, stride, w, rstd, N, C, accumulate);
    }
    LAUNCH_CHECK();
    add_partials<<<blocks_for(C, 32), dim3(32, 32), 0, ctx->stream>>>(dw, partial, (int)blocks, C);
    LAUNCH_CHECK();
}
