// The router on the GPU: cuBLASLt GEMMs (layers/matmul.cu) for logits and gradients, a warp per token for the rest.
//
// The three GEMMs read bf16 and sum in float32. They are small (2 N E C operations forward, four times that backward)
// and bound by memory at 16b's E. Forward reads x (N, C) once; backward reads x and updates dx once.
//
// dlogits is float32. It enters its two GEMMs as a sum of two bf16, hi + lo, which loses 2^-17 of it. The halves are
// stored next to each other, so that one GEMM reads both:
//
//   dlogits (N, 2E)  hi | lo        weights (2E, C)  Wg        halves (2E, C)  hi^T x
//                                                    Wg                        lo^T x
//
//   dx += dlogits weights, rounded to bf16 once;  halves = dlogits^T x, both added to dw
//
// Rows of dlogits and scores start on 16 bytes if E is a multiple of 4, as cuBLASLt's fast kernels require. A tensor
// core's float32 sum rounds toward zero after every 16 products. A sum of C products of random signs loses about
// C / 16 * 2^-24.5 / sqrt(3) of its size by that: logits 3e-6 at C = 2048 and 1e-5 at C = 7168.
//
// A warp per token, lane l has experts l, l + 32, ... in registers:
//
//   choose            logits -> scores s -> s + bias -> best groups -> K best -> gates
//   score_backward    dgate -> ds of the gates, + ds of the balance loss -> dlogits -> hi | lo
//
// Selection: scores become integers of the same order. So two warp reductions (redux.sync) find the best score and the
// lowest index that has it.
#include "moe/router.h"

#include "layers/matmul.h"
#include "moe/router.cuh"

// p = sigmoid(p) or softmax(p) over a token's experts; -inf beyond E.
template <int J>
static __device__ __forceinline__ void to_scores(float (&p)[J], const RouterShape& s) {
    if (s.score == SCORE_SIGMOID) {
#pragma unroll
        for (int j = 0; j < J; j++) p[j] = 1 / (1 + expf(-p[j]));
        return;
    }
    float top = -INFINITY, sum = 0;
#pragma unroll
    for (int j = 0; j < J; j++) top = fmaxf(top, p[j]);
    top = warp_max(top);
#pragma unroll
    for (int j = 0; j < J; j++) sum += p[j] = expf(p[j] - top);
    sum = warp_sum(sum);
    const float per_sum = 1 / sum;
#pragma unroll
    for (int j = 0; j < J; j++) p[j] *= per_sum;
}

// Keeps the experts of the top_groups best groups; those of the others count as -inf in `value`. `compared`: s + bias
// of the warp's token in shared memory, which is overwritten.
template <int J>
static __device__ __forceinline__ void limit_to_groups(uint32_t (&value)[J], float* compared, const RouterShape& s) {
    uint32_t group[J];
    float score[J];
    bool inside[J];
    best_groups(inside, group, score, compared, s);
#pragma unroll
    for (int j = 0; j < J; j++)
        if (threadIdx.x % 32 + 32 * j < s.E && !inside[j]) value[j] = ordered(-INFINITY);
}

// The K best experts, one after another, and their gates; lane k keeps choice k. gate_k = s of the selected expert,
// divided by (their sum + 1e-20) if norm, times scale. `row`: s of the token in shared memory.
template <int J>
static __device__ __forceinline__ void select_experts(int32_t* expert, float* gate, uint32_t (&value)[J],
                                                      const float* row, int64_t n, const RouterShape& s) {
    const int lane = threadIdx.x % 32;
    float sum = 0, my_gate = 0;
    int my_expert = 0;
    for (int k = 0; k < s.K; k++) {
        const int e = s.force_balance ? (int)((n * s.K + k) % s.E) : take_best<J>(value);
        const float score = row[e];
        sum += score;
        if (lane == k) {
            my_expert = e;
            my_gate = score;
        }
    }
    const float factor = s.norm ? s.scale / (sum + 1e-20f) : s.scale;
    if (lane < s.K) {
        expert[n * s.K + lane] = my_expert;
        gate[n * s.K + lane] = my_gate * factor;
    }
}

// Scores in place of the logits, then the selection and the gates. J: registers for the experts, 32 J >= E. 8 warps a
// block. `row_values`: a row of E values for each warp in shared memory, through which its lanes exchange values.
template <int J>
static __global__ void __launch_bounds__(256)
    choose(float* scores, int32_t* expert, float* gate, const float* bias, RouterShape s) {
    wait_for_previous();
    __shared__ float row_values[8][32 * J];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t n = blockIdx.x * (int64_t)8 + warp;
    if (n >= s.N) return;
    float *row = scores + n * s.E, *mine = row_values[warp], p[J];

    // Scores from logits, in registers.
#pragma unroll
    for (int j = 0; j < J; j++) {
        const int e = lane + 32 * j;
        p[j] = e < s.E ? row[e] : -INFINITY;
    }
    to_scores(p, s);

    // The selection compares s + bias: as ordered integers in `value`, as floats in shared memory.
    uint32_t value[J];
#pragma unroll
    for (int j = 0; j < J; j++) {
        const int e = lane + 32 * j;
        value[j] = 0;
        if (e >= s.E) continue;
        row[e] = p[j];
        mine[e] = p[j] + bias[e];
        value[j] = ordered(mine[e]);
    }
    __syncwarp();
    if (s.groups > 1) limit_to_groups(value, mine, s);

#pragma unroll
    for (int j = 0; j < J; j++)
        if (lane + 32 * j < s.E) mine[lane + 32 * j] = p[j];  // s, for the gates
    __syncwarp();
    select_experts(expert, gate, value, mine, n, s);
}

