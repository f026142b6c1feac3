// The routers' inputs and rows. center_add reads x once, in pieces of 16 bytes, and is bound by that; the others touch
// Wg alone, some hundred kilobytes a block.
//
// center_add: lane l of a warp holds 8 columns, warp w of 8 the rows w, w + 8, ... of those that its block has; the
// block's sums are added up in shared memory, and reach `sum` by one atomic a column. Whole numbers: in whatever order.
#include "moe/center.h"

#include "layers/adamw.h"
#include "layers/rows.cuh"

enum { WARPS = 8, COLUMNS = 32 * 8, THREADS = 32 * WARPS };

typedef unsigned long long Atomic;  // what atomicAdd takes; negative numbers wrap to the right sum

static __global__ void __launch_bounds__(THREADS) add_inputs(int64_t* sum, const floatX* x, int64_t N, int64_t C) {
    __shared__ int64_t held[WARPS][COLUMNS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t c0 = blockIdx.x * (int64_t)COLUMNS, c = c0 + lane * 8;

    // This warp's rows.
    int64_t mine[8] = {};
    if (c < C) {
        for (int64_t n = blockIdx.y * (int64_t)WARPS + warp; n < N; n += gridDim.y * (int64_t)WARPS) {
            float value[8];
            load(value, x + n * C + c);
#pragma unroll
            for (int i = 0; i < 8; i++) mine[i] += center_input(value[i]);
        }
    }

    // The block's.
#pragma unroll
    for (int i = 0; i < 8; i++) held[warp][lane * 8 + i] = mine[i];
    __syncthreads();
    if (c0 + threadIdx.x >= C) return;
    int64_t total = 0;
    for (int w = 0; w < WARPS; w++) total += held[w][threadIdx.x];
    atomicAdd((Atomic*)&sum[c0 + threadIdx.x], (Atomic)total);
}

void center_add(int64_t* sum, const floatX* x, int64_t N, int64_t C, Ctx* ctx) {
    if (N == 0) return;
    const int64_t across = ceil_div(C, COLUMNS), rows = ceil_div(4 * (int64_t)ctx->sms, across);
    launch(add_inputs, dim3((unsigned)across, (unsigned)min_i64(rows, ceil_div(N, WARPS))), THREADS, 0, ctx, sum, x, N,
           C);
}

// Sum over a block's threads, valid in all of them. Always the same order.
template <typename T>
static __device__ T block_sum(T x) {
    __shared__ T held[THREADS];
    held[threadIdx.x] = x;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) held[threadIdx.x] += held[threadIdx.x + half];
        __syncthreads();
    }
    return held[0];
}

static __global__ void __launch_bounds__(THREADS) direction(float* u, const int64_t* sum, int64_t C) {
    double square = 0;
    for (int64_t c = threadIdx.x; c < C; c += THREADS) square += (double)sum[c] * (double)sum[c];
    square = block_sum(square);
    const double factor = square > 0 ? 1 / sqrt(square) : 0;
    for (int64_t c = threadIdx.x; c < C; c += THREADS) u[c] = (float)((double)sum[c] * factor);
}

void center_direction(real* u, const int64_t* sum, int64_t C, Ctx* ctx) {
    launch(direction, 1, THREADS, 0, ctx, u, sum, C);
}

// A block an expert: what this rank has of its row.
static __global__ void __launch_bounds__(THREADS)
    add_along(int64_t* along, const float* own, const float* u, int64_t first, int64_t n, int64_t C) {
    const int64_t row = blockIdx.x * C, from = max(first, row), to = min(first + n, row + C);
    int64_t part = 0;
    for (int64_t i = from + threadIdx.x; i < to; i += THREADS)
        part += center_product((double)own[i - first] * (double)u[i - row]);
    part = block_sum(part);
    if (threadIdx.x == 0) along[blockIdx.x] = part;
}

void center_along(int64_t* along, const real* own, const real* u, int64_t first, int64_t n, int64_t E, int64_t C,
                  Ctx* ctx) {
    launch(add_along, E, THREADS, 0, ctx, along, own, u, first, n, C);
}

static __global__ void __launch_bounds__(THREADS)
    take_away(floatX* weight, float* w, const int64_t* along, const float* u, int64_t first, int64_t n, int64_t C,
              const StepState* state) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x, at = first + i;
    if (i >= n || !state->ok) return;
    w[i] -= (float)((double)along[at / C] * 0x1p-32 * (double)u[at % C]);
    weight[i] = (floatX)w[i];
}

void center_apply(floatX* weight, real* w, const int64_t* along, const real* u, int64_t first, int64_t n, int64_t C,
                  const StepState* state, Ctx* ctx) {
    if (n == 0) return;
    launch(take_away, ceil_div(n, THREADS), THREADS, 0, ctx, weight, w, along, u, first, n, C, state);
}
