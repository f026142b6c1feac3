// The ragged buffer on the GPU. permute_plan is a stable counting sort of the choices (layers/sort.cuh, three short
// launches). The other kernels move rows in 16-byte vectors and are bound by memory:
//
//     permute_rows     K copies of each token, in an order that reads a token from memory once
//     unpermute_rows   by token: K rows in, one row out, summed in float32 in the order of k
#include "grouped/permute.h"
#include "layers/rows.cuh"
#include "layers/sort.cuh"

size_t permute_workspace(int64_t N, int32_t K, int32_t El) { return sort_workspace(N * K, El) * sizeof(int32_t); }

// The sort key of a choice is its expert.
struct Choice {
    const int32_t* expert;
    __device__ int operator()(int64_t i) const { return expert[i]; }
};

// Writes the layout: operator() for each choice and its row, finish() for pad rows and groups.
struct Plan {
    Ragged r;
    const float* gate;
    int32_t K;
    __device__ void operator()(int64_t i, int32_t row) const {
        r.token_row[i] = row;
        if (row < 0) return;
        r.row_token[row] = (int32_t)(i / K);
        if (gate) r.row_gate[row] = gate[i];
    }
    // The pad rows are distributed over the blocks; block 0 writes group_start and group_rows.
    __device__ void finish(const int32_t* start, const int32_t* totals, int bins) const {
        for (int b = blockIdx.x; b < bins; b += gridDim.x)
            for (int row = start[b] + totals[b] + threadIdx.x; row < start[b + 1]; row += blockDim.x) {
                r.row_token[row] = -1;
                if (gate) r.row_gate[row] = 0;
            }
        if (blockIdx.x > 0) return;
        for (int b = threadIdx.x; b <= bins; b += blockDim.x) {
            r.group_start[b] = start[b];
            if (b < bins) r.group_rows[b] = totals[b];
        }
    }
};

void permute_plan(Ragged r, const int32_t* expert, const real* gate, int64_t N, int32_t K, Ctx* ctx) {
    ASSERT(r.El <= SORT_MAX_BINS && r.capacity < INT32_MAX && N * K < INT32_MAX);
    // Without tokens all experts are empty.
    if (N == 0) {
        device_zero(r.group_start, (r.El + 1) * sizeof(int64_t), ctx);
        device_zero(r.group_rows, r.El * sizeof(int32_t), ctx);
        return;
    }
    int32_t* workspace = ctx_workspace<int32_t>(ctx, sort_workspace(N * K, r.El));
    counting_sort(Choice{expert}, Plan{r, gate, K}, N * K, r.El, row_align(BACKEND), workspace, ctx);
}

// L2 reuse: an expert's rows are in token order, so blocks take the same slice of every expert before the next slice.
// All copies of a token are then made at about the same time: its first read is from memory, the others are from L2.
//
// One warp per row. Short rows (C < NARROW) would give a warp too few loads in flight, so they are merged (TOGETHER): a
// slice is contiguous in `rows`, and a warp copies 2 KB of it at a time.
enum { PERMUTE_WARPS = 8, VECTORS = 4, NARROW = 1024 };
template <bool TOGETHER>
static __global__ void __launch_bounds__(32 * PERMUTE_WARPS)
    permute_rows_kernel(floatX* rows, const floatX* tokens, Ragged r, int64_t C, int64_t slices) {
    wait_for_previous();
    // This block's slice of an expert's rows, with pad rows.
    const int64_t e = blockIdx.x % r.El, slice = blockIdx.x / r.El;
    const int64_t start = r.group_start[e], length = r.group_start[e + 1] - start;
    const int64_t first = start + length * slice / slices, end = start + length * (slice + 1) / slices;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (!TOGETHER) {
        for (int64_t row = first + warp; row < end; row += PERMUTE_WARPS) {
            const int64_t token = r.row_token[row];
            copy_row(rows + row * C, token < 0 ? NULL : tokens + token * C, C);
        }
        return;
    }
    // Merged rows: each lane copies several 16-byte vectors at once.
    const int of_row = (int)(C / 8), count = (int)(end - first) * of_row;
    Vec8* to = (Vec8*)(rows + first * C);
    for (int i0 = warp * 32 * VECTORS + lane; i0 < count; i0 += PERMUTE_WARPS * 32 * VECTORS) {
        // All loads are issued before the first store; a pad row is zeros.
        Vec8 p[VECTORS] = {};
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            const int i = i0 + 32 * j;
            const int64_t token = i < count ? r.row_token[first + i / of_row] : -1;
            if (token >= 0) p[j] = *(const Vec8*)(tokens + token * C + i % of_row * 8);
        }
#pragma unroll
        for (int j = 0; j < VECTORS; j++)
            if (i0 + 32 * j < count) to[i0 + 32 * j] = p[j];
    }
}

