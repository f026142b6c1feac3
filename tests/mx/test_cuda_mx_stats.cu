// The CUDA quantization statistics against the reference in double.
#include "mx/mx_stats.h"

#include "tests/mx/mx_bytes.cuh"

static void test_stats(void) {
    for (MxRecipe recipe : recipes) {
        const int64_t rows = 3001, columns = 1376;
        X x(rows * columns);
        set_wild(x, 1);
        QuantizationStats first = {1, 2, 3, 4, 5, 6}, want = first, got, again;
        QuantizationStats* dev = (QuantizationStats*)device_alloc(sizeof(QuantizationStats), "a test");
        auto run = [&](QuantizationStats* out) {
            device_upload(dev, &first, sizeof(first), ctx);
            mx_stats(dev, x.dev, NULL, 1, rows, columns, recipe, ctx);
            device_download(out, dev, sizeof(*out), ctx);
        };
        run(&got);
        run(&again);
        REFERENCE(mx_stats)(&want, x.ref(), NULL, 1, rows, columns, recipe, reference_ctx);
        CHECK(memcmp(&got, &again, sizeof(got)) == 0, "not the same on every run");
        CHECK(got.elements == want.elements && got.saturated == want.saturated && got.flushed == want.flushed &&
                  got.inexact == want.inexact,
              "%g %g %g %g, not %g %g %g %g", got.elements, got.saturated, got.flushed, got.inexact, want.elements,
              want.saturated, want.flushed, want.inexact);
        // 4 million positive numbers, which the reference adds one after the other.
        CHECK(fabs(got.signal / want.signal - 1) < 1e-10 && fabs(got.noise / want.noise - 1) < 1e-10,
              "signal %.17g noise %.17g, not %.17g %.17g", got.signal, got.noise, want.signal, want.noise);
        device_free(dev);
    }
}

// As test_stats, with the scales that mx_quantize_tiles wrote.
static void test_stats_tiles(void) {
    static const int64_t shapes[][3] = {{1, 32, 32}, {3, 96, 160}, {7, 288, 416}, {2, 1408, 992}};
    for (auto& m : shapes)
        for (int mode = MX_RCEIL; mode <= MX_FLOOR; mode++) {
            const int64_t n = m[0] * m[1] * m[2];
            X w(n);
            set_wild(w, 0);
            Bytes q(n), turned(n), scale(m[0] * ceil_div(m[1], 128) * ceil_div(m[2], 128));
            mx_quantize_tiles(q.dev, turned.dev, scale.dev, w.dev, m[0], m[1], m[2], mode, ctx);
            std::vector<uint8_t> scales = scale.got();
            scales.resize((size_t)scale.n);
            scales[(size_t)scale.n / 2] = MX_NAN;  // its tile is left out
            scale.send(scales);
            // Both sides add to the same statistics.
            QuantizationStats want = {1, 2, 3, 4, 5, 6}, got;
            QuantizationStats* dev = (QuantizationStats*)device_alloc(sizeof(QuantizationStats), "a test");
            device_upload(dev, &want, sizeof(want), ctx);
            mx_stats(dev, w.dev, scale.dev, m[0], m[1], m[2], {mode, 128}, ctx);
            device_download(&got, dev, sizeof(got), ctx);
            REFERENCE(mx_stats)(&want, w.ref(), scales.data(), m[0], m[1], m[2], {mode, 128}, reference_ctx);
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
    RUN(test_stats);
    RUN(test_stats_tiles);
    return test_summary();
}
