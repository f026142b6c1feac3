// The CUDA kernels of the experts' SwiGLU against the double reference. Tolerances: tests/cuda.cuh.
#include "grouped/experts.h"
#include "mx/mx_swiglu.h"
#include "tests/layout.cuh"

// The backward of the gate from the a of forward, rounded to bf16: gate * a in its place, and <da', a>. Against the
// reference from the same a, then against the backward that computes a itself, whose results are `gated` and
// `drow_gate`. Its a is not rounded to bf16: a gradient differs by at most 2^-8 of the sum of its terms' magnitudes, a
// product by that of itself and one more rounding.
static void gate_case(Layout& l, X& a, X& dap, X& gated, R& drow_gate, int64_t F) {
    X own(l.capacity * F);
    R own_gate(l.capacity);
    const auto from = a.got(), whole_gated = gated.got(), whole_gate = drow_gate.got();
    for (int64_t r = 0; r < l.reference_rows; r++)
        for (int64_t c = 0; c < F; c++) own.host[(size_t)(r * F + c)] = from[(size_t)(l.place[(size_t)r] * F + c)];
    auto run = [&] {
        CUDA_CHECK(cudaMemcpy(own.dev, a.dev, (size_t)a.n * sizeof(floatX), cudaMemcpyDeviceToDevice));
        settle();
        experts_gate_backward({NULL, own.dev, own_gate.dev, dap.dev, NULL}, l.dev, F, ctx);
    };
    run();
    const auto values = own.host;
    REFERENCE(experts_gate_backward)({NULL, own.ref(), own_gate.ref(), dap.ref(), NULL}, l.ref, F, reference_ctx);
    double error = l.error(own, F);
    CHECK(error <= BF16, "gated_a from a is off by %g", error);
    error = l.error(own_gate, 1);
    CHECK(error <= FLOAT, "drow_gate from a is off by %g", error);

    const auto got = own.got(), got_gate = own_gate.got();
    int64_t wrong = 0, wrong_gate = 0, behind = 0;
    for (int64_t r = 0; r < l.reference_rows; r++) {
        const int64_t row = l.place[(size_t)r];
        double size = 0;
        for (int64_t c = 0; c < F; c++) {
            const double x = got[(size_t)(row * F + c)], y = whole_gated[(size_t)(row * F + c)];
            wrong += !(fabs(x - y) <= 3.1 * 0x1p-8 * fabs(y));
            size += fabs(dap.host[(size_t)(r * F + c)] * values[(size_t)(r * F + c)]);
        }
        wrong_gate += !(fabs(got_gate[(size_t)row] - whole_gate[(size_t)row]) <= 1.02 * 0x1p-8 * size);
    }
    for (int64_t row = l.used; row < l.capacity; row++) behind += !isnan(got_gate[(size_t)row]);
    CHECK(wrong == 0 && wrong_gate == 0, "%lld of gated_a and %lld of drow_gate are not those of the whole backward",
          (long long)wrong, (long long)wrong_gate);
    CHECK(behind == 0, "%lld of drow_gate behind the last expert were written", (long long)behind);
    CHECK_REPEATS(own_gate, run());
}

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
    gate_case(l, a, dap, gated, drow_gate, F);
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
    experts_case(100000, 3, 4, 8, SPREAD);  // more rows than the grid has warps
}

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_experts);
    return test_summary();
}
