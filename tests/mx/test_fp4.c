// NVFP4 and MXFP4 fake quantization. Nearest: bit for bit against goldens by fouroversix and torchao
// (scripts/make_fp4_golden.py). Stochastic: unbiased, reproducible, the same in any parts. The Hadamard transform:
// orthogonal. Groups: each is its own tensor, also empty ones.
#include <zlib.h>

#include "data/safetensors.h"
#include "device/random.h"
#include "mx/formats.h"
#include "mx/fp4.h"
#include "tests/test.h"

enum { ROWS = 64, COLUMNS = 96, COUNT = ROWS * COLUMNS };
static const Draw nearest = {NULL, 0};
static Ragged groups_of(int32_t count, int64_t rows) {
    const Ragged groups = {count, rows, NULL, NULL, NULL, NULL, NULL};
    return groups;
}

static void round_values(real* out, real* back, const real* x, Ragged groups, int64_t columns, Fp4Blocks blocks,
                         Draw draw, Ctx* ctx) {
    const Fp4Work work = {out, back, x, groups, columns, blocks, draw, NULL};
    fp4_round(work, ctx);
}

static real* room(int64_t n) {
    real* x = malloc((size_t)n * sizeof(real));
    for (int64_t i = 0; i < n; i++) x[i] = NAN;
    return x;
}

static real* golden(const SafeTensors* st, const char* name) {
    float* f = malloc(COUNT * sizeof(float));
    const StTensor* t = st_find(st, name);
    CHECK(t && t->bytes == COUNT * 4 && st_read(st, t, 0, COUNT, f) == 0, "%s", name);
    real* x = room(COUNT);
    for (int i = 0; i < COUNT; i++) x[i] = f[i];
    free(f);
    return x;
}

static void check_same(const real* got, const real* want, int64_t n, const char* what) {
    int64_t wrong = 0, first = 0;
    for (int64_t i = 0; i < n; i++)
        if (isnan(want[i]) ? !isnan(got[i]) : got[i] != want[i] || !signbit(got[i]) != !signbit(want[i]))
            if (wrong++ == 0) first = i;
    CHECK(wrong == 0, "%s: %d differ, the first at %d is %.9g, not %.9g", what, (int)wrong, (int)first,
          (double)got[first], (double)want[first]);
}

static void test_golden(void) {
    static const struct {
        const char *x, *values;
        Fp4Blocks blocks;
    } cases[] = {{"x", "x.nvfp4", {1, 16, 0, 0}},
                 {"third", "third.nvfp4", {1, 16, 0, 0}},
                 {"x", "x.nvfp4.tiles", {16, 16, 0, 0}},
                 {"x", "x.mxfp4.rceil", {1, 32, 0, MX_RCEIL}},
                 {"special", "special.mxfp4.rceil", {1, 32, 0, MX_RCEIL}},
                 {"x", "x.mxfp4.floor", {1, 32, 0, MX_FLOOR}}};
    char error[256];
    SafeTensors* st = st_open("tests/golden/fp4.safetensors", error, sizeof(error));
    CHECK(st, "%s", error);
    if (!st) return;
    Ctx* ctx = ctx_create(0);
    for (int i = 0; i < (int)(sizeof(cases) / sizeof(cases[0])); i++) {
        real *x = golden(st, cases[i].x), *want = golden(st, cases[i].values), *out = room(COUNT), *back = room(COUNT);
        real *turned = room(COUNT), *turned_out = room(COUNT);
        Fp4Blocks down = cases[i].blocks;
        round_values(out, back, x, groups_of(1, ROWS), COLUMNS, down, nearest, ctx);
        check_same(out, want, COUNT, cases[i].values);
        for (int k = 0; k < COUNT; k++) turned[k] = x[k % ROWS * COLUMNS + k / ROWS];
        // The transposed copy; and blocks down the columns of the transposed x, in place.
        for (int k = 0; k < COUNT; k++) turned_out[k] = want[k % ROWS * COLUMNS + k / ROWS];
        check_same(back, turned_out, COUNT, "the transposed copy");
        down.high = cases[i].blocks.wide, down.wide = cases[i].blocks.high;
        round_values(turned, NULL, turned, groups_of(1, COLUMNS), ROWS, down, nearest, ctx);
        check_same(turned, turned_out, COUNT, "down the columns");
        free(x), free(want), free(out), free(back), free(turned), free(turned_out);
    }
    ctx_destroy(ctx);
    st_close(st);
}

