// Pretraining of a mixture-of-experts model, all of it in one file: plain C11, float32, no library but libc.
//
//   cc -O3 -march=native -fopenmp learn/train_moe.c -lm && ./a.out TRAIN.bin VAL.bin          (make sheet does both)
//   cc -O3 -march=native -DCHECK learn/train_moe.c -lm && ./a.out --check TRAIN.bin           is each gradient right?
//
// -fopenmp is optional, and uses all cores. With OMP_WAIT_POLICY=passive, threads that wait sleep.
// It trains the preset `tiny` as `make train` does: with the same weights at the start, the same order of data, and the
// same losses but for rounding. "Program:" names the files that do the same for every size, on GPUs, on many ranks.
//
// The ops are in the order in which a token meets them. The backward of an op follows its forward.
//   tokens -> embedding -> 4 blocks -> RMSNorm -> lm_head -> loss       a block:  x = x + attention(RMSNorm(x))
//                                                                                 x = x + mlp(RMSNorm(x))
// After the ops: fast matrix products, random numbers, files, the optimizers, the check, and the loop in main.
// Block 0 has a dense MLP. In the others, the MLP is a mixture of experts: each token uses 2 of 8, and a shared one.
// Matrices are row-major, and a weight W is (outputs, inputs): y = x W^T. dx is the gradient of the loss for x.
// Comments such as (N, C) are shapes. N is the number of tokens, T that of tokens in a sequence: SEQ.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>  // exp(x) is expf(x) where x is a float
#include <time.h>

#ifdef CHECK  // differences need the precision of double
typedef double real;
#else
typedef float real;
#endif

// The options of `make train` and the sizes of `tiny`. Program: model/settings.c.
enum { STEPS = 750, WARMUP = 50, BATCH = 8, SEQ = 256, MAX_N = BATCH * SEQ };  // a step is one batch of sequences
enum { VOCAB = 257, END_OF_TEXT = 256 };  // a token is a byte; one more token ends a document
enum { L = 4, C = 128, DENSE = 512 };     // blocks, width of the residual stream, hidden width of the dense MLP
enum { H = 4, NOPE = 32, ROPE = 16, QK = NOPE + ROPE };  // heads; a query or key: without position, with it, in all
enum { VD = 32, KV = NOPE + VD };           // value of a head; from the latent: key without position, value
enum { LATENT = 64, KVA = LATENT + ROPE };  // the latent of keys and values; with it, the key's part with position
enum { E = 8, K = 2, F = 128, ROWS = MAX_N * K };  // experts, experts of a token, hidden width; a row for each choice
enum { SEED = 1, SAMPLE = 400, VALIDATE_EVERY = 250 };
static const real WEIGHT_DECAY = 0.1f, BETA1 = 0.9f, BETA2 = 0.95f, MOMENTUM = 0.95f, AUX = 1e-2f;
static const double LR = 3e-3, MUON_LR = 12e-3, FINAL_LR = 0.1, CLIP = 1, TEMPERATURE = 0.8;

// The parameters of a block. In block 0 experts and router stay 0: its MLP is dense. Program: model/params.c.
typedef struct Block {
    real norm1[C], norm2[C];     // of the RMSNorms before attention and before the MLP
    real wq[H * QK * C];         // (H QK, C): queries
    real wkva[KVA * C];          // (KVA, C): down to the latent, and the key's part with position
    real kv_norm[LATENT];        // of the latent's RMSNorm
    real wkvb[H * KV * LATENT];  // (H KV, LATENT): up to the keys and values of each head
    real wo[C * H * VD];         // (C, H VD)
    real mlp13[2 * DENSE * C];   // (2 M, C): SwiGLU's gate, then up; dense MLP (M = DENSE), or shared expert (M = F)
    real mlp2[C * DENSE];        // (C, M)
    real router[E * C];          // (E, C)
    struct {
        real w13[2 * F * C], w2[C * F];
    } expert[E];  // the routed experts: (2F, C), gate, then up; (C, F)
} Block;

static struct Parameters {
    real embedding[VOCAB * C];  // (VOCAB, C)
    Block block[L];
    real final_norm[C];
    real lm_head[VOCAB * C];  // (VOCAB, C)
} weights, gradients, moment1, moment2;
static real selection_bias[L][E];  // of the router; set by load balancing, without a gradient

// The activations that backward needs, of one block.
typedef struct Saved {
    real norm1[MAX_N * C], rstd1[MAX_N];                 // (N, C), (N)
    real q[MAX_N * H * QK], kva[MAX_N * KVA];            // (N, H, QK), (N, KVA), both with positions
    real ckv[MAX_N * LATENT], rstd_kv[MAX_N];            // (N, LATENT), (N)
    real kv[MAX_N * H * KV];                             // (N, H, KV): a head's key without position, its value
    real attention[MAX_N * H * VD], p[MAX_N * H * SEQ];  // (N, H, VD); (N, H, T): the probabilities
    real x2[MAX_N * C], norm2[MAX_N * C], rstd2[MAX_N];  // (N, C): x after attention; (N, C), (N)
    real h[MAX_N * 2 * DENSE];                           // (N, 2M): the hidden layer before SwiGLU
    real scores[MAX_N * E], gate[ROWS];                  // (N, E), (N, K): of the router
    int expert[ROWS], row[ROWS], start[E + 1];           // (N, K), (N, K), (E + 1): see sort_by_expert
    real expert_x[ROWS * C], expert_h[ROWS * 2 * F], expert_out[ROWS * C];  // (N K, C), (N K, 2F), (N K, C)
} Saved;
static Saved saved[L];
static real residual[L + 1][MAX_N * C];                // (N, C): the residual stream before each block, and its end
static real final_norm[MAX_N * C], final_rstd[MAX_N];  // (N, C), (N)
static int input[MAX_N], target[MAX_N];                // (N): a batch, and the token after each of its tokens
static real logits[MAX_N * VOCAB];                     // (N, VOCAB)

// c (m, n) = a b, or c += a b with add 1. Element (i, k) of a is a[i * a_row + k * a_column], and the same for b. So
// exchanged strides read a matrix as its transpose. It is defined after the ops. Program: layers/matmul.h.
static void matmul(real* c, int c_row, const real* a, int a_row, int a_column, const real* b, int b_row, int b_column,
                   int m, int n, int depth, int add);