// count (sequences, E) += tokens that have an expert's score among their K largest. A block takes COUNT_TOKENS tokens
// of a sequence, one at a time in each warp. Counts are whole numbers, so the order of the atomics does not matter.
enum { COUNT_TOKENS = 32 };
template <int J>
static __global__ void __launch_bounds__(256) count_best(float* count, const float* scores, RouterShape s) {
    wait_for_previous();
    __shared__ int local_count[32 * J];
    const int lane = threadIdx.x % 32;
    const int64_t sequence = blockIdx.x, first = sequence * s.T + blockIdx.y * (int64_t)COUNT_TOKENS,
                  end = min(min(first + COUNT_TOKENS, (sequence + 1) * s.T), s.N);
    for (int e = threadIdx.x; e < 32 * J; e += 256) local_count[e] = 0;
    __syncthreads();
    for (int64_t n = first + threadIdx.x / 32; n < end; n += 8) {
        uint32_t value[J];
#pragma unroll
        for (int j = 0; j < J; j++) value[j] = lane + 32 * j < s.E ? ordered(scores[n * s.E + lane + 32 * j]) : 0;
        for (int k = 0; k < s.K; k++) {
            const int e = take_best<J>(value);
            if (lane == 0) atomicAdd(&local_count[e], 1);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < s.E; e += 256)
        if (local_count[e]) atomicAdd(&count[sequence * s.E + e], (float)local_count[e]);
}

// d = ds of the selected experts from the gradients of their gates; the others stay 0. With norm the gate is
// scale s_k / sum, so ds_k = (scale dgate_k - sum_j dgate_j gate_j) / sum.
template <int J>
static __device__ __forceinline__ void gate_backward(float (&d)[J], const float* dgate, const float* scores,
                                                     const int32_t* expert, const float* gate, int64_t n,
                                                     const RouterShape& s) {
    const int lane = threadIdx.x % 32;
    float sum = 1e-20f, gate_dot = 0;
    for (int k = 0; k < s.K; k++) {
        sum += scores[n * s.E + expert[n * s.K + k]];
        gate_dot += dgate[n * s.K + k] * gate[n * s.K + k];
    }
    for (int k = 0; k < s.K; k++) {
        const int e = expert[n * s.K + k];
        const float g = s.scale * dgate[n * s.K + k], ds = s.norm ? (g - gate_dot) / sum : g;
#pragma unroll
        for (int j = 0; j < J; j++)
            if (e == lane + 32 * j) d[j] = ds;
    }
}

// d += ds of the balance loss: aux / T * (f_e - sum_j f_j s_j / sum s) / sum s, with s in p. 1e-20: scores may all be
// 0.
template <int J>
static __device__ __forceinline__ void aux_backward(float (&d)[J], const float (&p)[J], const float* count, float aux,
                                                    int64_t n, const RouterShape& s) {
    const int lane = threadIdx.x % 32;
    const float f = (float)s.E / (s.K * s.T), *c = count + n / s.T * s.E;
    float total = 0, dot = 0;
#pragma unroll
    for (int j = 0; j < J; j++) {
        total += p[j];
        if (lane + 32 * j < s.E) dot += f * c[lane + 32 * j] * p[j];
    }
    total = warp_sum(total) + 1e-20f;
    dot = warp_sum(dot);
#pragma unroll
    for (int j = 0; j < J; j++)
        if (lane + 32 * j < s.E) d[j] += aux / s.T / total * (f * c[lane + 32 * j] - dot / total);
}

// dlogits of a token, split in two bf16: its row is hi (E), then lo (E). One warp per token, lane l has experts l,
// l + 32, ...; d is ds, then dlogits. count is NULL without balance loss. The grid also copies Wg twice into weights.
template <int J>
static __global__ void __launch_bounds__(256)
    score_backward(floatX* dlogits, const float* dgate, const float* scores, const int32_t* expert, const float* gate,
                   const float* count, float aux, floatX* weights, const floatX* w, RouterShape s) {
    wait_for_previous();

    // weights: Wg twice.
    const int64_t matrix = s.E * s.C;
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < matrix; i += gridDim.x * (int64_t)256)
        weights[i] = weights[matrix + i] = w[i];

    const int lane = threadIdx.x % 32;
    const int64_t n = blockIdx.x * (int64_t)8 + threadIdx.x / 32;
    if (n >= s.N) return;

    // s, and 0 for lanes beyond E. Then ds.
    float p[J], d[J] = {};
#pragma unroll
    for (int j = 0; j < J; j++) p[j] = lane + 32 * j < s.E ? scores[n * s.E + lane + 32 * j] : 0;
    gate_backward(d, dgate, scores, expert, gate, n, s);
    if (count) aux_backward(d, p, count, aux, n, s);

    // dlogits = s (1 - s) ds (sigmoid) or s (ds - sum_j s_j ds_j) (softmax)
    float dot = 0;
#pragma unroll
    for (int j = 0; j < J; j++) dot += d[j] * p[j];
    dot = warp_sum(dot);
#pragma unroll
    for (int j = 0; j < J; j++) d[j] = p[j] * (s.score == SCORE_SIGMOID ? d[j] * (1 - p[j]) : d[j] - dot);

    // hi = dlogits rounded to bf16, lo = the rounding error of hi, rounded to bf16
    floatX* row = dlogits + n * 2 * s.E;
#pragma unroll
    for (int j = 0; j < J; j++) {
        const int e = lane + 32 * j;
        if (e >= s.E) continue;
        // d - hi is exact in float32.
        const floatX hi = (floatX)d[j];
        row[e] = hi;
        row[s.E + e] = (floatX)(d[j] - (float)hi);
    }
}