// A tensor of NVFP4 with NaN or Inf becomes NaN; zeros stay zeros with their signs; the smallest tensors stay finite.
static void test_special_values(void) {
    const Fp4Blocks nv = {1, 16, 0, 0};
    Ctx* ctx = ctx_create(0);
    real x[32] = {0}, out[32];
    x[3] = -(real)0;
    round_values(out, NULL, x, groups_of(1, 1), 32, nv, nearest, ctx);
    check_same(out, x, 32, "zeros");
    for (int e = -149; e < 128; e++) {
        x[7] = (real)ldexp(1, e);
        round_values(out, NULL, x, groups_of(1, 1), 32, nv, nearest, ctx);
        for (int i = 0; i < 32; i++) CHECK(isfinite(out[i]) && (i == 7 || out[i] == 0), "2^%d: %g", e, (double)out[i]);
        // 1 / (2688 / amax), e4m3 and the product each round once, 2^-24 each.
        if (e > -100) CHECK(fabs((double)out[7] / (double)x[7] - 1) < 2e-7, "2^%d is %g", e, (double)out[7]);
    }
    for (int broken = 0; broken < 2; broken++) {
        x[7] = broken ? (real)INFINITY : (real)NAN;
        round_values(out, NULL, x, groups_of(1, 1), 32, nv, nearest, ctx);
        for (int i = 0; i < 32; i++) CHECK(isnan(out[i]), "element %d is %g", i, (double)out[i]);
    }
    ctx_destroy(ctx);
}

// Each group is a tensor of its own: rounding it alone gives the same. Rows of no group are not touched. An expert may
// have no rows, or all of them.
static void test_groups(void) {
    static int64_t starts[][5] = {{0, 19, 19, 20, 50}, {0, 0, 50, 50, 50}};
    Ctx* ctx = ctx_create(0);
    real* x = random_tensor(COUNT, 1);
    for (int i = 19 * COLUMNS; i < COUNT; i++) x[i] *= 7;
    for (int c = 0; c < 2; c++)
        for (int down = 0; down < 2; down++) {
            const Fp4Blocks blocks = {down ? 16 : 1, down ? 1 : 16, 0, 0};
            int32_t rows[4];
            for (int g = 0; g < 4; g++) rows[g] = (int32_t)(starts[c][g + 1] - starts[c][g]);
            const Ragged ragged = {4, ROWS, starts[c], rows, NULL, NULL, NULL};
            real *out = room(COUNT), *want = room(COUNT);
            round_values(out, NULL, x, ragged, COLUMNS, blocks, nearest, ctx);
            for (int g = 0; g < 4; g++) {
                const int64_t at = starts[c][g] * COLUMNS;
                round_values(want + at, NULL, x + at, groups_of(1, rows[g]), COLUMNS, blocks, nearest, ctx);
            }
            check_same(out, want, COUNT, "groups");
            free(out), free(want);
        }
    free(x);
    ctx_destroy(ctx);
}