// A linear layer: y (n, out) = x (n, in) W^T, with W (out, in)
static void linear_forward(real* y, const real* x, const real* w, int n, int in, int out) {
    matmul(y, out, x, in, 1, w, 1, in, n, out, in, 0);
}

// dx = dy W, or += with add;  dW += dy^T x
static void linear_backward(real* dx, real* dw, const real* dy, const real* x, const real* w, int n, int in, int out,
                            int add) {
    matmul(dx, in, dy, out, 1, w, in, 1, n, in, out, add);
    matmul(dw, in, dy, 1, out, x, in, 1, out, in, n, 1);
}

// RMSNorm: y (n, width) = w x rstd, rstd = (mean x^2 + 1e-6)^-1/2. x_row: from row to row. Program: layers/rmsnorm.c.
static void rmsnorm_forward(real* y, real* rstd, const real* x, int x_row, const real* w, int n, int width) {
    for (int i = 0; i < n; i++) {
        const real* xi = x + i * x_row;
        real squares = 0;
        for (int c = 0; c < width; c++) squares += xi[c] * xi[c];
        rstd[i] = 1 / sqrt(squares / (real)width + 1e-6f);
        for (int c = 0; c < width; c++) y[i * width + c] = xi[c] * rstd[i] * w[c];
    }
}

// With g = dy w:  dx += rstd (g - x rstd^2 mean(g x)),  dw += dy x rstd
static void rmsnorm_backward(real* dx, real* dw, const real* dy, const real* x, int x_row, const real* w,
                             const real* rstd, int n, int width) {
    for (int i = 0; i < n; i++) {
        const real *xi = x + i * x_row, *dyi = dy + i * width;
        real mean = 0;
        for (int c = 0; c < width; c++) mean += dyi[c] * w[c] * xi[c] / (real)width;
        for (int c = 0; c < width; c++)
            dx[i * x_row + c] += rstd[i] * (dyi[c] * w[c] - xi[c] * rstd[i] * rstd[i] * mean);
        for (int c = 0; c < width; c++) dw[c] += dyi[c] * xi[c] * rstd[i];
    }
}

// RoPE (Su et al. 2021) gives a vector its position t: pair i turns by the angle t 10000^(-2i / ROPE). A query times a
// key then depends on their distance alone. x: the first pair of token 0; the next token is `row` numbers away, the
// next head `head` numbers. For a gradient, direction -1 turns back. Program: layers/rope.h.
static void rope(real* x, int row, int heads, int head, int n, int direction) {
#pragma omp parallel for
    for (int i = 0; i < n; i++)
        for (int pair = 0; pair < ROPE / 2; pair++) {
            const double angle = i % SEQ * pow(10000, -2.0 * pair / ROPE);
            const real cosine = (real)cos(angle), sine = (real)(direction * sin(angle));
            for (int h = 0; h < heads; h++) {
                real* v = x + i * row + h * head + 2 * pair;
                const real even = v[0], odd = v[1];
                v[0] = even * cosine - odd * sine;
                v[1] = even * sine + odd * cosine;
            }
        }
}

// Softmax of n numbers in place: z_i = exp(z_i) / sum_j exp(z_j). exp(z_i - top) gives the same, and cannot overflow.
static void softmax(real* z, int n) {
    real top = z[0];
    real sum = 0;
    for (int i = 0; i < n; i++) top = fmax(top, z[i]);
    for (int i = 0; i < n; i++) z[i] = exp(z[i] - top);
    for (int i = 0; i < n; i++) sum += z[i];
    for (int i = 0; i < n; i++) z[i] /= sum;
}

// Causal attention of one head in one sequence: S = q k^T / sqrt(QK), P = softmax(S), out = P v. A query sees the keys
// up to its own token. A key has two parts, and each adds to S: one of this head, and one with the position, k_rope,
// which all heads share. kv has the first part, then v. The next token's vector of the same head is H vectors further.
// Program: layers/attention.h, as flash attention: in tiles, so that P never exists whole.
static void attention_forward(real* out, real* p, const real* q, const real* kv, const real* k_rope) {
    const real scale = (real)(1 / sqrt(QK));
    matmul(p, H * SEQ, q, H * QK, 1, kv, 1, H * KV, SEQ, SEQ, NOPE, 0);          // S = q k^T, without positions
    matmul(p, H * SEQ, q + NOPE, H * QK, 1, k_rope, 1, KVA, SEQ, SEQ, ROPE, 1);  // S += q k^T, with positions
    for (int i = 0; i < SEQ; i++) {
        for (int j = 0; j < SEQ; j++) p[i * H * SEQ + j] = j <= i ? scale * p[i * H * SEQ + j] : 0;
        softmax(p + i * H * SEQ, i + 1);
    }
    matmul(out, H * VD, p, H * SEQ, 1, kv + NOPE, H * KV, 1, SEQ, VD, SEQ, 0);  // out = P v
}

//   dP = dout v^T,  dS = P (dP - <dout, out>) / sqrt(QK),  dq = dS k,  dk = dS^T q,  dv = P^T dout
// For each query, <dout, out> is sum_j P_j dP_j: the softmax's sum is always 1. All heads add to the same dk_rope.
static void attention_backward(real* dq, real* dkv, real* dk_rope, const real* dout, const real* q, const real* kv,
                               const real* k_rope, const real* p, const real* out) {
    const real scale = (real)(1 / sqrt(QK));
    real ds[SEQ * SEQ];                                                       // dP, then dS: (T, T)
    matmul(ds, SEQ, dout, H * VD, 1, kv + NOPE, 1, H * KV, SEQ, SEQ, VD, 0);  // dP = dout v^T
    for (int i = 0; i < SEQ; i++) {
        real dot = 0;
        for (int c = 0; c < VD; c++) dot += dout[i * H * VD + c] * out[i * H * VD + c];
        for (int j = 0; j < SEQ; j++) ds[i * SEQ + j] = scale * p[i * H * SEQ + j] * (ds[i * SEQ + j] - dot);
    }
    matmul(dq, H * QK, ds, SEQ, 1, kv, H * KV, 1, SEQ, NOPE, SEQ, 0);             // dq = dS k, without positions
    matmul(dq + NOPE, H * QK, ds, SEQ, 1, k_rope, KVA, 1, SEQ, ROPE, SEQ, 0);     // the same with positions
    matmul(dkv, H * KV, ds, 1, SEQ, q, H * QK, 1, SEQ, NOPE, SEQ, 0);             // dk = dS^T q, without positions
    matmul(dk_rope, KVA, ds, 1, SEQ, q + NOPE, H * QK, 1, SEQ, ROPE, SEQ, 1);     // the same with positions
    matmul(dkv + NOPE, H * KV, p, 1, H * SEQ, dout, H * VD, 1, SEQ, VD, SEQ, 0);  // dv = P^T dout
}

