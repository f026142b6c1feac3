// The CUDA kernels of the experts' SwiGLU against the double reference. Tolerances: tests/cuda.cuh.
#include "grouped/experts.h"
#include "tests/layout.cuh"

static void experts_case(int64_t N, int32_t K, int32_t El, int64_t F, Kind kind) {
    Layout l(N, K, El, kind);
    X h(l.capacity * 2 * F, 1), dap(l.capacity * F, 2), a(l.capacity * F), gated(l.capacity * F),
        dh(l.capacity * 2 * F);
    R drow_gate(l.capacity);
    l.send(h, 2 * F);
    l.send(dap, F);
    experts_swiglu_forward(a.dev, h.dev, l.dev, F, ctx);
    REFERENCE(experts_swiglu_forward)(a.ref(), h.ref(), l.ref, F, reference_ctx);
    double error = l.error(a, F);
    CHECK(error <= BF16, "a is off by %g", error);
    auto run = [&] { experts_swiglu_backward({dh.dev, gated.dev, drow_gate.dev, dap.dev, h.dev}, l.dev, F, ctx); };
    run();
    REFERENCE(experts_swiglu_backward)
    ({dh.ref(), gated.ref(), drow_gate.ref(), dap.ref(), h.ref()}, l.ref, F, reference_ctx);
    error = l.error(dh, 2 * F);
    CHECK(error <= BF16, "dh is off by %g", error);
    error = l.error(gated, F);
    CHECK(error <= BF16, "gated_a is off by %g", error);
    error = l.error(drow_gate, 1);
    CHECK(error <= FLOAT, "drow_gate is off by %g", error);
    CHECK_REPEATS(drow_gate, run());
}

static void test_experts(void) {
    experts_case(1, 1, 1, 8, SPREAD);
    experts_case(129, 6, 64, 1408, SPREAD);
    experts_case(100, 2, 8, 40, ELSEWHERE);
    experts_case(1000, 1, 16, 128, ONE);
    experts_case(300, 3, 9, 264, SOME_EMPTY);
    experts_case(4, 2, 16, 24, ELSEWHERE);
    experts_case(0, 2, 4, 24, SPREAD);
}

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_experts);
    return test_summary();
}
