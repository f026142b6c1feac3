// The CUDA kernel of RoPE against the double reference. Tolerances: tests/cuda.cuh.
#include "layers/rope.h"
#include "tests/cuda.cuh"

static void rope_case(int64_t N, int64_t T, int64_t heads, int64_t D, int64_t head_stride, int64_t stride,
                      int64_t offset) {
    X x(N * stride + offset, 1);
    R table(T * D);
    RopeConfig config = {(int)D, 10000, D > 8, 40, 0.707, 4096};
    REFERENCE(rope_table)(table.ref(), T, &config);
    std::vector<float> own((size_t)(T * D));
    rope_table(own.data(), T, &config);
    for (int64_t i = 0; i < T * D; i++)
        CHECK(fabs(own[(size_t)i] - table.host[(size_t)i]) < 1e-7, "table differs at %lld", (long long)i);
    table.send();
    settle();
    const RopeShape shape = {N, T, heads, D, stride, head_stride}, none = {};
    for (int direction = 1; direction >= -1; direction -= 2) {
        auto before = x.host;
        rope_apply(x.dev + offset, shape, x.dev, none, table.dev, direction, ctx);
        REFERENCE(rope_apply)
        ((floatX*)((double*)x.ref() + offset), shape, (floatX*)x.ref(), none, table.ref(), direction, reference_ctx);
        CHECK_CLOSE(x, BF16);
        auto got = x.got();
        int64_t touched = 0;
        for (int64_t i = 0; i < x.n; i++) {
            int64_t at = i - offset, in_token = at < 0 ? -1 : at % stride, in_head = in_token % head_stride;
            bool mine = at >= 0 && in_token / head_stride < heads && in_head < D;
            if (!mine) touched += got[(size_t)i] != before[(size_t)i];
        }
        CHECK(touched == 0, "%lld elements beside the heads changed", (long long)touched);
        x.host = got;
    }
}

// Queries and keys of one launch: more blocks of the one, then of the other.
static void rope_two_case(int64_t heads, int64_t other_heads) {
    const int64_t N = 130, T = 65, D = 16;
    X x(N * heads * 24, 1), y(N * other_heads * D, 2);
    R table(T * D);
    RopeConfig config = {(int)D, 10000, 0, 40, 0.707, 4096};
    REFERENCE(rope_table)(table.ref(), T, &config);
    table.send();
    settle();
    const RopeShape of_x = {N, T, heads, D, heads * 24, 24}, of_y = {N, T, other_heads, D, other_heads * D, D};
    rope_apply(x.dev + 8, of_x, y.dev, of_y, table.dev, 1, ctx);
    REFERENCE(rope_apply)
    ((floatX*)((double*)x.ref() + 8), of_x, (floatX*)y.ref(), of_y, table.ref(), 1, reference_ctx);
    CHECK_CLOSE(x, BF16);
    CHECK_CLOSE(y, BF16);
}

static void test_rope(void) {
    rope_two_case(8, 1);
    rope_two_case(1, 12);
    rope_case(1, 1, 1, 8, 8, 8, 0);
    rope_case(129, 43, 1, 64, 64, 576, 512);
    rope_case(1000, 250, 16, 64, 192, 16 * 192, 128);
    rope_case(130, 65, 5, 24, 40, 200, 0);
    rope_case(130, 65, 3, 8, 24, 72, 8);
    rope_case(300, 100, 128, 64, 192, 128 * 192, 128);
    rope_case(130, 65, 9, 24, 40, 400, 8);
    RopeConfig config = {64, 10000, 1, 40, 0.707, 4096};
    int low, high, low_ref, high_ref;
    rope_yarn_ramp(&low, &high, &config);
    REFERENCE(rope_yarn_ramp)(&low_ref, &high_ref, &config);
    CHECK(low == low_ref && high == high_ref, "ramp %d..%d", low, high);
    CHECK(rope_mscale(&config) == REFERENCE(rope_mscale)(&config), "mscale %g", rope_mscale(&config));
}

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_rope);
    return test_summary();
}