// MLA, multi-head latent attention (DeepSeek-V2): keys and values come from a narrow latent. out (N, C) from norm1.
// Program: mla_forward in model/block_forward.c, mla_backward in model/block_backward.c.
static void mla_forward(real* out, const Block* w, Saved* s, int n) {
    // Queries of all heads, the latent, and the key's part with position, which the heads share.
    linear_forward(s->q, s->norm1, w->wq, n, C, H * QK);   // (N, C) -> (N, H QK)
    linear_forward(s->kva, s->norm1, w->wkva, n, C, KVA);  // (N, C) -> (N, LATENT + ROPE)
    // From the latent, the other part of each head's key, and its value.
    rmsnorm_forward(s->ckv, s->rstd_kv, s->kva, KVA, w->kv_norm, n, LATENT);
    linear_forward(s->kv, s->ckv, w->wkvb, n, LATENT, H * KV);  // (N, LATENT) -> (N, H (NOPE + VD))
    // Positions, then each head's attention, then one projection of all heads.
    rope(s->q + NOPE, H * QK, H, QK, n, 1);  // each head's query
    rope(s->kva + LATENT, KVA, 1, 0, n, 1);  // the key's part, one for all heads
#pragma omp parallel for collapse(2)
    for (int first = 0; first < n; first += SEQ)  // the first token of a sequence
        for (int h = 0; h < H; h++) {
            const int at = first * H + h;  // the token's vector of head h
            attention_forward(s->attention + at * VD, s->p + at * SEQ, s->q + at * QK, s->kv + at * KV,
                              s->kva + first * KVA + LATENT);
        }
    linear_forward(out, s->attention, w->wo, n, H * VD, C);  // (N, H VD) -> (N, C)
}

// dnorm1 (N, C) from dout (N, C): the lines of forward from last to first
static void mla_backward(real* dnorm1, const real* dout, const Block* w, Block* dw, const Saved* s, int n) {
    static real dattention[MAX_N * H * VD], dq[MAX_N * H * QK], dkv[MAX_N * H * KV];
    static real dkva[MAX_N * KVA], dckv[MAX_N * LATENT];
    linear_backward(dattention, dw->wo, dout, s->attention, w->wo, n, H * VD, C, 0);  // (N, C) -> (N, H VD)
    memset(dkva, 0, sizeof(dkva));
#pragma omp parallel for
    for (int first = 0; first < n; first += SEQ)
        for (int h = 0; h < H; h++) {  // one after another, because the heads of a sequence add to the same dkva
            const int at = first * H + h, at_rope = first * KVA + LATENT;
            attention_backward(dq + at * QK, dkv + at * KV, dkva + at_rope, dattention + at * VD, s->q + at * QK,
                               s->kv + at * KV, s->kva + at_rope, s->p + at * SEQ, s->attention + at * VD);
        }
    rope(dq + NOPE, H * QK, H, QK, n, -1);
    rope(dkva + LATENT, KVA, 1, 0, n, -1);
    // The latent's part of dkva comes through the keys and values.
    linear_backward(dckv, dw->wkvb, dkv, s->ckv, w->wkvb, n, LATENT, H * KV, 0);  // (N, H KV) -> (N, LATENT)
    rmsnorm_backward(dkva, dw->kv_norm, dckv, s->kva, KVA, w->kv_norm, s->rstd_kv, n, LATENT);
    // norm1 was the input of two products, so its gradient is a sum.
    linear_backward(dnorm1, dw->wq, dq, s->norm1, w->wq, n, C, H * QK, 0);     // (N, H QK) -> (N, C)
    linear_backward(dnorm1, dw->wkva, dkva, s->norm1, w->wkva, n, C, KVA, 1);  // (N, KVA) -> (N, C), +=
}

// SwiGLU: a (n, f) = silu(g) u, for h (n, 2f) = g, then u. Program: layers/swiglu.c.
static void swiglu_forward(real* a, const real* h, int n, int f) {
#pragma omp parallel for
    for (int i = 0; i < n; i++)
        for (int j = 0; j < f; j++) {
            const real g = h[i * 2 * f + j], u = h[i * 2 * f + f + j];
            a[i * f + j] = g / (1 + exp(-g)) * u;
        }
}

// With s = sigmoid(g):  du = da g s,  dg = da u s (1 + g (1 - s))
static void swiglu_backward(real* dh, const real* da, const real* h, int n, int f) {
#pragma omp parallel for
    for (int i = 0; i < n; i++)
        for (int j = 0; j < f; j++) {
            const real g = h[i * 2 * f + j], u = h[i * 2 * f + f + j];
            const real s = 1 / (1 + exp(-g));
            dh[i * 2 * f + j] = da[i * f + j] * u * s * (1 + g * (1 - s));
            dh[i * 2 * f + f + j] = da[i * f + j] * g * s;
        }
}

// An MLP: y (n, C) = W2 swiglu(W13 x), of hidden width f. The dense MLP, the shared expert, and each routed expert.
static void mlp_forward(real* y, real* h, const real* x, const real* w13, const real* w2, int n, int f) {
    static real a[MAX_N * DENSE];
    linear_forward(h, x, w13, n, C, 2 * f);  // (n, C) -> (n, 2f)
    swiglu_forward(a, h, n, f);              // (n, 2f) -> (n, f)
    linear_forward(y, a, w2, n, f, C);       // (n, f) -> (n, C)
}

static void mlp_backward(real* dx, real* dw13, real* dw2, const real* dy, const real* x, const real* h, const real* w13,
                         const real* w2, int n, int f) {
    static real a[MAX_N * DENSE], da[MAX_N * DENSE], dh[MAX_N * 2 * DENSE];
    swiglu_forward(a, h, n, f);                             // again, which is cheaper than to keep a
    linear_backward(da, dw2, dy, a, w2, n, f, C, 0);        // (n, C) -> (n, f)
    swiglu_backward(dh, da, h, n, f);                       // (n, f) -> (n, 2f)
    linear_backward(dx, dw13, dh, x, w13, n, C, 2 * f, 0);  // (n, 2f) -> (n, C)
}

