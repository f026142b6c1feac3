// Load balancing: histograms of margins exactly, quantiles against sorted margins, the sign rule.
#include "moe/balance.h"

#include "layers/adamw.h"
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

// alpha of each token, by sorting the scores of the experts that it did not select.
static float* oracle_alpha(const Router* r) {
    const RouterShape s = r->shape;
    float* alpha = host_alloc(s.N * sizeof(float));
    double* others = zeros(s.E);
    for (int64_t n = 0; n < s.N; n++) {
        int32_t count = 0;
        for (int32_t i = 0; i < s.E; i++) {
            int selected = 0;
            for (int32_t k = 0; k < s.K; k++) selected |= r->expert[n * s.K + k] == i;
            if (!selected) others[count++] = (double)((float)r->scores[n * s.E + i] + (float)r->bias[i]);
        }
        qsort(others, (size_t)count, sizeof(double), ascending);
        alpha[n] = count ? (float)others[count - 1] : -INFINITY;
    }
    return alpha;
}

// The margins of expert e in ascending order.
static double* sorted_margins(const Router* r, const float* alpha, int32_t e) {
    const RouterShape s = r->shape;
    double* margins = zeros(s.N);
    for (int64_t n = 0; n < s.N; n++)
        margins[n] = (double)(alpha[n] - ((float)r->scores[n * s.E + e] + (float)r->bias[e]));
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
    float* alpha = oracle_alpha(&r);
    double *expected = zeros(s.E), mean = 0;
    for (int32_t e = 0; e < s.E; e++) {
        const double* sorted = sorted_margins(&r, alpha, e);
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

    // Eight updates on the same tokens, with distinct scores: no expert is far above its share.
    for (int round = 0; round < 8 && !equal; round++) {
        memset(load, 0, s.E * sizeof(int64_t)), memset(margins, 0, cells * sizeof(int64_t));
        balance_count((BalanceCounts){load, margins}, r.scores, r.expert, r.bias, s, ctx);
        balance_quantile(r.bias, margins, 1, s.E, s.K, &state, ctx);
        run_router(&r);
    }
    memset(load, 0, s.E * sizeof(int64_t));
    balance_count((BalanceCounts){load, NULL}, r.scores, r.expert, r.bias, s, ctx);
    if (!equal && s.N > 100)
        CHECK(largest_load(load, s) < (s.groups > 1 ? 2 : 1.3), "E %d, groups %d: load %.2f", s.E, s.groups,
              largest_load(load, s));
    ctx_destroy(ctx);
    free(load), free(margins), free(alpha);
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
        {601, 601, 24, 7, 3, 1, 1, SIG, 0, 1, 0},
    };
    for (int i = 0; i < COUNT(shapes); i++) check_quantile(shapes[i], 0);
    check_quantile(shapes[2], 1);
    check_quantile(shapes[3], 1);
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
    RUN(test_quantile_edges);
    RUN(test_sign);
    return test_summary();
}
