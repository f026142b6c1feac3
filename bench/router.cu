// The router at the sizes of 16b and 671b, its products and its own kernels together: time, operations and bytes a
// second. Operations are those of the formula, 2 N E C forward and 4 N E C backward; bytes count each input read once
// and each output written once. A time is the median of 30 batches of calls, by CUDA events, after as many that bring
// the clock to where it stays; calls go round three sets of buffers, so that none finds its input in L2.
//
//   build/cuda/bench/router
#include <stdio.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "bench/data.cuh"
#include "moe/router.h"

enum { SETS = 3, CALLS = 30, BATCHES = 30 };

static Ctx* ctx;

// SETS buffers of n elements, about normal.
template <typename T>
struct Buffers {
    T* p[SETS];
    explicit Buffers(int64_t n, float scale = 1) {
        static uint64_t seed;
        for (T*& b : p) {
            b = (T*)device_alloc((size_t)n * sizeof(T), "the benchmark");
            fill<<<1024, 256, 0, ctx->stream>>>(b, n, ++seed, scale);
        }
        ctx_sync(ctx);
    }
    ~Buffers() {
        for (T* b : p) device_free(b);
    }
    T* operator[](int i) const { return p[i]; }
};

static double seconds(const std::function<void(int)>& call) {
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int b = 0; b < 2 * BATCHES; b++) {
        CUDA_CHECK(cudaEventRecord(start, ctx->stream));
        for (int i = 0; i < CALLS; i++) call(i % SETS);
        CUDA_CHECK(cudaEventRecord(stop, ctx->stream));
        CUDA_CHECK(cudaEventSynchronize(stop));
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (b >= BATCHES) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    return times[BATCHES / 2] / 1000.0 / CALLS;
}

static void row(const char* pass, const char* model, double operations, double bytes,
                const std::function<void(int)>& call) {
    const double s = seconds(call);
    printf("| %s | %s | %.1f | %.0f | %.2f |\n", pass, model, s * 1e6, operations / s * 1e-12, bytes / s * 1e-12);
    fflush(stdout);
}

static void bench(const char* model, RouterShape s) {
    Buffers<floatX> x(s.N * s.C), dx(s.N * s.C), w(s.E * s.C, 0.02f);
    Buffers<float> scores(s.N * s.E), gate(s.N * s.K), dgate(s.N * s.K), bias(s.E, 0), dw(s.E * s.C);
    Buffers<int32_t> expert(s.N * s.K);
    const double products = 2.0 * (double)s.N * (double)s.E * (double)s.C;
    const double of_x = 2.0 * (double)(s.N * s.C), of_scores = 4.0 * (double)(s.N * s.E);
    const double of_w = 2.0 * (double)(s.E * s.C), choices = 4.0 * (double)(s.N * s.K);

    // x and Wg in; scores, experts and gates out
    row("forward", model, products, of_x + of_w + of_scores + 2 * choices,
        [&](int i) { router_forward(scores[i], expert[i], gate[i], x[i], w[i], bias[i], s, ctx); });

    // dgate, scores, experts, gates, x and Wg in; dx and dw in and out
    auto backward = [&](int i, float aux) {
        router_backward(dx[i], dw[i], dgate[i], scores[i], expert[i], gate[i], x[i], w[i], aux, s, ctx);
    };
    const double bytes = 3 * of_x + 5 * of_w + of_scores + 3 * choices;
    row("backward", model, 2 * products, bytes, [&](int i) { backward(i, 0); });
    row("backward, auxiliary loss", model, 2 * products, bytes, [&](int i) { backward(i, 1e-3f); });
}

int main(void) {
    //                            N     T     C    E  K  groups  score   norm scale force
    const RouterShape of_16b = {16384, 4096, 2048, 64, 6, 1, 1, SCORE_SOFTMAX, 0, 1, 0};
    const RouterShape of_671b = {8192, 4096, 7168, 256, 8, 8, 4, SCORE_SIGMOID, 1, 2.5f, 0};
    ctx = ctx_create(max_size(router_workspace(of_16b), router_workspace(of_671b)));
    printf("%s\n| pass | model | us | TFLOP/s | TB/s |\n|---|---|---|---|---|\n", device_name(ctx));
    bench("16b", of_16b);
    bench("671b", of_671b);
    ctx_destroy(ctx);
    return 0;
}