// The K + 1 largest of E values, the largest first. Ties go to the lower index.
static void best_experts(int* best, const real* value) {
    int taken[E] = {0};
    for (int k = 0; k <= K; k++) {
        best[k] = -1;
        for (int e = 0; e < E; e++)
            if (!taken[e] && (best[k] < 0 || value[e] > value[best[k]])) best[k] = e;
        taken[best[k]] = 1;
    }
}

// Quantile balancing (J. Su, kexue.fm 11619; Kimi K3). Each expert should have a share K/E of the step's tokens. A
// token's margin for an expert is the largest score + bias that it does not select, minus that of the expert. It is
// negative for a selected expert. A sort would balance: with the N margins of an expert in order, its bias rises by
// number N K/E, so that N K/E become negative. But a sort needs all margins at once. A histogram can be added up over
// micro-batches and ranks, as in the program, and gives the same to the width of a bin. Most margins are near 0: there
// are 16 bins in each octave from 2^-19 to 2, on both sides of 0, and one in the middle. Program: moe/balance.h, .c.
enum { SIDE = 20 * 16, BINS = 2 * SIDE + 1 };
static int margins[L][E][BINS];

// The lower edge of a bin. The upper edge is that of the next bin.
static double margin_edge(int bin) {
    const int step = bin <= SIDE ? SIDE - bin : bin - SIDE - 1;  // from the middle; 16 steps double an edge
    return (bin <= SIDE ? -1 : 1) * ldexp(1 + step % 16 / 16.0, step / 16 - 19);
}

// The last bin whose lower edge is not above the margin, by bisection: 512 + 256 + ... + 1 is more than BINS.
static int margin_bin(real margin) {
    int bin = 0;
    for (int step = 512; step > 0; step /= 2)
        if (bin + step < BINS && margin >= margin_edge(bin + step)) bin += step;
    return bin;
}

// scores = sigmoid(x Wg^T). A token's experts are the K with the largest score + bias. Their gates are their scores,
// without the bias, divided by the sum. Program: moe/router.c, .cu; DeepSeek-V3, section 2.1.2.
static void router_forward(Saved* s, const real* wg, const real* bias, int histogram[E][BINS], int n) {
    linear_forward(s->scores, s->norm2, wg, n, C, E);
    for (int i = 0; i < n; i++) {
        real* score = s->scores + i * E;
        int best[K + 1];  // the token's experts, and the best of the others
        real biased[E];
        real sum = 0;
        for (int e = 0; e < E; e++) score[e] = 1 / (1 + exp(-score[e]));
        for (int e = 0; e < E; e++) biased[e] = score[e] + bias[e];
        best_experts(best, biased);
        for (int k = 0; k < K; k++) s->expert[i * K + k] = best[k];
        for (int k = 0; k < K; k++) sum += score[best[k]];
        for (int k = 0; k < K; k++) s->gate[i * K + k] = score[best[k]] / sum;
        for (int e = 0; e < E; e++) histogram[e][margin_bin(biased[best[K]] - biased[e])]++;  // its margin
    }
}

// The auxiliary loss of a sequence (DeepSeek-V3, equations 17 to 20): sum_e f_e P_e. f_e is E / (K T) times the number
// of tokens that have e among their K largest scores, without the bias. P_e is the mean over tokens of s_e / sum_j s_j.
static double auxiliary_loss(real* f, const Saved* s, int sequence) {
    double loss = 0;
    real p[E] = {0};
    for (int e = 0; e < E; e++) f[e] = 0;
    for (int i = sequence * SEQ; i < sequence * SEQ + SEQ; i++) {
        const real* score = s->scores + i * E;
        int best[K + 1];
        real all = 0;
        best_experts(best, score);
        for (int e = 0; e < E; e++) all += score[e];
        for (int k = 0; k < K; k++) f[best[k]] += (real)E / (real)(K * SEQ);
        for (int e = 0; e < E; e++) p[e] += score[e] / all / (real)SEQ;
    }
    for (int e = 0; e < E; e++) loss += f[e] * p[e];
    return loss;
}

// The choice of experts has no gradient. A score has one through its token's gates: gate_k = s_k / sum gives
//   ds_k = (dgate_k - sum_j dgate_j gate_j) / sum
// and one through AUX times the mean auxiliary loss of the sequences, where f_e is a constant:
//   ds_e = AUX / N (f_e - sum_j f_j s_j / all) / all,   all = sum_j s_j
static void router_backward(real* dnorm2, real* dwg, const real* dgate, const Saved* s, const real* wg, int n) {
    static real dlogits[MAX_N * E];
    real f[E];
    for (int i = 0; i < n; i++) {
        const real* score = s->scores + i * E;
        const real* dg = dgate + i * K;
        const int* expert = s->expert + i * K;
        real ds[E];
        real all = 0, selected = 0;                       // sums of scores: of all experts, of the selected ones
        real dot_f = 0, dot_gate = 0;                     // <f, s / all>, <dgate, gate>
        if (i % SEQ == 0) auxiliary_loss(f, s, i / SEQ);  // f of the sequence
        for (int e = 0; e < E; e++) all += score[e];
        for (int e = 0; e < E; e++) dot_f += f[e] * score[e] / all;
        for (int e = 0; e < E; e++) ds[e] = AUX / (real)n * (f[e] - dot_f) / all;
        for (int k = 0; k < K; k++) selected += score[expert[k]];
        for (int k = 0; k < K; k++) dot_gate += dg[k] * s->gate[i * K + k];
        for (int k = 0; k < K; k++) ds[expert[k]] += (dg[k] - dot_gate) / selected;
        for (int e = 0; e < E; e++) dlogits[i * E + e] = ds[e] * score[e] * (1 - score[e]);
    }
    linear_backward(dnorm2, dwg, dlogits, s->norm2, wg, n, C, E, 1);
}

// Once a step: each bias rises by the K/E quantile of its margins, so that a share K/E of them would have been
// negative. Inside its bin, the quantile is interpolated. The biases then get the mean 0.
static void balance(real* bias, int histogram[E][BINS], int n) {
    double mean = 0;
    for (int e = 0; e < E; e++) {
        const double wanted = (double)n * K / E;
        int below = 0, bin = 0;
        for (; below + histogram[e][bin] < wanted; bin++) below += histogram[e][bin];
        const double low = margin_edge(bin), high = margin_edge(bin + 1);
        bias[e] += (real)(low + (wanted - below) / histogram[e][bin] * (high - low));
        mean += bias[e] / E;
    }
    for (int e = 0; e < E; e++) bias[e] -= (real)mean;
}

