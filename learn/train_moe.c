// Pretraining of a mixture-of-experts model, all of it in one file: plain C11, float32, no library but libc and OpenMP.
//
//   cc -O3 -march=native -fopenmp learn/train_moe.c -lm && ./a.out TRAIN.bin VAL.bin          (make sheet does both)
//
// It trains the preset `tiny` as `make train` does: equal weights at the start, equal data in the same order, and equal
// losses but for rounding. tests/tools/test_sheet.py compares the two. The program has the same algorithm for every
// size, in bf16 on GPUs, on many ranks. "Program:" names the file that does the same there.
//
// The ops are in the order in which a token meets them, and the backward of an op follows its forward:
//   tokens -> embedding -> 4 blocks -> RMSNorm -> lm_head -> loss       a block:  x = x + attention(RMSNorm(x))
//                                                                                 x = x + mlp(RMSNorm(x))
// Block 0 has a dense MLP. In the others, the MLP is a mixture of experts: each token uses 2 of 8, and a shared one.
// Matrices are row-major, and a weight W is (outputs, inputs): y = x W^T. dx is the gradient of the loss for x.
// Comments such as (N, C) are shapes. N is the number of tokens, B that of sequences, T that of tokens in a sequence.
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The options of `make train` and the sizes of `tiny`. Program: model/settings.c.
enum { STEPS = 750, WARMUP = 50, BATCH = 8, SEQ = 256, MAX_N = BATCH * SEQ };  // a step is one batch of sequences
enum { VOCAB = 257, END_OF_TEXT = 256 };  // a token is a byte; one more token ends a document
enum { L = 4, C = 128, DENSE = 512 };     // blocks, width of the residual stream, hidden width of the dense MLP
enum { H = 4, NOPE = 32, ROPE = 16, QK = NOPE + ROPE };  // heads; a query or key: without position, and with it
enum { VD = 32, KV = NOPE + VD };                        // value of a head; its key without position, and its value
enum { LATENT = 64, KVA = LATENT + ROPE };  // the latent of keys and values; the same with the key's position part
enum { E = 8, K = 2, F = 128, ROWS = MAX_N * K };  // experts, experts of a token, hidden width; a row for each choice
enum { SEED = 1, SAMPLE = 400, VALIDATE_EVERY = 250 };
static const float WEIGHT_DECAY = 0.1f, BETA1 = 0.9f, BETA2 = 0.95f, MOMENTUM = 0.95f, AUX = 1e-2f;
static const double LR = 3e-3, MUON_LR = 12e-3, FINAL_LR = 0.1, CLIP = 1, TEMPERATURE = 0.8;

// The parameters of a block. In block 0 experts and router stay 0: its MLP is dense. Program: model/params.c.
typedef struct Block {
    float norm1[C], norm2[C];     // of the RMSNorms before attention and before the MLP
    float wq[H * QK * C];         // (H QK, C): queries
    float wkva[KVA * C];          // (KVA, C): down to the latent, and the key's part with position
    float kv_norm[LATENT];        // of the latent's RMSNorm
    float wkvb[H * KV * LATENT];  // (H KV, LATENT): up to the keys and values of each head
    float wo[C * H * VD];         // (C, H VD)
    float mlp13[2 * DENSE * C];   // (2 M, C): gate, then up; the dense MLP (M = DENSE), or the shared expert (M = F)
    float mlp2[C * DENSE];        // (C, M)
    float router[E * C];          // (E, C)
    float w13[E * 2 * F * C];     // (E, 2F, C): of each expert gate, then up
    float w2[E * C * F];          // (E, C, F)
} Block;

typedef struct Parameters {
    float embedding[VOCAB * C];  // (VOCAB, C)
    Block block[L];
    float final_norm[C];
    float lm_head[VOCAB * C];  // (VOCAB, C)
} Parameters;

static Parameters weights, gradients, moment1, moment2;
static float selection_bias[L][E];  // of the router; set by load balancing, without a gradient

// The activations that backward needs, of one block.
typedef struct Saved {
    float x[MAX_N * C], norm1[MAX_N * C], rstd1[MAX_N];         // (N, C), (N, C), (N)
    float q[MAX_N * H * QK], kva[MAX_N * KVA];                  // (N, H, QK), (N, KVA), both with positions
    float ckv[MAX_N * LATENT], rstd_kv[MAX_N];                  // (N, LATENT), (N)
    float kv[MAX_N * H * KV];                                   // (N, H, KV): a head's key without position, its value
    float attention[MAX_N * H * VD], p[BATCH * H * SEQ * SEQ];  // (N, H, VD); the probabilities, (B, H, T, T)
    float x2[MAX_N * C], norm2[MAX_N * C], rstd2[MAX_N];        // (N, C), (N, C), (N)
    float h[MAX_N * 2 * DENSE];                                 // (N, 2M): the hidden layer before SwiGLU
    float scores[MAX_N * E], gate[MAX_N * K];                   // (N, E), (N, K)
    int expert[MAX_N * K], start[E + 1], row[MAX_N * K], choice[ROWS];  // (N, K); the others: sort_by_expert
    float expert_h[ROWS * 2 * F];                                       // (rows, 2F)
} Saved;
static Saved saved[L];
static float output[MAX_N * C], final_norm[MAX_N * C], final_rstd[MAX_N];  // (N, C), (N, C), (N)
static float logits[MAX_N * VOCAB];                                        // (N, VOCAB)

