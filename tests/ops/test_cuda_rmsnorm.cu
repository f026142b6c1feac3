// The CUDA kernels of RMSNorm against the double reference. Tolerances: tests/cuda.cuh.
#include "layers/rmsnorm.h"
#include "tests/cuda.cuh"

// eps in (0, 1), where the mean square of a row is about 1.
static double random_eps(int64_t N, int64_t C) { return random_uniform(12, (uint32_t)C, (uint64_t)N); }

static void rmsnorm_case(int64_t N, int64_t C, int64_t stride) {
    X x(N * stride, 1), w(C, 2), y(N * C), dy(N * C, 3), dx(N * stride, 4);
    R rstd(N), dw(C, 5);
    const double eps = random_eps(N, C);
    settle();
    rmsnorm_forward(y.dev, rstd.dev, x.dev, stride, w.dev, eps, N, C, ctx);
    REFERENCE(rmsnorm_forward)(y.ref(), rstd.ref(), x.ref(), stride, w.ref(), eps, N, C, reference_ctx);
    CHECK_CLOSE(y, BF16);
    CHECK_CLOSE(rstd, FLOAT);
    rstd.send();
    // Backward, written and accumulated.
    auto dx_before = dx.host, dw_before = dw.host;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        restore(dx, dx_before);
        restore(dw, dw_before);
        auto run = [&] {
            rmsnorm_backward(dx.dev, dw.dev, dy.dev, x.dev, stride, w.dev, rstd.dev, N, C, accumulate, ctx);
        };
        run();
        REFERENCE(rmsnorm_backward)
        (dx.ref(), dw.ref(), dy.ref(), x.ref(), stride, w.ref(), rstd.ref(), N, C, accumulate, reference_ctx);
        CHECK_CLOSE(dx, BF16);
        CHECK_CLOSE(dw, FLOAT);
        if (stride > C) {  // elements between the rows are not written
            auto got = dx.got();
            for (int64_t i = 0; i < N * stride; i++)
                if (i % stride >= C) CHECK(got[(size_t)i] == dx_before[(size_t)i], "wrote between rows");
        }
        CHECK_REPEATS(dw, (restore(dx, dx_before), restore(dw, dw_before), run()));
    }
}

static void residual_case(int64_t N, int64_t C, int in_place) {
    X a(N * C, 1), b(N * C, 2), w(C, 3), other(N * C), y(N * C);
    R rstd(N);
    const double eps = random_eps(N, C);
    X& sum = in_place ? a : other;
    settle();
    residual_rmsnorm_forward(sum.dev, y.dev, rstd.dev, a.dev, b.dev, w.dev, eps, N, C, ctx);
    for (int64_t i = 0; i < N * C; i++) sum.host[(size_t)i] = a.host[(size_t)i] + b.host[(size_t)i];
    CHECK_CLOSE(sum, BF16);
    // The norm is that of the rounded sum.
    sum.host = sum.got();
    REFERENCE(rmsnorm_forward)(y.ref(), rstd.ref(), sum.ref(), C, w.ref(), eps, N, C, reference_ctx);
    CHECK_CLOSE(y, BF16);
    CHECK_CLOSE(rstd, FLOAT);
}

static void test_rmsnorm(void) {
    int device, shared;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    const int64_t widths[] = {8, 24, 40, 128, 512, 1000, 2048, 2056, 5120, 7168, 16384, 1544};
    for (int64_t C : widths) {
        if (C > 8192 && shared < 192 << 10) continue;
        rmsnorm_case(3, C, C);
        residual_case(3, C, 0);
        residual_case(C > 5000 ? 17 : 129, C, 1);
        rmsnorm_case(C > 3000 ? 600 : 1000, C, C + 64);
    }
    rmsnorm_case(129, 512, 576);
    rmsnorm_case(129, 512, 584);
    rmsnorm_case(9001, 128, 128);
    rmsnorm_case(4100, 2048, 2048);  // several rows a block
    rmsnorm_case(1000, 4096, 4096);
    rmsnorm_case(2500, 1024, 1024);
}

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_rmsnorm);
    return test_summary();
}
