// Weights at the start on the GPU have the bits of the reference. Parts begin and end anywhere.
#include "layers/draw.h"
#include "tests/cuda.cuh"

static void draw_case(int64_t n, double mean, double std, int64_t first) {
    Masters got(n + 2, 1);
    const auto low = got.got();
    R want(n);
    masters_draw(got.low + 1, got.weight.dev + 1, n, mean, std, 5, 7u << 20 | 3, first, ctx);
    REFERENCE(masters_draw)
    ((Master*)want.ref(), (floatX*)want.ref(), n, mean, std, 5, 7u << 20 | 3, first, reference_ctx);
    const auto there = got.got(), weight = got.weight.got();
    int64_t differ = 0, rounded = 0;
    for (int64_t i = 0; i < n; i++) {
        differ += there[(size_t)i + 1] != want.host[(size_t)i];
        rounded += fabs(weight[(size_t)i + 1] - want.host[(size_t)i]) > ldexp(fabs(want.host[(size_t)i]), -8);
    }
    CHECK(differ == 0 && rounded == 0, "%lld masters and %lld weights of %lld from %lld differ", (long long)differ,
          (long long)rounded, (long long)n, (long long)first);
    CHECK(there[0] == low[0] && there[(size_t)n + 1] == low[(size_t)n + 1], "an element outside was written");
}

static void test_draw(void) {
    for (int64_t first = 0; first < 6; first++)
        for (int64_t n = 1; n < 9; n++) draw_case(n, 0, 0.02, first);
    draw_case(5000003, 0, 0.02 / sqrt(54.0), 0);
    draw_case(100001, 0, 1, ((int64_t)1 << 34) + 3);
    draw_case(777, 1, 0, 1);
}

int main(void) {
    open_contexts(1 << 20);
    RUN(test_draw);
    return test_summary();
}
