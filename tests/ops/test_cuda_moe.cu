// The CUDA kernels of the MoE block that are no products: router, ragged layout, dispatch, SwiGLU of the experts.
// Bounds as in test_cuda_layers.cu. The reference lays experts out without gaps, the kernels at multiples of 128: a
// plan holds the first in its tensors' host halves and the second in their device halves, and Layout::place maps rows
// between them.
#include <algorithm>
#include <functional>

#include "grouped/experts.h"
#include "grouped/permute.h"
#include "layers/adamw.h"
#include "moe/dispatch_ops.h"
#include "moe/router.h"
#include "tests/cuda.cuh"

#define BF16 4e-3
// The router's: dlogits as two bf16 lose 2^-17 at most, 1e-6 of their norm. The tensor cores' float32 sums round toward
// zero after every 16 products: n products of random signs lose n / 16 * 2^-24.5 / sqrt(3) of their size, 3e-6 for
// logits at C = 2048 and for dw's change at N = 2048. Scores, a softmax of logits of variance 4, lose 1.25 times as
// much: 4e-6, and one alone at most 3.5e-6, so that a choice by 1e-5 stays what it is.
#define FLOAT 1e-5

// Copies to the GPU may still be under way when they return, and the ops' stream does not wait for them.
static void settle(void) { CUDA_CHECK(cudaDeviceSynchronize()); }

template <typename T>
static void restore(T& t, const decltype(t.host)& values) {
    t.host = values;
    t.send();
    settle();
}

static uint32_t draw(uint32_t stream, int64_t i, uint32_t below) {
    return (uint32_t)(random_uniform(11, stream, (uint64_t)i) * below);
}

// How choices are made: distinct experts at random, all tokens to one expert first, only every third expert, or half of
// the choices held elsewhere (-1).
enum Kind { SPREAD, ONE, SOME_EMPTY, ELSEWHERE };

struct Layout {
    int64_t N, capacity, used;
    int32_t K, El;
    I64 start;
    I32 group_rows, row_token, token_row, expert;
    R row_gate, gate;
    Ragged dev, ref;
    std::vector<int64_t> place;  // where the reference's row lies on the device
    int64_t reference_rows;

    Layout(int64_t N, int32_t K, int32_t El, Kind kind)
        : N(N),
          capacity(ragged_capacity(N, K, El, BACKEND_CUDA)),
          K(K),
          El(El),
          start(El + 1),
          group_rows(El),
          row_token(capacity),
          token_row(N * K),
          expert(N * K),
          row_gate(capacity),
          gate(N * K, 9) {
        for (int64_t n = 0; n < N; n++)
            for (int32_t k = 0; k < K; k++) {
                // Distinct: a random start and an odd step through a range of experts.
                int32_t e = (int32_t)((draw(20, n, (uint32_t)El) + k) % El);
                if (kind == ONE) e = (El / 2 + k) % El;
                if (kind == SOME_EMPTY) e = e / 3 * 3;
                if (kind == SOME_EMPTY && k > 0) e = -1;
                if (kind == ELSEWHERE && draw(21, n * K + k, 2)) e = -1;
                expert.host[(size_t)(n * K + k)] = e;
            }
        expert.send();
        dev = {El, capacity, start.dev, group_rows.dev, row_token.dev, token_row.dev, row_gate.dev};
        ref = {El, capacity, start.ref(), group_rows.ref(), row_token.ref(), token_row.ref(), row_gate.ref()};
        CHECK(permute_workspace(N, K, El) <= ctx->workspace_bytes, "workspace");
        settle();
        permute_plan(dev, expert.dev, gate.dev, N, K, ctx);
        REFERENCE(permute_plan)(ref, expert.ref(), gate.ref(), N, K, reference_ctx);
        reference_rows = start.host[(size_t)El];
        int64_t at = 0;
        for (int32_t e = 0; e < El; e++) {
            for (int64_t r = start.host[(size_t)e]; r < start.host[(size_t)e + 1]; r++)
                place.push_back(at + r - start.host[(size_t)e]);
            at += ceil_div(group_rows.host[(size_t)e], 128) * 128;
        }
        used = at;
    }

