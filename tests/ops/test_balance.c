// Load balancing: histograms of margins exactly, quantiles against sorted margins, the sign rule.
#include "moe/balance.h"

#include "layers/step.h"
#include "tests/router.h"

// margin_bin and margin_edge agree: a bin has the margins from its lower to its upper edge, and the edges are those of
// the header.
static void test_margin_bins(void) {
    CHECK(margin_bin(0) == MARGIN_SIDE && margin_bin(-0.0f) == MARGIN_SIDE, "0 is in bin %d", margin_bin(0));
    CHECK(margin_edge(0) == -2 && margin_edge(MARGIN_BINS) == 2, "from %g to %g", margin_edge(0),
          margin_edge(MARGIN_BINS));
    CHECK(margin_edge(MARGIN_SIDE + 1) == 0x1p-19 && margin_edge(MARGIN_SIDE) == -0x1p-19, "middle bin up to %g",
          margin_edge(MARGIN_SIDE + 1));
    for (int bin = 0; bin < MARGIN_BINS; bin++) {
        const float low = (float)margin_edge(bin), high = (float)margin_edge(bin + 1), middle = (low + high) / 2;
        // The lower edge belongs to the bin for positive margins, the upper edge for negative ones.
        const float edge = bin < MARGIN_SIDE ? high : low;
        CHECK(low < high && (double)low == margin_edge(bin), "bin %d is from %g to %g", bin, (double)low, (double)high);
        CHECK(margin_bin(middle) == bin, "%g is in bin %d, not %d", (double)middle, margin_bin(middle), bin);
        if (bin != MARGIN_SIDE) CHECK(margin_bin(edge) == bin, "edge %g is in bin %d", (double)edge, margin_bin(edge));
        if (bin > MARGIN_SIDE + MARGIN_SPLIT)
            CHECK((high - low) / low <= 1.0f / MARGIN_SPLIT, "bin %d is %g wide", bin, (double)(high - low));
    }
    const float beyond[] = {2, 100, INFINITY, NAN, -NAN};
    for (int i = 0; i < COUNT(beyond); i++) {
        CHECK(margin_bin(beyond[i]) == MARGIN_BINS - 1, "%g is in bin %d", (double)beyond[i], margin_bin(beyond[i]));
        if (i < 3) CHECK(margin_bin(-beyond[i]) == 0, "%g is in bin %d", (double)-beyond[i], margin_bin(-beyond[i]));
    }
}

