// Attention on the GPU against the reference in double, forward and backward, for the three head sizes. All kernels
// that the GPU can run are tested: Hopper's (layers/attention_forward.cuh and attention_backward.cuh) and those for
// every GPU (layers/attention_portable.cu and attention_portable_backward.cuh).
//
// Tolerances, of ||out - ref|| / ||ref||. bf16 rounds by at most u = 2^-9 = 1.95e-3 of each element, typically by u /
// 1.7.
//   out: P is rounded before it is multiplied by v, and out itself: 2 u = 3.9e-3. lse: float sums of 192 products,
//   without rounding to bf16: 1e-5 of logits around 1.
//   dv: P and dv: 2 u. dq: dS and dq: 2 u. dk and dk_rope: P, dS, and the result: 3 u = 5.9e-3.
// Backward gets the kernel's own out and lse on both sides. If a row sees only one key, dS is a difference of equal
// sums, 0 but for their float rounding. So errors are compared with ||ref|| + 1e-4 sqrt(n).
#include <sys/wait.h>
#include <unistd.h>

#include "layers/attention.h"
#include "tests/cuda.cuh"

static const double U = 0x1p-9;

struct Case {
    AttnShape shape;
    X q, kv, k_rope, dout, out, dq, dkv, dk_rope;
    R lse, max_logit;

    Case(AttnShape s, double times = 1)
        : shape(s),
          q(s.B * s.T * s.H * (s.nope + s.rope), 1, times),
          kv(s.B * s.T * s.H * (s.nope + s.v), 2, times),
          k_rope(s.B * s.T * s.k_rope_stride, 3, times),
          dout(s.B * s.T * s.H * s.v, 4),
          out(s.B * s.T * s.H * s.v),
          dq(q.n),
          dkv(kv.n),
          dk_rope(k_rope.n),
          lse(s.B * s.T * s.H),
          max_logit(1) {}
    // k_rope is at the end of its rows, as in the model, where it follows the columns of kv_lora.
    int64_t rope_at() const { return shape.k_rope_stride - shape.rope; }
    void forward() {
        attention_forward(out.dev, lse.dev, max_logit.dev, q.dev, kv.dev, k_rope.dev + rope_at(), shape, ctx);
    }
    void backward() {
        attention_backward(dq.dev, dkv.dev, dk_rope.dev + rope_at(), dout.dev, out.dev, lse.dev, q.dev, kv.dev,
                           k_rope.dev + rope_at(), shape, ctx);
    }
    floatX* rope_ref(X& t) { return (floatX*)(t.host.data() + rope_at()); }
};

static AttnShape shape_of(int64_t rope, int64_t B, int64_t T, int64_t H, int64_t stride) {
    return {B, T, H, 2 * rope, rope, 2 * rope, stride, 1 / sqrtf(3.0f * (float)rope)};
}

static double error_of(const X& t) {
    auto got = t.got();
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < t.n; i++) {
        double d = got[(size_t)i] - t.host[(size_t)i];
        if (!isfinite(d)) return INFINITY;
        diff += d * d, norm += t.host[(size_t)i] * t.host[(size_t)i];
    }
    return sqrt(diff) / (sqrt(norm) + 1e-4 * sqrt((double)t.n));
}