// Uniform in (0, 1): Philox 4x32-10 (Salmon et al. 2011), four random numbers from a counter. So each weight has its
// own number, whatever the order of drawing. Program: device/random.h.
static double uniform(uint32_t stream, uint64_t index) {
    uint32_t c[4] = {(uint32_t)(index / 4), (uint32_t)(index / 4 >> 32), stream, 0}, key[2] = {SEED, 0};
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
        const uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ key[0], (uint32_t)p1,
                                  (uint32_t)(p0 >> 32) ^ c[3] ^ key[1], (uint32_t)p0};
        memcpy(c, next, sizeof(c));
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return (c[index % 4] + 0.5) / 4294967296.0;
}

// Normal with deviation 1, cut at 3: the z with Phi(z) = p, by Newton's method. Program: layers/normal.h.
static double normal(uint32_t stream, uint64_t index) {
    const double below = 0.0013498980316300946, p = below + (1 - 2 * below) * uniform(stream, index);  // Phi(-3)
    double z = 0;
    for (int i = 0; i < 10; i++) z -= (0.5 * erfc(-z * sqrt(0.5)) - p) / (exp(-0.5 * z * z) * 0.3989422804014327);
    return z;
}

// A file of tokens, of two bytes each, after 256 numbers of four bytes; the third is the count. Program: data/shards.c.
static uint16_t* read_tokens(const char* path, int* count) {
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
    *count = header[2];
    return tokens;
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
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 8; round++) {
            const uint64_t next = left ^ (mix(key + (round << 32) + right * golden) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int)x;
}

// The windows of a batch: T inputs each, and the same shifted by one as targets.
static int input[MAX_N], target[MAX_N];  // (B, T)
static void read_batch(const uint16_t* tokens, const int window[BATCH]) {
    for (int i = 0; i < MAX_N; i++) input[i] = tokens[window[i / SEQ] * SEQ + i % SEQ];
    for (int i = 0; i < MAX_N; i++) target[i] = tokens[window[i / SEQ] * SEQ + i % SEQ + 1];
}

// A tile of c, 4 x 16 sums that stay in registers: the product of a strip (depth, 4) and a panel (depth, 16).
enum { TALL = 4, WIDE = 16 };
static void multiply_tile(float* c, int c_row, const float* restrict strip, const float* restrict panel, int rows,
                          int columns, int depth, int add) {
    float sum[TALL][WIDE] = {{0}};
    for (int k = 0; k < depth; k++)
        for (int i = 0; i < TALL; i++) {
#pragma omp simd
            for (int j = 0; j < WIDE; j++) sum[i][j] += strip[k * TALL + i] * panel[k * WIDE + j];
        }
    for (int i = 0; i < rows && i < TALL; i++)
        for (int j = 0; j < columns && j < WIDE; j++) c[i * c_row + j] = sum[i][j] + (add ? c[i * c_row + j] : 0);
}

// c (m, n) = a b, or c += a b. Element (i, k) of a is a[i * a_row + k * a_column]. So strides can transpose a matrix.
// The panels are a copy of b, filled up with zeros, and a strip is a copy of 4 rows of a. Program: layers/matmul.h.
static void matmul(float* c, int c_row, const float* a, int a_row, int a_column, const float* b, int b_row,
                   int b_column, int m, int n, int depth, int add) {
    const int width = (n + WIDE - 1) / WIDE * WIDE;
    float* panels = malloc(((size_t)width * (size_t)depth + 1) * sizeof(float));
#pragma omp parallel for
    for (int j = 0; j < width; j += WIDE)
        for (int k = 0; k < depth; k++)
            for (int i = j; i < j + WIDE; i++)
                panels[j * depth + k * WIDE + i - j] = i < n ? b[k * b_row + i * b_column] : 0;
#pragma omp parallel for
    for (int i = 0; i < m; i += TALL) {
        float strip[(MAX_N + DENSE + VOCAB) * TALL];  // no product here is deeper
        for (int k = 0; k < depth; k++)
            for (int r = 0; r < TALL; r++) strip[k * TALL + r] = a[(i + r < m ? i + r : m - 1) * a_row + k * a_column];
        for (int j = 0; j < n; j += WIDE)
            multiply_tile(c + i * c_row + j, c_row, strip, panels + j * depth, m - i, n - j, depth, add);
    }
    free(panels);
}

// y (n, out) = x (n, in) W^T, with W (out, in)
static void linear_forward(float* y, const float* x, const float* w, int n, int in, int out) {
    matmul(y, out, x, in, 1, w, 1, in, n, out, in, 0);
}

// dx = dy W, or += with add;  dW += dy^T x
static void linear_backward(float* dx, float* dw, const float* dy, const float* x, const float* w, int n, int in,
                            int out, int add) {
    matmul(dx, in, dy, out, 1, w, in, 1, n, in, out, add);
    matmul(dw, in, dy, 1, out, x, in, 1, out, in, n, 1);
}

// RMSNorm: y (n, width) = w x rstd, rstd = (mean x^2 + 1e-6)^-1/2. x_row: from row to row. Program: layers/rmsnorm.c.
static void rmsnorm_forward(float* y, float* rstd, const float* x, int x_row, const float* w, int n, int width) {
#pragma omp parallel for
    for (int i = 0; i < n; i++) {
        const float* xi = x + i * x_row;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int c = 0; c < width; c++) squares += xi[c] * xi[c];
        rstd[i] = 1 / sqrtf(squares / (float)width + 1e-6f);
        for (int c = 0; c < width; c++) y[i * width + c] = xi[c] * rstd[i] * w[c];
    }
}