// Each choice of an expert becomes a row. The rows of expert e are start[e] .. start[e + 1] - 1, so an expert is an
// ordinary MLP on its rows. Choice i is one of token i / K. Program: grouped/permute.h, as a counting sort.
static void sort_by_expert(Saved* s, int n) {
    int rows = 0;
    for (int e = 0; e < E; e++) {
        s->start[e] = rows;
        for (int i = 0; i < n * K; i++) {
            if (s->expert[i] != e) continue;
            s->row[i] = rows;
            rows++;
        }
    }
    s->start[E] = rows;
}

// y_n = shared(x_n) + sum_k gate_nk mlp_e(x_n), e = expert_nk. Program: moe/moe.c; the products of all experts in one
// launch: grouped/grouped_gemm.cu; experts on several GPUs: moe/dispatch.h.
static void moe_forward(real* y, const Block* w, Saved* s, int l, int n) {
    router_forward(s, w->router, selection_bias[l], margins[l], n);  // experts and gates, (N, K) each
    sort_by_expert(s, n);
    // Each row is a copy of its token, (N, C) -> (N K, C). Each expert is an MLP on its rows.
    for (int i = 0; i < n * K; i++) memcpy(s->expert_x + s->row[i] * C, s->norm2 + i / K * C, C * sizeof(real));
    for (int e = 0; e < E; e++) {
        const int at = s->start[e], count = s->start[e + 1] - at;  // the first row of expert e, and their number
        mlp_forward(s->expert_out + at * C, s->expert_h + at * 2 * F, s->expert_x + at * C, w->expert[e].w13,
                    w->expert[e].w2, count, F);
    }
    // The shared expert takes all tokens. Each row's output is added, times its gate, (N K, C) -> (N, C).
    mlp_forward(y, s->h, s->norm2, w->mlp13, w->mlp2, n, F);
    for (int i = 0; i < n * K; i++)
        for (int c = 0; c < C; c++) y[i / K * C + c] += s->gate[i] * s->expert_out[s->row[i] * C + c];
}

// dnorm2 (N, C) from dy (N, C). The program does not keep the experts' outputs (grouped/experts.h).
static void moe_backward(real* dnorm2, const real* dy, const Block* w, Block* dw, const Saved* s, int n) {
    static real dout[ROWS * C], dx[ROWS * C], dgate[ROWS];
    // y is a sum of gate * out. So dgate = <dy, out>, (N, K), and dout = gate * dy, (N K, C).
    for (int i = 0; i < n * K; i++) {
        const int at_token = i / K * C, at_row = s->row[i] * C;
        dgate[i] = 0;
        for (int c = 0; c < C; c++) dgate[i] += dy[at_token + c] * s->expert_out[at_row + c];
        for (int c = 0; c < C; c++) dout[at_row + c] = s->gate[i] * dy[at_token + c];
    }
    for (int e = 0; e < E; e++) {
        const int at = s->start[e], count = s->start[e + 1] - at;  // the first row of expert e, and their number
        mlp_backward(dx + at * C, dw->expert[e].w13, dw->expert[e].w2, dout + at * C, s->expert_x + at * C,
                     s->expert_h + at * 2 * F, w->expert[e].w13, w->expert[e].w2, count, F);
    }
    // The token's gradient is a sum: from the shared expert, from its rows, (N K, C) -> (N, C), and from the router.
    mlp_backward(dnorm2, dw->mlp13, dw->mlp2, dy, s->norm2, s->h, w->mlp13, w->mlp2, n, F);
    for (int i = 0; i < n * K; i++)
        for (int c = 0; c < C; c++) dnorm2[i / K * C + c] += dx[s->row[i] * C + c];
    router_backward(dnorm2, dw->router, dgate, s, w->router, n);
}

// Cross-entropy: loss = -ln softmax(z)_target. Returns the sum over the tokens, in nats. The gradient of their mean,
// (softmax(z) - onehot(target)) / N, overwrites the logits. Program: layers/loss.c, .cu.
static double cross_entropy(real* z, int n) {
    double loss = 0;
#pragma omp parallel for reduction(+ : loss)
    for (int i = 0; i < n; i++) {
        real* p = z + i * VOCAB;
        softmax(p, VOCAB);
        loss -= log(p[target[i]]);
        p[target[i]] -= 1;
        for (int v = 0; v < VOCAB; v++) p[v] /= (real)n;
    }
    return loss;
}

// From tokens (N) to logits (N, VOCAB). The embedding of a token is a row of a table. Program: model/passes.c.
static void forward(const int* token, int n) {
    for (int i = 0; i < n; i++) memcpy(residual[0] + i * C, weights.embedding + token[i] * C, C * sizeof(real));
    for (int l = 0; l < L; l++) {
        Block* w = &weights.block[l];
        Saved* s = &saved[l];
        real *x = residual[l], *next = residual[l + 1];
        rmsnorm_forward(s->norm1, s->rstd1, x, C, w->norm1, n, C);
        mla_forward(s->x2, w, s, n);
        for (int i = 0; i < n * C; i++) s->x2[i] += x[i];
        rmsnorm_forward(s->norm2, s->rstd2, s->x2, C, w->norm2, n, C);
        if (l == 0) mlp_forward(next, s->h, s->norm2, w->mlp13, w->mlp2, n, DENSE);
        if (l > 0) moe_forward(next, w, s, l, n);
        for (int i = 0; i < n * C; i++) next[i] += s->x2[i];
    }
    rmsnorm_forward(final_norm, final_rstd, residual[L], C, weights.final_norm, n, C);
    linear_forward(logits, final_norm, weights.lm_head, n, C, VOCAB);
}