// dw += hi^T x + lo^T x.
static __global__ void __launch_bounds__(256) add_halves(float* dw, const float* halves, int64_t matrix) {
    wait_for_previous();
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (i < matrix) dw[i] = dw[i] + halves[i] + halves[matrix + i];
}

// The router's arrays in the workspace, after matmul_workspace() bytes that each GEMM may overwrite.
struct RouterWorkspace {
    floatX* dlogits;  // (N, 2E): hi | lo
    floatX* weights;  // (2E, C): Wg twice
    float* halves;    // (2E, C): hi^T x, lo^T x
    float* count;     // (sequences, E)
    size_t bytes;     // of the workspace, that of the GEMMs included
};

// The arrays, each aligned to 256 bytes, of a workspace that starts at `base`.
static RouterWorkspace scratch_of(RouterShape s, char* base) {
    RouterWorkspace w;
    w.bytes = matmul_workspace();
    auto take = [&](int64_t count, size_t element) {
        char* part = base + w.bytes;
        w.bytes += (size_t)round_up(count * (int64_t)element, 256);
        return part;
    };
    w.dlogits = (floatX*)take(s.N * 2 * s.E, sizeof(floatX));
    w.weights = (floatX*)take(2 * s.E * s.C, sizeof(floatX));
    w.halves = (float*)take(2 * s.E * s.C, sizeof(float));
    w.count = (float*)take(ceil_div(s.N, s.T) * s.E, sizeof(float));
    return w;
}

size_t router_workspace(RouterShape s) { return scratch_of(s, nullptr).bytes; }

void router_forward(real* scores, int32_t* expert, real* gate, const floatX* x, const floatX* w, const real* bias,
                    RouterShape s, Ctx* ctx) {
    if (s.N == 0) return;
    matmul_forward_real(scores, x, w, s.N, s.C, s.E, ctx);  // logits = x Wg^T

    // Scores, selection and gates
    by_experts(s, [&](auto j) {
        launch_early(choose<decltype(j)::value>, blocks_for(s.N, 8), 256, 0, ctx, scores, expert, gate, bias, s);
    });
}

void router_backward(floatX* dx, real* dw, const real* dgate, const real* scores, const int32_t* expert,
                     const real* gate, const floatX* x, const floatX* w, float aux, RouterShape s, Ctx* ctx) {
    if (s.N == 0) return;
    const RouterWorkspace scratch = scratch_of(s, ctx_workspace<char>(ctx, (int64_t)router_workspace(s)));
    const int64_t matrix = s.E * s.C;

    // count_e of each sequence, for the balance loss.
    float* count = aux != 0 ? scratch.count : NULL;
    if (count) {
        const int64_t sequences = ceil_div(s.N, s.T);
        const dim3 blocks((unsigned)sequences, (unsigned)ceil_div(min_i64(s.T, s.N), COUNT_TOKENS));
        device_zero(count, (size_t)(sequences * s.E) * sizeof(float), ctx);
        by_experts(
            s, [&](auto j) { launch_early(count_best<decltype(j)::value>, blocks, 256, 0, ctx, count, scores, s); });
    }

    // dlogits = s (1 - s) ds, or s (ds - sum_j s_j ds_j), as hi + lo
    by_experts(s, [&](auto j) {
        launch_early(score_backward<decltype(j)::value>, blocks_for(s.N, 8), 256, 0, ctx, scratch.dlogits, dgate,
                     scores, expert, gate, count, aux, scratch.weights, w, s);
    });

    // dx += hi Wg + lo Wg: one GEMM, because a second rounding to bf16 would lose the correction by lo.
    matmul_dgrad(dx, scratch.dlogits, scratch.weights, s.N, s.C, 2 * s.E, 1, ctx);

    // dw += hi^T x + lo^T x: one GEMM that reads x once.
    matmul_wgrad(scratch.halves, scratch.dlogits, x, s.N, s.C, 2 * s.E, 0, ctx);
    launch_early(add_halves, blocks_for(matrix, 256), 256, 0, ctx, dw, scratch.halves, matrix);
}
