// MLA's attention core. The oracle materialises the causal softmax, row by row, in float64.
#include "layers/attention.h"
#include "tests/oracle.h"

typedef struct {
    AttnShape shape;
    int64_t tokens, nq, nkv, nr, nout, nlse;  // tokens, elements of q, kv, k_rope (packed), out, lse
    real *q, *kv, *k_rope, *dout;             // k_rope with its stride
    real *out, *lse, *max_logit, *dq, *dkv, *dk_rope;
    double *qd, *kvd, *rd, *doutd;  // rd: packed
} Attn;

static void run_attention(void* arg) {
    Attn* a = arg;
    Ctx* ctx = ctx_create(attention_workspace(a->shape));
    a->out = poisoned(a->nout), a->lse = poisoned(a->nlse);
    a->max_logit = filled(1, -INFINITY);
    attention_forward(a->out, a->lse, a->max_logit, a->q, a->kv, a->k_rope, a->shape, ctx);
    a->dq = poisoned(a->nq), a->dkv = poisoned(a->nkv), a->dk_rope = poisoned(a->tokens * a->shape.k_rope_stride);
    attention_backward(a->dq, a->dkv, a->dk_rope, a->dout, a->out, a->lse, a->q, a->kv, a->k_rope, a->shape, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

// Inputs with queries and keys `spread_by` times a standard normal.
static Attn make_attention(AttnShape s, double spread_by) {
    Attn a = {.shape = s, .tokens = s.B * s.T};
    a.nq = a.tokens * s.H * (s.nope + s.rope), a.nkv = a.tokens * s.H * (s.nope + s.v), a.nr = a.tokens * s.rope;
    a.nout = a.tokens * s.H * s.v, a.nlse = a.tokens * s.H;
    a.q = tensor(a.nq, 1), a.kv = tensor(a.nkv, 2), a.dout = tensor(a.nout, 4);
    real* k_rope = tensor(a.nr, 3);
    for (int64_t i = 0; i < a.nq; i++) a.q[i] *= (real)spread_by;
    for (int64_t i = 0; i < a.nkv; i++) a.kv[i] *= (real)spread_by;
    for (int64_t i = 0; i < a.nr; i++) k_rope[i] *= (real)spread_by;
    a.k_rope = spread(k_rope, a.tokens, s.rope, s.k_rope_stride);
    a.qd = doubles(a.q, a.nq), a.kvd = doubles(a.kv, a.nkv), a.rd = doubles(k_rope, a.nr),
    a.doutd = doubles(a.dout, a.nout);
    return a;
}

// Writes out, lse and the largest logit, where they are not NULL. Returns <dout, out>.
static double oracle_attention(double* out, double* lse, double* max_logit, const Attn* a) {
    AttnShape s = a->shape;
    double *p = host_alloc(s.T * sizeof(double)), objective = 0;
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t h = 0; h < s.H; h++)
            for (int64_t t = 0; t < s.T; t++) {
                const double* q = a->qd + ((b * s.T + t) * s.H + h) * (s.nope + s.rope);
                // Scores of row t, their maximum, and the softmax.
                double top = -INFINITY, sum = 0;
                for (int64_t j = 0; j <= t; j++) {
                    const double* k = a->kvd + ((b * s.T + j) * s.H + h) * (s.nope + s.v);
                    p[j] =
                        (double)s.scale * (dot(q, k, s.nope) + dot(q + s.nope, a->rd + (b * s.T + j) * s.rope, s.rope));
                    top = fmax(top, p[j]);
                }
                for (int64_t j = 0; j <= t; j++) sum += p[j] = exp(p[j] - top);
                if (lse) lse[(b * s.H + h) * s.T + t] = top + log(sum);
                if (max_logit) *max_logit = fmax(*max_logit, top);
                // out of row t.
                for (int64_t d = 0; d < s.v; d++) {
                    double value = 0;
                    for (int64_t j = 0; j <= t; j++)
                        value += p[j] / sum * a->kvd[((b * s.T + j) * s.H + h) * (s.nope + s.v) + s.nope + d];
                    int64_t at = ((b * s.T + t) * s.H + h) * s.v + d;
                    if (out) out[at] = value;
                    objective += value * a->doutd[at];
                }
            }
    free(p);
    return objective;
}

static double attention_objective(void* a) { return oracle_attention(NULL, NULL, NULL, a); }

static void check_attention(AttnShape s, double spread_by, double tolerance, double gradient_tolerance) {
    Attn a = make_attention(s, spread_by);
    check_threads(run_attention, &a);
    double *out = zeros(a.nout), *lse = zeros(a.nlse), max_logit = -INFINITY;
    oracle_attention(out, lse, &max_logit, &a);
    CHECK(fabs((double)a.max_logit[0] - max_logit) <= TOL(1e-6, 1e-14) * (1 + fabs(max_logit)),
          "largest logit %g, not %g", (double)a.max_logit[0], max_logit);
    CHECK_CLOSE(a.out, out, a.nout, tolerance);
    CHECK_CLOSE(a.lse, lse, a.nlse, TOL(1e-6, 1e-14));  // exp's argument as below, in the mean over rows; then one log
    check_gaps(a.dk_rope, a.tokens, s.rope, s.k_rope_stride);
    real* dk_rope = packed(a.dk_rope, a.tokens, s.rope, s.k_rope_stride);
    if (gradient_tolerance > 0 && s.T > 1) {
        CHECK_GRADIENT(attention_objective, &a, a.qd, a.dq, NULL, a.nq, gradient_tolerance);
        CHECK_GRADIENT(attention_objective, &a, a.kvd, a.dkv, NULL, a.nkv, gradient_tolerance);
        CHECK_GRADIENT(attention_objective, &a, a.rd, dk_rope, NULL, a.nr, gradient_tolerance);
    }
    for (int64_t i = 0; i < a.nq; i++) CHECK(isfinite(a.dq[i]), "dq[%lld]", (long long)i);
    for (int64_t i = 0; i < a.nkv; i++) CHECK(isfinite(a.dkv[i]), "dkv[%lld]", (long long)i);
    for (int64_t i = 0; i < a.nr; i++) CHECK(isfinite(dk_rope[i]), "dk_rope[%lld]", (long long)i);
    release_all();
}

// T around the tile sizes 64 and 128; one token; several sequences and heads; v smaller and larger than nope; different
// strides of k_rope.
static void test_attention_shapes(void) {
    static const AttnShape shapes[] = {
        {2, 5, 2, 3, 2, 4, 2, 0.45f},   {1, 2, 1, 1, 2, 1, 3, 1.0f},    {3, 3, 5, 4, 4, 2, 9, 0.3f},
        {2, 65, 3, 8, 4, 6, 20, 0.28f}, {1, 64, 2, 5, 2, 7, 2, 0.37f},  {2, 63, 1, 6, 6, 6, 7, 0.3f},
        {2, 130, 2, 7, 2, 5, 11, 0.3f}, {1, 129, 4, 4, 2, 3, 2, 0.41f}, {1, 193, 1, 16, 8, 12, 8, 0.2f},
    };
    // Logits of size 4 from 24 products: 4 sqrt(24) u = 1e-6 in the exponents, then sums of T terms, sqrt(193) u =
    // 8e-7. The backward adds a difference (dout v - delta) and another sum: three times that.
    for (int i = 0; i < COUNT(shapes); i++) check_attention(shapes[i], 1, TOL(2e-6, 1e-14), 6e-6);
}

// A token alone attends only to itself: out = v, whatever the logits. No gradient reaches q and k.
static void test_attention_one_token(void) {
    AttnShape s = {.B = 3, .T = 1, .H = 2, .nope = 4, .rope = 2, .v = 3, .k_rope_stride = 5, .scale = 0.4f};
    Attn a = make_attention(s, 1);
    check_threads(run_attention, &a);
    for (int64_t n = 0; n < a.tokens * s.H; n++)
        for (int64_t d = 0; d < s.v; d++) {
            CHECK(a.out[n * s.v + d] == a.kv[n * 7 + 4 + d], "out of (token, head) %lld", (long long)n);
            CHECK(a.dkv[n * 7 + 4 + d] == a.dout[n * s.v + d], "dv of (token, head) %lld", (long long)n);
        }
    // dS = dout v - delta, the same sum twice: 0 but for rounding.
    for (int64_t i = 0; i < a.nq; i++) CHECK(fabs((double)a.dq[i]) <= TOL(1e-5, 1e-14), "dq %g", (double)a.dq[i]);
    double* lse = zeros(a.nlse);
    oracle_attention(NULL, lse, NULL, &a);
    CHECK_CLOSE(a.lse, lse, a.nlse, TOL(1e-6, 1e-14));
    release_all();
}

static void test_attention_large_logits(void) {
    AttnShape s = {.B = 1, .T = 130, .H = 2, .nope = 8, .rope = 4, .v = 6, .k_rope_stride = 4, .scale = 0.29f};
    // Queries and keys times 30: logits of up to 3000, rounded to 2e-4. This matters only in rows without a clear
    // winner, with two logits less than 5 apart. That is one row in a hundred, so the norm is 2e-4 / sqrt(100) at most.
    check_attention(s, 30, TOL(2e-5, 1e-13), 0);
    // Times 4, with gradients: logits of up to 60, rounded to 60 u = 4e-6. Fewer terms matter, so their sums have
    // smaller errors.
    check_attention(s, 4, TOL(4e-6, 1e-14), 2e-5);
}

// A change of a token changes no bit of the outputs before it or of another sequence. The gradients of keys and values
// after it do not depend on earlier queries.
static void test_attention_causal(void) {
    static const int64_t lengths[] = {3, 65, 130, 200};
    for (int i = 0; i < COUNT(lengths); i++) {
        int64_t T = lengths[i];
        AttnShape s = {.B = 2, .T = T, .H = 2, .nope = 5, .rope = 2, .v = 4, .k_rope_stride = 3, .scale = 0.4f};
        int64_t q = s.H * 7, kv = s.H * 9, out = s.H * s.v, cuts[] = {1, T / 2, 64 < T ? 64 : T - 1, T - 1};
        Attn a = make_attention(s, 1);
        run_attention(&a);
        for (int k = 0; k < COUNT(cuts); k++) {
            int64_t cut = cuts[k];
            Attn b = a;
            // Changes the tokens from `cut` on of the first sequence.
            b.q = copied(a.q, a.nq), b.kv = copied(a.kv, a.nkv), b.dout = copied(a.dout, a.nout);
            b.k_rope = copied(a.k_rope, a.tokens * 3);
            for (int64_t j = cut * q; j < T * q; j++) b.q[j] = -3 * b.q[j] + 1;
            for (int64_t j = cut * kv; j < T * kv; j++) b.kv[j] = -2 * b.kv[j] + 7;
            for (int64_t j = cut * 3; j < T * 3; j++) b.k_rope[j] = -5 * b.k_rope[j];
            run_attention(&b);
            CHECK_BITS(a.out, b.out, cut * out * sizeof(real));
            for (int64_t h = 0; h < s.H; h++) CHECK_BITS(a.lse + h * T, b.lse + h * T, cut * sizeof(real));
            CHECK_BITS(a.dq, b.dq, cut * q * sizeof(real));
            CHECK(memcmp(a.out + cut * out, b.out + cut * out, out * sizeof(real)), "the change changed nothing");
            // The second sequence.
            CHECK_BITS(a.out + T * out, b.out + T * out, T * out * sizeof(real));
            CHECK_BITS(a.dq + T * q, b.dq + T * q, T * q * sizeof(real));
            CHECK_BITS(a.dkv + T * kv, b.dkv + T * kv, T * kv * sizeof(real));
            CHECK_BITS(a.dk_rope + T * 3, b.dk_rope + T * 3, T * 3 * sizeof(real));
            // Changes the queries before `cut` and their dout.
            Attn c = a;
            c.q = copied(a.q, a.nq), c.dout = copied(a.dout, a.nout);
            for (int64_t j = 0; j < cut * q; j++) c.q[j] = -3 * c.q[j] + 1;
            for (int64_t j = 0; j < cut * out; j++) c.dout[j] = -c.dout[j];
            run_attention(&c);
            CHECK_BITS(a.dkv + cut * kv, c.dkv + cut * kv, (T - cut) * kv * sizeof(real));
            CHECK_BITS(a.dk_rope + cut * 3, c.dk_rope + cut * 3, (T - cut) * 3 * sizeof(real));
            CHECK(memcmp(a.dkv, c.dkv, kv * sizeof(real)), "the change changed nothing");
        }
        release_all();
    }
}

int main(void) {
    RUN(test_attention_shapes);
    RUN(test_attention_one_token);
    RUN(test_attention_large_logits);
    RUN(test_attention_causal);
    return test_summary();
}
