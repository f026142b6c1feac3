#include "moe/balance.h"

#include "device/cpu.h"
#include "layers/adamw.h"

// alpha_n of one token: the largest s + bias of the experts that it did not select. In float32 in every build.
static float best_unselected(const real* score, const real* bias, const int32_t* selected, RouterShape s) {
    float best = -INFINITY;
    for (int32_t e = 0; e < s.E; e++) {
        int taken = 0;
        for (int32_t k = 0; k < s.K; k++) taken |= selected[k] == e;
        const float compared = (float)score[e] + (float)bias[e];
        if (!taken && compared > best) best = compared;
    }
    return best;
}

void balance_count(BalanceCounts counts, const real* scores, const int32_t* expert, const real* bias, RouterShape s,
                   Ctx* ctx) {
    for (int64_t i = 0; i < s.N * s.K; i++) counts.load[expert[i]]++;
    if (!counts.margins) return;

    // The histogram of alpha_n - (s + bias) for each expert. Values are negative where the expert is selected.
    for (int64_t n = 0; n < s.N; n++) {
        const real* score = scores + n * s.E;
        const float alpha = best_unselected(score, bias, expert + n * s.K, s);
        for (int64_t e = 0; e < s.E; e++)
            counts.margins[margin_bin(alpha - ((float)score[e] + (float)bias[e])) * (int64_t)s.E + e]++;
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
