// Token embedding.
//
// Forward: one warp copies a row in 16-byte vectors. Bound by memory.
//
// Backward: tokens repeat, so rows of dtable are sums over positions.
//
//   1. Radix sort of the positions by token id, stable (layers/sort.cuh). Digits have up to 9 bits: a vocabulary of 513
//      to 262144 tokens takes two passes.
//   2. One warp per (token, stripe of 256 columns) adds the rows of dout in the order of n.
//   3. A token with more than 32 occurrences uses 16 warps, whose sums are added in order.
//
// Bound by the rows of the most frequent token: a tenth of all rows where tokens are bytes. Only rows that occur are
// written: no pass over V x C. No atomics on floats.
#include "layers/embedding.h"
#include "layers/rows.cuh"
#include "layers/sort.cuh"

static __global__ void embedding_forward_kernel(floatX* out, const int32_t* token, const floatX* table, int64_t N,
                                                int64_t C) {
    // One warp per token.
    const int64_t n = blockIdx.x * 8 + threadIdx.x / 32;
    if (n < N) copy_row(out + n * C, table + token[n] * C, C);
}

void embedding_forward(floatX* out, const int32_t* token, const floatX* table, int64_t N, int64_t C, Ctx* ctx) {
    ASSERT(wide(C, out, table));
    launch(embedding_forward_kernel, blocks_for(N, 8), 256, 0, ctx, out, token, table, N, C);
}

enum { DIGIT_BITS = 9 };

struct Digit {
    const int32_t* token;
    int shift, mask;
    __device__ int operator()(int64_t i) const { return token[i] >> shift & mask; }
};

struct Scatter {
    int32_t *token_out, *position_out;
    const int32_t *token, *position;  // position NULL (first pass): element i has position i
    __device__ void operator()(int64_t i, int32_t place) const {
        token_out[place] = token[i];
        position_out[place] = position ? position[i] : (int32_t)i;
    }
    __device__ void finish(const int32_t*, const int32_t*, int) const {}
};

// Warps of a block, and rows that each warp has in flight.
enum { RUN_WARPS = 16, ROWS_AT_ONCE = 8 };

// acc += dout[position[i]] for i in first..last-1, in order.
static __device__ __forceinline__ void add_rows(float acc[8], const floatX* dout, const int32_t* position,
                                                int64_t first, int64_t last, int64_t c, int64_t C) {
    const int lane = threadIdx.x % 32;
    for (int64_t i0 = first; i0 < last; i0 += 32) {
        // 32 positions at a time, one per lane.
        const int count = last - i0 < 32 ? (int)(last - i0) : 32;
        const int mine = lane < count ? position[i0 + lane] : 0;
        for (int u = 0; u < count; u += ROWS_AT_ONCE) {
            // ROWS_AT_ONCE rows are loaded, then added in order.
            Vec8 p[ROWS_AT_ONCE] = {};
#pragma unroll
            for (int j = 0; j < ROWS_AT_ONCE; j++) {
                const int64_t n = __shfl_sync(0xffffffffu, mine, u + j);
                if (u + j < count && c < C) p[j] = *(const Vec8*)(dout + n * C + c);
            }
#pragma unroll
            for (int j = 0; j < ROWS_AT_ONCE; j++) {
                float f[8];
                floats_of(f, p[j]);
#pragma unroll
                for (int e = 0; e < 8; e++) acc[e] += f[e];
            }
        }
    }
}

// The end of the run of equal tokens that starts at `first`. The whole warp searches it.
static __device__ __forceinline__ int64_t run_end(const int32_t* token, int64_t first, int64_t N) {
    const int32_t id = token[first];
    const int64_t i = first + threadIdx.x % 32;

    // Most runs are short: the lanes compare 32 positions at once.
    unsigned same = __ballot_sync(0xffffffffu, i < N && token[i] == id);
    if (~same) return first + __ffs(~same) - 1;

    // The end of a longer run: binary search.
    int64_t low = first + 31, high = N;  // token[low] == id; high: beyond
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (token[middle] == id)
            low = middle;
        else
            high = middle;
    }
    return high;
}