void permute_rows(void* to, const void* from, Ragged r, size_t row_bytes, Ctx* ctx) {
    // Rows are copied as 2-byte elements. At balanced load a warp copies one row, or 2 KB; a block has a slice.
    const int64_t C = (int64_t)row_bytes / 2, together = C < NARROW ? 8 * 32 * VECTORS / C : 1;
    const int64_t slices = ceil_div(r.capacity, r.El * PERMUTE_WARPS * together);
    ASSERT(row_bytes % 16 == 0 && aligned(to, from));
    launch_early(C < NARROW ? permute_rows_kernel<true> : permute_rows_kernel<false>, slices * r.El, 32 * PERMUTE_WARPS,
                 0, ctx, to, from, r, C, slices);
}

// A thread computes one 16-byte vector of a token, with the loads of 4 rows in flight.
static __global__ void __launch_bounds__(256)
    unpermute_rows_kernel(floatX* tokens, const floatX* rows, const float* gate, const int32_t* token_row, int64_t N,
                          int32_t K, int64_t C, int accumulate) {
    wait_for_previous();
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x, vectors = C / 8, n = i / vectors, c = i % vectors * 8;
    if (n >= N) return;
    float sum[8] = {};
    if (accumulate) load(sum, tokens + n * C + c);
    for (int32_t k0 = 0; k0 < K; k0 += 4) {
        // All loads are issued first; a choice whose expert is not local counts as zeros.
        Vec8 p[4] = {};
        float g[4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int64_t row = k0 + j < K ? token_row[n * K + k0 + j] : -1;
            if (row < 0) continue;
            g[j] = gate ? gate[n * K + k0 + j] : 1;
            p[j] = *(const Vec8*)(rows + row * C + c);
        }

        // sum_k gate[n][k] * rows[token_row[n][k]], summed in the order of k.
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float f[8];
            floats_of(f, p[j]);
#pragma unroll
            for (int e = 0; e < 8; e++) sum[e] += g[j] * f[e];
        }
    }
    store(tokens + n * C + c, sum);
}

void unpermute_rows(floatX* tokens, const floatX* rows, const real* gate, Ragged r, int64_t N, int32_t K, int64_t C,
                    int accumulate, Ctx* ctx) {
    ASSERT(wide(C, tokens, rows));
    launch_early(unpermute_rows_kernel, blocks_for(N * (C / 8), 256), 256, 0, ctx, tokens, rows, gate, r.token_row, N,
                 K, C, accumulate);
}

static __global__ void unpermute_gates_kernel(float* dgate, const float* drow_gate, int32_t parts,
                                              const int32_t* token_row, int64_t count) {
    wait_for_previous();
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x, row = i < count ? token_row[i] : -1;
    float sum = 0;
    for (int32_t p = 0; p < parts && row >= 0; p++) sum += drow_gate[row * parts + p];
    if (i < count) dgate[i] = sum;
}

void unpermute_gates(real* dgate, const real* drow_gate, int32_t parts, Ragged r, int64_t N, int32_t K, Ctx* ctx) {
    launch_early(unpermute_gates_kernel, blocks_for(N * K, 256), 256, 0, ctx, dgate, drow_gate, parts, r.token_row,
                 N * K);
}