// The mean over `TRIES` steps, for blocks whose largest element is a value of the format, so that nothing saturates. An
// element between neighbours lo and hi is a coin with p = (x - lo) / (hi - lo). The mean of TRIES coins has sigma (hi -
// lo) sqrt(p (1 - p) / TRIES). Of 6,000 elements one is beyond five sigma with probability 3e-3, and the seed is fixed.
static void test_unbiased(void) {
    enum { TRIES = 400 };
    Ctx* ctx = ctx_create(0);
    for (int wide = 16; wide <= 32; wide += 16) {
        const Fp4Blocks blocks = {1, wide, 0, MX_RCEIL};
        const double scale = wide == 32 ? 512 : 448;  // 2688 = 6 448
        real *x = random_tensor(COUNT, 2), *out = room(COUNT);
        double* sum = calloc(COUNT, sizeof(double));
        for (int i = 0; i < COUNT; i++) x[i] = i % wide == 3 ? 2688 : (real)fmax(-2688, fmin(2688, 600 * (double)x[i]));
        double worst = 0, all = 0;
        for (int step = 1; step <= TRIES; step++) {
            const BatchDraws draws = {(uint64_t)step, 0};
            const Draw draw = {&draws, 9};
            round_values(out, NULL, x, groups_of(1, ROWS), COLUMNS, blocks, draw, ctx);
            for (int i = 0; i < COUNT; i++) sum[i] += (double)out[i] / TRIES;
        }
        for (int i = 0; i < COUNT; i++) {
            const double a = fabs((double)(float)x[i]) / scale,
                         step = a < 2   ? 0.5
                                : a < 4 ? 1
                                        : 2,
                         p = a / step - floor(a / step);
            if (a > 6) continue;
            const double sigma = scale * step * sqrt(p * (1 - p) / TRIES);
            const double off = fabs(sum[i] - (double)x[i]) - scale * step * 0x1p-17;  // probabilities of 16 bits
            worst = fmax(worst, off / (sigma + 1e-9));
            if (sigma > 0.1) all += (sum[i] - (double)x[i]) / sigma / COUNT;
        }
        CHECK(worst < 5, "an element is %g sigma from its mean", worst);
        CHECK(fabs(all) < 5 / sqrt(COUNT), "all elements are %g sigma off", all);
        free(x), free(out), free(sum);
    }
    ctx_destroy(ctx);
}

// 2^k x has 2^k times the values of x in NVFP4, at random too: no operation rounds differently.
static void test_magnitudes(void) {
    Ctx* ctx = ctx_create(0);
    const BatchDraws draws = {5, 0};
    const Draw random = {&draws, 9};
    real *x = random_tensor(COUNT, 4), *scaled = room(COUNT), *out = room(COUNT), *want = room(COUNT);
    for (int high = 1; high <= 16; high += 15)
        for (int k = -90; k <= 90; k += 30)
            for (int at_random = 0; at_random < 2; at_random++) {
                const Fp4Blocks blocks = {high, 16, 0, 0};
                const Draw draw = at_random ? random : nearest;
                for (int i = 0; i < COUNT; i++) scaled[i] = (real)ldexp((double)(float)x[i], k);
                round_values(out, NULL, scaled, groups_of(1, ROWS), COLUMNS, blocks, draw, ctx);
                round_values(want, NULL, x, groups_of(1, ROWS), COLUMNS, blocks, draw, ctx);
                for (int i = 0; i < COUNT; i++) want[i] = (real)ldexp((double)want[i], k);
                check_same(out, want, COUNT, "2^k x");
            }
    free(x), free(scaled), free(out), free(want);
    ctx_destroy(ctx);
}

