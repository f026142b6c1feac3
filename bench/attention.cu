// Speed of attention on the GPU: bench/attention. Medians of CUDA events on random inputs. FLOPs count the causal half:
// forward 2 products, 2 B H T T / 2 (Dqk + v); backward 5, 2 B H T T / 2 (3 Dqk + 2 v), whatever the kernels do.
// The yardstick is bench/attention_torch.py.
#include <stdio.h>

#include <algorithm>
#include <vector>

#include "device/cuda.cuh"
#include "layers/attention.h"

static floatX* random_bf16(int64_t n, uint32_t seed) {
    std::vector<uint16_t> host((size_t)n);
    uint64_t x = seed * 0x9E3779B97F4A7C15u + 1;
    for (auto& h : host) {  // sums of three uniform numbers: variance 1, near enough to normal
        float sum = 0;
        for (int i = 0; i < 3; i++) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            sum += (float)(x >> 40) * 0x1p-23f - 1;
        }
        __nv_bfloat16 b = __float2bfloat16(sum);
        memcpy(&h, &b, 2);
    }
    floatX* p = (floatX*)device_alloc((size_t)n * sizeof(floatX), "a benchmark");
    CUDA_CHECK(cudaMemcpy(p, host.data(), (size_t)n * sizeof(floatX), cudaMemcpyHostToDevice));
    return p;
}

template <typename Run>
static double median_seconds(Run run, Ctx* ctx) {
    Stopwatch* watch = stopwatch_create();
    std::vector<double> times;
    for (int i = 0; i < 25; i++) {
        stopwatch_start(watch, ctx);
        run();
        stopwatch_stop(watch, ctx);
        if (i >= 5) times.push_back(stopwatch_seconds(watch));
    }
    stopwatch_destroy(watch);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

int main(int argc, char** argv) {
    struct {
        int64_t B, T, H, rope, stride;
    } cases[] = {{4, 4096, 16, 64, 576},  {1, 4096, 16, 64, 576}, {2, 8192, 16, 64, 576}, {16, 1024, 16, 64, 576},
                 {1, 4096, 128, 64, 576}, {8, 2048, 8, 32, 288},  {8, 1024, 4, 16, 80}};
    int count = argc > 1 ? atoi(argv[1]) : (int)(sizeof(cases) / sizeof(cases[0]));
    Ctx* ctx = ctx_create((size_t)512 << 20);
    printf("%s\n%3s %5s %4s %12s | %9s %8s | %9s %8s\n", device_name(ctx), "B", "T", "H", "heads", "fwd ms", "TFLOP/s",
           "bwd ms", "TFLOP/s");
    for (int i = 0; i < count; i++) {
        auto c = cases[i];
        AttnShape s = {c.B, c.T, c.H, 2 * c.rope, c.rope, 2 * c.rope, c.stride, 1 / sqrtf(3.0f * (float)c.rope)};
        int64_t n = c.B * c.T, row = c.H * c.rope;
        floatX *q = random_bf16(n * 3 * row, 1), *kv = random_bf16(n * 4 * row, 2),
               *k_rope = random_bf16(n * c.stride, 3);
        floatX *dout = random_bf16(n * 2 * row, 4), *out = random_bf16(n * 2 * row, 5);
        floatX *dq = random_bf16(n * 3 * row, 6), *dkv = random_bf16(n * 4 * row, 7);
        floatX* dk_rope = random_bf16(n * c.stride, 8);
        real* lse = (real*)device_alloc((size_t)(n * c.H) * sizeof(real), "a benchmark");
        double forward = median_seconds([&] { attention_forward(out, lse, q, kv, k_rope, s, ctx); }, ctx);
        double backward =
            median_seconds([&] { attention_backward(dq, dkv, dk_rope, dout, out, lse, q, kv, k_rope, s, ctx); }, ctx);
        double half = (double)(c.B * c.H) * (double)c.T * (double)c.T, qk = 3.0 * (double)c.rope,
               v = 2.0 * (double)c.rope;
        char heads[32];
        snprintf(heads, sizeof(heads), "%lld/%lld/%lld", (long long)s.nope, (long long)s.rope, (long long)s.v);
        printf("%3lld %5lld %4lld %12s | %9.3f %8.1f | %9.3f %8.1f\n", (long long)c.B, (long long)c.T, (long long)c.H,
               heads, forward * 1e3, half * (qk + v) / forward * 1e-12, backward * 1e3,
               half * (3 * qk + 2 * v) / backward * 1e-12);
        for (floatX* p : {q, kv, k_rope, dout, out, dq, dkv, dk_rope}) device_free(p);
        device_free(lse);
    }
    ctx_destroy(ctx);
    return 0;
}