#define CHECK_NEAR(tensor, tolerance)                                                                                  \
    do {                                                                                                               \
        double error_ = error_of(tensor);                                                                              \
        if (getenv("TEST_ERRORS")) printf("    %s: %.3g of %.3g\n", #tensor, error_, (double)(tolerance));             \
        CHECK(error_ <= (tolerance), "%s is off by %g (rope %lld, B %lld, T %lld, H %lld)", #tensor, error_,           \
              (long long)s.rope, (long long)s.B, (long long)s.T, (long long)s.H);                                      \
    } while (0)

static void check_case(AttnShape s, double times, double tolerance, double gradient_tolerance) {
    Case c(s, times);
    c.max_logit.host[0] = -INFINITY;
    c.max_logit.send();
    c.forward();
    REFERENCE(attention_forward)
    (c.out.ref(), (real*)c.lse.ref(), (real*)c.max_logit.ref(), c.q.ref(), c.kv.ref(), c.rope_ref(c.k_rope), s,
     reference_ctx);
    CHECK_NEAR(c.out, tolerance);
    CHECK_CLOSE(c.lse, 1e-5);
    CHECK_CLOSE(c.max_logit, 1e-5);  // of one row, as lse
    c.out.host = c.out.got();
    c.lse.host = c.lse.got();
    c.backward();
    REFERENCE(attention_backward)
    (c.dq.ref(), c.dkv.ref(), c.rope_ref(c.dk_rope), c.dout.ref(), c.out.ref(), (real*)c.lse.ref(), c.q.ref(),
     c.kv.ref(), c.rope_ref(c.k_rope), s, reference_ctx);
    CHECK_NEAR(c.dq, gradient_tolerance);
    CHECK_NEAR(c.dkv, gradient_tolerance);
    // Nothing is written between the rows of dk_rope: the poison is still there. Both sides are compared without it.
    auto got = c.dk_rope.got();
    int64_t touched = 0;
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < c.dk_rope.n; i++) {
        if (i % s.k_rope_stride < c.rope_at()) {
            touched += !isnan(got[(size_t)i]);
        } else {
            double r = c.dk_rope.host[(size_t)i], d = got[(size_t)i] - r;
            diff += d * d, norm += r * r;
        }
    }
    CHECK(touched == 0, "%lld elements between the rows of dk_rope were written", (long long)touched);
    double error = sqrt(diff) / (sqrt(norm) + 1e-4 * sqrt((double)(s.B * s.T * s.rope)));
    if (getenv("TEST_ERRORS")) printf("    dk_rope: %.3g of %.3g\n", error, gradient_tolerance);
    CHECK(error <= gradient_tolerance, "dk_rope is off by %g (rope %lld, B %lld, T %lld, H %lld)", error,
          (long long)s.rope, (long long)s.B, (long long)s.T, (long long)s.H);
}

static void sizes(int64_t rope, int64_t stride) {
    static const int64_t lengths[] = {1, 2, 63, 64, 65, 127, 128, 129, 200, 515};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++)
        for (int64_t H = 1; H <= 3; H += 2)
            check_case(shape_of(rope, 1 + (int64_t)i % 3, lengths[i], H, i % 4 == 3 ? rope : stride), 1, 2 * U, 3 * U);
}

static void test_heads_128_64_128(void) { sizes(64, 576); }
static void test_heads_64_32_64(void) { sizes(32, 288); }
static void test_heads_32_16_32(void) { sizes(16, 80); }

static void test_small(void) {
    for (int64_t rope = 16; rope <= 64; rope *= 2) check_case(shape_of(rope, 1, 200, 2, 2 * rope), 1, 2 * U, 3 * U);
}

// More tiles than SMs: every block of Hopper's kernels takes work from the counter.
static void test_many_blocks(void) { check_case(shape_of(64, 2, 1100, 12, 72), 1, 2 * U, 3 * U); }

// More sequences than a grid has rows.
static void test_many_sequences(void) { check_case(shape_of(16, 65536 + 9, 2, 1, 24), 1, 2 * U, 3 * U); }

// Queries and keys times 20: logits around 400 and up to 2000. Their float sums are off by a few 2^-24 * 2000 = 1e-4,
// and so is P; bf16 adds its rounding. dS of the few rows without a clear winner carries the gradients, with twice the
// error.
static void test_large_logits(void) {
    for (int64_t rope = 16; rope <= 64; rope *= 2) check_case(shape_of(rope, 2, 200, 3, 2 * rope), 20, 3 * U, 6 * U);
}