// From the gradient of the logits, which cross_entropy has left in their place, to all gradients. dx is that of the
// residual stream: it passes a block unchanged, and each norm adds its branch's gradient. Program: model/passes.c.
static void backward(int n) {
    static real dx[MAX_N * C], dnorm[MAX_N * C];
    memset(dx, 0, sizeof(dx));
    linear_backward(dnorm, gradients.lm_head, logits, final_norm, weights.lm_head, n, C, VOCAB, 0);
    rmsnorm_backward(dx, gradients.final_norm, dnorm, residual[L], C, weights.final_norm, final_rstd, n, C);
    for (int l = L - 1; l >= 0; l--) {
        const Block* w = &weights.block[l];
        const Saved* s = &saved[l];
        Block* dw = &gradients.block[l];
        if (l > 0) moe_backward(dnorm, dx, w, dw, s, n);
        if (l == 0) mlp_backward(dnorm, dw->mlp13, dw->mlp2, dx, s->norm2, s->h, w->mlp13, w->mlp2, n, DENSE);
        rmsnorm_backward(dx, dw->norm2, dnorm, s->x2, C, w->norm2, s->rstd2, n, C);
        mla_backward(dnorm, dx, w, dw, s, n);
        rmsnorm_backward(dx, dw->norm1, dnorm, residual[l], C, w->norm1, s->rstd1, n, C);
    }
    for (int i = 0; i < n * C; i++) gradients.embedding[input[i / C] * C + i % C] += dx[i];
}

// Computes c in tiles of 4 x 16 sums, which stay in registers. A panel is a copy of 16 columns of b, and a strip of 4
// rows of a, ordered as a tile reads them. Inside a parallel loop, as in attention, the loops run on one thread.
static void matmul(real* c, int c_row, const real* a, int a_row, int a_column, const real* b, int b_row, int b_column,
                   int m, int n, int depth, int add) {
    enum { TALL = 4, WIDE = 16 };
    real* panels = malloc((size_t)(n + WIDE) * (size_t)depth * sizeof(real));
#pragma omp parallel for
    for (int j = 0; j < n; j += WIDE)
        for (int k = 0; k < depth; k++)
            for (int v = 0; v < WIDE; v++)
                panels[j * depth + k * WIDE + v] = j + v < n ? b[k * b_row + (j + v) * b_column] : 0;
#pragma omp parallel for
    for (int i = 0; i < m; i += TALL) {
        real strip[(MAX_N + 2 * DENSE + VOCAB) * TALL];  // no product here is deeper
        for (int k = 0; k < depth; k++)
            for (int u = 0; u < TALL; u++) strip[k * TALL + u] = i + u < m ? a[(i + u) * a_row + k * a_column] : 0;
        for (int j = 0; j < n; j += WIDE) {
            real sum[TALL][WIDE] = {{0}};
            for (int k = 0; k < depth; k++)
                for (int u = 0; u < TALL; u++) {
#pragma omp simd
                    for (int v = 0; v < WIDE; v++) sum[u][v] += strip[k * TALL + u] * panels[j * depth + k * WIDE + v];
                }
            for (int u = 0; u < TALL && i + u < m; u++)
                for (int v = 0; v < WIDE && j + v < n; v++)
                    c[(i + u) * c_row + j + v] = sum[u][v] + (add ? c[(i + u) * c_row + j + v] : 0);
        }
    }
    free(panels);
}

// Uniform in (0, 1): Philox 4x32-10 (Salmon et al. 2011). A number depends on its place only. Program: device/random.h.
static double uniform(uint32_t stream, uint64_t index) {
    uint32_t c[4] = {(uint32_t)(index / 4), (uint32_t)(index / 4 >> 32), stream, 0};
    for (uint32_t round = 0; round < 10; round++) {
        const uint32_t key0 = SEED + round * 0x9E3779B9u, key1 = round * 0xBB67AE85u;
        const uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
        const uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ key0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c[3] ^ key1,
                                  (uint32_t)p0};
        memcpy(c, next, sizeof(c));
    }
    return (c[index % 4] + 0.5) / 4294967296.0;
}

// Normal, cut at -3 and 3: the z with Phi(z) = p, p in (Phi(-3), Phi(3)), by Newton's method. Program: layers/normal.h.
static double normal(uint32_t stream, uint64_t index) {
    const double below = 0.0013498980316300946, p = below + (1 - 2 * below) * uniform(stream, index);
    double z = 0;
    for (int i = 0; i < 10; i++) z -= (0.5 * erfc(-z * sqrt(0.5)) - p) / (exp(-0.5 * z * z) * 0.3989422804014327);
    return z;
}

// A hash of 64 bits: the end of SplitMix64.
static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Element i of a random permutation of 0 .. n - 1, another one for each epoch: the order of the windows of T tokens.
// A Feistel network permutes 0 .. 4^half - 1. It is repeated until the result is below n. Program: data/order.c.
static int permute(int epoch, int i, int n) {
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    const uint64_t key = mix(mix(SEED + golden) + ((uint64_t)epoch + 1) * golden);
    int half = 1;
    while (1 << (2 * half) < n) half++;
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t x = (uint64_t)i;
    do {
        for (uint64_t round = 0; round < 8; round++) {
            const uint64_t left = x >> half, right = x & mask;
            x = right << half | (left ^ (mix(key + (round << 32) + right * golden) & mask));
        }
    } while (x >= (uint64_t)n);
    return (int)x;
}

// A file has 256 numbers of four bytes, the third is the count of tokens, then tokens of two bytes. Window w begins
// with token w T, and has T + 1: the last one is a target only. Program: data/shards.c.
static uint16_t* read_tokens(const char* path, int* windows) {
    int32_t header[256] = {0};
    FILE* file = fopen(path, "rb");
    int good = file && fread(header, sizeof(header), 1, file) == 1 && header[0] == 20240520 && header[2] > MAX_N;
    uint16_t* tokens = malloc(good ? (size_t)header[2] * sizeof(*tokens) : 1);
    good = good && tokens && fread(tokens, sizeof(*tokens), (size_t)header[2], file) == (size_t)header[2];
    for (int i = 0; good && i < header[2]; i++) good = tokens[i] < VOCAB;
    if (!good) {
        fprintf(stderr, "%s: not a whole file of more than %d byte tokens; make sheet prepares two\n", path, MAX_N);
        exit(1);
    }
    fclose(file);
    *windows = (header[2] - 1) / SEQ;
    return tokens;
}

// Fills sequence i of input and target with a window of a file.
static void read_window(const uint16_t* tokens, int window, int i) {
    for (int j = 0; j < SEQ; j++) input[i * SEQ + j] = tokens[window * SEQ + j];
    for (int j = 0; j < SEQ; j++) target[i * SEQ + j] = tokens[window * SEQ + j + 1];
}

// All parameters as a list of matrices. A norm is a matrix of one row. Muon updates gate, up and down apart.
enum { NORM, ADAMW, MUON };  // rules of the update. NORM: AdamW without weight decay
typedef struct Matrix {
    real *w, *gradient, *m1, *m2;   // m1: AdamW's first moment, or Muon's momentum; m2: AdamW's second moment
    int rows, columns, rule, unit;  // unit: 0 is the embedding, l + 1 is block l, L + 1 is the head
    const char* name;
} Matrix;
static Matrix matrices[2 + L * (11 + 3 * E) + 1];
static int matrix_count;

