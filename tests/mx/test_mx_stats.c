// Quantization statistics: by hand, and against sums over the oracle's values (tests/mx/mx_bytes.h).
#include "mx/mx_stats.h"

#include "tests/mx/mx_bytes.h"

static QuantizationStats stats_of(const real* x, int64_t rows, int64_t columns, MxRecipe recipe) {
    QuantizationStats stats = {1, 2, 3, 4, 5, 6};  // added to
    Ctx* ctx = ctx_create(0);
    mx_stats(&stats, x, NULL, 1, rows, columns, recipe, ctx);
    ctx_destroy(ctx);
    return (QuantizationStats){stats.elements - 1, stats.saturated - 2, stats.flushed - 3,
                               stats.inexact - 4,  stats.signal - 5,    stats.noise - 6};
}

static void test_stats(void) {
    // By hand: a chunk of 2^14. Its other blocks have 2^-5, which is below half of the smallest value and is flushed,
    // and 1.25. The next chunk has Inf or 1.
    for (int broken = 0; broken < 2; broken++) {
        real* x = filled(256, 0);
        x[0] = 16384, x[1] = 16385, x[40] = 0x1p-5, x[70] = 1.25, x[200] = broken ? INFINITY : 1;
        QuantizationStats s = stats_of(x, 1, 256, (MxRecipe){MX_RCEIL, 128});
        double exact = 1 - broken, signal = 0x1p28 + 16385.0 * 16385.0 + 0x1p-10 + 1.5625 + exact;
        CHECK(s.elements == 4 + exact && s.saturated == 0 && s.flushed == 1 && s.inexact == 1, "%g %g %g %g",
              s.elements, s.saturated, s.flushed, s.inexact);
        CHECK(fabs(s.signal / signal - 1) < 1e-12, "signal %.17g, not %.17g", s.signal, signal);
        CHECK(fabs(s.noise - (1 + 0x1p-10)) < 1e-6, "noise %.17g", s.noise);  // 2^-24 of a sum of 2^28
        release_all();
    }
    // FLOOR: 448 is in range, 480 is not.
    real* x = filled(32, 1.75);
    x[3] = -1.875;
    QuantizationStats s = stats_of(x, 1, 32, (MxRecipe){MX_FLOOR, 1});
    CHECK(s.saturated == 1 && fabs(s.noise - 0x1p-6) < 1e-12, "%g saturated, noise %g", s.saturated, s.noise);
    for (int i = 0; i < COUNT(recipes); i++) {
        x = wild_tensor(64, 352, 80);
        x[5] = NAN;
        s = stats_of(x, 64, 352, recipes[i]);
        QuantizationStats want = {0, 0, 0, 0, 0, 0};
        uint8_t *q = kept_bytes(64 * 352), *scale = kept_bytes(64 * 16), *q1 = kept_bytes(64 * 352);
        uint8_t* scale1 = kept_bytes(64 * 16);
        oracle_quantize(q, scale, x, 64, 352, recipes[i]);
        oracle_quantize(q1, scale1, x, 64, 352, (MxRecipe){recipes[i].scale, 1});
        for (int64_t j = 0; j < 64 * 352; j++) {
            int64_t b = j / 352 * 16 + j % 352 / 32;
            double v = oracle_value(q[j], scale[b]), f = (float)x[j];
            if (scale[b] == 255) continue;
            want.elements += f != 0, want.saturated += fabs(f) * pow(2, 127 - scale[b]) > 448;
            want.flushed += f != 0 && v == 0, want.inexact += v != oracle_value(q1[j], scale1[b]);
            want.signal += f * f, want.noise += (f - v) * (f - v);
        }
        CHECK(s.elements == want.elements && s.saturated == want.saturated && s.flushed == want.flushed &&
                  s.inexact == want.inexact,
              "cast %d: %g %g %g %g, not %g %g %g %g", i, s.elements, s.saturated, s.flushed, s.inexact, want.elements,
              want.saturated, want.flushed, want.inexact);
        CHECK((recipes[i].scale == MX_FLOOR) == (want.saturated > 0), "cast %d: %g saturated", i, want.saturated);
        CHECK((recipes[i].align == 128) == (want.inexact > 0), "cast %d: %g inexact", i, want.inexact);
        CHECK(fabs(s.signal / want.signal - 1) < 1e-12 && fabs(s.noise / want.noise - 1) < 1e-9,
              "cast %d: %g %g, not %g %g", i, s.signal, s.noise, want.signal, want.noise);
        release_all();
    }
}

// Tiles with the oracle's scales, one of them NaN. Every element counts with its tile's scale and with its block's own.
static void test_stats_tiles(void) {
    for (int i = 0; i < COUNT(matrices) * 2; i++) {
        const int64_t *m = matrices[i / 2], rows = m[1], columns = m[2], n = m[0] * rows * columns;
        const int64_t tr = tiles_of(rows), tc = tiles_of(columns);
        const int mode = i % 2;
        real* w = wild_tensor(m[0] * rows, columns, 90);
        w[n / 2] = NAN;
        uint8_t *scale = kept_bytes(m[0] * tr * tc), *q = kept_bytes(n), *alone = kept_bytes(m[0] * rows * 16);
        oracle_quantize(q, alone, w, m[0] * rows, columns, (MxRecipe){mode, 1});
        // The sums over the elements.
        QuantizationStats want = {1, 2, 3, 4, 5, 6}, got = want;
        int64_t broken = 0;
        for (int64_t j = 0; j < n; j++) {
            int64_t e = j / (rows * columns), r = j / columns % rows, c = j % columns, r0 = r / 128 * 128;
            int64_t c0 = c / 128 * 128, nr = rows - r0 < 128 ? rows - r0 : 128;
            int64_t nc = columns - c0 < 128 ? columns - c0 : 128, tile = (e * tr + r0 / 128) * tc + c0 / 128;
            if (r == r0 && c == c0) scale[tile] = (uint8_t)oracle_scale(oracle_amax(w + j, columns, nr, nc), mode);
            const int s = scale[tile];
            broken += s == 255;
            if (s == 255) continue;
            const double f = (float)w[j], v = oracle_value(oracle_byte(w[j], s), s);
            want.elements += f != 0, want.saturated += fabs(f) * pow(2, 127 - s) > 448;
            want.flushed += f != 0 && v == 0;
            want.inexact += v != oracle_value(q[j], alone[(e * rows + r) * 16 + c / 32]);
            want.signal += f * f, want.noise += (f - v) * (f - v);
        }
        Ctx* ctx = ctx_create(0);
        mx_stats(&got, w, scale, m[0], rows, columns, (MxRecipe){mode, 128}, ctx);
        ctx_destroy(ctx);
        CHECK(broken > 0 && broken <= 128 * 128, "%lld elements in a tile of NaN", (long long)broken);
        CHECK(got.elements == want.elements && got.saturated == want.saturated && got.flushed == want.flushed &&
                  got.inexact == want.inexact,
              "tiles %d: %g %g %g %g, not %g %g %g %g", i, got.elements, got.saturated, got.flushed, got.inexact,
              want.elements, want.saturated, want.flushed, want.inexact);
        CHECK(fabs(got.signal / want.signal - 1) < 1e-12 && fabs(got.noise / want.noise - 1) < 1e-9,
              "tiles %d: %g %g, not %g %g", i, got.signal, got.noise, want.signal, want.noise);
        release_all();
    }
}

int main(void) {
    list_e4m3();
    RUN(test_stats);
    RUN(test_stats_tiles);
    return test_summary();
}