// All queries of a head are equal, and so are its keys. Row t sees t + 1 equal scores s, lse = s + ln(t + 1), and out
// is the mean of the values so far. The maximum never changes, and each of 128 tiles adds to the error of a sum, so the
// error grows with t.
// The error of lse. The tensor cores cut sums off behind 24 bits, in each of 12 steps half of s on average: 3.6e-5 of
// 50 at most. Each tile loses 2^-24 of a sum of ones: 8e-6. exp2 and lse itself: 1e-5. Together 5.4e-5; twice that is
// allowed. (Guards against a factor of old sums that is off by up to half of the last bit of s log2(e). Where s is
// large it shows 3e-4 at most; 1.5e-4 was seen, for one of the heads here.)
static void test_equal_scores(void) {
    enum { T = 16384, H = 4 };
    for (int64_t rope = 16; rope <= 64; rope *= 2) {
        AttnShape s = shape_of(rope, 1, T, H, rope);
        Case c(s);
        const int64_t D = 3 * rope, V = 2 * rope;
        double score[H] = {};
        for (int64_t h = 0; h < H; h++) {
            for (int64_t i = 0; i < D; i++) {  // q = a k, so that the score is a scale |k|^2
                const double k = i < V ? c.kv.host[(size_t)(h * 2 * V + i)] : c.k_rope.host[(size_t)(i - V)];
                for (int64_t t = 0; t < T; t++) {
                    c.q.host[(size_t)((t * H + h) * D + i)] = (0.8 + 0.9 * (double)h) * k;
                    if (i < V) c.kv.host[(size_t)((t * H + h) * 2 * V + i)] = k;
                    if (i >= V) c.k_rope.host[(size_t)(t * rope + i - V)] = k;
                }
            }
        }
        c.q.send(), c.kv.send(), c.k_rope.send();
        c.forward();
        auto lse = c.lse.got(), out = c.out.got();
        for (int64_t h = 0; h < H; h++) {
            for (int64_t i = 0; i < D; i++)  // of q and k as rounded to bf16
                score[h] += (double)s.scale * c.q.host[(size_t)(h * D + i)] *
                            (i < V ? c.kv.host[(size_t)(h * 2 * V + i)] : c.k_rope.host[(size_t)(i - V)]);
            double worst = 0, diff = 0, norm = 0;
            std::vector<double> sum((size_t)V);
            for (int64_t t = 0; t < T; t++) {
                worst = fmax(worst, fabs(lse[(size_t)(h * T + t)] - score[h] - log((double)(t + 1))));
                for (int64_t i = 0; i < V; i++) {
                    sum[(size_t)i] += c.kv.host[(size_t)((t * H + h) * 2 * V + V + i)];
                    const double mean = sum[(size_t)i] / (double)(t + 1);
                    diff += pow(out[(size_t)((t * H + h) * V + i)] - mean, 2), norm += mean * mean;
                }
            }
            CHECK(worst < 1e-4, "lse is off by %g at scores of %g (rope %lld)", worst, score[h], (long long)rope);
            CHECK(sqrt(diff / norm) < 2 * U, "out is off by %g at scores of %g (rope %lld)", sqrt(diff / norm),
                  score[h], (long long)rope);
        }
    }
}

static void test_repeats(void) {
    for (int64_t rope = 16; rope <= 64; rope *= 2) {
        Case c(shape_of(rope, 2, 700, 10, 2 * rope));
        CHECK_REPEATS(c.out, c.forward());
        CHECK_REPEATS(c.lse, c.forward());
        CHECK_REPEATS(c.dq, c.backward());
        CHECK_REPEATS(c.dkv, c.backward());
        CHECK_REPEATS(c.dk_rope, c.backward());
    }
}

static bool same(const std::vector<double>& a, const std::vector<double>& b, int64_t from, int64_t to) {
    return memcmp(&a[(size_t)from], &b[(size_t)from], (size_t)(to - from) * sizeof(double)) == 0;
}

