// The CUDA kernels of the router, and the counts for load balancing, against the double reference.
#include <algorithm>
#include <functional>

#include "moe/balance.h"
#include "tests/cuda.cuh"

// Tolerance of float32 results: ROUTER. dlogits as two bf16 lose 2^-17 at most, 1e-6 of their norm. The tensor cores'
// float32 sums round toward zero after every 16 products. Sums of n products of random signs lose n / 16 * 2^-24.5 /
// sqrt(3) of their size: 3e-6 for logits at C = 2048 and for dw's change at N = 2048. Scores, a softmax of logits of
// variance 4, lose 1.25 times that: 4e-6. A single score loses at most 3.5e-6, so a selection with a gap of 1e-5 does
// not change.
#define ROUTER 1e-5

// The smallest gap that decided a token's selection: between selected and other groups, and between successive experts.
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
    // Forward. Tokens that are too close to call are left out of the comparison of experts and gates.
    auto forward = [&] { router_forward(scores.dev, expert.dev, gate.dev, x.dev, w.dev, bias.dev, s, ctx); };
    settle();
    forward();
    REFERENCE(router_forward)
    (scores.ref(), expert.ref(), gate.ref(), x.ref(), w.ref(), bias.ref(), s, reference_ctx);
    CHECK_CLOSE(scores, ROUTER);
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
    CHECK(sqrt(diff) <= ROUTER * sqrt(norm), "gates are off by %g", sqrt(diff / norm));
    CHECK(close <= 2 + s.N / 50, "%lld of %lld tokens too close to call", (long long)close, (long long)s.N);
    CHECK_REPEATS(scores, forward());

    // Counts of the same scores and the same selection, added to large numbers. The reference computes the scores
    // again, because the repetition has poisoned them.
    REFERENCE(router_forward)
    (scores.ref(), expert.ref(), gate.ref(), x.ref(), w.ref(), bias.ref(), s, reference_ctx);
    for (auto& l : load.host) l = (int64_t)1 << 40;
    for (auto& m : margins.host) m = (int64_t)1 << 40;
    for (auto& v : scores.host) v = (float)v;
    for (R* r : {&scores, &gate}) r->send();
    load.send(), margins.send(), expert.send();  // from here on the reference's selection
    settle();
    balance_count({load.dev, margins.dev}, scores.dev, expert.dev, bias.dev, s, ctx);
    REFERENCE(balance_count)({load.ref(), margins.ref()}, scores.ref(), expert.ref(), bias.ref(), s, reference_ctx);
    CHECK_SAME(load);
    CHECK_SAME(margins);

    // Backward, on the scores and gates of the reference.
    auto dx_before = dx.host, dw_before = dw.host;
    auto run = [&] {
        router_backward(dx.dev, dw.dev, dgate.dev, scores.dev, expert.dev, gate.dev, x.dev, w.dev, aux, s, ctx);
    };
    run();
    REFERENCE(router_backward)
    (dx.ref(), dw.ref(), dgate.ref(), scores.ref(), expert.ref(), gate.ref(), x.ref(), w.ref(), aux, s, reference_ctx);
    CHECK_CLOSE(dx, BF16);
    CHECK_CLOSE(dw, ROUTER);
    // The change of dw alone.
    auto added = dw.got();
    diff = norm = 0;
    for (size_t i = 0; i < added.size(); i++) {
        diff += pow(added[i] - dw.host[i], 2);
        norm += pow(dw.host[i] - dw_before[i], 2);
    }
    CHECK(sqrt(diff) <= 4 * ROUTER * sqrt(norm), "dw's change is off by %g", sqrt(diff / norm));
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
    router_case({200, 100, 256, 8, 2, 4, 1, SCORE_SIGMOID, 1, 1, 0}, 0);  // a token selects all experts of its group
    router_case({200, 100, 256, 8, 2, 4, 1, SCORE_SOFTMAX, 1, 1, 0}, 0);
    router_case({777, 111, 65, 70, 7, 7, 2, SCORE_SIGMOID, 1, 1, 1}, 0.3f);
    router_case({2048, 1024, 72, 37, 5, 1, 1, SCORE_SIGMOID, 1, 1, 0},
                0.1f);  // a long sum in dw, rows of odd length
}

// Equal scores select the lower index first. A token of NaN selects K distinct experts.
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

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_router);
    RUN(test_router_ties);
    return test_summary();
}