// Each element by its number r = (h + 1/2) 2^-16, of the 16 bits h that (key, stream, element) give: it goes up if its
// distance from the lower neighbour is above r, by 2^-18 of a step. So every r is half a number from a multiple of
// 2^-16, and their mean is 1/2. A mean over coins would need 1e11 of them to show this half.
static void test_coins(void) {
    static const double low[] = {0, 0.5, 1, 1.5, 2, 3, 4}, steps[] = {0.5, 0.5, 0.5, 0.5, 1, 1, 2};
    Ctx* ctx = ctx_create(0);
    real *x = room(COUNT), *out = room(COUNT), *want = room(COUNT);
    const BatchDraws draws = {0x123456789abcull, 648};
    const Draw draw = {&draws, 9};
    for (int down = 0; down < 2; down++)
        for (int above = 0; above < 2; above++) {
            for (int i = 0; i < COUNT; i++) {
                const uint64_t row = (uint64_t)(648 + i / COLUMNS), column = i % COLUMNS;
                const uint64_t element = down ? column << 40 | row : row << 24 | column;
                uint32_t word[4];
                philox(word, draws.key, 9, element / 8);
                const uint32_t w = word[element % 8 / 2], h = (element % 2 ? w << 9 | w >> 23 : w >> 7) & 0xffff;
                const double r = (h + 0.5) * 0x1p-16 + (above ? 0x1p-18 : -0x1p-18);
                const int k = i * 7 / 5 % 7, sign = i % 3 ? 1 : -1;
                x[i] = (real)(sign * (low[k] + r * steps[k])), want[i] = (real)(sign * (low[k] + above * steps[k]));
                if ((down ? i / COLUMNS : i % COLUMNS) % 32 == 5) x[i] = want[i] = 6;  // the scale is 1
            }
            const Fp4Blocks blocks = {down ? 32 : 1, down ? 1 : 32, 0, MX_RCEIL};
            round_values(out, NULL, x, groups_of(1, ROWS), COLUMNS, blocks, draw, ctx);
            check_same(out, want, COUNT, above ? "above r" : "below r");
        }
    free(x), free(out), free(want);
    ctx_destroy(ctx);
}

// The random numbers are those of (key, stream, element): the same again, others if one of them differs, and the
// same when the rows come in two parts.
static void test_draws(void) {
    Ctx* ctx = ctx_create(0);
    real *x = random_tensor(COUNT, 3), *out = room(COUNT), *other = room(COUNT);
    for (int down = 0; down < 2; down++) {
        const Fp4Blocks blocks = {down ? 32 : 1, down ? 1 : 32, 0, MX_RCEIL};
        const BatchDraws base = {7, 640}, second = {7, 640 + ROWS / 2};
        const BatchDraws others[] = {{8, 640}, {7, 704}, base};
        const Draw draw = {&base, 9}, late = {&second, 9};
        round_values(out, NULL, x, groups_of(1, ROWS), COLUMNS, blocks, draw, ctx);
        round_values(other, NULL, x, groups_of(1, ROWS / 2), COLUMNS, blocks, draw, ctx);
        round_values(other + COUNT / 2, NULL, x + COUNT / 2, groups_of(1, ROWS / 2), COLUMNS, blocks, late, ctx);
        check_same(other, out, COUNT, "two parts");
        for (int i = 0; i < 3; i++) {
            const Draw changed = {&others[i], 9 + (i == 2)};
            round_values(other, NULL, x, groups_of(1, ROWS), COLUMNS, blocks, changed, ctx);
            int64_t same = 0;
            for (int k = 0; k < COUNT; k++) same += out[k] == other[k];
            // Two coins differ with probability 2 p (1 - p), a third for an even p.
            CHECK(same < COUNT * 0.8, "change %d: %d elements are the same", i, (int)same);
        }
        // Each element has its own number: of 31 equal ones in a block, halfway between neighbours, some go up.
        for (int k = 0; k < COUNT; k++) other[k] = (down ? k / COLUMNS : k) % 32 ? (real)1.25 : 6;
        round_values(other, NULL, other, groups_of(1, ROWS), COLUMNS, blocks, draw, ctx);
        for (int b = 0; b < COUNT / 32; b++) {
            int up = 0;
            for (int k = 0; k < 32; k++)
                up += other[down ? (b / COLUMNS * 32 + k) * COLUMNS + b % COLUMNS : b * 32 + k] == (real)1.5;
            CHECK(up > 0 && up < 31, "block %d: %d of 31 go up", b, up);
        }
    }
    free(x), free(out), free(other);
    ctx_destroy(ctx);
}

