// The CUDA kernels of the dispatch against the double reference. Tolerances: tests/cuda.cuh.
#include "moe/dispatch_ops.h"
#include "tests/layout.cuh"

// The choices: distinct experts anywhere; experts of the last rank first; or experts of few ranks.
static void dispatch_case(int64_t N, int32_t K, int32_t P, int32_t El, Kind kind) {
    const int32_t E = P * El;
    const int64_t capacity = ragged_capacity(N, P, P, BACKEND_CUDA);
    I32 expert(N * K), rank(N * P), group_rows(P), row_token(capacity), token_row(N * P), row_expert(capacity * K);
    I64 counts(2 * P), start(P + 1);
    R gate(N * K, 9), row_gate(capacity * K), dgate(N * K), drow_gate(capacity * K, 10);
    for (int64_t n = 0; n < N; n++)
        for (int32_t k = 0; k < K; k++) {
            int32_t first = (int32_t)draw_below(22, n, (uint32_t)E);
            if (kind == ONE) first = E - El;
            if (kind == SOME_EMPTY) first = first / (3 * El) * (3 * El);
            expert.host[(size_t)(n * K + k)] = (first + k) % E;
        }
    expert.send();
    Ragged dev = {P, capacity, start.dev, group_rows.dev, row_token.dev, token_row.dev, NULL};
    Ragged ref = {P, capacity, start.ref(), group_rows.ref(), row_token.ref(), token_row.ref(), NULL};
    CHECK(permute_workspace(N, P, P) <= ctx->workspace_bytes, "workspace");
    settle();
    // The ranks of each token, and the plan of the rows sent.
    auto ranks = [&] { dispatch_ranks(rank.dev, counts.dev, expert.dev, N, K, P, El, ctx); };
    ranks();
    REFERENCE(dispatch_ranks)(rank.ref(), counts.ref(), expert.ref(), N, K, P, El, reference_ctx);
    CHECK_SAME(rank);
    CHECK_SAME(counts);
    CHECK_REPEATS(counts, ranks());
    permute_plan(dev, rank.dev, NULL, N, P, ctx);
    REFERENCE(permute_plan)(ref, rank.ref(), NULL, N, P, reference_ctx);
    CHECK_SAME(group_rows);
    // The choices and gates of each sent row.
    dispatch_choices(row_expert.dev, row_gate.dev, expert.dev, gate.dev, dev, N, K, El, ctx);
    REFERENCE(dispatch_choices)
    (row_expert.ref(), row_gate.ref(), expert.ref(), gate.ref(), ref, N, K, El, reference_ctx);
    // The reference lays the ranks' rows out without gaps. drow_gate gets the same values in the same rows here, and
    // NaN elsewhere.
    auto places = token_row.got(), ids = row_expert.got();
    auto gates = row_gate.got(), values = drow_gate.host;
    std::fill(drow_gate.host.begin(), drow_gate.host.end(), NAN);
    int64_t wrong = 0, written = 0, sent = 0;
    for (int64_t i = 0; i < N * P; i++) {
        const int64_t here = places[(size_t)i], there = token_row.host[(size_t)i];
        wrong += (here < 0) != (there < 0);
        if (here < 0 || there < 0) continue;
        sent++;
        for (int32_t k = 0; k < K; k++) {
            wrong += ids[(size_t)(here * K + k)] != row_expert.host[(size_t)(there * K + k)];
            wrong += gates[(size_t)(here * K + k)] != row_gate.host[(size_t)(there * K + k)];
            drow_gate.host[(size_t)(here * K + k)] = values[(size_t)(there * K + k)];
        }
    }
    for (double g : gates) written += g == g;
    CHECK(wrong == 0, "%lld of the sent choices wrong", (long long)wrong);
    CHECK(written == sent * K, "%lld gates written for %lld rows", (long long)written, (long long)sent);
    // Backward.
    drow_gate.send();
    drow_gate.host = values;
    settle();
    dispatch_choices_backward(dgate.dev, drow_gate.dev, expert.dev, dev, N, K, El, ctx);
    REFERENCE(dispatch_choices_backward)(dgate.ref(), drow_gate.ref(), expert.ref(), ref, N, K, El, reference_ctx);
    CHECK_SAME(dgate);
}

static void test_dispatch(void) {
    dispatch_case(1, 1, 1, 1, SPREAD);
    dispatch_case(3, 2, 2, 1, SPREAD);
    dispatch_case(129, 3, 4, 2, SPREAD);
    dispatch_case(1000, 6, 8, 8, SPREAD);
    dispatch_case(1000, 6, 8, 8, ONE);
    dispatch_case(777, 1, 64, 4, SOME_EMPTY);
    dispatch_case(70001, 8, 8, 32, SPREAD);
    dispatch_case(0, 6, 8, 8, SPREAD);
}

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_dispatch);
    return test_summary();
}
