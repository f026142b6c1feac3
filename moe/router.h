// The router: which experts a token goes to, and with which weight. DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) with
// sigmoid scores, DeepSeek-V2 (arXiv 2405.04434, section 2.2) with softmax scores.
//
//   logits = x Wg^T in float32;  s = sigmoid(logits) or softmax(logits)
//   selection: the K largest s + bias in the top_groups best groups of experts (other groups count as -inf)
//     a group's score: the sum of its two largest s + bias (sigmoid; or of its only one), or the largest (softmax)
//   gate_k = s of the selected expert, divided by (their sum + 1e-20) if norm, times scale
//
// Of equal scores the lower index comes first. A token with NaN scores still gets K distinct experts. The bias only
// selects; gradients reach x and Wg through the gates (and the auxiliary loss) alone.
//
// Early in training x is nearly the same for all tokens (it carries the frequencies of the tokens). What is left of it
// lies along few directions, and both move at every step by more than the tokens differ: whole steps would choose the
// same K experts. So training selects by logits less a share `even` of what evens out a sequence's choice:
//
//   selection among s(logits_te - even d_e) + bias
//   d = mean_t logits_t and h = 0 at first; then for each tau of EVEN_ROUNDS, with p_te = sigmoid((logits_te - d_e -
//   h_t) / tau),  h_t += tau log(sum_e p_te / K + EVEN_LEAST)  and then  d_e += EVEN_STEP tau log(E / K mean_t p_te +
//   EVEN_LEAST); tau = EVEN_TAU times the standard deviation of logits_te - mean_t logits_te, plus 1e-20, and each time
//   EVEN_COOLER of that; t: every n-th token of the sequence, n the least that makes them EVEN_TOKENS or fewer
//
// p_t is a soft choice of K experts: h_t lies between the K-th of a token's scores and the next. The rounds are
// Sinkhorn's (as in S-BASE, arXiv 2202.01169, section 3, which chooses one) towards p of equal means, ever closer to a
// hard choice: a few tokens with large logits make tau large, and one tau would leave the others as they are, and
// tokens that are nearly alike stay together until tau is as small as what tells them apart. Where tokens differ along
// few directions the rounds converge slowly, so d goes twice as far as its own equation asks. The gates keep s. d looks
// ahead within the sequence, so a model is used with even 0. A share of d evens out in proportion only where tokens
// differ: frequent ones stay nearly alike for long, and move together. So `even` is 1 until late, and then falls
// (settings_even). How tokens are spread over ranks and micro-steps does not count, as a sequence is on one.
#ifndef MOE_ROUTER_H
#define MOE_ROUTER_H

#include "device/device.h"

BEGIN_C

typedef struct StepState StepState;  // layers/adamw.h

enum { ROUTER_MOST_EXPERTS = 512, ROUTER_MOST_CHOICES = 32 };  // of the kernels, which have a lane for each choice
enum { EVEN_ROUNDS = 18, EVEN_TOKENS = 1024 };
#define EVEN_TAU 0.8
#define EVEN_COOLER 0.7
#define EVEN_STEP 2.0
#define EVEN_LEAST 1e-9  // for an expert or token that p gives nothing

typedef enum { SCORE_SIGMOID = 0, SCORE_SOFTMAX = 1 } ScoreFunction;

typedef struct RouterShape {
    int64_t N, T, C;             // tokens, tokens of a sequence (the last may be shorter), width
    int32_t E, K;                // experts, experts a token
    int32_t groups, top_groups;  // E % groups == 0, K <= top_groups * E / groups
    int32_t score;               // ScoreFunction
    int32_t norm;                // 1: gates of a token sum to scale
    float scale;                 // route_scale
    int32_t force_balance;       // 1: expert k of token n is (n K + k) % E, whatever the scores
    const float* even;           // in device memory: share of d that the selection goes without; NULL: none
} RouterShape;

void router_forward(real* scores,      // (N, E): s, kept for backward
                    int32_t* expert,   // (N, K): selected experts, best first
                    real* gate,        // (N, K)
                    const floatX* x,   // (N, C)
                    const floatX* w,   // (E, C)
                    const real* bias,  // (E)
                    RouterShape shape, Ctx* ctx);

// aux: weight of the sequence-wise balance loss aux * sum_sequences sum_e f_e P_e, f_e = E / (K T) * count_e,
// P_e = mean_t s_te / sum_e' s_te' (DeepSeek-V3, equations 17 to 20), counts taken as constants. 0 switches it off.
// count_e: tokens that have s_te among their K largest, without bias and groups; so a router whose choice is evened out
// learns to be even by itself.
void router_backward(floatX* dx,             // (N, C), +=
                     real* dw,               // (E, C), +=
                     const real* dgate,      // (N, K)
                     const real* scores,     // (N, E)
                     const int32_t* expert,  // (N, K)
                     const real* gate,       // (N, K)
                     const floatX* x, const floatX* w, float aux, RouterShape shape, Ctx* ctx);

size_t router_workspace(RouterShape shape);

// load[e] += tokens that chose expert e. Called in training's forward only, once a micro-step.
void router_count(int64_t* load,          // (E)
                  const int32_t* expert,  // (N, K)
                  int64_t NK, int32_t E, Ctx* ctx);

// Auxiliary-loss-free balancing (arXiv 2408.15664), of all layers at once: bias_e += rate * (1 - load_e / mean load),
// load over the whole step and all ranks, its mean over the layer. The paper takes the sign of that, and this for a
// variant; but where scores differ by less than rate (sigmoids near 1, to which the balance loss drives them), steps of
// full length move all tokens to and fro. Nothing is written if state->ok is 0, nor in a layer that counted no token.
void router_update_bias(real* bias,           // (layers, E)
                        const int64_t* load,  // (layers, E)
                        int64_t layers, int32_t E, float rate, const StepState* state, Ctx* ctx);

END_C

#endif
