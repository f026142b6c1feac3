// The router: scores and gates against float64, selection exactly, by ranks instead of a sort; the backward against
// differences of the oracle; histograms of margins exactly and quantiles against sorted margins.
#include "layers/adamw.h"
#include "moe/router.h"
#include "tests/oracle.h"

typedef struct {
    RouterShape shape;
    float aux;
    real *x, *w, *bias, *dgate, *dx_before, *dw_before;
    real *scores, *gate, *dx, *dw;
    int32_t* expert;
    double *xd, *wd, *dgated;
} Router;

static void run_router(void* arg) {
    Router* r = arg;
    RouterShape s = r->shape;
    Ctx* ctx = ctx_create(router_workspace(s));
    r->scores = poisoned(s.N * s.E), r->gate = poisoned(s.N * s.K), r->expert = poisoned_ints(s.N * s.K);
    router_forward(r->scores, r->expert, r->gate, r->x, r->w, r->bias, s, ctx);
    r->dx = copied(r->dx_before, s.N * s.C), r->dw = copied(r->dw_before, s.E * s.C);
    router_backward(r->dx, r->dw, r->dgate, r->scores, r->expert, r->gate, r->x, r->w, r->aux, s, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static Router make_router(RouterShape s) {
    Router r = {.shape = s};
    r.x = tensor(s.N * s.C, 1), r.w = tensor(s.E * s.C, 2), r.bias = tensor(s.E, 3), r.dgate = tensor(s.N * s.K, 4);
    r.dx_before = tensor(s.N * s.C, 5), r.dw_before = tensor(s.E * s.C, 6);
    for (int64_t i = 0; i < s.E * s.C; i++) r.w[i] /= (real)sqrt((double)s.C);  // logits of size 1
    for (int32_t e = 0; e < s.E; e++) r.bias[e] *= (real)0.1;
    return r;
}

static void oracle_scores(double* scores, const double* x, const double* w, RouterShape s) {
    for (int64_t n = 0; n < s.N; n++) {
        double top = -INFINITY, sum = 0, *row = scores + n * s.E;
        for (int32_t e = 0; e < s.E; e++) top = fmax(top, row[e] = dot(x + n * s.C, w + e * s.C, s.C));
        for (int32_t e = 0; e < s.E; e++) sum += exp(row[e] - top);
        for (int32_t e = 0; e < s.E; e++)
            row[e] = s.score == SCORE_SIGMOID ? 1 / (1 + exp(-row[e])) : exp(row[e] - top) / sum;
    }
}

static double oracle_gate(const double* scores, const int32_t* expert, int32_t k, RouterShape s) {
    double sum = 1e-20;
    for (int32_t j = 0; j < s.K; j++) sum += scores[expert[j]];
    return scores[expert[k]] / (s.norm ? sum : 1) * (double)s.scale;
}

// a stands before b
static int before(double a, int32_t ia, double b, int32_t ib) { return a > b || (a == b && ia < ib); }

// The choice of one token from its scores as the op gave them (they are checked on their own), by the rank of each
// group and each expert. Sums in real, as a score's last bit decides between near ties.
static void oracle_select(int32_t* expert, const real* scores, const real* bias, RouterShape s) {
    int32_t per = s.E / s.groups;
    real *key = host_alloc(s.E * sizeof(real)), *group = host_alloc(s.groups * sizeof(real));
    char* allowed = host_alloc(s.E);
    for (int32_t e = 0; e < s.E; e++) key[e] = scores[e] + bias[e];
    for (int32_t g = 0; g < s.groups; g++) {
        group[g] = -INFINITY;
        for (int32_t i = g * per; i < (g + 1) * per; i++) {
            if (s.score == SCORE_SOFTMAX || per == 1) group[g] = key[i] > group[g] ? key[i] : group[g];
            for (int32_t j = i + 1; j < (g + 1) * per && s.score == SCORE_SIGMOID; j++)
                group[g] = key[i] + key[j] > group[g] ? key[i] + key[j] : group[g];
        }
    }
    for (int32_t e = 0; e < s.E; e++) {
        int32_t rank = 0;
        for (int32_t g = 0; g < s.groups; g++) rank += before(group[g], g, group[e / per], e / per);
        allowed[e] = rank < s.top_groups;
    }
    for (int32_t e = 0; e < s.E; e++) {
        int32_t rank = 0;
        for (int32_t o = 0; o < s.E; o++) rank += allowed[o] && before(key[o], o, key[e], e);
        if (allowed[e] && rank < s.K) expert[rank] = e;
    }
    free(key), free(group), free(allowed);
}

// <dgate, gate> plus the auxiliary loss, the choice and the counts held.
static double router_objective(void* arg) {
    Router* r = arg;
    RouterShape s = r->shape;
    double *scores = host_alloc(s.N * s.E * sizeof(double)), *sum = host_alloc(s.N * sizeof(double)), objective = 0;
    oracle_scores(scores, r->xd, r->wd, s);
    for (int64_t n = 0; n < s.N; n++) {
        for (int32_t k = 0; k < s.K; k++)
            objective += r->dgated[n * s.K + k] * oracle_gate(scores + n * s.E, r->expert + n * s.K, k, s);
        for (int32_t e = 0; e < s.E; e++) sum[n] += scores[n * s.E + e];
    }
    for (int64_t start = 0; start < s.N && r->aux != 0; start += s.T)
        for (int32_t e = 0; e < s.E; e++) {
            double count = 0, share = 0;
            for (int64_t n = start; n < start + s.T && n < s.N; n++) {
                share += scores[n * s.E + e] / sum[n] / (double)s.T;
                int32_t above = 0;  // by the op's scores: differences must not move the counts
                for (int32_t o = 0; o < s.E; o++)
                    above += before((double)r->scores[n * s.E + o], o, (double)r->scores[n * s.E + e], e);
                count += above < s.K;
            }
            objective += (double)r->aux * s.E / ((double)s.K * s.T) * count * share;
        }
    free(scores), free(sum);
    return objective;
}

static void check_router(RouterShape s, float aux, double x_scale) {
    Router r = make_router(s);
    r.aux = aux;
    for (int64_t i = 0; i < s.N * s.C; i++) r.x[i] *= (real)x_scale;
    r.xd = doubles(r.x, s.N * s.C), r.wd = doubles(r.w, s.E * s.C), r.dgated = doubles(r.dgate, s.N * s.K);
    check_threads(run_router, &r);
    // Logits of size x_scale from up to 129 products: sqrt(129) u x_scale = 7e-7 x_scale in the exponents.
    double tolerance = x_scale * TOL(2e-6, 1e-14), *scores = zeros(s.N * s.E), *gate = zeros(s.N * s.K);
    oracle_scores(scores, r.xd, r.wd, s);
    CHECK_CLOSE(r.scores, scores, s.N * s.E, tolerance);
    int32_t* expert = poisoned_ints(s.N * s.K);
    for (int64_t n = 0; n < s.N; n++) {
        oracle_select(expert + n * s.K, r.scores + n * s.E, r.bias, s);
        for (int32_t k = 0; k < s.K && s.force_balance; k++) expert[n * s.K + k] = (int32_t)((n * s.K + k) % s.E);
        for (int32_t k = 0; k < s.K; k++) gate[n * s.K + k] = oracle_gate(scores + n * s.E, expert + n * s.K, k, s);
    }
    CHECK_BITS(r.expert, expert, s.N * s.K * sizeof(int32_t));
    if (memcmp(r.expert, expert, s.N * s.K * sizeof(int32_t)) == 0) {
        CHECK_CLOSE(r.gate, gate, s.N * s.K, tolerance);
        // s, its slope, a difference between experts and a sum of up to 129 or 300 products: three times the forward's.
        if (x_scale == 1) {
            CHECK_GRADIENT(router_objective, &r, r.xd, r.dx, r.dx_before, s.N * s.C, 6e-6);
            CHECK_GRADIENT(router_objective, &r, r.wd, r.dw, r.dw_before, s.E * s.C, 6e-6);
        }
    }
    release_all();
}

static void test_router_random(void) {
    enum { SIG = SCORE_SIGMOID, SOFT = SCORE_SOFTMAX };
    static const RouterShape shapes[] = {
        // N, T, C, E, K, groups, top_groups, score, norm, scale, force_balance
        {1, 1, 5, 4, 1, 1, 1, SIG, 0, 1, 0},          {6, 3, 7, 8, 2, 1, 1, SIG, 1, 2.5f, 0},
        {6, 2, 7, 8, 3, 1, 1, SOFT, 0, 1, 0},         {6, 6, 5, 6, 2, 3, 1, SIG, 1, 1, 0},
        {127, 127, 24, 16, 4, 4, 2, SIG, 1, 2.5f, 0}, {129, 43, 33, 16, 4, 4, 2, SOFT, 0, 16, 0},
        {300, 100, 40, 24, 6, 8, 3, SOFT, 0, 16, 0},  {300, 60, 129, 20, 5, 4, 3, SIG, 1, 2.5f, 0},
        {129, 129, 24, 8, 8, 2, 2, SIG, 0, 1.5f, 0},  {128, 64, 24, 160, 6, 8, 3, SOFT, 1, 1, 0},
        {65, 13, 24, 6, 2, 6, 3, SIG, 1, 1, 0},       {64, 32, 24, 256, 8, 8, 4, SIG, 1, 2.5f, 0},
        {130, 65, 24, 5, 3, 1, 1, SIG, 1, 1, 1},      {130, 26, 33, 8, 2, 4, 2, SOFT, 0, 3, 1},
    };
    for (int i = 0; i < COUNT(shapes); i++) {
        check_router(shapes[i], 0, 1);
        check_router(shapes[i], 3, 1);
        check_router(shapes[i], 0.5f, 30);
    }
}

// The gate of one expert, normalised, is `scale` whatever its score: dgate gives the router no gradient, the balance
// loss does. What the subtraction leaves is a rounding of the gate and one of each product: 3 u dgate (1 - s) of dgate
// s'.
static void test_router_constant_gate(void) {
    RouterShape s = {40, 20, 24, 8, 1, 1, 1, SCORE_SIGMOID, 1, 2.5f, 0};
    for (int aux = 0; aux < 2; aux++) {
        Router r = make_router(s);
        r.aux = (float)aux;
        memset(r.dw_before, 0, (size_t)(s.E * s.C) * sizeof(real));
        run_router(&r);
        double most = 0;
        for (int64_t i = 0; i < s.E * s.C; i++) most = fmax(most, fabs((double)r.dw[i]));
        CHECK(aux ? most > 1e-3 : most < TOL(1e-5, 1e-13), "with aux %d the largest gradient is %g", aux, most);
        release_all();
    }
}

// Tokens e_0: the logits are what w's first column says, small whole numbers, so that equal means equal in any
// arithmetic.
static void check_choice(RouterShape s, const double* logits, const double* bias, const int32_t* expected) {
    s.N = s.T = 3, s.C = 24;
    Router r = make_router(s);
    memset(r.x, 0, s.N * s.C * sizeof(real));
    for (int64_t n = 0; n < s.N; n++) r.x[n * s.C] = 1;
    for (int32_t e = 0; e < s.E; e++) r.w[e * s.C] = (real)logits[e], r.bias[e] = bias ? (real)bias[e] : 0;
    check_threads(run_router, &r);
    for (int64_t n = 0; n < s.N; n++)
        for (int32_t k = 0; k < s.K; k++) {
            int32_t e = r.expert[n * s.K + k];
            CHECK(e == expected[k], "choice %d is expert %d, expected %d", k, e, expected[k]);
            // Gates come from s alone: without norm they are s, to the bit of the scores.
            if (!s.norm && s.scale == 1 && e >= 0 && e < s.E)
                CHECK(r.gate[n * s.K + k] == r.scores[n * s.E + e], "gate %g is not s", (double)r.gate[n * s.K + k]);
        }
    release_all();
}

#define CHOICE(shape, expected, bias, ...)                                                                             \
    do {                                                                                                               \
        const double logits_[] = {__VA_ARGS__};                                                                        \
        check_choice(shape, logits_, bias, expected);                                                                  \
    } while (0)

static void test_router_choice(void) {
    RouterShape s = {.E = 8, .K = 3, .groups = 1, .top_groups = 1, .score = SCORE_SIGMOID, .scale = 1};
    for (s.score = 0; s.score < 2; s.score++) {
        s.groups = s.top_groups = 1, s.K = 3;
        CHOICE(s, ((int32_t[]){1, 2, 4}), NULL, 1, 2, 2, 0, 2, 1, 0, 0);
        CHOICE(s, ((int32_t[]){0, 1, 2}), NULL, 0, 0, 0, 0, 0, 0, 0, 0);
        CHOICE(s, ((int32_t[]){7, 0, 1}), NULL, 1, 1, 1, 1, 1, 1, 1, 3);
        s.K = 4;
        CHOICE(s, ((int32_t[]){1, 2, 4, 0}), NULL, 1, 2, 2, 0, 2, 1, 0, 0);
        // Equal groups: the lower ones. Two of four groups of two.
        s.groups = 4, s.top_groups = 2;
        CHOICE(s, ((int32_t[]){0, 1, 2, 3}), NULL, 0, 0, 0, 0, 0, 0, 0, 0);
        CHOICE(s, ((int32_t[]){2, 4, 3, 5}), NULL, 0, 0, 2, 1, 2, 1, 2, 1);
        // The bias chooses, experts 7 and 3, and all s + bias in the chosen groups are negative: other groups are -inf,
        // not 0.
        double bias[] = {-9, -9, -9, -3, -9, -9, -9, -2};
        s.K = 3;
        CHOICE(s, ((int32_t[]){7, 3, 2}), bias, 0, 0, 0, 0, 0, 0, -1, 0);
        s.K = 1, s.top_groups = 1;
        CHOICE(s, ((int32_t[]){7}), bias, 0, 0, 0, 0, 0, 0, 0, 0);
        // The bias lifts expert 6 over all others but is not part of its gate (checked inside).
        double lift[] = {0, 0, 0, 0, 0, 0, 5, 0};
        s.groups = 1, s.K = 2;
        CHOICE(s, ((int32_t[]){6, 1}), lift, 1, 3, 0, 0, 1, 0, -2, 0);
    }
    // Equal logits make equal scores wherever they stand, whatever the vector width.
    for (int i = 0; i < 12; i++) {
        int32_t E = (int32_t[]){9, 10, 13, 18, 23, 37}[i / 2];
        RouterShape odd = {.E = E, .K = 3, .groups = 1, .top_groups = 1, .score = i % 2, .scale = 1};
        double logits[37];
        for (int e = 0; e < E; e++) logits[e] = 1;
        check_choice(odd, logits, NULL, (int32_t[]){0, 1, 2});
        for (int e = 0; e < E; e++) logits[e] = e % 3;
        check_choice(odd, logits, NULL, (int32_t[]){2, 5, 8});
    }
    // One strong expert against two good ones: softmax takes the group of the strong one, sigmoid the sum of two.
    RouterShape two = {.E = 6, .K = 2, .groups = 2, .top_groups = 1, .score = SCORE_SIGMOID, .scale = 1};
    CHOICE(two, ((int32_t[]){3, 5}), NULL, 2, -9, -9, 1, -9, 1);
    two.score = SCORE_SOFTMAX;
    CHOICE(two, ((int32_t[]){0, 1}), NULL, 2, -9, -9, 1, -9, 1);
    // Only the two best count, not the sum over the group.
    two.score = SCORE_SIGMOID;
    CHOICE(two, ((int32_t[]){4, 3}), NULL, 1, 1, 1, 1, 2, -9);
}

// Scores that are all 0 in float32 divide by 1e-20, not by 0; a token that is not finite still gets K different
// experts, so that the step goes on to be found and skipped.
static void test_router_extreme(void) {
    RouterShape s = {.N = 4, .T = 4, .C = 3, .E = 8, .K = 3, .groups = 4, .top_groups = 2, .norm = 1, .scale = 1};
    for (s.score = 0; s.score < 2; s.score++) {
        Router r = make_router(s);
        for (int64_t i = 0; i < s.N * s.C; i++)
            r.x[i] = i == 0 ? -200 : i == 3 ? 1000 : i == 6 ? (real)NAN : (real)INFINITY;
        for (int32_t e = 0; e < s.E; e++) r.w[e * s.C] = 1, r.w[e * s.C + 1] = r.w[e * s.C + 2] = r.bias[e] = 0;
        r.x[1] = r.x[2] = r.x[4] = r.x[5] = 0;
        check_threads(run_router, &r);
        for (int64_t i = 0; i < 2 * s.K; i++)
            CHECK(isfinite(r.gate[i]), "gate %lld: %g", (long long)i, (double)r.gate[i]);
        for (int64_t i = 0; i < 2 * s.C; i++) CHECK(isfinite(r.dx[i]), "dx %lld: %g", (long long)i, (double)r.dx[i]);
        // Token 0 has logits of -200. sigmoid: s = 1e-87 (0 in float32) over 1e-20. softmax: three equal shares.
        double tiny = exp(-200), expected = s.score == SCORE_SIGMOID ? tiny / (1e-20 + 3 * tiny) : 1 / 3.0;
        for (int64_t i = 0; i < s.K; i++) {
            double gate = r.gate[i];
            CHECK(fabs(gate - expected) <= 1e-6 * expected + TOL(1e-37, 0), "gate %g, expected %g", gate, expected);
        }
        for (int64_t i = 0; i < s.K; i++) CHECK(r.expert[i] == i && r.expert[s.K + i] == i, "equal scores");
        for (int64_t n = 2; n < s.N; n++) {
            int chosen[8] = {0}, bad = 0;
            for (int32_t k = 0; k < s.K; k++) {
                int32_t e = r.expert[n * s.K + k];
                if (e < 0 || e >= s.E || chosen[e]++) bad++;
            }
            CHECK(bad == 0, "token %lld, not finite: %d bad choices", (long long)n, bad);
        }
        release_all();
    }
}

// margin_bin and margin_edge agree: a bin holds the margins from its lower edge to its upper one, and the edges are
// where the header says.
static void test_margin_bins(void) {
    CHECK(margin_bin(0) == MARGIN_SIDE && margin_bin(-0.0f) == MARGIN_SIDE, "0 is in bin %d", margin_bin(0));
    CHECK(margin_edge(0) == -2 && margin_edge(MARGIN_BINS) == 2, "from %g to %g", margin_edge(0),
          margin_edge(MARGIN_BINS));
    CHECK(margin_edge(MARGIN_SIDE + 1) == 0x1p-19 && margin_edge(MARGIN_SIDE) == -0x1p-19, "middle bin up to %g",
          margin_edge(MARGIN_SIDE + 1));
    for (int bin = 0; bin < MARGIN_BINS; bin++) {
        const float low = (float)margin_edge(bin), high = (float)margin_edge(bin + 1), middle = (low + high) / 2;
        // Of positive margins the lower edge belongs to the bin, of negative ones the upper.
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

// alpha of each token, by sorting what it did not select.
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

// The K/E quantile of sorted margins: the wanted number of them is reached in a bin, and the quantile divides the bin
// as that number divides the margins in it.
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

// Loads and histograms, and the quantile update, against sorted margins. equal: the tokens are alike in threes, and all
// experts in fours, so that scores tie.
static void check_quantile(RouterShape s, int equal) {
    Router r = make_router(s);
    for (int64_t i = 0; i < s.N * s.C && equal; i++) r.x[i] = r.x[i / s.C / 3 * 3 * s.C + i % s.C];
    for (int64_t i = 0; i < s.E * s.C && equal; i++) r.w[i] = r.w[i / s.C / 4 * 4 * s.C + i % s.C];
    for (int32_t e = 0; e < s.E && equal; e++) r.bias[e] = r.bias[e / 4 * 4];
    run_router(&r);

    // In two micro-steps of different sizes, as in one.
    Ctx* ctx = ctx_create(0);
    const int64_t cells = (int64_t)s.E * MARGIN_BINS, first = s.N / 3;
    int64_t *load = host_alloc(2 * s.E * sizeof(int64_t)), *margins = host_alloc(2 * cells * sizeof(int64_t));
    RouterShape parts[2] = {s, s};
    parts[0].N = first, parts[1].N = s.N - first;
    router_count((RouterCounts){load, margins}, r.scores, r.expert, r.bias, s, ctx);
    for (int i = 0; i < 2; i++)
        router_count((RouterCounts){load + s.E, margins + cells}, r.scores + i * first * s.E,
                     r.expert + i * first * s.K, r.bias, parts[i], ctx);
    CHECK_BITS(load, load + s.E, s.E * sizeof(int64_t));
    CHECK_BITS(margins, margins + cells, cells * sizeof(int64_t));

    // The update: every bias by its quantile, then the mean off. Float32 rounds twice.
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
    router_balance_quantile(updated, margins, 1, s.E, s.K, &state, ctx);
    for (int32_t e = 0; e < s.E; e++)
        CHECK(fabs((double)updated[e] - (expected[e] - mean)) <= TOL(2e-7, 1e-14), "E %d, expert %d: %.9g, not %.9g",
              s.E, e, (double)updated[e], expected[e] - mean);

    // Eight updates on the same tokens, with distinct scores: no expert is far above its share.
    for (int round = 0; round < 8 && !equal; round++) {
        memset(load, 0, s.E * sizeof(int64_t)), memset(margins, 0, cells * sizeof(int64_t));
        router_count((RouterCounts){load, margins}, r.scores, r.expert, r.bias, s, ctx);
        router_balance_quantile(r.bias, margins, 1, s.E, s.K, &state, ctx);
        run_router(&r);
    }
    memset(load, 0, s.E * sizeof(int64_t));
    router_count((RouterCounts){load, NULL}, r.scores, r.expert, r.bias, s, ctx);
    if (!equal && s.N > 100)
        CHECK(largest_load(load, s) < (s.groups > 1 ? 2 : 1.3), "E %d, groups %d: load %.2f", s.E, s.groups,
              largest_load(load, s));
    ctx_destroy(ctx);
    free(load), free(margins), free(alpha);
    release_all();
}

static void test_router_quantile(void) {
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

// Nothing is written if the step is not good, nor in a layer that counted no token; where all experts are selected they
// keep equal biases. The layers before and behind do not matter.
static void test_router_quantile_edges(void) {
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
        router_balance_quantile(bias, margins, 3, E, K, &state, ctx);
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

// The largest rate that is a float32 moves a bias by itself, and only by the sign.
static void test_router_sign(void) {
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
        router_balance_sign(bias, loads[0], COUNT(loads), E, 0.001f, &state, ctx);
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
    RUN(test_router_random);
    RUN(test_router_constant_gate);
    RUN(test_router_choice);
    RUN(test_router_extreme);
    RUN(test_margin_bins);
    RUN(test_router_quantile);
    RUN(test_router_quantile_edges);
    RUN(test_router_sign);
    return test_summary();
}
