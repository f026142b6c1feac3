// The router: selects K experts for each token, and their gates. Source: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)
// with sigmoid scores, DeepSeek-V2 (arXiv 2405.04434, section 2.2) with softmax scores.
//
//   logits = x Wg^T in float32;  s = sigmoid(logits) or softmax(logits)
//   selection: the K largest s + bias in the top_groups best groups of experts (other groups count as -inf)
//     a group's score: the largest s + bias (softmax, or a group of one expert), or the sum of the two largest
//     (sigmoid)
//   gate_k = s of the selected expert, divided by (their sum + 1e-20) if norm, times scale
//
//   x, dx          (N, C)
//   w, dw          (E, C): Wg
//   bias           (E)
//   scores         (N, E): s, kept for backward
//   expert         (N, K): the selected experts, best first
//   gate, dgate    (N, K)
//
// Ties go to the lower index. A token with NaN scores still gets K distinct experts. The selection bias changes the
// selection only: gradients reach x and Wg through the gates and the balance loss alone (router_backward).
//
// Load balancing sets the selection bias once a step (moe/balance.h).
#pragma once

#include "device/device.h"

enum { ROUTER_MOST_EXPERTS = 512, ROUTER_MOST_CHOICES = 32 };  // limits of the implementations
typedef enum { SCORE_SIGMOID = 0, SCORE_SOFTMAX = 1 } ScoreFunction;

typedef struct RouterShape {
    int64_t N, T, C;             // tokens, tokens of a sequence (the last may be shorter), width
    int32_t E, K;                // experts, experts a token
    int32_t groups, top_groups;  // E % groups == 0, K <= top_groups * E / groups
    int32_t score;               // ScoreFunction
    int32_t norm;                // 1: gates of a token sum to scale
    float scale;                 // route_scale
    int32_t force_balance;       // 1: expert k of token n is (n K + k) % E, whatever the scores
} RouterShape;

// A group's score is the sum of this many of its largest s + bias.
static inline BOTH_SIDES int experts_in_score(RouterShape s) {
    return s.score == SCORE_SIGMOID && s.E > s.groups ? 2 : 1;
}

void router_forward(real* scores, int32_t* expert, real* gate, const floatX* x, const floatX* w, const real* bias,
                    RouterShape shape, Ctx* ctx);

// dx and dw are +=. aux: weight of the balance loss, DeepSeek-V3's auxiliary loss of each sequence (equations 17 to
// 20). aux 0 switches the balance loss off.
//
//   aux * sum_sequences sum_e f_e P_e,   f_e = E / (K T) * count_e,   P_e = mean_t s_te / sum_e' s_te'
//
// count_e: tokens that have s_te among their K largest, without bias and groups. Counts are constants in its gradient.
void router_backward(floatX* dx, real* dw, const real* dgate, const real* scores, const int32_t* expert,
                     const real* gate, const floatX* x, const floatX* w, float aux, RouterShape shape, Ctx* ctx);

size_t router_workspace(RouterShape shape);  // bytes, for both functions