// With g = dy w:  dx += rstd (g - x rstd^2 mean(g x)),  dw += dy x rstd
static void rmsnorm_backward(float* dx, float* dw, const float* dy, const float* x, int x_row, const float* w,
                             const float* rstd, int n, int width) {
#pragma omp parallel for
    for (int i = 0; i < n; i++) {
        const float *xi = x + i * x_row, *dyi = dy + i * width;
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int c = 0; c < width; c++) dot += dyi[c] * w[c] * xi[c];
        const float k = dot / (float)width * rstd[i] * rstd[i];
        for (int c = 0; c < width; c++) dx[i * x_row + c] += rstd[i] * (dyi[c] * w[c] - xi[c] * k);
    }
    for (int i = 0; i < n; i++)
        for (int c = 0; c < width; c++) dw[c] += dy[i * width + c] * x[i * x_row + c] * rstd[i];
}

// RoPE (Su et al. 2021) gives a vector its position: pair i turns by the angle t 10000^(-2i / ROPE). A query times a
// key then depends on their distance alone. x: the first pair of token 0; a token has `heads` vectors, `head` apart.
// The gradient turns back: direction -1. Program: layers/rope.h.
static void rope(float* x, int row, int heads, int head, int n, int t, int direction) {
#pragma omp parallel for
    for (int i = 0; i < n; i++)
        for (int pair = 0; pair < ROPE / 2; pair++) {
            const double angle = i % t * pow(10000, -2.0 * pair / ROPE);
            const float cosine = (float)cos(angle), sine = (float)(direction * sin(angle));
            for (int h = 0; h < heads; h++) {
                float* v = x + i * row + h * head + 2 * pair;
                const float even = v[0], odd = v[1];
                v[0] = even * cosine - odd * sine;
                v[1] = even * sine + odd * cosine;
            }
        }
}

// Causal attention of head h: S = q k^T / sqrt(QK), P = softmax(S) over the keys up to the query's token, out = P v.
// A key has two parts: one from the latent for each head, and one with position that all heads share. Each adds to S.
// Program: layers/attention.h, as flash attention: in tiles, so that P never exists whole.
static void attention_forward(Saved* s, int b, int t) {
    const float scale = (float)(1 / sqrt(QK));
#pragma omp parallel for
    for (int bh = 0; bh < b * H; bh++) {
        const int first = bh / H * t, at = first * H + bh % H;  // the sequence's first token; its vector of this head
        const float *q = s->q + at * QK, *k = s->kv + at * KV, *v = k + NOPE, *k_rope = s->kva + first * KVA + LATENT;
        float* p = s->p + bh * t * t;
        matmul(p, t, q, H * QK, 1, k, 1, H * KV, t, t, NOPE, 0);
        matmul(p, t, q + NOPE, H * QK, 1, k_rope, 1, KVA, t, t, ROPE, 1);
        for (int i = 0; i < t; i++) {
            float *pi = p + i * t, top = -INFINITY, sum = 0;
            for (int j = 0; j <= i; j++) top = fmaxf(top, scale * pi[j]);
            for (int j = 0; j <= i; j++) sum += pi[j] = expf(scale * pi[j] - top);
            for (int j = 0; j < t; j++) pi[j] = j <= i ? pi[j] / sum : 0;
        }
        matmul(s->attention + at * VD, H * VD, p, t, 1, v, H * KV, 1, t, VD, t, 0);
    }
}

// dP = dout v^T,  dS = P (dP - <dout, out>) / sqrt(QK),  dq = dS k,  dk = dS^T q,  dv = P^T dout.
// The heads of a sequence run one after another, because they add to the same dk_rope, which begins as 0.
static void attention_backward(float* dq, float* dkv, float* dkva, const float* dout, const Saved* s, int b, int t) {
    const float scale = (float)(1 / sqrt(QK));
#pragma omp parallel for
    for (int i = 0; i < b; i++)
        for (int h = 0; h < H; h++) {
            const int first = i * t, at = first * H + h, at_rope = first * KVA + LATENT;
            const float *q = s->q + at * QK, *k = s->kv + at * KV, *v = k + NOPE, *p = s->p + (i * H + h) * t * t;
            const float *out = s->attention + at * VD, *dout_h = dout + at * VD;
            float *dq_h = dq + at * QK, *dk = dkv + at * KV, *dv = dk + NOPE, ds[SEQ * SEQ];
            matmul(ds, t, dout_h, H * VD, 1, v, 1, H * KV, t, t, VD, 0);
            for (int r = 0; r < t; r++) {
                float delta = 0;
                for (int c = 0; c < VD; c++) delta += dout_h[r * H * VD + c] * out[r * H * VD + c];
                for (int j = 0; j < t; j++) ds[r * t + j] = scale * p[r * t + j] * (ds[r * t + j] - delta);
            }
            matmul(dq_h, H * QK, ds, t, 1, k, H * KV, 1, t, NOPE, t, 0);
            matmul(dq_h + NOPE, H * QK, ds, t, 1, s->kva + at_rope, KVA, 1, t, ROPE, t, 0);
            matmul(dk, H * KV, ds, 1, t, q, H * QK, 1, t, NOPE, t, 0);
            matmul(dkva + at_rope, KVA, ds, 1, t, q + NOPE, H * QK, 1, t, ROPE, t, 1);
            matmul(dv, H * KV, p, 1, t, dout_h, H * VD, 1, t, VD, t, 0);
        }
}

// MLA, multi-head latent attention (DeepSeek-V2): keys and values come from a narrow latent. out (N, C) from norm1.
// Program: mla_forward in model/block_forward.c, mla_backward in model/block_backward.c.
static void mla_forward(float* out, const Block* w, Saved* s, int b, int t) {
    const int n = b * t;
    linear_forward(s->q, s->norm1, w->wq, n, C, H * QK);
    linear_forward(s->kva, s->norm1, w->wkva, n, C, KVA);
    rmsnorm_forward(s->ckv, s->rstd_kv, s->kva, KVA, w->kv_norm, n, LATENT);
    linear_forward(s->kv, s->ckv, w->wkvb, n, LATENT, H * KV);
    rope(s->q + NOPE, H * QK, H, QK, n, t, 1);
    rope(s->kva + LATENT, KVA, 1, 0, n, t, 1);
    attention_forward(s, b, t);
    linear_forward(out, s->attention, w->wo, n, H * VD, C);
}

