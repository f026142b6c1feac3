// The dense GEMMs against the double reference.
//
// Tolerances, of the norm: a result rounded to bf16 is off by at most 2^-8 of itself, 4e-3. Float32 results have the
// tensor cores' loss at a contraction of K, 2e-9 K + 5e-7 (derived in tests/ops/test_cuda_exact.cu).
#include "layers/matmul.h"
#include "tests/cuda.cuh"

static void product_case(int64_t N, int64_t IC, int64_t OC) {
    X x(N * IC, 1), w(OC * IC, 2, 0.1), dy(N * OC, 3), y(N * OC), dx(N * IC);
    R dw(OC * IC), scores(N * OC);
    auto bound = [](int64_t K) { return 2e-9 * (double)K + 5e-7; };

    matmul_forward(y.dev, x.dev, w.dev, N, IC, OC, ctx);
    REFERENCE(matmul_forward)(y.ref(), x.ref(), w.ref(), N, IC, OC, reference_ctx);
    CHECK_CLOSE(y, 4e-3);

    matmul_forward_real(scores.dev, x.dev, w.dev, N, IC, OC, ctx);
    REFERENCE(matmul_forward_real)(scores.ref(), x.ref(), w.ref(), N, IC, OC, reference_ctx);
    CHECK_CLOSE(scores, bound(IC));

    // Written over old contents, then added to them. A sum that is split has the same bits in every call.
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        matmul_dgrad(dx.dev, dy.dev, w.dev, N, IC, OC, accumulate, ctx);
        REFERENCE(matmul_dgrad)(dx.ref(), dy.ref(), w.ref(), N, IC, OC, accumulate, reference_ctx);
        CHECK_CLOSE(dx, 6e-3);  // rounded twice
        matmul_wgrad(dw.dev, dy.dev, x.dev, N, IC, OC, accumulate, ctx);
        REFERENCE(matmul_wgrad)(dw.ref(), dy.ref(), x.ref(), N, IC, OC, accumulate, reference_ctx);
        CHECK_CLOSE(dw, bound(N));
    }
    CHECK_REPEATS(dw, matmul_wgrad(dw.dev, dy.dev, x.dev, N, IC, OC, 0, ctx));
}

static void test_linear(void) {
    product_case(1, 8, 8);
    product_case(129, 200, 72);
    product_case(1000, 2048, 576);
    product_case(4096, 512, 4096);
    product_case(16384, 384, 512);
}

// Without tokens a gradient is zeros if written, and unchanged if accumulated.
static void test_no_tokens(void) {
    X none(8);
    R dw(64);
    matmul_wgrad(dw.dev, none.dev, none.dev, 0, 8, 8, 0, ctx);
    for (double& d : dw.host) d = 0;
    CHECK_SAME(dw);
    for (double& d : dw.host) d = 3;
    dw.send();
    matmul_wgrad(dw.dev, none.dev, none.dev, 0, 8, 8, 1, ctx);
    CHECK_SAME(dw);
}

int main(void) {
    if (device_available()) open_contexts(matmul_workspace());
    RUN(test_linear);
    RUN(test_no_tokens);
    return test_summary();
}
