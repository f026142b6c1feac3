// Load balancing: the selection biases of the router (moe/router.h), set once a step from that step's loads or margins.
// So the selection of a token depends on past steps and on the token itself, never on other tokens of its sequence. The
// selection is causal, and the same in training and in inference.
//
// The margin of expert e for token n is negative if the token selects the expert, and positive if not (ties: 0). With
// groups, an expert is selected if its group is, and if it is among the best of the selected groups:
//
//   margin_ne = max(alpha_n - (s_ne + bias_e), (beta_n - score_ng) / W)
//   alpha_n   = the best s + bias of the selected groups' experts that the token did not select
//   beta_n    = the best score of the groups that the token did not select
//   score_ng  = the score of the group of e (moe/router.h)
//   W         = 2 if a group's score is the sum of two experts, else 1: biases that rise by r raise the score by W r
//
// An alpha or beta that does not exist is -inf. Without groups there is no beta; alpha is the (K+1)-th best s + bias.
//
// A histogram has MARGIN_OCTAVES octaves of |margin| on each side of 0, and in the middle one bin for smaller margins.
// An octave has MARGIN_SPLIT bins of equal width. So the relative precision is the same for sigmoid scores and for
// softmax scores, which are near 1 / E. A margin beyond the last bin counts in the last bin.
#pragma once

#include <math.h>
#include <string.h>

#include "moe/router.h"

typedef struct StepState StepState;  // layers/step.h

enum { MARGIN_OCTAVES = 20, MARGIN_SPLIT = 16, MARGIN_SIDE = MARGIN_OCTAVES * MARGIN_SPLIT };
enum { MARGIN_BINS = 2 * MARGIN_SIDE + 1 };
#define MARGIN_LARGEST 2.0f  // scores are in [0, 1]; the lower end of the octaves is 2^-19

// Counts of a step for load balancing: forward counts each micro-step once, in training only. Counts are integers, so
// that sums over micro-steps and ranks do not depend on the layout.
typedef struct BalanceCounts {
    int64_t* load;     // (E): tokens that selected each expert; NULL: nothing is counted
    int64_t* margins;  // (MARGIN_BINS, E): histograms of the margins, or NULL
} BalanceCounts;

// counts += the loads and margins of N tokens, from the scores (N, E), experts (N, K) and biases (E) of the router.
// Margins are computed in float32 in every build.
void balance_count(BalanceCounts counts, const real* scores, const int32_t* expert, const real* bias, RouterShape shape,
                   Ctx* ctx);

// The update of the selection biases (layers, E), from the counts of the whole step, summed over all ranks: margins
// (layers, MARGIN_BINS, E), or load (layers, E). Nothing is written if state->ok is 0, nor in a layer that counted no
// token.
//
// Quantile balancing (J. Su, kexue.fm 11619; Kimi K3 technical report, section 2.3.3 and appendix D):
//   bias_e += the K/E quantile of margin_.e, interpolated in its bin;   then bias -= mean_e bias
// With the new bias and the same alpha and beta, a fraction K/E of the tokens would select expert e.
void balance_quantile(real* bias, const int64_t* margins, int64_t layers, int32_t E, int32_t K, const StepState* state,
                      Ctx* ctx);

// Auxiliary-loss-free balancing (arXiv 2408.15664; DeepSeek-V3, section 2.1.2):
//   bias_e += rate * sign(mean load - load_e)
void balance_sign(real* bias, const int64_t* load, int64_t layers, int32_t E, float rate, const StepState* state,
                  Ctx* ctx);

// The functions below are shared by both builds. The bin of a margin comes from its bits, which have the order of the
// float itself. The upper 4 of 23 bits of mantissa are the 16 bins of an octave.
static inline BOTH_SIDES int margin_bin(float margin) {
    const float least = MARGIN_LARGEST / (1 << MARGIN_OCTAVES);
    int32_t bits, least_bits;
    memcpy(&bits, &margin, sizeof(bits));
    memcpy(&least_bits, &least, sizeof(least_bits));
    const int32_t above = ((bits & 0x7fffffff) - least_bits) >> 19, bin = above < 0 ? 0 : above + 1;
    const int32_t side = bin < MARGIN_SIDE ? bin : MARGIN_SIDE;
    return margin < 0 ? MARGIN_SIDE - side : MARGIN_SIDE + side;
}

// The lower edge of a bin; the upper edge of bin i is the lower edge of bin i + 1. Negative margins mirror the
// positive.
static inline BOTH_SIDES double margin_edge(int bin) {
    const double least = MARGIN_LARGEST / (1 << MARGIN_OCTAVES);
    const int negative = bin <= MARGIN_SIDE, step = negative ? MARGIN_SIDE - bin : bin - MARGIN_SIDE - 1;
    const double fraction = (double)(step % MARGIN_SPLIT) / (int)MARGIN_SPLIT;
    const double size = ldexp(least * (1 + fraction), step / MARGIN_SPLIT);
    return negative ? -size : size;
}

// The margin with `wanted` tokens below it: interpolated in its bin, which has `inside` tokens, and `below` before it.
static inline BOTH_SIDES double margin_in_bin(int bin, double wanted, int64_t below, int64_t inside) {
    const double low = margin_edge(bin), share = (wanted - (double)below) / (double)inside;
    return low + share * (margin_edge(bin + 1) - low);
}