// dnorm1 (N, C) from dout (N, C)
static void mla_backward(float* dnorm1, const float* dout, const Block* w, Block* dw, const Saved* s, int b, int t) {
    static float dattention[MAX_N * H * VD], dq[MAX_N * H * QK], dkv[MAX_N * H * KV];
    static float dkva[MAX_N * KVA], dckv[MAX_N * LATENT];
    const int n = b * t;
    linear_backward(dattention, dw->wo, dout, s->attention, w->wo, n, H * VD, C, 0);
    memset(dkva, 0, sizeof(dkva));
    attention_backward(dq, dkv, dkva, dattention, s, b, t);
    rope(dq + NOPE, H * QK, H, QK, n, t, -1);
    rope(dkva + LATENT, KVA, 1, 0, n, t, -1);
    linear_backward(dckv, dw->wkvb, dkv, s->ckv, w->wkvb, n, LATENT, H * KV, 0);
    rmsnorm_backward(dkva, dw->kv_norm, dckv, s->kva, KVA, w->kv_norm, s->rstd_kv, n, LATENT);
    linear_backward(dnorm1, dw->wq, dq, s->norm1, w->wq, n, C, H * QK, 0);
    linear_backward(dnorm1, dw->wkva, dkva, s->norm1, w->wkva, n, C, KVA, 1);
}

// SwiGLU: a (n, f) = silu(g) u, for h (n, 2f) = g, then u. Program: layers/swiglu.c.
static void swiglu_forward(float* a, const float* h, int n, int f) {
#pragma omp parallel for
    for (int i = 0; i < n; i++)
        for (int j = 0; j < f; j++) {
            const float g = h[i * 2 * f + j], u = h[i * 2 * f + f + j];
            a[i * f + j] = g / (1 + expf(-g)) * u;
        }
}

// With s = sigmoid(g):  du = da g s,  dg = da u s (1 + g (1 - s))
static void swiglu_backward(float* dh, const float* da, const float* h, int n, int f) {
#pragma omp parallel for
    for (int i = 0; i < n; i++)
        for (int j = 0; j < f; j++) {
            const float g = h[i * 2 * f + j], u = h[i * 2 * f + f + j], d = da[i * f + j], s = 1 / (1 + expf(-g));
            dh[i * 2 * f + j] = d * u * s * (1 + g * (1 - s));
            dh[i * 2 * f + f + j] = d * g * s;
        }
}

// An MLP: y (n, C) = W2 swiglu(W13 x), of hidden width f. The dense MLP, the shared expert, and each routed expert.
static void mlp_forward(float* y, float* h, const float* x, const float* w13, const float* w2, int n, int f) {
    static float a[MAX_N * DENSE];
    linear_forward(h, x, w13, n, C, 2 * f);
    swiglu_forward(a, h, n, f);
    linear_forward(y, a, w2, n, f, C);
}

// Backward computes the activation a again, which is cheaper than to keep it. gate (n): of the rows of a routed expert,
// whose output was multiplied by it; NULL for the other MLPs. The gradient of a gate is the dot product of dy with the
// output Y = W2 a. But Y is not kept, and it is not computed again, because
//   dgate = <dy, Y> = <dy, W2 a> = <W2^T dy, a> = <da', a>     with da' = dy W2, which backward needs in any case.
// Then da = gate da', and dW2 = dy^T (gate a). So the gate acts on the f numbers of a row, and dy stays as it is.
// Program: grouped/experts.h.
static void mlp_backward(float* dx, float* dw13, float* dw2, float* dgate, const float* dy, const float* x,
                         const float* h, const float* gate, const float* w13, const float* w2, int n, int f) {
    static float a[MAX_N * DENSE], gated[MAX_N * DENSE], da[MAX_N * DENSE], dh[MAX_N * 2 * DENSE];
    swiglu_forward(a, h, n, f);
    for (int i = 0; i < n * f; i++) gated[i] = gate ? gate[i / f] * a[i] : a[i];
    linear_backward(da, dw2, dy, gated, w2, n, f, C, 0);
    for (int r = 0; gate && r < n; r++) {
        dgate[r] = 0;
        for (int i = r * f; i < (r + 1) * f; i++) dgate[r] += da[i] * a[i];
        for (int i = r * f; i < (r + 1) * f; i++) da[i] *= gate[r];
    }
    swiglu_backward(dh, da, h, n, f);
    linear_backward(dx, dw13, dh, x, w13, n, C, 2 * f, 0);
}

// The K largest of E values, best first, ties to the lower index. taken[e], 0 before, is then 1 for each of them.
static void best_experts(int* best, int* taken, const float* value) {
    for (int k = 0; k < K; k++) {
        best[k] = -1;
        for (int e = 0; e < E; e++)
            if (!taken[e] && (best[k] < 0 || value[e] > value[best[k]])) best[k] = e;
        taken[best[k]] = 1;
    }
}

// Quantile balancing (J. Su, kexue.fm 11619; Kimi K3). A token's margin for an expert is the rise of the bias at which
// the token would select it: negative for a selected one. The histogram has 20 octaves on each side of 0, from 2^-19
// to 2, of 16 bins each; the middle bin has the rest. Program: moe/balance.h, .c.
enum { SIDE = 20 * 16, BINS = 2 * SIDE + 1 };
static int margins[L][E][BINS];

