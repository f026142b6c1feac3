// The CUDA kernels of SwiGLU against the double reference. Tolerances: tests/cuda.cuh.
#include "layers/swiglu.h"
#include "tests/cuda.cuh"

static void swiglu_case(int64_t N, int64_t F) {
    X h(N * 2 * F, 1, 2), a(N * F), da(N * F, 2), dh(N * 2 * F);
    h.host[0] = 90, h.host[1] = -100;  // exp over- and underflows
    h.send();
    settle();
    swiglu_forward(a.dev, h.dev, N, F, ctx);
    REFERENCE(swiglu_forward)(a.ref(), h.ref(), N, F, reference_ctx);
    CHECK_CLOSE(a, BF16);
    a.poison();
    swiglu_backward(dh.dev, a.dev, da.dev, h.dev, N, F, ctx);
    REFERENCE(swiglu_backward)(dh.ref(), a.ref(), da.ref(), h.ref(), N, F, reference_ctx);
    CHECK_CLOSE(dh, BF16);
    CHECK_CLOSE(a, BF16);
}

static void test_swiglu(void) {
    swiglu_case(1, 8);
    swiglu_case(3, 40);
    swiglu_case(129, 1408);
    swiglu_case(1000, 24);
    swiglu_case(100, 1000);
}

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_swiglu);
    return test_summary();
}