    void check() {
        auto starts = start.got();
        auto tokens = row_token.got(), rows = token_row.got();
        auto gates = row_gate.got();
        CHECK_SAME(group_rows);
        int64_t at = 0, wrong = 0;
        for (int32_t e = 0; e <= El; e++) {
            CHECK(starts[(size_t)e] == at, "expert %d starts at %lld for %lld", e, (long long)starts[(size_t)e],
                  (long long)at);
            if (e < El) at += ceil_div(group_rows.host[(size_t)e], 128) * 128;
        }
        CHECK(used <= capacity, "%lld rows of %lld", (long long)used, (long long)capacity);
        for (int64_t i = 0; i < N * K; i++) {
            int64_t r = token_row.host[(size_t)i];
            wrong += rows[(size_t)i] != (r < 0 ? -1 : place[(size_t)r]);
        }
        CHECK(wrong == 0, "%lld of token_row wrong", (long long)wrong);
        std::vector<int32_t> token_want((size_t)used, -1);
        std::vector<double> gate_want((size_t)used, 0.0);
        for (int64_t r = 0; r < reference_rows; r++) {
            token_want[(size_t)place[(size_t)r]] = row_token.host[(size_t)r];
            gate_want[(size_t)place[(size_t)r]] = row_gate.host[(size_t)r];
        }
        for (int64_t r = 0; r < used; r++)
            wrong += tokens[(size_t)r] != token_want[(size_t)r] || gates[(size_t)r] != gate_want[(size_t)r];
        CHECK(wrong == 0, "%lld rows wrong", (long long)wrong);
    }

    // A tensor of rows: the host's values to their places on the device, NaN in pad rows.
    template <typename T>
    void send(T& t, int64_t width) {
        auto values = t.host;
        std::fill(t.host.begin(), t.host.end(), NAN);
        for (int64_t r = 0; r < reference_rows; r++)
            for (int64_t c = 0; c < width; c++)
                t.host[(size_t)(place[(size_t)r] * width + c)] = values[(size_t)(r * width + c)];
        t.send();
        t.host = values;
        settle();
    }

    // The error of the rows in use, infinity where a pad row is not zero.
    template <typename T>
    double error(T& t, int64_t width) {
        auto got = t.got();
        std::vector<double> want((size_t)(used * width), 0.0);
        for (int64_t r = 0; r < reference_rows; r++)
            for (int64_t c = 0; c < width; c++)
                want[(size_t)(place[(size_t)r] * width + c)] = t.host[(size_t)(r * width + c)];
        std::vector<char> real_row((size_t)used, 0);
        for (int64_t r : place) real_row[(size_t)r] = 1;
        double diff = 0, norm = 0;
        for (int64_t i = 0; i < used * width; i++) {
            if (!real_row[(size_t)(i / width)] && got[(size_t)i] != 0) return INFINITY;
            double d = got[(size_t)i] - want[(size_t)i];
            if (!(d == d)) return INFINITY;
            diff += d * d;
            norm += want[(size_t)i] * want[(size_t)i];
        }
        return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
    }
};