// Other tokens from `cut` on in the first sequence: no bit changes before `cut` or in the second sequence.
static void test_causality(void) {
    static const int64_t cuts[] = {1, 64, 100, 128, 299};
    for (int64_t rope = 16; rope <= 64; rope *= 2)
        for (int64_t cut : cuts) {
            AttnShape s = shape_of(rope, 2, 300, 2, rope);
            Case c(s);
            c.forward(), c.backward();
            auto out = c.out.got(), lse = c.lse.got(), dq = c.dq.got(), dkv = c.dkv.got();
            int64_t row = s.H * rope;
            for (int64_t i = cut * 3 * row; i < s.T * 3 * row; i++) c.q.host[(size_t)i] *= -3;
            for (int64_t i = cut * 4 * row; i < s.T * 4 * row; i++) c.kv.host[(size_t)i] *= -2;
            for (int64_t i = cut * rope; i < s.T * rope; i++) c.k_rope.host[(size_t)i] *= 5;
            for (int64_t i = cut * 2 * row; i < s.T * 2 * row; i++) c.dout.host[(size_t)i] *= -1;
            c.q.send(), c.kv.send(), c.k_rope.send(), c.dout.send();
            c.forward(), c.backward();
            auto out2 = c.out.got(), lse2 = c.lse.got(), dq2 = c.dq.got(), dkv2 = c.dkv.got();
            CHECK(same(out, out2, 0, cut * 2 * row), "out before token %lld", (long long)cut);
            CHECK(!same(out, out2, cut * 2 * row, s.T * 2 * row), "the change changed nothing");
            for (int64_t h = 0; h < s.H; h++)
                CHECK(same(lse, lse2, h * s.T, h * s.T + cut), "lse before token %lld", (long long)cut);
            CHECK(same(dq, dq2, 0, cut * 3 * row), "dq before token %lld", (long long)cut);
            CHECK(same(out, out2, s.T * 2 * row, 2 * s.T * 2 * row), "out of the other sequence");
            CHECK(same(dq, dq2, s.T * 3 * row, 2 * s.T * 3 * row), "dq of the other sequence");
            CHECK(same(dkv, dkv2, s.T * 4 * row, 2 * s.T * 4 * row), "dkv of the other sequence");
        }
}

// Head sizes without a kernel end the run. The settings refuse them earlier.
static void test_unknown_heads(void) {
    int ends[2];
    CHECK(pipe(ends) == 0, "pipe");
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        attention_forward(NULL, NULL, NULL, NULL, NULL, NULL, {1, 8, 1, 96, 32, 64, 32, 1}, NULL);
        _exit(0);
    }
    close(ends[1]);
    char text[512] = {};
    size_t length = 0;
    for (ssize_t n; (n = read(ends[0], text + length, sizeof(text) - 1 - length)) > 0;) length += (size_t)n;
    int status = 0;
    waitpid(child, &status, 0);
    close(ends[0]);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILED, "status %d", status);
    CHECK(strstr(text, "internal check failed"), "%s", text);
}

int main(int argc, char** argv) {
    RUN(test_unknown_heads);  // forks: before there is a CUDA context
    open_contexts((size_t)128 << 20);
    CHECK(attention_workspace(shape_of(64, 2, 1100, 12, 72)) < (size_t)128 << 20, "the workspace of these tests");
    const bool small = argc > 1 && !strcmp(argv[1], "small");  // under compute-sanitizer
    for (int kind = ctx->portable; kind < 2; kind++) {
        ctx->portable = kind;
        printf("%s kernels:\n", kind ? "portable" : "Hopper's");
        RUN(test_small);
        if (small) continue;
        RUN(test_heads_128_64_128);
        RUN(test_heads_64_32_64);
        RUN(test_heads_32_16_32);
        RUN(test_many_blocks);
        RUN(test_many_sequences);
        RUN(test_large_logits);
        RUN(test_equal_scores);
        RUN(test_repeats);
        RUN(test_causality);
    }
    return test_summary();
}