static int margin_bin(float margin) {
    int exponent;
    const float fraction = frexpf(fabsf(margin), &exponent);  // |margin| = fraction 2^exponent, fraction in [0.5, 1)
    const int bin = (exponent + 18) * 16 + (int)(32 * fraction - 16) + 1;
    const int side = fabsf(margin) < 0x1p-19f ? 0 : bin < SIDE ? bin : SIDE;
    return margin < 0 ? SIDE - side : SIDE + side;
}

// The lower edge of a bin. The next one's is its upper edge.
static double margin_edge(int bin) {
    const int step = bin <= SIDE ? SIDE - bin : bin - SIDE - 1;
    return (bin <= SIDE ? -1 : 1) * ldexp(1 + step % 16 / 16.0, step / 16 - 19);
}

// scores = sigmoid(x Wg^T). A token's experts are the K with the largest score + bias. Their gates are their scores,
// without the bias, divided by the sum. Program: moe/router.c, .cu; DeepSeek-V3, section 2.1.2.
static void router_forward(Saved* s, const float* wg, const float* bias, int histogram[E][BINS], int n) {
    linear_forward(s->scores, s->norm2, wg, n, C, E);
    for (int i = 0; i < n; i++) {
        float *score = s->scores + i * E, *gate = s->gate + i * K, biased[E], sum = 0, best_left = -INFINITY;
        int *expert = s->expert + i * K, taken[E] = {0};
        for (int e = 0; e < E; e++) score[e] = 1 / (1 + expf(-score[e]));
        for (int e = 0; e < E; e++) biased[e] = score[e] + bias[e];
        best_experts(expert, taken, biased);
        for (int k = 0; k < K; k++) sum += gate[k] = score[expert[k]];
        for (int k = 0; k < K; k++) gate[k] /= sum;
        for (int e = 0; e < E; e++) best_left = taken[e] ? best_left : fmaxf(best_left, biased[e]);
        for (int e = 0; e < E; e++) histogram[e][margin_bin(best_left - biased[e])]++;
    }
}

// The choice of experts has no gradient. A score has one through its token's gates: gate_k = s_k / sum gives
//   ds_k = (dgate_k - sum_j dgate_j gate_j) / sum
// and one through the auxiliary loss (DeepSeek-V3, equations 17 to 20), AUX times the mean over sequences of
//   sum_e f_e P_e,   f_e = E / (K T) count_e,   P_e = mean over tokens of s_e / sum_j s_j
// count_e is the number of tokens that have e among their K largest scores, without the bias. It is a constant here.
static void router_backward(float* dnorm2, float* dwg, const float* dgate, const Saved* s, const float* wg, int b,
                            int t) {
    static float dlogits[MAX_N * E];
    for (int sequence = 0; sequence < b; sequence++) {
        float f[E] = {0};
        for (int i = sequence * t; i < sequence * t + t; i++) {
            int best[K], taken[E] = {0};
            best_experts(best, taken, s->scores + i * E);
            for (int e = 0; e < E; e++) f[e] += taken[e] * (float)E / (K * t);
        }
        for (int i = sequence * t; i < sequence * t + t; i++) {
            const float *score = s->scores + i * E, *gate = s->gate + i * K, *dg = dgate + i * K;
            float ds[E], all = 0, selected = 0, dot_f = 0, dot_gate = 0;
            for (int e = 0; e < E; e++) all += score[e];
            for (int e = 0; e < E; e++) dot_f += f[e] * score[e] / all;
            for (int e = 0; e < E; e++) ds[e] = AUX / (float)(b * t) * (f[e] - dot_f) / all;
            for (int k = 0; k < K; k++) selected += score[s->expert[i * K + k]];
            for (int k = 0; k < K; k++) dot_gate += dg[k] * gate[k];
            for (int k = 0; k < K; k++) ds[s->expert[i * K + k]] += (dg[k] - dot_gate) / selected;
            for (int e = 0; e < E; e++) dlogits[i * E + e] = ds[e] * score[e] * (1 - score[e]);
        }
    }
    linear_backward(dnorm2, dwg, dlogits, s->norm2, wg, b * t, C, E, 1);
}

// Once a step: each bias rises by the K/E quantile of its margins. With the new bias, a share K/E of the step's tokens
// would have selected the expert. The biases then get the mean 0.
static void balance(float* bias, int histogram[E][BINS], int n) {
    double mean = 0;
    for (int e = 0; e < E; e++) {
        const double wanted = (double)n * K / E;
        int below = 0, bin = 0;
        while (below + histogram[e][bin] < wanted) below += histogram[e][bin++];
        const double low = margin_edge(bin), high = margin_edge(bin + 1);
        bias[e] += (float)(low + (wanted - below) / histogram[e][bin] * (high - low));
        mean += bias[e] / E;
    }
    for (int e = 0; e < E; e++) bias[e] -= (float)mean;
}

// Each choice of an expert becomes a row. The rows of expert e are start[e] .. start[e + 1] - 1, so an expert is an
// ordinary MLP on its rows. Choice i is that of token i / K. It is a counting sort. Program: grouped/permute.h.
static void sort_by_expert(Saved* s, int n) {
    int next[E];
    memset(s->start, 0, sizeof(s->start));
    for (int i = 0; i < n * K; i++) s->start[s->expert[i] + 1]++;
    for (int e = 0; e < E; e++) next[e] = s->start[e + 1] += s->start[e];
    for (int i = n * K - 1; i >= 0; i--) s->choice[s->row[i] = --next[s->expert[i]]] = i;
}