// Puts a matrix on the list, and draws its weights: normal with standard deviation `std`, or ones if it is 0.
static void add_matrix(const char* name, real* w, int rows, int columns, double std, int rule, uint32_t* stream) {
    const long at = (long)(w - (real*)&weights);  // its place, the same in weights, gradients and moments
    real *dw = (real*)&gradients + at, *m1 = (real*)&moment1 + at, *m2 = (real*)&moment2 + at;
    matrices[matrix_count] = (Matrix){w, dw, m1, m2, rows, columns, rule, (int)(*stream >> 20), name};
    matrix_count++;
#pragma omp parallel for
    for (int i = 0; i < rows * columns; i++) w[i] = std > 0 ? (real)(std * normal(*stream, (uint64_t)i)) : 1;
    ++*stream;
}

// Matrices that write into the residual stream start smaller, because 2 L of them add up. The random numbers of unit u
// are streams u 2^20, u 2^20 + 1 and so on. Program: the table of model/params.c.
static void initialize(void) {
    const double std = 0.02, residual = 0.02 / sqrt(2.0 * L);
    uint32_t stream = 0;
    add_matrix("embedding", weights.embedding, VOCAB, C, std, ADAMW, &stream);
    for (int l = 0; l < L; l++) {
        Block* w = &weights.block[l];
        const int f = l == 0 ? DENSE : F;
        stream = (uint32_t)(l + 1) << 20;
        add_matrix("Wq", w->wq, H * QK, C, std, MUON, &stream);  // attention
        add_matrix("Wkva", w->wkva, KVA, C, std, MUON, &stream);
        add_matrix("Wkvb", w->wkvb, H * KV, LATENT, std, MUON, &stream);
        add_matrix("Wo", w->wo, C, H * VD, residual, MUON, &stream);
        add_matrix("MLP gate", w->mlp13, f, C, std, MUON, &stream);  // the dense MLP, or the shared expert
        add_matrix("MLP up", w->mlp13 + f * C, f, C, std, MUON, &stream);
        add_matrix("MLP down", w->mlp2, C, f, residual, MUON, &stream);
        if (l > 0) add_matrix("router", w->router, E, C, std, ADAMW, &stream);
        add_matrix("norm1", w->norm1, 1, C, 0, NORM, &stream);
        add_matrix("kv norm", w->kv_norm, 1, LATENT, 0, NORM, &stream);
        add_matrix("norm2", w->norm2, 1, C, 0, NORM, &stream);
        for (int e = 0; l > 0 && e < E; e++) {
            add_matrix("expert gate", w->expert[e].w13, F, C, std, MUON, &stream);  // a routed expert
            add_matrix("expert up", w->expert[e].w13 + F * C, F, C, std, MUON, &stream);
            add_matrix("expert down", w->expert[e].w2, C, F, residual, MUON, &stream);
        }
    }
    stream = (uint32_t)(L + 1) << 20;
    add_matrix("lm_head", weights.lm_head, VOCAB, C, std, ADAMW, &stream);
    add_matrix("final norm", weights.final_norm, 1, C, 0, NORM, &stream);
}

// AdamW. The moments begin at 0: fix1 and fix2 correct that. Program: layers/adamw.h, .c, .cu.
static void adamw(Matrix m, real clip, real lr, int step) {
    const real decay = m.rule == NORM ? 0 : WEIGHT_DECAY;
    const real fix1 = (real)(1 / (1 - pow(BETA1, step))), fix2 = (real)(1 / (1 - pow(BETA2, step)));
    for (int i = 0; i < m.rows * m.columns; i++) {
        const real g = clip * m.gradient[i];
        m.m1[i] = BETA1 * m.m1[i] + (1 - BETA1) * g;
        m.m2[i] = BETA2 * m.m2[i] + (1 - BETA2) * g * g;
        m.w[i] -= lr * (m.m1[i] * fix1 / (sqrt(m.m2[i] * fix2) + 1e-8f) + decay * m.w[i]);
    }
}

// Muon (K. Jordan 2024; Moonlight, arXiv 2502.16982): the momentum of a matrix is made orthogonal, so that an update
// moves all directions equally far. Five Newton-Schulz steps bring the singular values of X close to 1:
//   A = X X^T,   X = a X + (b A + c A A) X
// X has rows <= columns here: a tall matrix is read and written as its transpose. Program: layers/muon.h, .c, .cu.
static void muon(Matrix m, real clip, real lr) {
    const int tall = m.rows > m.columns, rows = tall ? m.columns : m.rows, columns = tall ? m.rows : m.columns;
    real x[DENSE * C], next[DENSE * C], A[C * C], B[C * C];
    double squares = 0;
    for (int i = 0; i < rows * columns; i++) {  // x = u, with Nesterov momentum: m = momentum m + g, u = g + momentum m
        const real g = clip * m.gradient[i];
        m.m1[i] = MOMENTUM * m.m1[i] + g;
        const real u = g + MOMENTUM * m.m1[i];
        squares += (double)u * u;
        x[tall ? i % m.columns * m.rows + i / m.columns : i] = u;  // transposed if tall
    }
    const real per_norm = (real)(1 / (sqrt(squares) + 1e-7));
    for (int i = 0; i < rows * columns; i++) x[i] *= per_norm;
    for (int iteration = 0; iteration < 5; iteration++) {
        matmul(A, rows, x, columns, 1, x, 1, columns, rows, rows, columns, 0);
        matmul(B, rows, A, rows, 1, A, rows, 1, rows, rows, rows, 0);
        for (int i = 0; i < rows * rows; i++) B[i] = -4.7750f * A[i] + 2.0315f * B[i];
        matmul(next, columns, B, rows, 1, x, columns, 1, rows, columns, rows, 0);
        for (int i = 0; i < rows * columns; i++) x[i] = 3.4445f * x[i] + next[i];
    }
    const real size = (real)(0.2 * sqrt(columns));  // that of AdamW's updates
    for (int i = 0; i < rows * columns; i++)
        m.w[i] -= lr * (size * x[tall ? i % m.columns * m.rows + i / m.columns : i] + WEIGHT_DECAY * m.w[i]);
}

