// Speed of attention with every kind of kernels that the GPU can run: bench/attention [cases]. The yardstick is
// bench/attention_torch.py. FLOPs are counted for the causal half, the same for all kernels:
//
//   forward    2 GEMMs: 2 B H T T / 2 (Dqk + v)
//   backward   5 GEMMs: 2 B H T T / 2 (3 Dqk + 2 v)
//
// Calls run one after another for some 300 ms, and the host waits only for the last one. So the clock is the sustained
// one under the card's power limit. (After a pause the clock is higher.) A number in the table is the median of the
// calls' times, measured with CUDA events on random inputs.
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "bench/data.cuh"
#include "layers/attention.h"

static Ctx* ctx;

static floatX* random_bf16(int64_t n, uint64_t seed) {
    floatX* p = (floatX*)device_alloc((size_t)n * sizeof(floatX), "a benchmark");
    fill<<<1024, 256, 0, ctx->stream>>>(p, n, seed);
    LAUNCH_CHECK();
    return p;
}

// The median of a round's calls, in ms.
static double median_ms(const std::function<void()>& call) {
    enum { ROUND_MS = 300, LEAST = 20, MOST = 2000 };
    static cudaEvent_t at[MOST + 1];
    if (!at[0])
        for (cudaEvent_t& e : at) CUDA_CHECK(cudaEventCreate(&e));

    // The number of calls in a round, from the time of the second of two calls.
    float ms;
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaEventRecord(at[i], ctx->stream));
        call();
    }
    CUDA_CHECK(cudaEventRecord(at[2], ctx->stream));
    CUDA_CHECK(cudaEventSynchronize(at[2]));
    CUDA_CHECK(cudaEventElapsedTime(&ms, at[1], at[2]));
    const int calls = std::max((int)LEAST, std::min((int)MOST, (int)(ROUND_MS / ms)));

    // The calls: one event before each, one after the last.
    for (int i = 0; i < calls; i++) {
        CUDA_CHECK(cudaEventRecord(at[i], ctx->stream));
        call();
    }
    CUDA_CHECK(cudaEventRecord(at[calls], ctx->stream));
    CUDA_CHECK(cudaEventSynchronize(at[calls]));

    // The times, without the first quarter of the calls: the clock still falls there.
    std::vector<float> times;
    for (int i = calls / 4; i < calls; i++) {
        CUDA_CHECK(cudaEventElapsedTime(&ms, at[i], at[i + 1]));
        times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

int main(int argc, char** argv) {
    struct {
        int64_t B, T, H, rope, stride;
    } cases[] = {{4, 4096, 16, 64, 576},  {1, 4096, 16, 64, 576}, {2, 8192, 16, 64, 576}, {16, 1024, 16, 64, 576},
                 {1, 4096, 128, 64, 576}, {8, 2048, 8, 32, 288},  {8, 1024, 4, 16, 80}};
    int count = argc > 1 ? atoi(argv[1]) : (int)(sizeof(cases) / sizeof(cases[0]));
    ctx = ctx_create((size_t)512 << 20);
    const int first_kind = ctx->portable;  // 1: there are portable kernels only
    printf("%s\n%3s %5s %4s %12s %8s | %9s %8s | %9s %8s\n", device_name(ctx), "B", "T", "H", "heads", "kernels",
           "fwd ms", "TFLOP/s", "bwd ms", "TFLOP/s");
    for (int i = 0; i < count; i++) {
        // The tensors of this shape. forward writes out and lse, backward reads them.
        auto c = cases[i];
        AttnShape s = {c.B, c.T, c.H, 2 * c.rope, c.rope, 2 * c.rope, c.stride, 1 / sqrtf(3.0f * (float)c.rope)};
        int64_t n = c.B * c.T, row = c.H * c.rope;
        floatX *q = random_bf16(n * 3 * row, 1), *kv = random_bf16(n * 4 * row, 2),
               *k_rope = random_bf16(n * c.stride, 3);
        floatX *dout = random_bf16(n * 2 * row, 4), *out = random_bf16(n * 2 * row, 5);
        floatX *dq = random_bf16(n * 3 * row, 6), *dkv = random_bf16(n * 4 * row, 7);
        floatX* dk_rope = random_bf16(n * c.stride, 8);
        real* lse = (real*)device_alloc((size_t)(n * c.H) * sizeof(real), "a benchmark");

        // One row of the table for each kind of kernels. GFLOP over ms is TFLOP/s.
        double half = (double)(c.B * c.H) * (double)c.T * (double)c.T * 1e-9, qk = 3.0 * (double)c.rope,
               v = 2.0 * (double)c.rope;
        char heads[32];
        snprintf(heads, sizeof(heads), "%lld/%lld/%lld", (long long)s.nope, (long long)s.rope, (long long)s.v);
        for (int kind = first_kind; kind < 2; kind++) {
            ctx->portable = kind;
            double forward = median_ms([&] { attention_forward(out, lse, NULL, q, kv, k_rope, s, ctx); });
            double backward =
                median_ms([&] { attention_backward(dq, dkv, dk_rope, dout, out, lse, q, kv, k_rope, s, ctx); });
            printf("%3lld %5lld %4lld %12s %8s | %9.3f %8.1f | %9.3f %8.1f\n", (long long)c.B, (long long)c.T,
                   (long long)c.H, heads, kind ? "portable" : "Hopper's", forward, half * (qk + v) / forward, backward,
                   half * (3 * qk + 2 * v) / backward);
        }
        for (floatX* p : {q, kv, k_rope, dout, out, dq, dkv, dk_rope}) device_free(p);
        device_free(lse);
    }
    ctx_destroy(ctx);
    return 0;
}
