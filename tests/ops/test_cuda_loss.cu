// The CUDA kernels of the cross-entropy loss against the double reference. Tolerances: tests/cuda.cuh.
#include "layers/loss.h"
#include "tests/cuda.cuh"

static void loss_case(int64_t N, int64_t V, int64_t Vp, double scale) {
    X logits(N * Vp, 1, scale);
    R loss(N);
    I32 target(N);
    for (int64_t n = 0; n < N; n++) {
        target.host[(size_t)n] = (int32_t)(random_uniform(7, 2, (uint64_t)n) * (double)V);
        if (n % 5 == 1) logits.host[(size_t)(n * Vp + target.host[(size_t)n])] = 8 * scale;  // a small loss
        if (n % 5 == 2) logits.host[(size_t)(n * Vp)] = -INFINITY, target.host[(size_t)n] = (int32_t)(V - 1);
        for (int64_t v = V; v < Vp; v++) logits.host[(size_t)(n * Vp + v)] = 1e30;
    }
    target.send();
    logits.send();
    auto run = [&](float dscale) { cross_entropy(loss.dev, logits.dev, target.dev, N, V, Vp, dscale, ctx); };
    auto before = logits.host;
    REFERENCE(cross_entropy)(loss.ref(), logits.ref(), target.ref(), N, V, Vp, 0, reference_ctx);
    settle();
    run(0);
    CHECK_CLOSE(loss, FLOAT);
    CHECK_SAME(logits);
    loss.poison();
    for (int64_t n = 0; n < N; n++)
        for (int64_t v = V; v < Vp; v++) logits.host[(size_t)(n * Vp + v)] = NAN;
    auto with_nan = logits.host;
    logits.send();
    settle();
    run(0.125f);
    REFERENCE(cross_entropy)(loss.ref(), logits.ref(), target.ref(), N, V, Vp, 0.125f, reference_ctx);
    CHECK_CLOSE(loss, FLOAT);
    CHECK_CLOSE(logits, BF16);
    auto got = logits.got();
    for (int64_t i = 0; i < N * Vp; i++)
        if (i % Vp >= V) CHECK(got[(size_t)i] == 0, "padding holds %g", got[(size_t)i]);
    CHECK_REPEATS(loss, (restore(logits, with_nan), run(0.125f)));
    // Logits that are not finite make a loss that is not finite.
    const double bad[] = {NAN, INFINITY};
    for (double value : bad) {
        before[(size_t)((N - 1) * Vp + V / 2)] = value;
        restore(logits, before);
        run(0.125f);
        CHECK(!isfinite(loss.got()[(size_t)(N - 1)]), "a logit of %g went by", value);
    }
}

static void test_cross_entropy(void) {
    loss_case(1, 5, 8, 1);
    loss_case(3, 33, 40, 1);
    loss_case(129, 257, 384, 3);
    loss_case(7, 50257, 50304, 1);
    loss_case(5, 102400, 102400, 30);
    loss_case(3, 129279, 129280, 4);
    loss_case(3, 450600, 450688, 3);
    loss_case(600, 16390, 16448, 3);
    // Small vocabularies: fewer threads a row.
    loss_case(100, 1000, 1000, 10);
    loss_case(600, 1030, 1088, 3);
    loss_case(700, 257, 264, 3);
    loss_case(1000, 9000, 9088, 3);
}

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_cross_entropy);
    return test_summary();
}