// One update; returns the norm of the gradient. A norm above CLIP is scaled down to it. The learning rates rise in a
// line to their peaks, then fall along half a cosine. Program: model/update.c; the schedule: model/config.c.
static double update(int step) {
    const real* g = (real*)&gradients;  // all of them, one after another
    double squares = 0;
    for (size_t i = 0; i < sizeof(gradients) / sizeof(real); i++) squares += (double)g[i] * g[i];
    const double norm = sqrt(squares), left = (double)(STEPS - step) / (STEPS - WARMUP);
    const double fall = FINAL_LR + (1 - FINAL_LR) * (0.5 - 0.5 * cos(acos(-1) * left));  // acos(-1) is pi
    const double part = step <= WARMUP ? (double)step / WARMUP : fall;                   // of the peaks
    const real clip = (real)(norm > CLIP ? CLIP / norm : 1);
#pragma omp parallel for schedule(dynamic)
    for (int k = 0; k < matrix_count; k++) {
        if (matrices[k].rule == MUON) muon(matrices[k], clip, (real)(MUON_LR * part));
        if (matrices[k].rule != MUON) adamw(matrices[k], clip, (real)(LR * part), step);
    }
    for (int l = 1; l < L; l++) balance(selection_bias[l], margins[l], MAX_N);
    return norm;
}

// Mean loss over the windows of a file, in whole batches. Program: pretrained/evaluate.c.
static double validate(const uint16_t* tokens, int windows) {
    const int batches = windows / BATCH;
    double loss = 0;
    for (int k = 0; k < batches; k++) {
        for (int i = 0; i < BATCH; i++) read_window(tokens, k * BATCH + i, i);
        forward(input, MAX_N);
        loss += cross_entropy(logits, MAX_N);
    }
    return loss / batches / MAX_N;
}

// Token after token, from an end of text on. Each computes its whole context again. Program: pretrained/sample.c.
static void sample(void) {
    int token[SAMPLE + SEQ] = {END_OF_TEXT};
    for (int n = 1; n <= SAMPLE; n++) {
        const int first = n < SEQ ? 0 : n - SEQ;  // of the context; no token sees the later ones
        real* p = logits + (n - 1 - first) * VOCAB;
        forward(token + first, SEQ);
        for (int v = 0; v < VOCAB; v++) p[v] /= (real)TEMPERATURE;
        softmax(p, VOCAB);
        double left = uniform(UINT32_MAX, (uint64_t)n);
        int v = 0;
        for (; v < VOCAB - 1 && left > p[v]; v++) left -= p[v];
        if (v == END_OF_TEXT) break;
        token[n] = v;
        putchar(v);
    }
    putchar('\n');
}

// The number whose gradients backward computes, of one sequence: the mean loss and the auxiliary loss.
static double objective(void) {
    double auxiliary = 0;
    real f[E];
    forward(input, SEQ);
    for (int l = 1; l < L; l++) auxiliary += auxiliary_loss(f, &saved[l], 0);
    return cross_entropy(logits, SEQ) / SEQ + AUX * auxiliary;
}

static void move(Matrix m, double by) {
    for (int i = 0; i < m.rows * m.columns; i++) m.w[i] += (real)(by * m.gradient[i]);
}

// Moves each matrix by h along its gradient, forth and back. The slope of the objective must be the gradient's norm.
// Returns for how many it is not. Rounding changes a slope by 1e-15 / h. With a larger h, tokens select other experts.
static int check(const uint16_t* tokens) {
    const double h = 1e-6;
    int wrong = 0;
    read_window(tokens, 0, 0);
    objective();
    backward(SEQ);
    printf("%-12s %5s %13s %13s %6s\n", "matrix", "unit", "gradient", "slope", "error");
    for (int k = 0; k < matrix_count; k++) {
        const Matrix m = matrices[k];
        double squares = 0;
        for (int i = 0; i < m.rows * m.columns; i++) squares += m.gradient[i] * m.gradient[i];
        const double norm = sqrt(squares);
        move(m, h / norm);
        const double above = objective();
        move(m, -2 * h / norm);
        const double slope = (above - objective()) / (2 * h), error = fabs(slope / norm - 1);
        const int right = error <= 1e-5;  // NaN is not
        move(m, h / norm);
        printf("%-12s %5d %13.5e %13.5e %6.0e %s\n", m.name, m.unit, norm, slope, error, right ? "ok" : "WRONG");
        wrong += !right;
    }
    printf("%d of %d gradients are right\n", matrix_count - wrong, matrix_count);
    return wrong;
}

// Program: train in train_moe.cu.
int main(int argc, char** argv) {
    const int checks = argc == 3 && strcmp(argv[1], "--check") == 0;
    if (argc != 3 || (checks && sizeof(real) != sizeof(double))) {
        fprintf(stderr, "usage: %s TRAIN.bin VAL.bin; compiled with -DCHECK: %s --check TRAIN.bin\n", argv[0], argv[0]);
        return 2;
    }
    int train_windows, val_windows;
    uint16_t* train = read_tokens(argv[1 + checks], &train_windows);
    uint16_t* val = read_tokens(argv[2], &val_windows);
    const time_t began = time(NULL);
    initialize();
    if (checks) return check(train) > 0;
    for (int step = 1; step <= STEPS; step++) {
        for (int i = 0; i < BATCH; i++) {
            const int w = (step - 1) * BATCH + i;  // counts windows over all epochs
            read_window(train, permute(w / train_windows, w % train_windows, train_windows), i);
        }
        memset(margins, 0, sizeof(margins));
        memset(&gradients, 0, sizeof(gradients));
        forward(input, MAX_N);
        const double loss = cross_entropy(logits, MAX_N) / MAX_N;
        backward(MAX_N);
        const double norm = update(step);
        double load = 0;  // tokens of the fullest expert of all blocks, over the mean
        for (int l = 1; l < L; l++)
            for (int e = 0; e < E; e++)
                load = fmax(load, (double)(saved[l].start[e + 1] - saved[l].start[e]) * E / (MAX_N * K));
        printf("step %d/%d  loss %.6f  norm %.4f  load %.2f  %.0f s", step, STEPS, loss, norm, load,
               difftime(time(NULL), began));
        if (step % VALIDATE_EVERY == 0 || step == STEPS) printf("  validation %.4f", validate(val, val_windows));
        printf("\n");
        fflush(stdout);
    }
    sample();
    free(train);
    free(val);
    return 0;
}
