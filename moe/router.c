#include "moe/router.h"

#include "moe/router_cpu.h"

// Never vectorized: the vector exp and the scalar exp of leftover elements differ in the last bit. Equal logits must
// make equal scores at every index.
static __attribute__((noinline)) real exp_one(real x) { return exp(x); }

// Scores of one token from its logits, in place.
static void score_row(real* s, int32_t E, int32_t function) {
    if (function == SCORE_SIGMOID) {
        for (int32_t e = 0; e < E; e++) s[e] = 1 / (1 + exp_one(-s[e]));
        return;
    }
    // Softmax. The largest logit is subtracted, so that exp cannot overflow.
    real top = s[0], sum = 0;
    for (int32_t e = 1; e < E; e++) top = s[e] > top ? s[e] : top;
    for (int32_t e = 0; e < E; e++) sum += s[e] = exp_one(s[e] - top);
    for (int32_t e = 0; e < E; e++) s[e] /= sum;
}

// Index of the largest value that is not taken, the first of equals; marks it as taken, so that the next call finds the
// next one. If all values are NaN, it is the first index that is not taken: any expert, but no expert twice.
static int32_t take_best(const real* value, char* taken, int32_t n) {
    int32_t best = -1;
    for (int32_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || value[i] > value[best])) best = i;
    taken[best] = 1;
    return best;
}

void best_groups(char* selected, real* score, const real* compared, RouterShape s) {
    const int32_t size = s.E / s.groups;
    for (int32_t g = 0; g < s.groups; g++) {
        real best = -INFINITY, second = -INFINITY;
        for (int32_t e = g * size; e < (g + 1) * size; e++) {
            if (compared[e] > best) {
                second = best;
                best = compared[e];
            } else if (compared[e] > second) {
                second = compared[e];
            }
        }
        score[g] = experts_in_score(s) == 2 ? best + second : best;
        selected[g] = 0;
    }
    for (int32_t i = 0; i < s.top_groups; i++) take_best(score, selected, s.groups);
}

// Sets `choice` to -inf for every expert outside the best groups.
static void limit_groups(real* choice, RouterShape s) {
    real score[ROUTER_MOST_EXPERTS];
    char selected[ROUTER_MOST_EXPERTS];
    best_groups(selected, score, choice, s);
    for (int32_t e = 0; e < s.E; e++)
        if (!selected[e / (s.E / s.groups)]) choice[e] = -INFINITY;
}

// Backward needs dlogits (N, E) and counts (sequences, E).
size_t router_workspace(RouterShape s) { return (size_t)((s.N + ceil_div(s.N, s.T)) * s.E) * sizeof(real); }

void router_forward(real* scores, int32_t* expert, real* gate, const floatX* x, const floatX* w, const real* bias,
                    RouterShape s, Ctx* ctx) {
    ASSERT(s.E <= ROUTER_MOST_EXPERTS);

    // logits = x Wg^T
#pragma omp parallel for schedule(dynamic)
    for (int64_t n = 0; n < s.N; n += TILE)
        gemm(0, 1, min_i64(TILE, s.N - n), s.E, s.C, 1, x + n * s.C, s.C, w, s.C, 0, scores + n * s.E, s.E);

#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < s.N; n++) {
        real *score = scores + n * s.E, *g = gate + n * s.K, choice[ROUTER_MOST_EXPERTS], sum = 0;
        char taken[ROUTER_MOST_EXPERTS] = {0};
        int32_t* id = expert + n * s.K;

        // Scores s. The selection compares s + bias, or -inf outside the best groups.
        score_row(score, s.E, s.score);
        for (int32_t e = 0; e < s.E; e++) choice[e] = score[e] + bias[e];
        if (s.groups > 1) limit_groups(choice, s);

        // The K best, one after another.
        for (int32_t k = 0; k < s.K; k++) {
            // force_balance assigns experts in turn: the load is even for any scores.
            id[k] = s.force_balance ? (int32_t)((n * s.K + k) % s.E) : take_best(choice, taken, s.E);
            sum += g[k] = score[id[k]];
        }

        // Gates: s of the selected experts, divided by their sum if norm, times scale.
        real factor = s.norm ? (real)s.scale / (sum + (real)1e-20) : (real)s.scale;
        for (int32_t k = 0; k < s.K; k++) g[k] *= factor;
    }
}