// y_n = shared(x_n) + sum_k gate_nk mlp_e(x_n), e = expert_nk. Program: moe/moe.c; the products of all experts in one
// launch: grouped/grouped_gemm.cu; experts on several GPUs: moe/dispatch.h.
static void moe_forward(float* y, const Block* w, Saved* s, int l, int n) {
    static float x[ROWS * C], out[ROWS * C];
    router_forward(s, w->router, selection_bias[l], margins[l], n);
    sort_by_expert(s, n);
    for (int r = 0; r < n * K; r++) memcpy(x + r * C, s->norm2 + s->choice[r] / K * C, C * sizeof(float));
    for (int e = 0; e < E; e++) {
        const int at = s->start[e], count = s->start[e + 1] - at;
        float* h = s->expert_h + at * 2 * F;
        mlp_forward(out + at * C, h, x + at * C, w->w13 + e * 2 * F * C, w->w2 + e * C * F, count, F);
    }
    mlp_forward(y, s->h, s->norm2, w->mlp13, w->mlp2, n, F);
    for (int i = 0; i < n * K; i++)
        for (int c = 0; c < C; c++) y[i / K * C + c] += s->gate[i] * out[s->row[i] * C + c];
}

static void moe_backward(float* dnorm2, const float* dy, const Block* w, Block* dw, const Saved* s, int b, int t) {
    static float x[ROWS * C], dout[ROWS * C], dx[ROWS * C], gate[ROWS], dgate_row[ROWS], dgate[ROWS];
    const int n = b * t;
    for (int r = 0; r < n * K; r++) {
        memcpy(x + r * C, s->norm2 + s->choice[r] / K * C, C * sizeof(float));
        memcpy(dout + r * C, dy + s->choice[r] / K * C, C * sizeof(float));
        gate[r] = s->gate[s->choice[r]];
    }
    for (int e = 0; e < E; e++) {
        const int at = s->start[e], count = s->start[e + 1] - at, w13 = e * 2 * F * C, w2 = e * C * F;
        mlp_backward(dx + at * C, dw->w13 + w13, dw->w2 + w2, dgate_row + at, dout + at * C, x + at * C,
                     s->expert_h + at * 2 * F, gate + at, w->w13 + w13, w->w2 + w2, count, F);
    }
    mlp_backward(dnorm2, dw->mlp13, dw->mlp2, NULL, dy, s->norm2, s->h, NULL, w->mlp13, w->mlp2, n, F);
    for (int i = 0; i < n * K; i++) {
        dgate[i] = dgate_row[s->row[i]];
        for (int c = 0; c < C; c++) dnorm2[i / K * C + c] += dx[s->row[i] * C + c];
    }
    router_backward(dnorm2, dw->router, dgate, s, w->router, b, t);
}

// Cross-entropy: loss = -ln softmax(z)_target. Returns the sum over the tokens, in nats. The gradient of their mean,
// (softmax(z) - onehot(target)) / N, overwrites the logits. Program: layers/loss.c, .cu.
static double cross_entropy(float* z, int n) {
    double loss = 0;
#pragma omp parallel for reduction(+ : loss)
    for (int i = 0; i < n; i++) {
        float *zi = z + i * VOCAB, top = zi[0], sum = 0;
        for (int v = 0; v < VOCAB; v++) top = fmaxf(top, zi[v]);
        for (int v = 0; v < VOCAB; v++) sum += zi[v] = expf(zi[v] - top);
        loss -= logf(zi[target[i]] / sum);
        for (int v = 0; v < VOCAB; v++) zi[v] /= sum * (float)n;
        zi[target[i]] -= 1 / (float)n;
    }
    return loss;
}

// From tokens (B, T) to logits (N, VOCAB). The embedding of a token is a row of a table. Program: model/passes.c,
// layers/embedding.c, model/block_forward.c.
static void forward(const int* token, int b, int t) {
    const int n = b * t;
    for (int i = 0; i < n; i++) memcpy(saved[0].x + i * C, weights.embedding + token[i] * C, C * sizeof(float));
    for (int l = 0; l < L; l++) {
        Block* w = &weights.block[l];
        Saved* s = &saved[l];
        float* next = l + 1 < L ? saved[l + 1].x : output;
        rmsnorm_forward(s->norm1, s->rstd1, s->x, C, w->norm1, n, C);
        mla_forward(s->x2, w, s, b, t);
        for (int i = 0; i < n * C; i++) s->x2[i] += s->x[i];
        rmsnorm_forward(s->norm2, s->rstd2, s->x2, C, w->norm2, n, C);
        if (l == 0) mlp_forward(next, s->h, s->norm2, w->mlp13, w->mlp2, n, DENSE);
        if (l > 0) moe_forward(next, w, s, l, n);
        for (int i = 0; i < n * C; i++) next[i] += s->x2[i];
    }
    rmsnorm_forward(final_norm, final_rstd, output, C, weights.final_norm, n, C);
    linear_forward(logits, final_norm, weights.lm_head, n, C, VOCAB);
}

// From the gradient of the logits to all gradients. dx is that of the residual stream: it passes each block unchanged,
// and each norm adds the gradient of its branch. Program: model/passes.c, model/block_backward.c.
static void backward(int b, int t) {
    static float dx[MAX_N * C], dnorm[MAX_N * C];
    const int n = b * t;
    memset(dx, 0, sizeof(dx));
    linear_backward(dnorm, gradients.lm_head, logits, final_norm, weights.lm_head, n, C, VOCAB, 0);
    rmsnorm_backward(dx, gradients.final_norm, dnorm, output, C, weights.final_norm, final_rstd, n, C);
    for (int l = L - 1; l >= 0; l--) {
        const Block* w = &weights.block[l];
        const Saved* s = &saved[l];
        Block* dw = &gradients.block[l];
        if (l > 0) moe_backward(dnorm, dx, w, dw, s, b, t);
        if (l == 0)
            mlp_backward(dnorm, dw->mlp13, dw->mlp2, NULL, dx, s->norm2, s->h, NULL, w->mlp13, w->mlp2, n, DENSE);
        rmsnorm_backward(dx, dw->norm2, dnorm, s->x2, C, w->norm2, s->rstd2, n, C);
        mla_backward(dnorm, dx, w, dw, s, b, t);
        rmsnorm_backward(dx, dw->norm1, dnorm, s->x, C, w->norm1, s->rstd1, n, C);
    }
    for (int i = 0; i < n * C; i++) gradients.embedding[input[i / C] * C + i % C] += dx[i];
}