// A block has RUN_WARPS sorted positions (x) and a stripe of 256 columns (y). Warp w owns the run that starts at
// position w, if any.
static __global__ void __launch_bounds__(32 * RUN_WARPS)
    embedding_backward_kernel(float* dtable, const floatX* dout, const int32_t* token, const int32_t* position,
                              int64_t N, int64_t C) {
    wait_for_previous();
    __shared__ __align__(16) float part[RUN_WARPS][256];
    __shared__ int64_t ends[RUN_WARPS];  // ends of long runs, which the whole block shares; else 0
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Does a run start at this warp's position, and is it long?
    const int64_t first = blockIdx.x * (int64_t)RUN_WARPS, i = first + warp, stripe = blockIdx.y * (int64_t)256,
                  c = stripe + lane * 8;
    int64_t end = 0;
    if (i < N && (i == 0 || token[i - 1] != token[i])) end = run_end(token, i, N);
    const bool shared = end - i > 32;
    if (lane == 0) ends[warp] = shared ? end : 0;

    // A short run: the warp adds all of its rows.
    if (end && !shared) {
        float* d = dtable + token[i] * C + c;
        float acc[8] = {};
        if (c < C) load(acc, d);
        add_rows(acc, dout, position, i, end, c, C);
        if (c < C) store(d, acc);
    }
    __syncthreads();

    // Long runs, one after the other: each warp adds its share of the rows. Then each thread adds one column of the
    // warps' sums, in order.
    for (int s = 0; s < RUN_WARPS; s++) {
        if (!ends[s]) continue;  // block-uniform
        const int64_t start = first + s, length = ends[s] - start;
        float acc[8] = {};
        add_rows(acc, dout, position, start + length * warp / RUN_WARPS, start + length * (warp + 1) / RUN_WARPS, c, C);
        store(&part[warp][lane * 8], acc);
        __syncthreads();
        const int64_t mine = stripe + threadIdx.x;
        if (threadIdx.x < 256 && mine < C) {
            float* d = dtable + token[start] * C + mine;
            float sum = *d;
#pragma unroll
            for (int w = 0; w < RUN_WARPS; w++) sum += part[w][threadIdx.x];
            *d = sum;
        }
        __syncthreads();
    }
}

size_t embedding_workspace(int64_t N, int64_t V) {
    return (size_t)(4 * N + sort_workspace(N, 1 << DIGIT_BITS)) * sizeof(int32_t);
}

void embedding_backward(real* dtable, const floatX* dout, const int32_t* token, int64_t N, int64_t V, int64_t C,
                        Ctx* ctx) {
    if (N == 0) return;
    ASSERT(N < INT32_MAX && wide(C, dtable, dout));

    // Two pairs (token, position): each pass sorts from one pair into the other.
    int32_t* sorted[4];
    sorted[0] = ctx_workspace<int32_t>(ctx, embedding_workspace(N, V) / sizeof(int32_t));
    for (int i = 1; i < 4; i++) sorted[i] = sorted[i - 1] + N;

    // The fewest passes that cover the vocabulary, with digits of equal size.
    int bits = 1;
    while (V > (int64_t)1 << bits) bits++;
    int passes = (int)ceil_div(bits, DIGIT_BITS), digit = (int)ceil_div(bits, passes);
    const int32_t *tokens = token, *positions = NULL;
    // Least significant digit first.
    for (int pass = 0; pass < passes; pass++) {
        int32_t **out = sorted + 2 * (pass % 2), mask = (1 << digit) - 1;
        counting_sort(Digit{tokens, pass * digit, mask}, Scatter{out[0], out[1], tokens, positions}, N, 1 << digit, 1,
                      sorted[3] + N, ctx);
        tokens = out[0];
        positions = out[1];
    }

    // Equal tokens are adjacent now: sum their rows.
    const dim3 grid(blocks_for(N, RUN_WARPS), blocks_for(C, 256));
    launch_early(embedding_backward_kernel, grid, 32 * RUN_WARPS, 0, ctx, dtable, dout, tokens, positions, N, C);
}
