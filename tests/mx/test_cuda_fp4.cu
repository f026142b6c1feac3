// CUDA fake quantization of NVFP4 and MXFP4 against the reference, bit for bit: both sides have the same arithmetic,
// and the kernel rounds its float32 result to bf16. To nearest and stochastic, rows, columns and tiles with the
// transposed copy, the Hadamard transform, and statistics. Odd widths, groups without rows, and one with all rows.
#include "mx/fp4.h"
#include "mx/mxfp8.h"
#include "tests/ragged.cuh"

// Compares with the reference, rounded to bf16. What neither writes is NaN on both sides.
static void check_values(const char* what, const X& x) {
    const auto got = x.got();
    int64_t wrong = 0, first = 0;
    for (int64_t i = 0; i < x.n; i++) {
        const double want = __bfloat162float(__double2bfloat16(x.host[(size_t)i])), have = got[(size_t)i];
        const bool same = want != want ? have != have : have == want && signbit(have) == signbit(want);
        if (!same && wrong++ == 0) first = i;
    }
    CHECK(wrong == 0, "%s: %lld of %lld differ, the first at %lld is %g, not %g", what, (long long)wrong,
          (long long)x.n, (long long)first, got[(size_t)first], x.host[(size_t)first]);
}

// Random numbers of a step on both sides.
struct Numbers {
    BatchDraws host = {0x123456789abcull, 3 << 20}, *dev;
    Numbers() {
        dev = (BatchDraws*)device_alloc(sizeof(BatchDraws), "a test");
        device_upload(dev, &host, sizeof(host), ctx);
        ctx_sync(ctx);
    }
    ~Numbers() { device_free(dev); }
};

// x by fp4_round, into another tensor and in place, and its transform. Each has a guard behind it.
static void check_round(X& x, Ragged dev, Ragged ref, int64_t columns, Fp4Blocks blocks, bool with_back) {
    Numbers numbers;
    for (int stochastic = 0; stochastic < 2; stochastic++)
        for (int in_place = 0; in_place < 2; in_place++) {
            X out(x.n + 64), back(x.n + 64);
            const Draw on_gpu = {stochastic ? numbers.dev : NULL, 77};
            const Draw on_host = {stochastic ? &numbers.host : NULL, 77};
            if (in_place) {
                std::copy(x.host.begin(), x.host.end(), out.host.begin());
                CUDA_CHECK(cudaMemcpy(out.dev, x.dev, (size_t)x.n * sizeof(floatX), cudaMemcpyDeviceToDevice));
                settle();
            }
            fp4_round(out.dev, with_back ? back.dev : NULL, in_place ? out.dev : x.dev, dev, columns, blocks, on_gpu,
                      ctx);
            REFERENCE(fp4_round)
            (out.ref(), with_back ? back.ref() : NULL, in_place ? out.ref() : x.ref(), ref, columns, blocks, on_host,
             reference_ctx);
            check_values(stochastic ? "stochastic" : "nearest", out);
            check_values("transposed", back);
        }
}

static const Fp4Blocks all_blocks[] = {
    {NVFP4_SIX, 1, 16}, {NVFP4_SIX, 16, 1}, {NVFP4_FOUR_SIX, 1, 16}, {NVFP4_FOUR_SIX, 16, 1}, {MX_RCEIL, 1, 32}, {MX_FLOOR, 1, 32}, {MX_RCEIL, 32, 1}};

static void test_groups(void) {
    static const Rows lists[] = {{128, 0, 512, 131}, {0, 1, 0, 31, 33, 97}, {0, 0, 1111, 0}, {5}, {0, 0}};
    for (const Rows& rows : lists)
        for (int64_t columns : {(int64_t)32, (int64_t)160, (int64_t)1408}) {
            Layout l(rows);
            RowBuffer x(l, columns, 1);
            for (Fp4Blocks blocks : all_blocks) check_round(x, l.device(), l.reference(), columns, blocks, false);
            X out(x.n + 64);
            fp4_hadamard(out.dev, x.dev, l.device(), columns, ctx);
            REFERENCE(fp4_hadamard)(out.ref(), x.ref(), l.reference(), columns, reference_ctx);
            check_values("fp4_hadamard", out);
        }
}

// Without starts: all rows as one group, and weights in tiles.
static void test_matrices(void) {
    static const int64_t shapes[][3] = {{1, 1, 32}, {1, 67, 96}, {3, 96, 160}, {7, 288, 416}, {2, 1408, 992}};
    for (auto& s : shapes) {
        X x(s[0] * s[1] * s[2], 2);
        x.host[5] = 0, x.host[6] = -0.0;
        x.send();
        Ragged r = {};
        r.El = (int32_t)s[0], r.capacity = s[1];
        for (Fp4Blocks blocks : all_blocks) check_round(x, r, r, s[2], blocks, true);
        check_round(x, r, r, s[2], {NVFP4_SIX, 16, 16}, true);
        check_round(x, r, r, s[2], {NVFP4_FOUR_SIX, 16, 16}, true);
        check_round(x, r, r, s[2], {MX_RCEIL, 32, 32}, true);
        x.host[7] = s[1] % 2 ? NAN : INFINITY;
        x.send();
        for (Fp4Blocks blocks : all_blocks) check_round(x, r, r, s[2], blocks, true);
    }
}

// Counts are exact. Sums are of the same doubles in another order.
static void test_stats(void) {
    Ragged r = {};
    r.El = 3, r.capacity = 96;
    X x(3 * 96 * 416, 3);
    for (Fp4Blocks blocks : {Fp4Blocks{NVFP4_SIX, 1, 16}, Fp4Blocks{NVFP4_FOUR_SIX, 16, 16}, Fp4Blocks{MX_FLOOR, 1, 32}}) {
        QuantizationStats want = {1, 2, 3, 4, 5, 6}, got;
        QuantizationStats* dev = (QuantizationStats*)device_alloc(sizeof(QuantizationStats), "a test");
        device_upload(dev, &want, sizeof(want), ctx);
        fp4_stats(dev, x.dev, r, 416, blocks, ctx);
        device_download(&got, dev, sizeof(got), ctx);
        REFERENCE(fp4_stats)(&want, x.ref(), r, 416, blocks, reference_ctx);
        CHECK(got.elements == want.elements && got.saturated == want.saturated && got.flushed == want.flushed &&
                  got.inexact == want.inexact && fabs(got.signal / want.signal - 1) < 1e-10 &&
                  fabs(got.noise / want.noise - 1) < 1e-10,
              "%g %g %g %g %.17g %.17g, not %g %g %g %g %.17g %.17g", got.elements, got.saturated, got.flushed,
              got.inexact, got.signal, got.noise, want.elements, want.saturated, want.flushed, want.inexact,
              want.signal, want.noise);
        device_free(dev);
    }
}

int main(void) {
    open_contexts((size_t)1 << 20);
    RUN(test_groups);
    RUN(test_matrices);
    RUN(test_stats);
    return test_summary();
}
