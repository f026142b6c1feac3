#include "moe/balance.h"

#include "layers/step.h"
#include "moe/router_cpu.h"

// The margins of one token (moe/balance.h), from compared = s + bias.
static void token_margins(float* margin, const real* compared, const int32_t* selected, RouterShape s) {
    const int32_t size = s.E / s.groups;
    char taken[ROUTER_MOST_EXPERTS] = {0}, inside[ROUTER_MOST_EXPERTS];
    real score[ROUTER_MOST_EXPERTS], alpha = -INFINITY, beta = -INFINITY;
    best_groups(inside, score, compared, s);

    for (int32_t k = 0; k < s.K; k++) taken[selected[k]] = 1;
    for (int32_t e = 0; e < s.E; e++)
        if (!taken[e] && inside[e / size] && compared[e] > alpha) alpha = compared[e];
    for (int32_t g = 0; g < s.groups; g++)
        if (!inside[g] && score[g] > beta) beta = score[g];

    for (int32_t e = 0; e < s.E; e++)
        margin[e] = fmaxf((float)alpha - (float)compared[e],
                          ((float)beta - (float)score[e / size]) / (float)experts_in_score(s));
}

void balance_count(BalanceCounts counts, const real* scores, const int32_t* expert, const real* bias, RouterShape s,
                   Ctx* ctx) {
    for (int64_t i = 0; i < s.N * s.K; i++) counts.load[expert[i]]++;
    if (!counts.margins) return;

    for (int64_t n = 0; n < s.N; n++) {
        real compared[ROUTER_MOST_EXPERTS];
        float margin[ROUTER_MOST_EXPERTS];
        for (int64_t e = 0; e < s.E; e++) compared[e] = (float)scores[n * s.E + e] + (float)bias[e];
        token_margins(margin, compared, expert + n * s.K, s);
        for (int64_t e = 0; e < s.E; e++) counts.margins[margin_bin(margin[e]) * (int64_t)s.E + e]++;
    }
}

// The K/E quantile of expert e's margins among `tokens`.
static double margin_quantile(const int64_t* margins, int64_t e, int64_t tokens, int32_t E, int32_t K) {
    const double wanted = (double)tokens * K / E;
    int64_t below = 0;
    int bin = 0;
    while ((double)(below + margins[bin * (int64_t)E + e]) < wanted) below += margins[bin++ * (int64_t)E + e];
    return margin_in_bin(bin, wanted, below, margins[bin * (int64_t)E + e]);
}

void balance_quantile(real* bias, const int64_t* margins, int64_t layers, int32_t E, int32_t K, const StepState* state,
                      Ctx* ctx) {
    for (int64_t l = 0; l < layers; l++, bias += E, margins += (int64_t)MARGIN_BINS * E) {
        // Every expert's histogram counts all tokens.
        int64_t tokens = 0;
        for (int64_t bin = 0; bin < MARGIN_BINS; bin++) tokens += margins[bin * E];
        if (!state->ok || tokens == 0) continue;

        // Each bias rises by its quantile, then their mean becomes 0.
        double mean = 0;
        for (int32_t e = 0; e < E; e++)
            mean += (double)(bias[e] += (real)margin_quantile(margins, e, tokens, E, K)) / E;
        for (int32_t e = 0; e < E; e++) bias[e] -= (real)mean;
    }
}

void balance_sign(real* bias, const int64_t* load, int64_t layers, int32_t E, float rate, const StepState* state,
                  Ctx* ctx) {
    for (int64_t l = 0; l < layers; l++, bias += E, load += E) {
        int64_t total = 0;
        for (int32_t e = 0; e < E; e++) total += load[e];
        // A step that is not ok leaves the biases unchanged.
        if (!state->ok) continue;
        for (int32_t e = 0; e < E; e++) {
            const int64_t below = total - load[e] * E;  // E * (mean load - load_e), exact
            bias[e] += (real)rate * (real)((below > 0) - (below < 0));
        }
    }
}
