// Muon. Momentum and update are bound by memory: a thread owns 8 elements. Newton-Schulz takes three GEMMs per
// iteration, bound by the tensor cores. cuBLASLt's strided batches compute all matrices of a parameter at once. The
// terms b A and a X are added as the C operand, so no other kernel passes over the matrices:
//
//   A    = X X^T                  2 small^2 large FLOPs a matrix
//   B    = c A A + b A            2 small^3
//   next = B X + a X              2 small^2 large        (the last one times 0.2 sqrt(max(rows, columns)))
//
// The norm of X is a reduction in double over chunks, in a fixed order. One block sums a chunk. Then each block adds
// all sums of its matrix before it scales a chunk.
#include "layers/muon.h"

#include "device/lt.cuh"
#include "layers/buffer_list.cuh"

enum { THREADS = LIST_THREADS, CHUNK = 32768, MOST = 32768 };

template <typename Momentum>
static __global__ void __launch_bounds__(THREADS)
    muon_momentum_kernel(const __grid_constant__ BufferList<MuonBuffer> list, const StepState* state) {
    const auto [buffer, i] = list_place(list);
    wait_for_previous();
    if (i >= buffer.n || !state->ok) return;
    const float scale = (float)state->grad_scale, momentum = MUON_MOMENTUM;
    Momentum* m = (Momentum*)buffer.m;
    float g[8], m1[8], u[8];
    load(m1, m + i);
    load_gradients(g, buffer, i);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        m1[j] = momentum * m1[j] + scale * g[j];
        u[j] = scale * g[j] + momentum * m1[j];
    }
    store(m + i, m1);
    store(buffer.x + i, u);
}

void muon_momentum(const MuonBuffer* buffers, int count, int bf16, const StepState* state, Ctx* ctx) {
    for (int b = 0; b < count; b++)
        ASSERT(wide(buffers[b].n, buffers[b].x, buffers[b].m, buffers[b].grad, buffers[b].rounded));
    launch_list(bf16 ? muon_momentum_kernel<floatX> : muon_momentum_kernel<float>, buffers, count, ctx, state);
}

// squares[matrix][chunk] = sum of squares; grid (chunks, matrices).
static __global__ void __launch_bounds__(THREADS) muon_square_kernel(double* squares, const floatX* x, int64_t n) {
    wait_for_previous();
    const int64_t first = blockIdx.x * (int64_t)CHUNK, end = min(first + CHUNK, n);
    const floatX* matrix = x + blockIdx.y * n;
    double sum = 0;
    for (int64_t i = first + threadIdx.x * 8; i < end; i += THREADS * 8) {
        float v[8], square = 0;
        load(v, matrix + i);
#pragma unroll
        for (int j = 0; j < 8; j++) square += v[j] * v[j];
        sum += square;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) squares[blockIdx.y * (int64_t)gridDim.x + blockIdx.x] = sum;
}

// to = x / norm of its matrix
static __global__ void __launch_bounds__(THREADS)
    muon_normalize_kernel(floatX* to, const floatX* x, const double* squares, int64_t n) {
    wait_for_previous();
    const int64_t first = blockIdx.x * (int64_t)CHUNK, end = min(first + CHUNK, n);
    double sum = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += THREADS) sum += squares[blockIdx.y * (int64_t)gridDim.x + i];
    const float per_norm = (float)(1 / (sqrt(block_sum(sum)) + MUON_EPS));
    const int64_t matrix = blockIdx.y * n;
    for (int64_t i = first + threadIdx.x * 8; i < end; i += THREADS * 8) {
        float v[8];
        load(v, x + matrix + i);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= per_norm;
        store(to + matrix + i, v);
    }
}

// A, B, a second X, and the sums of squares of the chunks.
int64_t muon_work(int64_t count, int64_t rows, int64_t columns) {
    const int64_t small = min_i64(rows, columns), n = rows * columns;
    return count * (2 * small * small + n + ceil_div(n, CHUNK) * (int64_t)(sizeof(double) / sizeof(floatX)));
}

void muon_orthogonalize(floatX* x, floatX* work, int64_t count, int64_t rows, int64_t columns, Ctx* ctx) {
    const bool tall = rows > columns;
    const int64_t small = min_i64(rows, columns), large = max_i64(rows, columns), n = rows * columns,
                  n2 = small * small;
    // A grid has a row for each matrix, and at most 65,535.
    for (; count > MOST; count -= MOST, x += MOST * n) muon_orthogonalize(x, work, MOST, rows, columns, ctx);
    floatX *A = work, *B = A + count * n2, *other = B + count * n2;
    double* squares = (double*)(other + count * n);
    ASSERT(wide(n, x, other));

    // X = u / ||u||, in the second buffer. After an odd number of steps the result is in x.
    static_assert(MUON_STEPS % 2 == 1, "the result is in the second place");
    const dim3 blocks(blocks_for(n, CHUNK), (unsigned)count);
    launch_early(muon_square_kernel, blocks, THREADS, 0, ctx, squares, x, n);
    launch_early(muon_normalize_kernel, blocks, THREADS, 0, ctx, other, x, squares, n);

    // Newton-Schulz, with two buffers of X used in turn. The last X has the size of AdamW's updates.
    for (int step = 0; step < MUON_STEPS; step++) {
        floatX *from = step % 2 ? x : other, *to = step % 2 ? other : x;
        const float size = step == MUON_STEPS - 1 ? (float)(0.2 * sqrt((double)large)) : 1;
        // A = X X^T, or X^T X
        LtProduct gram = {.m = small, .n = small, .k = large, .transpose_a = tall, .transpose_b = !tall};
        gram.batch = {count, n, n, n2};
        lt_multiply({A, small}, {from, columns}, {from, columns}, gram, ctx);

        // B = c A A + b A
        LtProduct square = {.m = small, .n = small, .k = small, .alpha = (float)MUON_C, .beta = (float)MUON_B, .c = A};
        square.batch = {count, n2, n2, n2};
        lt_multiply({B, small}, {A, small}, {A, small}, square, ctx);

        // X = B X + a X, or X B + a X
        LtProduct next = {.m = rows, .n = columns, .k = small, .alpha = size, .beta = size * (float)MUON_A, .c = from};
        next.batch = {count, tall ? n : n2, tall ? n2 : n, n};
        const LtMatrix X = {from, columns}, polynomial_of = {B, small};
        lt_multiply({to, columns}, tall ? X : polynomial_of, tall ? polynomial_of : X, next, ctx);
    }
}

static __global__ void __launch_bounds__(THREADS)
    muon_update_kernel(const __grid_constant__ BufferList<MuonBuffer> list, const Muon* opt, const StepState* state) {
    const auto [buffer, i] = list_place(list);
    wait_for_previous();
    if (i >= buffer.n || !state->ok) return;
    const float lr = opt->lr, decay = opt->weight_decay;
    float w[8], x[8];
    load_masters(w, buffer.weight + i, buffer.master + i);
    load(x, buffer.x + i);
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] -= lr * (x[j] + decay * w[j]);
    store_masters(buffer.weight + i, buffer.master + i, w);
}

void muon_update(const MuonBuffer* buffers, int count, const Muon* opt, const StepState* state, Ctx* ctx) {
    for (int b = 0; b < count; b++) ASSERT(wide(buffers[b].n, buffers[b].weight, buffers[b].master, buffers[b].x));
    launch_list(muon_update_kernel, buffers, count, ctx, opt, state);
}