// All parameters as a list of matrices. A norm is a matrix of one row. An expert's gate, up and down are one each.
enum { NORM, ADAMW, MUON };  // rules of the update. NORM: AdamW without weight decay
typedef struct Matrix {
    float *w, *gradient, *m1, *m2;  // m1: AdamW's first moment, or Muon's momentum; m2: AdamW's second moment
    int rows, columns, rule;
} Matrix;
static Matrix matrices[2 + L * (11 + 3 * E) + 1];
static int matrix_count;

// Puts a matrix on the list, and draws its weights: normal with this deviation, or ones if it is 0.
static void add_matrix(float* w, int rows, int columns, double deviation, int rule, uint32_t* stream) {
    const long at = (long)(w - (float*)&weights);  // its place, the same in weights, gradients and moments
    float *g = (float*)&gradients + at, *m1 = (float*)&moment1 + at, *m2 = (float*)&moment2 + at;
    matrices[matrix_count++] = (Matrix){w, g, m1, m2, rows, columns, rule};
#pragma omp parallel for
    for (int i = 0; i < rows * columns; i++)
        w[i] = deviation > 0 ? (float)(deviation * normal(*stream, (uint64_t)i)) : 1;
    ++*stream;
}

// Matrices that write into the residual stream start smaller, because 2 L of them add up. The streams of unit u begin
// at u 2^20: unit 0 is the embedding, block l is unit l + 1. Program: the table of model/params.c.
static void initialize(void) {
    const double std = 0.02, residual = 0.02 / sqrt(2.0 * L);
    uint32_t stream = 0;
    add_matrix(weights.embedding, VOCAB, C, std, ADAMW, &stream);
    for (int l = 0; l < L; l++) {
        Block* w = &weights.block[l];
        const int f = l == 0 ? DENSE : F;
        stream = (uint32_t)(l + 1) << 20;
        add_matrix(w->wq, H * QK, C, std, MUON, &stream);  // attention
        add_matrix(w->wkva, KVA, C, std, MUON, &stream);
        add_matrix(w->wkvb, H * KV, LATENT, std, MUON, &stream);
        add_matrix(w->wo, C, H * VD, residual, MUON, &stream);
        add_matrix(w->mlp13, f, C, std, MUON, &stream);  // the dense MLP, or the shared expert
        add_matrix(w->mlp13 + f * C, f, C, std, MUON, &stream);
        add_matrix(w->mlp2, C, f, residual, MUON, &stream);
        if (l > 0) add_matrix(w->router, E, C, std, ADAMW, &stream);
        add_matrix(w->norm1, 1, C, 0, NORM, &stream);
        add_matrix(w->kv_norm, 1, LATENT, 0, NORM, &stream);
        add_matrix(w->norm2, 1, C, 0, NORM, &stream);
        for (int e = 0; l > 0 && e < E; e++) {
            add_matrix(w->w13 + 2 * e * F * C, F, C, std, MUON, &stream);  // a routed expert
            add_matrix(w->w13 + (2 * e + 1) * F * C, F, C, std, MUON, &stream);
            add_matrix(w->w2 + e * C * F, C, F, residual, MUON, &stream);
        }
    }
    stream = (uint32_t)(L + 1) << 20;
    add_matrix(weights.lm_head, VOCAB, C, std, ADAMW, &stream);
    add_matrix(weights.final_norm, 1, C, 0, NORM, &stream);
}

// AdamW. g is the gradient times `clip`. Program: layers/adamw.h, .c, .cu.
static void adamw(Matrix m, float clip, float lr, int step) {
    const float decay = m.rule == NORM ? 0 : WEIGHT_DECAY;
    const float fix1 = (float)(1 / (1 - pow(BETA1, step))), fix2 = (float)(1 / (1 - pow(BETA2, step)));
    for (int i = 0; i < m.rows * m.columns; i++) {
        const float g = clip * m.gradient[i];
        m.m1[i] = BETA1 * m.m1[i] + (1 - BETA1) * g;
        m.m2[i] = BETA2 * m.m2[i] + (1 - BETA2) * g * g;
        m.w[i] -= lr * (m.m1[i] * fix1 / (sqrtf(m.m2[i] * fix2) + 1e-8f) + decay * m.w[i]);
    }
}

