// The rates of this card that bound a step: dense bf16 products of cuBLASLt, as layers/matmul.cu calls it, and copies
// from device to device. They are the yardstick of a card whose peak is not known (device/kernels.h). Takes about two
// seconds.
//
//   build/cuda/bench/peaks
#include <stdio.h>

#include <functional>

#include "bench/data.cuh"
#include "layers/matmul.h"

static Ctx* ctx;
static Stopwatch* watch;

// Seconds of a call. Rounds have 1, 2, 4, ... calls, until one takes a quarter of a second: the power limit then has
// its effect. The call before them loads the kernel.
static double seconds(const std::function<void()>& call) {
    call();
    for (int calls = 1;; calls *= 2) {
        stopwatch_start(watch, ctx);
        for (int i = 0; i < calls; i++) call();
        stopwatch_stop(watch, ctx);
        const double took = stopwatch_seconds(watch);
        if (took >= 0.25) return took / calls;
    }
}

int main(void) {
    ctx = ctx_create(matmul_workspace());
    watch = stopwatch_create();
    // Three square matrices; the buffers of a copy are larger than any L2. Random values: zeros take less power.
    const int64_t n = 8192, elements = (int64_t)1 << 28;
    floatX *a = (floatX*)device_alloc(elements * sizeof(floatX), "the benchmark"),
           *b = (floatX*)device_alloc(elements * sizeof(floatX), "the benchmark");
    fill<<<1024, 256, 0, ctx->stream>>>(a, elements, 1);
    LAUNCH_CHECK();
    const double matmul = seconds([&] { matmul_forward(b, a, a + n * n, n, n, n, ctx); });
    const double copy = seconds([&] { device_copy(b, a, elements * sizeof(floatX), ctx); });
    printf("matmul    %.1f TFLOP/s: bf16, %ld x %ld x %ld\n", 2 * (double)(n * n * n) / matmul * 1e-12, n, n, n);
    printf("copy      %.3f TB/s: read and written, %.1f GiB each\n", 4 * (double)elements / copy * 1e-12,
           2 * (double)elements / 0x1p30);
    device_free(a), device_free(b);
    stopwatch_destroy(watch);
    ctx_destroy(ctx);
}