// ds (E) of one token from the gradients of its gates.
static void gate_backward(real* ds, const real* dgate, const real* score, const int32_t* id, const real* gate,
                          RouterShape s) {
    for (int32_t e = 0; e < s.E; e++) ds[e] = 0;
    real sum = (real)1e-20, dot = 0;
    for (int32_t k = 0; k < s.K; k++) {
        sum += score[id[k]];
        dot += dgate[k] * gate[k];
    }
    // With norm: gate_k = scale s_k / sum, so ds_k = (scale dgate_k - sum_j dgate_j gate_j) / sum.
    for (int32_t k = 0; k < s.K; k++) ds[id[k]] = s.norm ? (s.scale * dgate[k] - dot) / sum : s.scale * dgate[k];
}

// The balance loss's part of ds: aux / T * (f_e - sum_j f_j s_j / sum s) / sum s. 1e-20: scores may all be 0.
static void aux_backward(real* ds, const real* score, const real* count, float aux, RouterShape s) {
    real sum = (real)1e-20, dot = 0, f = (real)s.E / (s.K * s.T), scale = (real)aux / s.T;
    for (int32_t e = 0; e < s.E; e++) {
        sum += score[e];
        dot += f * count[e] * score[e];
    }
    for (int32_t e = 0; e < s.E; e++) ds[e] += scale / sum * (f * count[e] - dot / sum);
}

void router_backward(floatX* dx, real* dw, const real* dgate, const real* scores, const int32_t* expert,
                     const real* gate, const floatX* x, const floatX* w, float aux, RouterShape s, Ctx* ctx) {
    int64_t sequences = ceil_div(s.N, s.T);
    real *dlogits = ctx_workspace(ctx, (s.N + sequences) * s.E), *counts = dlogits + s.N * s.E;

    // count_e of each sequence, for the balance loss.
    // It counts the K best scores without the bias, which may differ from the experts that were selected.
    if (aux != 0) {
        for (int64_t i = 0; i < sequences * s.E; i++) counts[i] = 0;
        for (int64_t n = 0; n < s.N; n++) {
            char taken[ROUTER_MOST_EXPERTS] = {0};
            for (int32_t k = 0; k < s.K; k++) counts[n / s.T * s.E + take_best(scores + n * s.E, taken, s.E)]++;
        }
    }

    // dlogits = s (1 - s) ds (sigmoid) or s (ds - sum_j s_j ds_j) (softmax);  dx += dlogits Wg
#pragma omp parallel for schedule(dynamic)
    for (int64_t n0 = 0; n0 < s.N; n0 += TILE) {
        int64_t rows = min_i64(TILE, s.N - n0);
        for (int64_t n = n0; n < n0 + rows; n++) {
            const real* score = scores + n * s.E;
            real *ds = dlogits + n * s.E, dot = 0;
            gate_backward(ds, dgate + n * s.K, score, expert + n * s.K, gate + n * s.K, s);
            if (aux != 0) aux_backward(ds, score, counts + n / s.T * s.E, aux, s);
            for (int32_t e = 0; e < s.E; e++) dot += ds[e] * score[e];
            for (int32_t e = 0; e < s.E; e++)
                ds[e] = score[e] * (s.score == SCORE_SIGMOID ? ds[e] * (1 - score[e]) : ds[e] - dot);
        }
        gemm(0, 0, rows, s.C, s.E, 1, dlogits + n0 * s.E, s.E, w, s.C, 1, dx + n0 * s.C, s.C);
    }
    // dw += dlogits^T x, in tiles of columns: the sum over tokens is never split.
#pragma omp parallel for schedule(dynamic)
    for (int64_t c = 0; c < s.C; c += TILE)
        gemm(1, 0, s.E, min_i64(TILE, s.C - c), s.N, 1, dlogits, s.E, x + c, s.C, 1, dw + c, s.C);
}