// Muon (K. Jordan 2024; Moonlight, arXiv 2502.16982): the momentum of a matrix is made orthogonal, so that an update
// moves all directions equally far. Five Newton-Schulz steps bring the singular values of X close to 1:
//   A = X X^T,   X = a X + (b A + c A A) X
// X has rows <= columns here: a tall matrix is read and written as its transpose. Program: layers/muon.h, .c, .cu.
static void muon(Matrix m, float clip, float lr) {
    const int tall = m.rows > m.columns, rows = tall ? m.columns : m.rows, columns = tall ? m.rows : m.columns;
    float x[DENSE * C], next[DENSE * C], A[C * C], B[C * C];
    double squares = 0;
    for (int i = 0; i < rows * columns; i++) {  // x = u, with Nesterov momentum: m = momentum m + g, u = g + momentum m
        const float g = clip * m.gradient[i];
        m.m1[i] = MOMENTUM * m.m1[i] + g;
        const float u = g + MOMENTUM * m.m1[i];
        squares += (double)u * u;
        x[tall ? i % m.columns * m.rows + i / m.columns : i] = u;
    }
    const float per_norm = (float)(1 / (sqrt(squares) + 1e-7));
    for (int i = 0; i < rows * columns; i++) x[i] *= per_norm;
    for (int iteration = 0; iteration < 5; iteration++) {
        matmul(A, rows, x, columns, 1, x, 1, columns, rows, rows, columns, 0);
        matmul(B, rows, A, rows, 1, A, rows, 1, rows, rows, rows, 0);
        for (int i = 0; i < rows * rows; i++) B[i] = -4.7750f * A[i] + 2.0315f * B[i];
        matmul(next, columns, B, rows, 1, x, columns, 1, rows, columns, rows, 0);
        for (int i = 0; i < rows * columns; i++) x[i] = 3.4445f * x[i] + next[i];
    }
    const float size = (float)(0.2 * sqrt(columns));  // that of AdamW's updates
    for (int i = 0; i < rows * columns; i++)
        m.w[i] -= lr * (size * x[tall ? i % m.columns * m.rows + i / m.columns : i] + WEIGHT_DECAY * m.w[i]);
}

// One update; returns the norm of the gradient. A norm above CLIP is scaled down to it. The learning rates rise in a
// line to their peaks, then fall along half a cosine. Program: model/update.c; the schedule: model/config.c.
static double update(int step) {
    double squares = 0;
#pragma omp parallel for reduction(+ : squares)
    for (size_t i = 0; i < sizeof(gradients) / sizeof(float); i++)
        squares += (double)((float*)&gradients)[i] * ((float*)&gradients)[i];
    const double norm = sqrt(squares), left = (double)(STEPS - step) / (STEPS - WARMUP);
    const double fall = FINAL_LR + (1 - FINAL_LR) * (0.5 - 0.5 * cos(acos(-1) * left));
    const double part = step <= WARMUP ? (double)step / WARMUP : fall;
    const float clip = (float)(norm > CLIP ? CLIP / norm : 1);
#pragma omp parallel for schedule(dynamic)
    for (int k = 0; k < matrix_count; k++) {
        if (matrices[k].rule == MUON) muon(matrices[k], clip, (float)(MUON_LR * part));
        if (matrices[k].rule != MUON) adamw(matrices[k], clip, (float)(LR * part), step);
    }
    for (int l = 1; l < L; l++) balance(selection_bias[l], margins[l], MAX_N);
    return norm;
}

// Mean loss over the windows of a file, in whole batches. Program: pretrained/evaluate.c.
static double validate(const uint16_t* tokens, int windows) {
    int first = 0;
    double loss = 0;
    for (; first + BATCH <= windows; first += BATCH) {
        int window[BATCH];
        for (int i = 0; i < BATCH; i++) window[i] = first + i;
        read_batch(tokens, window);
        forward(input, BATCH, SEQ);
        loss += cross_entropy(logits, MAX_N);
    }
    return loss / ((double)first * SEQ);
}

// Token after token, from an end of text on. Each computes its whole context again. Program: pretrained/sample.c.
static void sample(void) {
    int token[SAMPLE + 1] = {END_OF_TEXT};
    for (int n = 1; n <= SAMPLE; n++) {
        const int context = n < SEQ ? n : SEQ;
        forward(token + n - context, 1, context);
        const float* z = logits + (context - 1) * VOCAB;
        double weight[VOCAB], sum = 0;
        for (int v = 0; v < VOCAB; v++) sum += weight[v] = exp((z[v] - z[END_OF_TEXT]) / TEMPERATURE);
        double left = uniform(UINT32_MAX, (uint64_t)n) * sum;
        int v = 0;
        while (v < VOCAB - 1 && (left -= weight[v]) > 0) v++;
        if (v == END_OF_TEXT) break;
        putchar(token[n] = v);
    }
    putchar('\n');
}

// Program: train in train_moe.cu.
int main(int argc, char** argv) {
    static uint16_t *train, *val;
    int train_count, val_count;
    if (argc != 3) return fprintf(stderr, "usage: %s TRAIN.bin VAL.bin\n", argv[0]), 1;
    train = read_tokens(argv[1], &train_count);
    val = read_tokens(argv[2], &val_count);
    const int windows = (train_count - 1) / SEQ;
    initialize();
    for (int step = 1; step <= STEPS; step++) {
        const double began = omp_get_wtime();
        int window[BATCH];
        for (int i = 0, w = (step - 1) * BATCH; i < BATCH; i++, w++)  // w counts windows over all epochs
            window[i] = permute(w / windows, w % windows, windows);
        read_batch(train, window);
        memset(margins, 0, sizeof(margins));  // of this step
        forward(input, BATCH, SEQ);
        double fullest = 0;  // tokens of the expert that has the most, of all blocks
        for (int i = E; i < L * E; i++)
            fullest = fmax(fullest, saved[i / E].start[i % E + 1] - saved[i / E].start[i % E]);
        const double loss = cross_entropy(logits, MAX_N) / MAX_N;
        memset(&gradients, 0, sizeof(gradients));
        backward(BATCH, SEQ);
        const double norm = update(step);
        printf("step %d/%d  loss %.6f  norm %.4f  load %.2f  %.0f ms", step, STEPS, loss, norm,
               fullest * E / (MAX_N * K), 1000 * (omp_get_wtime() - began));
        if (step % VALIDATE_EVERY == 0 || step == STEPS)
            printf("  validation %.4f", validate(val, (val_count - 1) / SEQ));
        printf("\n");
        fflush(stdout);
    }
    sample();
    return 0;
}