static void permute_case(int64_t N, int32_t K, int32_t El, int64_t C, Kind kind) {
    Layout l(N, K, El, kind);
    l.check();
    X tokens(N * C, 1), rows(l.capacity * C);
    settle();
    permute_rows(rows.dev, tokens.dev, l.dev, (size_t)C * sizeof(floatX), ctx);
    REFERENCE(permute_rows)(rows.ref(), tokens.ref(), l.ref, (size_t)C * sizeof(double), reference_ctx);
    double error = l.error(rows, C);
    CHECK(error == 0, "permute_rows is off by %g", error);

    l.send(rows, C);  // pad rows NaN: nobody may read them
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
    R dgate(N * K), drow_gate(l.capacity, 3);
    l.send(drow_gate, 1);
    unpermute_gates(dgate.dev, drow_gate.dev, l.dev, N, K, ctx);
    REFERENCE(unpermute_gates)(dgate.ref(), drow_gate.ref(), l.ref, N, K, reference_ctx);
    CHECK_SAME(dgate);
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

// Where choices go: distinct experts anywhere, all on the last rank as far as its experts go, or those of few ranks.
static void dispatch_case(int64_t N, int32_t K, int32_t P, int32_t El, Kind kind) {
    const int32_t E = P * El;
    const int64_t capacity = ragged_capacity(N, P, P, BACKEND_CUDA);
    I32 expert(N * K), rank(N * P), group_rows(P), row_token(capacity), token_row(N * P), row_expert(capacity * K);
    I64 counts(2 * P), start(P + 1);
    R gate(N * K, 9), row_gate(capacity * K), dgate(N * K), drow_gate(capacity * K, 10);
    for (int64_t n = 0; n < N; n++)
        for (int32_t k = 0; k < K; k++) {
            int32_t first = (int32_t)draw(22, n, (uint32_t)E);
            if (kind == ONE) first = E - El;
            if (kind == SOME_EMPTY) first = first / (3 * El) * (3 * El);
            expert.host[(size_t)(n * K + k)] = (first + k) % E;
        }
    expert.send();
    Ragged dev = {P, capacity, start.dev, group_rows.dev, row_token.dev, token_row.dev, NULL};
    Ragged ref = {P, capacity, start.ref(), group_rows.ref(), row_token.ref(), token_row.ref(), NULL};
    CHECK(permute_workspace(N, P, P) <= ctx->workspace_bytes, "workspace");
    settle();
    auto ranks = [&] { dispatch_ranks(rank.dev, counts.dev, expert.dev, N, K, P, El, ctx); };
    ranks();
    REFERENCE(dispatch_ranks)(rank.ref(), counts.ref(), expert.ref(), N, K, P, El, reference_ctx);
    CHECK_SAME(rank);
    CHECK_SAME(counts);
    CHECK_REPEATS(counts, ranks());
    permute_plan(dev, rank.dev, NULL, N, P, ctx);
    REFERENCE(permute_plan)(ref, rank.ref(), NULL, N, P, reference_ctx);
    CHECK_SAME(group_rows);
    dispatch_choices(row_expert.dev, row_gate.dev, expert.dev, gate.dev, dev, N, K, El, ctx);
    REFERENCE(dispatch_choices)
    (row_expert.ref(), row_gate.ref(), expert.ref(), gate.ref(), ref, N, K, El, reference_ctx);
    // The reference lays the ranks' rows out without gaps. drow_gate goes to the same rows here, NaN to the others.
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
    auto run = [&] { experts_swiglu_backward(dh.dev, gated.dev, drow_gate.dev, dap.dev, h.dev, l.dev, F, ctx); };
    run();
    REFERENCE(experts_swiglu_backward)
    (dh.ref(), gated.ref(), drow_gate.ref(), dap.ref(), h.ref(), l.ref, F, reference_ctx);
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

// The smallest gap that decided a token's choice: between its groups in and out, and between successive choices.
static double gap(const double* s, const double* bias, RouterShape shape) {
    std::vector<double> choice;
    int32_t size = shape.E / shape.groups;
    double least = INFINITY;
    std::vector<std::pair<double, int>> groups;
    for (int32_t g = 0; g < shape.groups; g++) {
        std::vector<double> v;
        for (int32_t e = g * size; e < (g + 1) * size; e++) v.push_back(s[e] + bias[e]);
        std::sort(v.begin(), v.end(), std::greater<double>());
        groups.push_back({shape.score == SCORE_SIGMOID && size > 1 ? v[0] + v[1] : v[0], g});
    }
    std::sort(groups.begin(), groups.end(), std::greater<std::pair<double, int>>());
    int32_t in = shape.groups > 1 ? shape.top_groups : 1;
    if (in < shape.groups) least = groups[(size_t)in - 1].first - groups[(size_t)in].first;
    for (int32_t i = 0; i < in; i++)
        for (int32_t e = groups[(size_t)i].second * size; e < (groups[(size_t)i].second + 1) * size; e++)
            choice.push_back(s[e] + bias[e]);
    std::sort(choice.begin(), choice.end(), std::greater<double>());
    for (size_t k = 1; k < choice.size() && k <= (size_t)shape.K; k++)
        least = std::min(least, choice[k - 1] - choice[k]);
    return least;
}

static void router_case(RouterShape s, float aux) {
    X x(s.N * s.C, 1), w(s.E * s.C, 2, 2 / sqrt((double)s.C)), dx(s.N * s.C, 3);
    R scores(s.N * s.E), gate(s.N * s.K), bias(s.E, 4, 0.05), dgate(s.N * s.K, 5), dw(s.E * s.C, 6, 0.1);
    I32 expert(s.N * s.K);
    I64 load(s.E), margins((int64_t)s.E * MARGIN_BINS);
    CHECK(router_workspace(s) <= ctx->workspace_bytes, "workspace of %zu", router_workspace(s));
    auto forward = [&] { router_forward(scores.dev, expert.dev, gate.dev, x.dev, w.dev, bias.dev, s, ctx); };
    settle();
    forward();
    REFERENCE(router_forward)
    (scores.ref(), expert.ref(), gate.ref(), x.ref(), w.ref(), bias.ref(), s, reference_ctx);
    CHECK_CLOSE(scores, FLOAT);
    auto id = expert.got();
    auto gates = gate.got();
    int64_t close = 0, wrong = 0;
    double diff = 0, norm = 0;
    for (int64_t n = 0; n < s.N; n++) {
        if (!s.force_balance && gap(&scores.host[(size_t)(n * s.E)], bias.host.data(), s) < 1e-5) {
            close++;
            for (int32_t k = 0; k < s.K; k++)
                CHECK(id[(size_t)(n * s.K + k)] >= 0 && id[(size_t)(n * s.K + k)] < s.E, "id");
            continue;
        }
        for (int32_t k = 0; k < s.K; k++) {
            size_t i = (size_t)(n * s.K + k);
            wrong += id[i] != expert.host[i];
            diff += (gates[i] - gate.host[i]) * (gates[i] - gate.host[i]);
            norm += gate.host[i] * gate.host[i];
        }
    }
    CHECK(wrong == 0, "%lld experts differ", (long long)wrong);
    CHECK(sqrt(diff) <= FLOAT * sqrt(norm), "gates are off by %g", sqrt(diff / norm));
    CHECK(close <= 2 + s.N / 50, "%lld of %lld tokens too close to call", (long long)close, (long long)s.N);
    CHECK_REPEATS(scores, forward());

    // Counts of the same scores and the same selection, added to large numbers.
    for (auto& l : load.host) l = (int64_t)1 << 40;
    for (auto& m : margins.host) m = (int64_t)1 << 40;
    for (auto& v : scores.host) v = (float)v;
    for (R* r : {&scores, &gate}) r->send();
    load.send(), margins.send(), expert.send();  // from here on the reference's choice
    settle();
    router_count({load.dev, margins.dev}, scores.dev, expert.dev, bias.dev, s, ctx);
    REFERENCE(router_count)({load.ref(), margins.ref()}, scores.ref(), expert.ref(), bias.ref(), s, reference_ctx);
    CHECK_SAME(load);
    CHECK_SAME(margins);

    REFERENCE(router_forward)
    (scores.ref(), expert.ref(), gate.ref(), x.ref(), w.ref(), bias.ref(), s, reference_ctx);
    scores.send();
    gate.send();
    settle();
    auto dx_before = dx.host, dw_before = dw.host;
    auto run = [&] {
        router_backward(dx.dev, dw.dev, dgate.dev, scores.dev, expert.dev, gate.dev, x.dev, w.dev, aux, s, ctx);
    };
    run();
    REFERENCE(router_backward)
    (dx.ref(), dw.ref(), dgate.ref(), scores.ref(), expert.ref(), gate.ref(), x.ref(), w.ref(), aux, s, reference_ctx);
    CHECK_CLOSE(dx, BF16);
    CHECK_CLOSE(dw, FLOAT);
    // What was added alone.
    auto added = dw.got();
    diff = norm = 0;
    for (size_t i = 0; i < added.size(); i++) {
        diff += pow(added[i] - dw.host[i], 2);
        norm += pow(dw.host[i] - dw_before[i], 2);
    }
    CHECK(sqrt(diff) <= 4 * FLOAT * sqrt(norm), "dw's change is off by %g", sqrt(diff / norm));
    CHECK_REPEATS(dw, (restore(dx, dx_before), restore(dw, dw_before), run()));
    CHECK_REPEATS(dx, (restore(dx, dx_before), restore(dw, dw_before), run()));
}

static void test_router(void) {
    //            N    T   C   E   K  groups  score  norm  scale  force
    router_case({1, 1, 8, 1, 1, 1, 1, SCORE_SIGMOID, 1, 1, 0}, 0);
    router_case({3, 3, 24, 8, 2, 1, 1, SCORE_SIGMOID, 1, 1, 0}, 0.01f);
    router_case({129, 43, 33, 12, 3, 1, 1, SCORE_SOFTMAX, 0, 1, 0}, 0);
    router_case({1000, 125, 128, 32, 4, 1, 1, SCORE_SIGMOID, 1, 1, 0}, 1);
    router_case({1000, 250, 2048, 64, 6, 1, 1, SCORE_SOFTMAX, 0, 1, 0}, 1);
    router_case({300, 100, 512, 160, 6, 8, 3, SCORE_SOFTMAX, 0, 16, 0}, 0);
    router_case({300, 300, 1024, 256, 8, 8, 4, SCORE_SIGMOID, 1, 2.5f, 0}, 0.5f);
    router_case({129, 129, 40, 500, 5, 100, 10, SCORE_SIGMOID, 1, 1, 0}, 0);
    router_case({200, 100, 1000, 6, 2, 6, 3, SCORE_SIGMOID, 0, 1, 0}, 0);
    router_case({777, 111, 65, 70, 7, 7, 2, SCORE_SIGMOID, 1, 1, 1}, 0.3f);
    router_case({2048, 1024, 72, 37, 5, 1, 1, SCORE_SIGMOID, 1, 1, 0},
                0.1f);  // a long sum in dw, rows of odd length
}

// Equal scores: the lower index first. A token of NaN: K distinct experts.
static void test_router_ties(void) {
    for (int score = 0; score < 2; score++)
        for (int groups = 1; groups <= 8; groups *= 4) {
            RouterShape s = {67, 67, 64, 128, 6, groups, groups > 1 ? 2 : 1, score, 1, 1, 0};
            X x(s.N * s.C, 1), w(s.E * s.C, 2);
            R scores(s.N * s.E), gate(s.N * s.K), bias(s.E, 3, 0);
            I32 expert(s.N * s.K);
            for (int64_t e = 1; e < s.E; e += 2)
                for (int64_t c = 0; c < s.C; c++) w.host[(size_t)(e * s.C + c)] = w.host[(size_t)((e - 1) * s.C + c)];
            x.host[0] = NAN;
            x.send();
            w.send();
            settle();
            router_forward(scores.dev, expert.dev, gate.dev, x.dev, w.dev, bias.dev, s, ctx);
            auto id = expert.got();
            for (int64_t n = 0; n < s.N; n++)
                for (int32_t k = 0; k < s.K; k++) {
                    int32_t e = id[(size_t)(n * s.K + k)];
                    CHECK(e >= 0 && e < s.E, "token %lld got expert %d", (long long)n, e);
                    for (int32_t j = 0; j < k; j++) CHECK(id[(size_t)(n * s.K + j)] != e, "expert %d twice", e);
                    if (n > 0 && e % 2 == 0 && k + 1 < s.K)
                        CHECK(id[(size_t)(n * s.K + k + 1)] == e + 1, "expert %d without its twin", e);
                    if (n > 0 && e % 2) CHECK(k > 0 && id[(size_t)(n * s.K + k - 1)] == e - 1, "twin %d first", e);
                }
        }
}

// Updates of several layers, one of which counted nothing. Quantiles: the same bin, or another result by a multiple of
// its width; float32 rounds the bias and the mean.
static void test_router_balance(void) {
    for (int32_t E : {1, 7, 64, 256, 500}) {
        enum { LAYERS = 4, EMPTY = 2, TOKENS = 3000 };
        const int32_t K = E < 8 ? 1 : 8;
        R by_quantile(LAYERS * E, 1), by_sign(LAYERS * E, 2);
        I64 load(LAYERS * E), margins((int64_t)LAYERS * E * MARGIN_BINS);
        StepState host, *state = (StepState*)device_alloc(sizeof(StepState), "a test");
        memset(&host, 0, sizeof(host));
        for (auto& l : load.host) l = 0;
        for (auto& m : margins.host) m = 0;
        for (int32_t i = 0; i < LAYERS * E; i++) {
            if (i / E == EMPTY) continue;
            load.host[(size_t)i] = 1000 * (1 + i / E) + draw(30, i, 3);
            // Margins around a middle of the expert's own, most of them within 0.1.
            for (int n = 0; n < TOKENS; n++) {
                const double u = draw(31, (int64_t)i * TOKENS + n, 1 << 20) / (double)(1 << 19) - 1;
                const double middle = 0.2 * (draw(32, i, 100) / 50.0 - 1);
                const int64_t bin = margin_bin((float)(middle + 0.5 * u * u * u));
                margins.host[(size_t)((i / E * MARGIN_BINS + bin) * E + i % E)]++;
            }
        }
        load.send(), margins.send();
        settle();
        const auto quantile_before = by_quantile.got(), sign_before = by_sign.got();
        for (int ok = 0; ok < 2; ok++) {
            host.ok = ok;
            device_upload(state, &host, sizeof(host), ctx);
            router_balance_quantile(by_quantile.dev, margins.dev, LAYERS, E, K, state, ctx);
            REFERENCE(router_balance_quantile)(by_quantile.ref(), margins.ref(), LAYERS, E, K, &host, reference_ctx);
            router_balance_sign(by_sign.dev, load.dev, LAYERS, E, 1e-3f, state, ctx);
            REFERENCE(router_balance_sign)(by_sign.ref(), load.ref(), LAYERS, E, 1e-3f, &host, reference_ctx);
            CHECK_CLOSE(by_quantile, 1e-6);
            CHECK_CLOSE(by_sign, 1e-6);
            const auto quantile = by_quantile.got(), sign = by_sign.got();
            for (int32_t i = 0; i < LAYERS * E; i++) {
                const bool still = !ok || i / E == EMPTY;
                CHECK(!still || quantile[(size_t)i] == quantile_before[(size_t)i], "bias %d moved with ok %d", i, ok);
                CHECK(!still || sign[(size_t)i] == sign_before[(size_t)i], "bias %d moved by sign with ok %d", i, ok);
                if (!still && E > 1) CHECK(quantile[(size_t)i] != quantile_before[(size_t)i], "bias %d stayed", i);
            }
        }
        device_free(state);
    }
}

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_permute);
    RUN(test_plan_large);
    RUN(test_plan_without_gates);
    RUN(test_dispatch);
    RUN(test_experts);
    RUN(test_router);
    RUN(test_router_ties);
    RUN(test_router_balance);
    return test_summary();
}
