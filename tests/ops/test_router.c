// The router: scores and gates against float64; the selection exactly, by ranks instead of a sort; the backward against
// differences of the oracle.
#include "tests/router.h"

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

// True if a is before b.
static int before(double a, int32_t ia, double b, int32_t ib) { return a > b || (a == b && ia < ib); }

// The selection of one token from the op's scores (which are tested separately), by the rank of each group and each
// expert. Sums are in real, because the last bit of a score decides near ties.
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

// <dgate, gate> plus the auxiliary loss, with fixed selection and counts.
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

// A single expert's normalized gate is `scale` for any score. So dgate gives the router no gradient, only the balance
// loss does. The subtraction leaves a rounding of the gate and one of each product: 3 u dgate (1 - s) of dgate s'.
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

// Tokens e_0: the logits are the first column of w, small whole numbers. So equal logits are equal in any arithmetic.
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
            // Gates come from s alone: without norm they are s, with the bits of the scores.
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
        // The bias selects experts 7 and 3. All s + bias in the selected groups are negative: other groups must be
        // -inf, not 0.
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
    // Equal logits make equal scores at any index, whatever the vector width.
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
    // Only the two best experts of a group count, not the sum over the group.
    two.score = SCORE_SIGMOID;
    CHOICE(two, ((int32_t[]){4, 3}), NULL, 1, 1, 1, 1, 2, -9);
}

// If all scores are 0 in float32, gates and the balance loss divide by 1e-20, not by 0. A token that is not finite
// still gets K different experts, so that the step continues until it is detected and skipped.
static void test_router_extreme(void) {
    RouterShape s = {.N = 4, .T = 4, .C = 3, .E = 8, .K = 3, .groups = 4, .top_groups = 2, .norm = 1, .scale = 1};
    for (s.score = 0; s.score < 2; s.score++) {
        Router r = make_router(s);
        r.aux = 1;
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
        // Tokens that are not finite.
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

int main(void) {
    RUN(test_router_random);
    RUN(test_router_constant_gate);
    RUN(test_router_choice);
    RUN(test_router_extreme);
    return test_summary();
}
