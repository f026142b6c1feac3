// The CUDA kernels of permute and of its plan against the double reference. Tolerances: tests/cuda.cuh.
#include "grouped/permute.h"
#include "tests/layout.cuh"

static void permute_case(int64_t N, int32_t K, int32_t El, int64_t C, Kind kind) {
    Layout l(N, K, El, kind);
    l.check();
    X tokens(N * C, 1), rows(l.capacity * C);
    settle();
    // Permute, exactly.
    permute_rows(rows.dev, tokens.dev, l.dev, (size_t)C * sizeof(floatX), ctx);
    REFERENCE(permute_rows)(rows.ref(), tokens.ref(), l.ref, (size_t)C * sizeof(double), reference_ctx);
    double error = l.error(rows, C);
    CHECK(error == 0, "permute_rows is off by %g", error);

    l.send(rows, C);  // pad rows are NaN and may not be read
    X out(N * C, 2);
    auto before = out.host;
    for (int accumulate = 0; accumulate < 2; accumulate++)
        for (int gated = 0; gated < 2; gated++) {
            restore(out, before);
            unpermute_rows(out.dev, rows.dev, gated ? l.gate.dev : NULL, l.dev, N, K, C, accumulate, ctx);
            REFERENCE(unpermute_rows)
            (out.ref(), rows.ref(), gated ? l.gate.ref() : NULL, l.ref, N, K, C, accumulate, reference_ctx);
            CHECK_CLOSE(out, BF16);
        }
    // The gates' gradients.
    for (int32_t parts : {1, 3}) {
        R dgate(N * K), drow_gate(l.capacity * parts, 3);
        l.send(drow_gate, parts);
        unpermute_gates(dgate.dev, drow_gate.dev, parts, l.dev, N, K, ctx);
        REFERENCE(unpermute_gates)(dgate.ref(), drow_gate.ref(), parts, l.ref, N, K, reference_ctx);
        if (parts == 1) CHECK_SAME(dgate);
        CHECK_CLOSE(dgate, FLOAT);
    }
}

static void test_permute(void) {
    permute_case(1, 1, 1, 8, SPREAD);
    permute_case(3, 2, 8, 24, SPREAD);
    permute_case(129, 6, 64, 2048, SPREAD);
    permute_case(129, 6, 64, 40, ELSEWHERE);
    permute_case(300, 3, 5, 1016, SOME_EMPTY);
    permute_case(1000, 8, 256, 128, SPREAD);
    permute_case(1000, 5, 7, 40, SOME_EMPTY);
    permute_case(1000, 1, 64, 128, ONE);
    permute_case(3000, 6, 64, 64, ELSEWHERE);
    permute_case(700, 3, 600, 8, SPREAD);
    permute_case(5, 2, 16, 8, ELSEWHERE);
    permute_case(0, 2, 4, 8, SPREAD);
}

static void test_plan_without_gates(void) {
    Layout l(1000, 6, 64, ELSEWHERE);
    l.row_token.poison(), l.token_row.poison(), l.row_gate.poison();
    settle();
    permute_plan(l.dev, l.expert.dev, NULL, l.N, l.K, ctx);
    REFERENCE(permute_plan)(l.ref, l.expert.ref(), l.gate.ref(), l.N, l.K, reference_ctx);
    int64_t written = 0;
    for (double gate : l.row_gate.got()) written += gate == gate;
    CHECK(written == 0, "%lld gates written", (long long)written);
    permute_plan(l.dev, l.expert.dev, l.gate.dev, l.N, l.K, ctx);
    l.check();
}

static void test_plan_large(void) {  // many chunks, and the same plan every time
    for (Kind kind : {SPREAD, ELSEWHERE, ONE}) {
        Layout l(70001, 6, 160, kind);
        l.check();
        CHECK_REPEATS(l.token_row, permute_plan(l.dev, l.expert.dev, l.gate.dev, l.N, l.K, ctx));
    }
}

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_permute);
    RUN(test_plan_without_gates);
    RUN(test_plan_large);
    return test_summary();
}