// A change of any value needs a new revision, which this test then names with the new CRC-32.
static void test_revision(void) {
    Ctx* ctx = ctx_create(0);
    const BatchDraws draws = {5, 0};
    const Draw random = {&draws, 9};
    real *x = room(COUNT), *out = room(COUNT);
    uLong crc = 0;
    for (int i = 0; i < COUNT; i++) x[i] = (real)((i * 7919 + i / COLUMNS * 104729) % 20011 - 10005) / 1024;
    // MXFP4 with both rules, and NVFP4.
    static const int sizes[] = {32, 32, 16}, rules[] = {MX_RCEIL, MX_FLOOR, MX_RCEIL};
    for (int i = 0; i < 3; i++)
        for (int at_random = 0; at_random < 2; at_random++)
            for (int down = 0; down < 2; down++) {
                const Fp4Blocks blocks = {down ? sizes[i] : 1, down ? 1 : sizes[i], down, rules[i]};
                round_values(out, NULL, x, groups_of(1, ROWS), COLUMNS, blocks, at_random ? random : nearest, ctx);
                for (int k = 0; k < COUNT; k++) {
                    const float value = (float)out[k];
                    crc = crc32(crc, (const Bytef*)&value, sizeof(value));
                }
            }
    CHECK(FP4_ROUNDING == 1 && crc == 380409674u, "revision %d has CRC-32 %lu", FP4_ROUNDING, crc);
    free(x), free(out);
    ctx_destroy(ctx);
}

// H S of unit vectors has orthonormal columns, exactly: the entries are +-1/4. Its signs are not all equal, and H is
// its own inverse. An entry is the largest magnitude of its block, so MXFP4 keeps it.
static void test_hadamard(void) {
    static const Fp4Blocks blocks = {32, 1, 1, MX_RCEIL}, plain = {32, 1, 0, MX_RCEIL};
    Ctx* ctx = ctx_create(0);
    enum { N = FP4_HADAMARD, C = 32 };
    real unit[N * C] = {0}, m[N * C], again[N * C];
    for (int i = 0; i < N; i++) unit[i * C + i] = 1;
    round_values(m, NULL, unit, groups_of(1, N), C, blocks, nearest, ctx);
    int negative = 0;
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            double columns = 0;
            for (int k = 0; k < N; k++) columns += (double)m[k * C + i] * (double)m[k * C + j];
            CHECK(columns == (i == j), "columns %d and %d: %g", i, j, columns);
            CHECK(fabs((double)m[i * C + j]) == 0.25, "entry %g", (double)m[i * C + j]);
            negative += i == 0 && m[j] < 0;
        }
    CHECK(negative > 0 && negative < N, "%d signs are negative", negative);
    // S H S H = 1: row 0 of H is all 1/4, so m's row 0 has the signs.
    for (int i = 0; i < N * C; i++) again[i] = m[i] * 16 * m[i / C] * m[i % C];
    round_values(again, NULL, again, groups_of(1, N), C, blocks, nearest, ctx);
    for (int i = 0; i < N * C; i++) CHECK((double)again[i] == (double)unit[i], "H H has %g at %d", (double)again[i], i);

    // 45 rows: two runs of 16, and 13 rows as they are, also in the second half of a block of 32. The transform of the
    // product's operands is that of the matrix above, and rounded once.
    real *x = random_tensor(COUNT, 4), *out = room(COUNT), *want = room(COUNT);
    round_values(out, NULL, x, groups_of(1, 45), COLUMNS, blocks, nearest, ctx);
    CHECK(isnan(out[45 * COLUMNS]), "a row after the group is written");
    for (int r = 0; r < 45; r++)
        for (int c = 0; c < COLUMNS; c++) {
            float sum = 0;
            if (r >= 32) sum = (float)x[r * COLUMNS + c];
            for (int k = 0; k < N && r < 32; k++)
                sum += (float)m[r % N * C + k] * (float)x[(r / N * N + k) * COLUMNS + c];
            want[r * COLUMNS + c] = sum;
        }
    round_values(want, NULL, want, groups_of(1, 45), COLUMNS, plain, nearest, ctx);
    // Sums of another order, in float32: one element in 1e5 may be rounded to the other neighbour.
    int differ = 0;
    for (int i = 0; i < 45 * COLUMNS; i++) differ += out[i] != want[i];
    CHECK(differ <= 2, "%d transformed elements differ", differ);
    check_same(out + 32 * COLUMNS, want + 32 * COLUMNS, 13 * COLUMNS, "a short block");

    // Pad rows, as on the GPU, are not transformed with the group's own rows.
    int64_t start[] = {0, ROWS};
    int32_t own = 45;
    const Ragged padded = {1, ROWS, start, &own, NULL, NULL, NULL};
    for (int i = 45 * COLUMNS; i < COUNT; i++) x[i] = 0;
    round_values(want, NULL, x, padded, COLUMNS, blocks, nearest, ctx);
    check_same(want, out, 45 * COLUMNS, "with pad rows");
    free(x), free(out), free(want);
    ctx_destroy(ctx);
}

