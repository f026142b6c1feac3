// The sums and decisions of a step. Reductions are in double over fixed chunks: one block per chunk, then one block
// over the chunks' sums. The order of summation depends neither on the number of SMs nor on timing. Bound by memory.
#include "layers/adamw.h"
#include "layers/rows.cuh"

enum { CHUNK = 16384, THREADS = 256, TOTAL_THREADS = 1024 };

template <int SQUARED>
static __device__ __forceinline__ double term(float x) {
    return SQUARED ? (double)x * x : (double)x;
}

// Four values: one access of 16 bytes, or of 8.
static __device__ __forceinline__ float4 load4(const float* p) { return *(const float4*)p; }
static __device__ __forceinline__ float4 load4(const floatX* p) {
    const uint2 pair = *(const uint2*)p;
    return make_float4(__uint_as_float(pair.x << 16), __uint_as_float(pair.x & 0xffff0000u),
                       __uint_as_float(pair.y << 16), __uint_as_float(pair.y & 0xffff0000u));
}

template <int SQUARED, typename T>
static __global__ void sum_chunks_kernel(double* partial, const T* x, int64_t n) {
    // A full chunk in vectors of four, or the rest in the last chunk.
    const int64_t first = blockIdx.x * (int64_t)CHUNK;
    double sum = 0;
    if (first + CHUNK <= n) {
#pragma unroll 8
        for (int i = threadIdx.x; i < CHUNK / 4; i += THREADS) {
            const float4 f = load4(x + first + 4 * i);
            sum += (term<SQUARED>(f.x) + term<SQUARED>(f.y)) + (term<SQUARED>(f.z) + term<SQUARED>(f.w));
        }
    } else {
        for (int64_t i = first + threadIdx.x; i < n && i < first + CHUNK; i += THREADS)
            sum += term<SQUARED>((float)x[i]);
    }

    // One partial sum per chunk.
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// *total += the chunks' sums, in a fixed order.
static __global__ void add_total_kernel(double* total, const double* partial, int64_t count) {
    wait_for_previous();
    double sum = 0;
    for (int64_t i = threadIdx.x; i < count; i += TOTAL_THREADS) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total += sum;
}

template <int SQUARED, typename T>
static void add_sum(double* total, const T* x, int64_t n, Ctx* ctx) {
    ASSERT(aligned(x));
    int64_t chunks = ceil_div(n, CHUNK);
    double* partial = ctx_workspace<double>(ctx, chunks);
    launch(sum_chunks_kernel<SQUARED, T>, chunks, THREADS, 0, ctx, partial, x, n);
    launch_early(add_total_kernel, 1, TOTAL_THREADS, 0, ctx, total, partial, chunks);
}

size_t step_workspace(int64_t n) { return (size_t)ceil_div(n, CHUNK) * sizeof(double); }

void loss_add(double* sum, const real* loss, int64_t N, Ctx* ctx) { add_sum<0>(sum, loss, N, ctx); }

void grad_norm_add(StepState* state, const real* grad, const floatX* rounded, int64_t n, Ctx* ctx) {
    rounded ? add_sum<1>(&state->grad_sq, rounded, n, ctx) : add_sum<1>(&state->grad_sq, grad, n, ctx);
}

// One thread each: the sums and decisions of a step are a few numbers.
static __global__ void step_begin_kernel(StepState* state) { step_begin_now(state); }

void step_begin(StepState* state, Ctx* ctx) { launch(step_begin_kernel, 1, 1, 0, ctx, state); }

static __global__ void step_decide_kernel(StepState* state, int64_t tokens, const AdamW* opt) {
    step_decide_now(state, tokens, opt->clip, opt->beta1, opt->beta2);
}

void step_decide(StepState* state, int64_t tokens, const AdamW* opt, Ctx* ctx) {
    launch(step_decide_kernel, 1, 1, 0, ctx, state, tokens, opt);
}