static int ascending(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// The k-th largest of n values, from k = 0 on; -inf if there are fewer.
static double largest(const double* value, int32_t n, int32_t k) {
    double sorted[ROUTER_MOST_EXPERTS];
    memcpy(sorted, value, (size_t)n * sizeof(double));
    qsort(sorted, (size_t)n, sizeof(double), ascending);
    return k < n ? sorted[n - 1 - k] : -INFINITY;
}

// The score of a group, by sorting: in float32, as the margins are.
static double oracle_group(const double* value, RouterShape s) {
    const int32_t size = s.E / s.groups;
    const float best = (float)largest(value, size, 0), second = (float)largest(value, size, 1);
    return s.score == SCORE_SIGMOID && size > 1 ? (double)(best + second) : (double)best;
}

// The margins (N, E), by sorting. The sign of each is checked: the routing itself is the oracle.
static float* oracle_margins(const Router* r) {
    const RouterShape s = r->shape;
    const int32_t size = s.E / s.groups;
    float* margins = host_alloc(s.N * s.E * sizeof(float));
    int64_t wrong = 0;
    for (int64_t n = 0; n < s.N; n++) {
        double value[ROUTER_MOST_EXPERTS], score[ROUTER_MOST_EXPERTS], others[ROUTER_MOST_EXPERTS];
        char taken[ROUTER_MOST_EXPERTS] = {0}, inside[ROUTER_MOST_EXPERTS];
        for (int32_t e = 0; e < s.E; e++) value[e] = (double)((float)r->scores[n * s.E + e] + (float)r->bias[e]);
        for (int32_t k = 0; k < s.K; k++) taken[r->expert[n * s.K + k]] = 1;

        // A group is selected if fewer than top_groups are better, or equal with a lower index.
        for (int32_t g = 0; g < s.groups; g++) score[g] = oracle_group(value + g * size, s);
        for (int32_t g = 0; g < s.groups; g++) {
            int32_t better = 0;
            for (int32_t i = 0; i < s.groups; i++) better += score[i] > score[g] || (score[i] == score[g] && i < g);
            inside[g] = better < s.top_groups;
        }
        int32_t count = 0;
        for (int32_t g = 0; g < s.groups; g++)
            if (!inside[g]) others[count++] = score[g];
        const float beta = (float)largest(others, count, 0);
        count = 0;
        for (int32_t e = 0; e < s.E; e++)
            if (inside[e / size] && !taken[e]) others[count++] = value[e];
        const float alpha = (float)largest(others, count, 0);
        for (int32_t e = 0; e < s.E; e++) {
            const float rise = beta - (float)score[e / size], own = alpha - (float)value[e];
            const float group = s.score == SCORE_SIGMOID && size > 1 ? rise / 2 : rise;
            const float margin = margins[n * s.E + e] = own > group ? own : group;
            wrong += taken[e] ? margin > 0 : margin < 0;
        }
    }
    CHECK(wrong == 0, "E %d, %d groups: %lld margins have the wrong sign", s.E, s.groups, (long long)wrong);
    return margins;
}

// The margins of expert e in ascending order.
static double* sorted_margins(const Router* r, const float* all, int32_t e) {
    const RouterShape s = r->shape;
    double* margins = zeros(s.N);
    for (int64_t n = 0; n < s.N; n++) margins[n] = (double)all[n * s.E + e];
    qsort(margins, (size_t)s.N, sizeof(double), ascending);
    return margins;
}

// The K/E quantile of sorted margins: the bin in which the wanted number of margins is reached. The quantile divides
// the bin in the ratio in which that number divides its margins.
static double oracle_quantile(const double* margins, RouterShape s) {
    const double wanted = (double)s.N * s.K / s.E, reached = margins[(int64_t)ceil(wanted) - 1];
    int bin = 0;
    while (bin < MARGIN_BINS - 1 && margin_edge(bin + 1) <= reached - (reached < 0 ? 0x1p-60 : 0)) bin++;
    double below = 0, inside = 0;
    for (int64_t n = 0; n < s.N; n++) {
        const int at = margin_bin((float)margins[n]);
        below += at < bin, inside += at == bin;
    }
    return margin_edge(bin) + (wanted - below) / inside * (margin_edge(bin + 1) - margin_edge(bin));
}

static double largest_load(const int64_t* load, RouterShape s) {
    double most = 0;
    for (int32_t e = 0; e < s.E; e++) most = fmax(most, (double)load[e]);
    return most * s.E / ((double)s.N * s.K);
}

// Loads, histograms and the quantile update, against sorted margins. equal: tokens are equal in threes and experts in
// fours, so that scores tie.
static void check_quantile(RouterShape s, int equal) {
    Router r = make_router(s);
    for (int64_t i = 0; i < s.N * s.C && equal; i++) r.x[i] = r.x[i / s.C / 3 * 3 * s.C + i % s.C];
    for (int64_t i = 0; i < s.E * s.C && equal; i++) r.w[i] = r.w[i / s.C / 4 * 4 * s.C + i % s.C];
    for (int32_t e = 0; e < s.E && equal; e++) r.bias[e] = r.bias[e / 4 * 4];
    run_router(&r);

    // Counts in two micro-steps of different sizes equal those in one.
    Ctx* ctx = ctx_create(0);
    const int64_t cells = (int64_t)s.E * MARGIN_BINS, first = s.N / 3;
    int64_t *load = host_alloc(2 * s.E * sizeof(int64_t)), *margins = host_alloc(2 * cells * sizeof(int64_t));
    RouterShape parts[2] = {s, s};
    parts[0].N = first, parts[1].N = s.N - first;
    balance_count((BalanceCounts){load, margins}, r.scores, r.expert, r.bias, s, ctx);
    for (int i = 0; i < 2; i++)
        balance_count((BalanceCounts){load + s.E, margins + cells}, r.scores + i * first * s.E,
                      r.expert + i * first * s.K, r.bias, parts[i], ctx);
    CHECK_BITS(load, load + s.E, s.E * sizeof(int64_t));
    CHECK_BITS(margins, margins + cells, cells * sizeof(int64_t));

    // The update: every bias moves by its quantile, then the mean is subtracted. Float32 rounds twice.
    StepState state = {.ok = 1};
    float* all = oracle_margins(&r);
    double *expected = zeros(s.E), mean = 0;
    for (int32_t e = 0; e < s.E; e++) {
        const double* sorted = sorted_margins(&r, all, e);
        int64_t inside[MARGIN_BINS] = {0};
        for (int64_t n = 0; n < s.N; n++) inside[margin_bin((float)sorted[n])]++;
        int64_t wrong = 0;
        for (int64_t bin = 0; bin < MARGIN_BINS; bin++) wrong += inside[bin] != margins[bin * s.E + e];
        CHECK(wrong == 0, "expert %d: %lld bins differ", e, (long long)wrong);
        expected[e] = (double)r.bias[e] + oracle_quantile(sorted, s);
        mean += expected[e] / s.E;
    }
    real* updated = copied(r.bias, s.E);
    balance_quantile(updated, margins, 1, s.E, s.K, &state, ctx);
    for (int32_t e = 0; e < s.E; e++)
        CHECK(fabs((double)updated[e] - (expected[e] - mean)) <= TOL(2e-7, 1e-14), "E %d, expert %d: %.9g, not %.9g",
              s.E, e, (double)updated[e], expected[e] - mean);

    ctx_destroy(ctx);
    free(load), free(margins), free(all);
    release_all();
}

// Updates on the same tokens. With distinct scores the load becomes even: the fixed point of the rule.
static void check_fixed_point(RouterShape s, int updates, double most) {
    Router r = make_router(s);
    Ctx* ctx = ctx_create(router_workspace(s));
    StepState state = {.ok = 1};
    int64_t *load = host_alloc(s.E * sizeof(int64_t)), *margins = host_alloc(s.E * MARGIN_BINS * sizeof(int64_t));
    r.scores = poisoned(s.N * s.E), r.gate = poisoned(s.N * s.K), r.expert = poisoned_ints(s.N * s.K);
    for (int i = 0; i <= updates; i++) {
        router_forward(r.scores, r.expert, r.gate, r.x, r.w, r.bias, s, ctx);
        memset(load, 0, s.E * sizeof(int64_t)), memset(margins, 0, s.E * MARGIN_BINS * sizeof(int64_t));
        balance_count((BalanceCounts){load, margins}, r.scores, r.expert, r.bias, s, ctx);
        if (i < updates) balance_quantile(r.bias, margins, 1, s.E, s.K, &state, ctx);
    }
    CHECK(largest_load(load, s) < most, "E %d, %d of %d groups, score %d: load %.3f", s.E, s.top_groups, s.groups,
          s.score, largest_load(load, s));
    ctx_destroy(ctx);
    free(load), free(margins);
    release_all();
}

static void test_quantile(void) {
    enum { SIG = SCORE_SIGMOID, SOFT = SCORE_SOFTMAX };
    static const RouterShape shapes[] = {
        // N, T, C, E, K, groups, top_groups, score, norm, scale, force_balance
        {1, 1, 5, 4, 1, 1, 1, SIG, 1, 1, 0},         {5, 5, 5, 8, 2, 1, 1, SOFT, 0, 1, 0},
        {601, 601, 24, 8, 2, 1, 1, SIG, 1, 1, 0},    {600, 300, 24, 64, 6, 1, 1, SOFT, 0, 1, 0},
        {600, 600, 24, 32, 4, 8, 4, SIG, 1, 1, 0},   {1500, 500, 24, 160, 6, 8, 3, SOFT, 0, 1, 0},
        {1000, 500, 24, 512, 8, 1, 1, SIG, 1, 1, 0}, {600, 600, 24, 32, 31, 1, 1, SOFT, 0, 1, 0},
        {601, 601, 24, 7, 3, 1, 1, SIG, 0, 1, 0},    {300, 300, 24, 8, 2, 4, 1, SIG, 1, 1, 0},
        {300, 100, 24, 6, 2, 6, 3, SIG, 0, 1, 0},    {300, 300, 24, 32, 4, 8, 2, SIG, 1, 1, 0},
    };
    for (int i = 0; i < COUNT(shapes); i++) check_quantile(shapes[i], 0);
    for (int i = 2; i < 5; i++) check_quantile(shapes[i], 1);
}

// An expert's even share of the tokens is 64 at least. Its quantile is between two of them, and other experts may move
// it by some more: below 10 %. Few groups of many experts, and tokens that select all experts of a group, are the hard
// cases.
static void test_fixed_point(void) {
    for (int32_t score = 0; score < 2; score++) {
        check_fixed_point((RouterShape){1024, 1024, 24, 8, 2, 1, 1, score, 1, 1, 0}, 8, 1.1);
        check_fixed_point((RouterShape){1024, 1024, 24, 64, 6, 1, 1, score, 1, 1, 0}, 8, 1.1);
        check_fixed_point((RouterShape){1024, 1024, 24, 8, 2, 4, 1, score, 1, 1, 0}, 100, 1.1);
        check_fixed_point((RouterShape){1024, 1024, 24, 32, 4, 8, 2, score, 1, 1, 0}, 100, 1.1);
        check_fixed_point((RouterShape){1024, 1024, 24, 8, 4, 2, 1, score, 1, 1, 0}, 100, 1.1);
        check_fixed_point((RouterShape){1024, 1024, 24, 32, 8, 4, 1, score, 1, 1, 0}, 100, 1.1);
        check_fixed_point((RouterShape){1024, 1024, 24, 64, 4, 8, 1, score, 1, 1, 0}, 100, 1.1);
        check_fixed_point((RouterShape){1024, 1024, 24, 64, 8, 8, 2, score, 1, 1, 0}, 100, 1.1);
        check_fixed_point((RouterShape){2048, 2048, 24, 160, 6, 8, 3, score, 1, 1, 0}, 100, 1.1);
        check_fixed_point((RouterShape){2048, 2048, 24, 256, 8, 8, 4, score, 1, 1, 0}, 100, 1.1);
    }
}

// Nothing is written if the step is not good, or in a layer that counted no token. If all experts are selected, they
// keep equal biases. Other layers do not matter.
static void test_quantile_edges(void) {
    enum { E = 4, K = 2, CELLS = E * MARGIN_BINS };
    Ctx* ctx = ctx_create(0);
    int64_t* margins = host_alloc(3 * CELLS * sizeof(int64_t));
    for (int e = 0; e < E; e++) {
        for (int n = 0; n < 10; n++) margins[margin_bin(0.1f * (float)(n - 2 - e)) * E + e]++;
        margins[2 * CELLS + e] = 10;  // every margin is -inf, as with K = E
    }
    for (int ok = 0; ok < 2; ok++) {
        StepState state = {.ok = ok};
        real *bias = tensor(3 * E, 1), *was = copied(bias, 3 * E);
        for (int e = 1; e < E; e++) bias[2 * E + e] = was[2 * E + e] = bias[2 * E];
        balance_quantile(bias, margins, 3, E, K, &state, ctx);
        if (!ok) CHECK_BITS(bias, was, 3 * E * sizeof(real));
        CHECK_BITS(bias + E, was + E, E * sizeof(real));
        for (int e = 0; e < E && ok; e++) {
            CHECK(bias[e] != was[e], "expert %d: bias %g", e, (double)bias[e]);
            CHECK(fabs((double)bias[2 * E + e]) <= TOL(1e-6, 1e-14), "all selected: bias %g", (double)bias[2 * E + e]);
        }
    }
    ctx_destroy(ctx);
    release_all();
}

// A bias moves by exactly the rate. Only the sign of the mean load minus its own load counts.
static void test_sign(void) {
    enum { E = 5 };
    static const int64_t loads[][E] = {{10, 20, 30, 20, 20},
                                       {7, 7, 7, 7, 7},
                                       {0, 0, 0, 0, 0},
                                       {1, 0, 0, 0, 0},
                                       {50000000001, 50000000002, 50000000000, 50000000001, 50000000001}};
    static const int signs[][E] = {{1, 0, -1, 0, 0}, {0}, {0}, {-1, 1, 1, 1, 1}, {0, -1, 1, 0, 0}};
    Ctx* ctx = ctx_create(0);
    for (int ok = 0; ok < 2; ok++) {
        StepState state = {.ok = ok};
        real *bias = tensor(COUNT(loads) * E, 1), *was = copied(bias, COUNT(loads) * E);
        balance_sign(bias, loads[0], COUNT(loads), E, 0.001f, &state, ctx);
        for (int i = 0; i < COUNT(loads) * E; i++) {
            const real expected = was[i] + (real)0.001f * (real)(ok * signs[i / E][i % E]);
            CHECK(bias[i] == expected, "load %lld: bias %.17g, expected %.17g", (long long)loads[i / E][i % E],
                  (double)bias[i], (double)expected);
        }
    }
    ctx_destroy(ctx);
    release_all();
}

int main(void) {
    RUN(test_margin_bins);
    RUN(test_quantile);
    RUN(test_fixed_point);
    RUN(test_quantile_edges);
    RUN(test_sign);
    return test_summary();
}