// Sums over values, as the statistics have them.
static void check_stats(QuantizationStats got, const real* x, const real* out) {
    QuantizationStats want = {0};
    for (int i = 0; i < COUNT; i++) {
        const double a = (float)x[i], b = (float)out[i];
        want.elements += a != 0, want.flushed += a != 0 && b == 0;
        want.signal += a * a, want.noise += (a - b) * (a - b);
    }
    CHECK(got.elements == want.elements && got.flushed == want.flushed, "counts");
    CHECK(fabs(got.signal / want.signal - 1) < 1e-12 && fabs(got.noise / want.noise - 1) < 1e-12, "sums");
    // A Gaussian in NVFP4 has about 20 dB.
    const double snr = 10 * log10(got.signal / got.noise);
    CHECK(snr > 15 && snr < 25, "%g dB", snr);
}

// Statistics are of the values of fp4_round, for tiles and for rows. Those of a weight are of what forward reads.
static void test_stats(void) {
    static const FormatId formats[] = {FORMAT_NVFP4, FORMAT_MXFP4, FORMAT_MXFP4_WEIGHTS};
    Ctx* ctx = ctx_create(0);
    real *x = random_tensor(COUNT, 5), *out = room(COUNT), *back = room(COUNT);
    for (int i = 0; i < COUNT; i += 50) x[i] = 0;
    for (int high = 1; high <= 16; high += 15) {
        const Fp4Blocks blocks = {high, 16, 0, 0};
        QuantizationStats stats = {0};
        const Fp4Work work = {NULL, NULL, x, groups_of(2, ROWS / 2), COLUMNS, blocks, nearest, &stats};
        fp4_round(work, ctx);
        round_values(out, NULL, x, groups_of(2, ROWS / 2), COLUMNS, blocks, nearest, ctx);
        check_stats(stats, x, out);
    }
    for (int i = 0; i < 3; i++) {
        const Format* f = format_of_id(formats[i], MX_RCEIL);
        QuantizationStats stats = {0};
        f->round_weight(f, NULL, NULL, x, 2, ROWS / 2, COLUMNS, &stats, ctx);
        f->round_weight(f, out, back, x, 2, ROWS / 2, COLUMNS, NULL, ctx);
        check_stats(stats, x, out);
    }
    free(x), free(out), free(back);
    ctx_destroy(ctx);
}

int main(void) {
    RUN(test_golden);
    RUN(test_special_values);
    RUN(test_groups);
    RUN(test_unbiased);
    RUN(test_magnitudes);
    RUN(test_coins);
    RUN(test_draws);
    RUN(test_revision);
    RUN(test_hadamard);
    RUN(test_stats);
    return test_summary();
}
