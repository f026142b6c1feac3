// The bookkeeping of expert parallelism. One thread computes one element of the output, and neighbouring threads access
// neighbouring addresses. A token's K choices come from L1 after its first thread. The kernels are bound by memory, and
// move about a hundredth of the bytes of the tokens themselves. Counts are integers: atomics in shared memory, then one
// global atomic per block and count.
#include "layers/rows.cuh"
#include "moe/dispatch_ops.h"

static __global__ void __launch_bounds__(256)
    ranks_kernel(int32_t* rank, unsigned long long* counts, const int32_t* expert, int64_t N, int32_t K, int32_t P,
                 int32_t El) {
    extern __shared__ int local_count[];  // (P, 2)
    // The counts of this thread block.
    for (int i = threadIdx.x; i < 2 * P; i += 256) local_count[i] = 0;
    __syncthreads();
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < N * P; i += gridDim.x * (int64_t)256) {
        // The number of the token's choices that rank j owns.
        const int64_t n = i / P;
        const int32_t j = (int32_t)(i % P);
        int choices = 0;
        for (int32_t k = 0; k < K; k++) choices += expert[n * K + k] / El == j;
        rank[i] = choices ? j : -1;
        if (choices == 0) continue;
        atomicAdd(&local_count[2 * j], 1);
        atomicAdd(&local_count[2 * j + 1], choices);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * P; i += 256)
        if (local_count[i]) atomicAdd(&counts[i], (unsigned long long)local_count[i]);
}

void dispatch_ranks(int32_t* rank, int64_t* counts, const int32_t* expert, int64_t N, int32_t K, int32_t P, int32_t El,
                    Ctx* ctx) {
    device_zero(counts, 2 * P * sizeof(int64_t), ctx);
    const int64_t blocks = min_i64(ceil_div(N * P, 1024), 4 * (int64_t)ctx->sms);
    launch(ranks_kernel, blocks, 256, 2 * P * sizeof(int), ctx, rank, (unsigned long long*)counts, expert, N, K, P, El);
}

static __global__ void __launch_bounds__(256)
    choices_kernel(int32_t* row_expert, float* row_gate, const int32_t* expert, const float* gate,
                   const int32_t* token_row, int64_t N, int32_t K, int32_t P, int32_t El) {
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x, n = i / K / P;
    if (n >= N) return;
    // Choice k of token n, in the row that is sent to rank j; row -1: there is none.
    const int32_t j = (int32_t)(i / K % P), k = (int32_t)(i % K);
    const int64_t row = token_row[n * P + j];
    if (row < 0) return;

    // Its expert's local number on rank j.
    const int32_t e = expert[n * K + k];
    const bool here = e / El == j;
    row_expert[row * K + k] = here ? e - j * El : -1;
    row_gate[row * K + k] = here ? gate[n * K + k] : 0;
}

void dispatch_choices(int32_t* row_expert, real* row_gate, const int32_t* expert, const real* gate, Ragged send,
                      int64_t N, int32_t K, int32_t El, Ctx* ctx) {
    launch(choices_kernel, blocks_for(N * send.El * K, 256), 256, 0, ctx, row_expert, row_gate, expert, gate,
           send.token_row, N, K, send.El, El);
}

static __global__ void __launch_bounds__(256)
    choices_backward_kernel(float* dgate, const float* drow_gate, const int32_t* expert, const int32_t* token_row,
                            int64_t count, int32_t K, int32_t P, int32_t El) {
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (i >= count) return;
    // The row that was sent to the rank that owns this choice.
    const int64_t row = token_row[i / K * P + expert[i] / El];
    dgate[i] = drow_gate[row * K + i % K];
}

void dispatch_choices_backward(real* dgate, const real* drow_gate, const int32_t* expert, Ragged send, int64_t N,
                               int32_t K, int32_t El, Ctx* ctx) {
    launch(choices_backward_kernel, blocks_for(N * K, 256), 256, 0, ctx, dgate, drow_gate, expert, send.token_row,
           N * K, K, send.El, El);
}
