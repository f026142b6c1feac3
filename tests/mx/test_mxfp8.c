// MXFP8 quantization, bit for bit. Every bf16 value is the largest of its block once; float32 with its subnormals and
// borders, zero, Inf and NaN. Aligned chunks, both orientations, tiles, and dequantization. Against an oracle without
// bit operations (tests/mx/mx_bytes.h), and against goldens by torchao and PyTorch (scripts/make_mx_golden.py).
#include "data/safetensors.h"
#include "mx/mxfp8.h"
#include "tests/mx/mx_bytes.h"

typedef struct {
    const real* x;
    int64_t rows, columns;
    MxRecipe recipe;
    uint8_t *q, *scale;
} Cast;

static void run_quantize(void* arg) {
    Cast* c = arg;
    Ctx* ctx = ctx_create(0);
    c->q = poisoned_bytes(c->rows * c->columns), c->scale = poisoned_bytes(c->rows * mx_stride(c->columns));
    mx_quantize((MxBytes){c->q, c->scale}, c->x, c->rows, c->columns, c->recipe, ctx);
    ctx_destroy(ctx);
}

// Quantizes x with every recipe and compares with the oracle.
static void check_quantize(const real* x, int64_t rows, int64_t columns, const char* what) {
    uint8_t *q = kept_bytes(rows * columns), *scale = kept_bytes(rows * mx_stride(columns));
    for (int i = 0; i < COUNT(recipes); i++) {
        Cast c = {.x = x, .rows = rows, .columns = columns, .recipe = recipes[i]};
        check_threads(run_quantize, &c);
        oracle_quantize(q, scale, x, rows, columns, recipes[i]);
        CHECK_BYTES(c.scale, scale, rows * mx_stride(columns), "%s, mode %d align %d, scales", what, recipes[i].scale,
                    recipes[i].align);
        CHECK_BYTES(c.q, q, rows * columns, "%s, mode %d align %d, bytes", what, recipes[i].scale, recipes[i].align);
    }
}

// --- Blocks ---

// Every bf16 as the largest of a block. The other elements are up to 24 binades below.
static void test_every_bf16(void) {
    real* x = kept_bytes(65536 * 32 * sizeof(real));
    for (uint32_t h = 0; h < 65536; h++) {
        uint32_t largest = h & 0x7fff, at = draw(1, h, 32);
        for (uint32_t i = 0; i < 32; i++) {
            uint32_t below = draw(2, h * 32 + i, 24 * 128);
            if (largest >= 0x7f80) below = largest - draw(2, h * 32 + i, 0x7f80);
            uint32_t magnitude = below < largest ? largest - below : 0;
            x[h * 32 + i] = from_bits(i == at ? h << 16 : (magnitude | draw(3, h * 32 + i, 2) << 15) << 16);
        }
    }
    check_quantize(x, 65536, 32, "bf16");
    release_all();
}

static void test_float32(void) {
    // The borders of scales: mantissas about 1.75 and at the ends, for every exponent, each with elements of all sizes.
    static const uint32_t mantissas[] = {0, 1, 0x5fffff, 0x600000, 0x600001, 0x7fffff};
    real* x = kept_bytes(256 * COUNT(mantissas) * 32 * sizeof(real));
    for (uint32_t i = 0; i < 256 * (uint32_t)COUNT(mantissas) * 32; i++) {
        uint32_t u = (i / 32 / COUNT(mantissas)) << 23 | mantissas[i / 32 % COUNT(mantissas)];
        uint32_t below = draw(5, i, 24.0 * (1 << 23)) + draw(6, i, 2);
        x[i] = from_bits(i % 32 == 7 ? u : (u > below ? u - below : 0) | draw(7, i, 2) << 31);
    }
    check_quantize(x, 256 * COUNT(mantissas), 32, "borders");
    // Subnormal blocks. They are scaled by 2^127, and their elements use all magnitudes up to 448.
    x = kept_bytes(4096 * 64 * sizeof(real));
    for (uint32_t i = 0; i < 4096 * 64; i++)
        x[i] = from_bits(draw(8, i, (double)(2u << (i / 64 % 25))) | draw(9, i, 2) << 31);
    check_quantize(x, 4096, 64, "subnormal");
    // Any bits, Inf and NaN included.
    for (uint32_t i = 0; i < 4096 * 64; i++) x[i] = from_bits(draw(10, i, 4294967296.0));
    check_quantize(x, 4096, 64, "any bits");
    x = tensor(512 * 224, 11);
    check_quantize(x, 512, 224, "normal");
    release_all();
}

// Halfway between neighbours, and one step of float32 to either side. An element of 448 makes the scale 1.
static void test_rounding(void) {
    real* x = filled(127 * 32, 448);
    for (int b = 0; b < 127; b++) {
        float middle = (float)(b < 126 ? (e4m3_values[b] + e4m3_values[b + 1]) / 2 : 464);
        float near[] = {middle, nextafterf(middle, 0), nextafterf(middle, 1000), (float)e4m3_values[b]};
        for (int i = 0; i < 8; i++) x[b * 32 + i] = fabsf(near[i / 2]) > 448 ? 448 : near[i / 2] * (i % 2 ? -1 : 1);
    }
    check_quantize(x, 127, 32, "rounding");
    // FLOOR saturates: the largest of a block may be up to 512 after scaling.
    for (int i = 0; i < 127 * 32; i++) x[i] = (i % 2 ? -1 : 1) * (447 + i / 64.0);
    check_quantize(x, 127, 32, "saturation");
    release_all();
}

static void expect(real value, int s, uint8_t q, MxRecipe recipe, const char* what) {
    real* x = filled(32, 0);
    x[31] = value;
    Cast c = {.x = x, .rows = 1, .columns = 32, .recipe = recipe};
    run_quantize(&c);
    CHECK(c.scale[0] == s && c.q[31] == q, "%s: scale %d byte %#x, not %d %#x", what, c.scale[0], c.q[31], s, q);
    for (int i = 0; i < 31; i++) CHECK(c.q[i] == (s == 255 ? 0x7f : 0), "%s: byte %d is %#x", what, i, c.q[i]);
}

// By hand, so that the oracle is tested too.
static void test_special_values(void) {
    for (int i = 0; i < COUNT(recipes); i++) {
        expect(0, 0, 0, recipes[i], "zero");
        expect(-(real)0, 0, 0x80, recipes[i], "-0");
        expect(NAN, 255, 0x7f, recipes[i], "NaN");
        expect(-(real)NAN, 255, 0x7f, recipes[i], "-NaN");
        expect(INFINITY, 255, 0x7f, recipes[i], "Inf");
        expect(-(real)INFINITY, 255, 0x7f, recipes[i], "-Inf");
        expect(1, 119, 0x78, recipes[i], "1: 256 x 2^-8");
        expect(1.75, 119, 0x7e, recipes[i], "1.75: 448 x 2^-8");
        expect((real)0x1p-133, 0, 0x01 << 3, recipes[i], "2^-133: 2^-6 x 2^-127");
        expect((real)0x1p-136, 0, 0x01, recipes[i], "2^-136: the smallest byte at the smallest scale");
        expect((real)0x1p-137, 0, 0x00, recipes[i], "2^-137: half of it, to even");
        expect((real)-0x1.8p-137, 0, 0x81, recipes[i], "more than half");
        expect((real)-0x1p-149, 0, 0x80, recipes[i], "the smallest float32");
    }
    expect((real)1.875, 120, 0x77, recipes[0], "RCEIL, 1.875: 240 x 2^-7");
    expect((real)1.875, 119, 0x7e, recipes[1], "FLOOR, 1.875: 480, saturated");
    expect((real)0x1.fffffep127, 247, 0x78, recipes[0], "RCEIL, the largest float32");
    expect((real)0x1.fffffep127, 246, 0x7e, recipes[1], "FLOOR, the largest float32");
    expect((real)0x1.cp-119, 0, 0x7e, recipes[0], "448 x 2^-127");
    expect((real)0x1.c00002p-119, 0, 0x7e, recipes[0], "the exception of RCEIL");
    expect((real)0x1.c00004p-119, 1, 0x76, recipes[0], "the next float32");
#ifdef F64
    expect(1 + 0.75 + 0x1p-30, 119, 0x7e, recipes[0], "a double is rounded to float32 first");
    expect(1e300, 255, 0x7f, recipes[0], "too large for float32");
#endif
    release_all();
}

// --- Chunks of 128 ---

static void test_align(void) {
    static const int64_t widths[] = {32, 64, 96, 128, 160, 192, 224, 256, 544, 1408};
    for (int w = 0; w < COUNT(widths); w++) {
        real* x = wild_tensor(67, widths[w], 20 + w);
        for (int64_t i = 0; i < 67 * widths[w]; i += 1 + draw(30, i, 3000)) x[i] = i % 2 ? INFINITY : NAN;
        check_quantize(x, 67, widths[w], "chunks");
        release_all();
    }
    // One NaN makes its chunk NaN and nothing else. The trailing 64 elements are a chunk of their own.
    real* x = filled(320, 1);
    x[140] = NAN, x[256] = 1024;
    Cast c = {.x = x, .rows = 1, .columns = 320, .recipe = {MX_RCEIL, 128}};
    run_quantize(&c);
    static const uint8_t want[16] = {119, 119, 119, 119, 255, 255, 255, 255, 129, 129};
    CHECK_BYTES(c.scale, want, 16, "a chunk of NaN");
    for (int i = 0; i < 320; i++)
        CHECK(c.q[i] == (i < 128 ? 0x78 : i < 256 ? 0x7f : i == 256 ? 0x78 : 0x28), "byte %d is %#x", i, c.q[i]);
    release_all();
}

// --- Tiles ---

typedef struct {
    const real* x;
    int64_t count, rows, columns;
    MxRecipe recipe;
    uint8_t *q, *q_transposed, *scale;
} Matrices;

static void run_tiles(void* arg) {
    Matrices* m = arg;
    Ctx* ctx = ctx_create(0);
    m->q = poisoned_bytes(m->count * m->rows * m->columns);
    m->q_transposed = poisoned_bytes(m->count * m->rows * m->columns);
    m->scale = poisoned_bytes(m->count * tiles_of(m->rows) * tiles_of(m->columns));
    mx_quantize_tiles(m->q, m->q_transposed, m->scale, m->x, m->count, m->rows, m->columns, m->recipe.scale, ctx);
    ctx_destroy(ctx);
}

static void test_tiles(void) {
    for (int i = 0; i < COUNT(matrices) * 2; i++) {
        const int64_t* s = matrices[i / 2];
        int64_t count = s[0], rows = s[1], columns = s[2], n = count * rows * columns, tc = tiles_of(columns);
        real* x = wild_tensor(count * rows, columns, 50);
        x[n / 2] = i % 4 ? 0 : NAN;
        Matrices m = {.x = x, .count = count, .rows = rows, .columns = columns, .recipe = recipes[i % 2]};
        check_threads(run_tiles, &m);
        uint8_t *q = kept_bytes(n), *turned = kept_bytes(n), *scale = kept_bytes(count * tiles_of(rows) * tc);
        for (int64_t j = 0; j < n; j++) {
            int64_t e = j / (rows * columns), r = j / columns % rows, c = j % columns, r0 = r / 128 * 128;
            int64_t c0 = c / 128 * 128, nr = rows - r0 < 128 ? rows - r0 : 128;
            int64_t nc = columns - c0 < 128 ? columns - c0 : 128,
                    tile = (e * tiles_of(rows) + r0 / 128) * tc + c0 / 128;
            if (r == r0 && c == c0)
                scale[tile] = (uint8_t)oracle_scale(oracle_amax(x + j, columns, nr, nc), m.recipe.scale);
            q[j] = turned[(e * columns + c) * rows + r] = oracle_byte(x[j], scale[tile]);
        }
        CHECK_BYTES(m.scale, scale, count * tiles_of(rows) * tc, "tiles %d, scales", i);
        CHECK_BYTES(m.q, q, n, "tiles %d, bytes", i);
        CHECK_BYTES(m.q_transposed, turned, n, "tiles %d, transposed bytes", i);
        release_all();
    }
}

// --- Row-wise and column-wise at once ---

typedef struct {
    const real* x;
    int64_t rows, columns, length;
    int32_t mode;
    uint8_t *q, *scale, *q_channels, *scale_channels;
} Both;

static void run_both(void* arg) {
    Both* b = arg;
    Ctx* ctx = ctx_create(0);
    b->q = poisoned_bytes(b->rows * b->columns), b->scale = poisoned_bytes(b->rows * mx_stride(b->columns));
    b->q_channels = poisoned_bytes(b->columns * b->length);
    b->scale_channels = poisoned_bytes(b->length / 128 * b->columns);
    mx_quantize_both((MxBytes){b->q, b->scale}, (MxBytes){b->q_channels, b->scale_channels}, b->x, b->length, b->rows,
                     b->columns, b->mode, ctx);
    ctx_destroy(ctx);
}

// The column-wise result equals that of the rows of x transposed, filled up with zeros to whole chunks. Everything
// behind stays unchanged.
static void test_both(void) {
    static const int64_t shapes[][2] = {{1, 32}, {127, 96}, {128, 160}, {129, 128}, {300, 288}};
    for (int i = 0; i < COUNT(shapes) * 2; i++) {
        const int64_t rows = shapes[i / 2][0], columns = shapes[i / 2][1], used = tiles_of(rows) * 128;
        const MxRecipe recipe = {i % 2, 128};
        Both b = {.rows = rows, .columns = columns, .mode = recipe.scale};
        real *x = wild_tensor(rows, columns, 50 + i), *turned = filled(columns * used, 0);
        for (int64_t j = 0; j < rows * columns; j += 1 + draw(51, j, 4000)) x[j] = j % 2 ? -(real)INFINITY : NAN;
        for (int64_t j = 0; j < rows * columns; j++) turned[j % columns * used + j / columns] = x[j];
        b.x = x, b.length = mx_channel_length(rows, 1, BACKEND);
        check_threads(run_both, &b);

        uint8_t *q = kept_bytes(rows * columns), *scale = kept_bytes(rows * mx_stride(columns));
        oracle_quantize(q, scale, x, rows, columns, recipe);
        CHECK_BYTES(b.scale, scale, rows * mx_stride(columns), "both %d, scales along rows", i);
        CHECK_BYTES(b.q, q, rows * columns, "both %d, bytes along rows", i);

        // Column-wise.
        uint8_t *q_turned = kept_bytes(columns * used), *scale_turned = kept_bytes(columns * mx_stride(used));
        uint8_t *by_channel = poisoned_bytes(columns * b.length), *scales = poisoned_bytes(b.length / 128 * columns);
        oracle_quantize(q_turned, scale_turned, turned, columns, used, recipe);
        for (int64_t c = 0; c < columns; c++)
            for (int64_t r = 0; r < used; r++) {
                by_channel[c * b.length + r] = q_turned[c * used + r];
                scales[r / 128 * columns + c] = scale_turned[c * mx_stride(used) + r / 32];
            }
        CHECK_BYTES(b.scale_channels, scales, b.length / 128 * columns, "both %d, scales by channel", i);
        CHECK_BYTES(b.q_channels, by_channel, columns * b.length, "both %d, bytes by channel", i);
        release_all();
    }
}

// --- Dequantization and layout ---

static void test_dequantize(void) {
    uint8_t *q = kept_bytes(256 * 256), *scale = kept_bytes(256 * mx_stride(256));
    for (int i = 0; i < 256 * 256; i++)
        q[i] = (uint8_t)(i % 256), scale[i / 256 * mx_stride(256) + i % 256 / 32] = i / 256;
    real* x = poisoned(256 * 256);
    Ctx* ctx = ctx_create(0);
    mx_dequantize(x, (MxBytes){q, scale}, 256, 256, 0, ctx);
    for (int i = 0; i < 256 * 256; i++) {
        float want = (float)oracle_value(q[i], i / 256), got = (float)x[i];
        CHECK(isnan(want) ? isnan(got) : !memcmp(&got, &want, 4), "byte %#x scale %d is %g, not %g", i % 256, i / 256,
              got, want);
    }
    // A dequantized value is within half a step of 3 bits of mantissa, or of the smallest step.
    real* from = wild_tensor(64, 352, 70);
    Cast c = {.x = from, .rows = 64, .columns = 352, .recipe = {MX_RCEIL, 128}};
    run_quantize(&c);
    real* back = poisoned(64 * 352);
    mx_dequantize(back, (MxBytes){c.q, c.scale}, 64, 352, 0, ctx);
    for (int64_t i = 0; i < 64 * 352; i++) {
        double step = pow(2, c.scale[i / 352 * mx_stride(352) + i % 352 / 32] - 127 - 10);
        CHECK(fabs(back[i] - from[i]) <= fmax(fabs(from[i]) / 16, step), "%g came back as %g", from[i], back[i]);
    }
    ctx_destroy(ctx);
    release_all();
}

// The sum of the old contents and the dequantized value, exactly.
static void test_dequantize_add(void) {
    enum { ROWS = 7, COLUMNS = 96 };
    real *from = wild_tensor(ROWS, COLUMNS, 71), *before = random_tensor(ROWS * COLUMNS, 72);
    Cast c = {.x = from, .rows = ROWS, .columns = COLUMNS, .recipe = {MX_RCEIL, 1}};
    run_quantize(&c);
    real *value = poisoned(ROWS * COLUMNS), *sum = poisoned(ROWS * COLUMNS);
    Ctx* ctx = ctx_create(0);
    mx_dequantize(value, (MxBytes){c.q, c.scale}, ROWS, COLUMNS, 0, ctx);
    memcpy(sum, before, sizeof(real) * ROWS * COLUMNS);
    mx_dequantize(sum, (MxBytes){c.q, c.scale}, ROWS, COLUMNS, 1, ctx);
    for (int i = 0; i < ROWS * COLUMNS; i++)
        CHECK(sum[i] == before[i] + value[i], "%g + %g is %g", before[i], value[i], sum[i]);
    ctx_destroy(ctx);
    free(before);
    release_all();
}

// --- Fake quantization ---

// Checks n values, `step` apart, against the oracle's quantization of as many elements of x.
static void check_rounded(const real* got, const real* x, int64_t step, int64_t n, MxRecipe recipe, const char* what) {
    const int64_t whole = (n + 31) / 32 * 32;
    real* from = host_alloc(whole * sizeof(real));
    uint8_t *q = host_alloc(whole), *scale = host_alloc(mx_stride(whole));
    for (int64_t k = 0; k < whole; k++) from[k] = k < n ? x[k * step] : 0;
    oracle_quantize(q, scale, from, 1, whole, recipe);
    for (int64_t k = 0; k < n; k++) {
        float want = (float)oracle_value(q[k], scale[k / 32]), is = (float)got[k * step];
        CHECK(isnan(want) ? isnan(is) : is == want, "%s: element %lld is %g, not %g", what, (long long)k, is, want);
    }
    free(from), free(q), free(scale);
}

static real* with_specials(int64_t rows, int64_t columns, uint32_t stream) {
    real* x = wild_tensor(rows, columns, stream);
    for (int64_t j = 0; j < rows * columns; j += 1 + draw(stream, j, 9000)) x[j] = j % 2 ? -(real)INFINITY : NAN;
    return x;
}

static void test_round_rows(void) {
    enum { ROWS = 7, COLUMNS = 352 };
    Ctx* ctx = ctx_create(0);
    for (int i = 0; i < COUNT(recipes); i++) {
        real *x = with_specials(ROWS, COLUMNS, 85 + i), *out = poisoned(ROWS * COLUMNS);
        mx_round_rows(out, x, ROWS, COLUMNS, recipes[i], ctx);
        for (int r = 0; r < ROWS; r++)
            check_rounded(out + r * COLUMNS, x + r * COLUMNS, 1, COLUMNS, recipes[i], "a row");
        mx_round_rows(x, x, ROWS, COLUMNS, recipes[i], ctx);
        CHECK(!memcmp(x, out, sizeof(real) * ROWS * COLUMNS), "in place the result is another");
    }
    ctx_destroy(ctx);
    release_all();
}

// The columns of each group, and of all rows as one group. The last blocks are short.
static void test_round_columns(void) {
    enum { GROUPS = 6, COLUMNS = 64 };
    static const int32_t rows_of[GROUPS] = {1, 0, 32, 127, 300, 45};
    int64_t start[GROUPS + 1] = {0};
    int32_t rows[GROUPS];
    for (int e = 0; e < GROUPS; e++) rows[e] = rows_of[e], start[e + 1] = start[e] + rows[e];
    const Ragged groups = {.El = GROUPS, .capacity = start[GROUPS], .group_start = start, .group_rows = rows};
    const Ragged all = {.El = 1, .capacity = start[GROUPS]};
    Ctx* ctx = ctx_create(0);
    for (int i = 0; i < COUNT(recipes); i++) {
        const int64_t n = start[GROUPS] * COLUMNS;
        real *x = with_specials(start[GROUPS], COLUMNS, 80 + i), *out = poisoned(n);
        mx_round_columns(out, x, all, COLUMNS, recipes[i], ctx);
        for (int c = 0; c < COLUMNS; c++)
            check_rounded(out + c, x + c, COLUMNS, start[GROUPS], recipes[i], "a column of all rows");
        memcpy(out, x, sizeof(real) * n);
        mx_round_columns(out, out, groups, COLUMNS, recipes[i], ctx);
        for (int e = 0; e < GROUPS; e++)
            for (int64_t at = start[e] * COLUMNS; at < (start[e] + (rows[e] > 0)) * COLUMNS; at++)
                check_rounded(out + at, x + at, COLUMNS, rows[e], recipes[i], "a column of a group");
    }
    ctx_destroy(ctx);
    release_all();
}

// Along the rows, and down the columns with the matrices transposed.
static void test_round_weight(void) {
    Ctx* ctx = ctx_create(0);
    for (int i = 0; i < COUNT(matrices) * 2; i++) {
        const int64_t *s = matrices[i / 2], count = s[0], rows = s[1], columns = s[2], n = count * rows * columns;
        const MxRecipe recipe = recipes[i % 2];
        real *x = with_specials(count * rows, columns, 40), *out = poisoned(n), *turned = poisoned(n);
        real* back = kept_bytes(n * sizeof(real));
        mx_round_weight(out, turned, x, count, rows, columns, recipe.scale, ctx);
        for (int64_t j = 0; j < n; j++) {
            int64_t m = j / (rows * columns), r = j / columns % rows, c = j % columns;
            back[j] = turned[(m * columns + c) * rows + r];
        }
        for (int64_t r = 0; r < count * rows; r++)
            check_rounded(out + r * columns, x + r * columns, 1, columns, recipe, "a row of a weight");
        for (int64_t m = 0; m < count; m++)
            for (int64_t at = m * rows * columns; at < m * rows * columns + columns; at++)
                check_rounded(back + at, x + at, columns, rows, recipe, "a column of a weight");
        release_all();
    }
    ctx_destroy(ctx);
}

static void test_blackwell_offset(void) {
    for (int64_t R = 128; R <= 384; R += 128)
        for (int64_t C = 4; C <= 12; C += 4) {
            uint8_t* seen = kept_bytes(R * C);
            int64_t wrong = 0;
            for (int64_t i = 0; i < R * C; i++) {
                int64_t at = mx_blackwell_offset(i / C, i % C, C);
                wrong += at < 0 || at >= R * C || seen[at]++;
            }
            CHECK(wrong == 0, "%lld x %lld: %lld scales share a place", (long long)R, (long long)C, (long long)wrong);
        }
    // Offsets by hand.
    static const int64_t by_hand[][4] = {// row, block, blocks, offset
                                         {0, 0, 4, 0},    {0, 3, 4, 3},      {1, 0, 4, 16},     {31, 3, 4, 499},
                                         {32, 0, 4, 4},   {127, 3, 4, 511},  {0, 4, 8, 512},    {128, 0, 8, 1024},
                                         {70, 6, 7, 618}, {128, 0, 5, 1024}, {300, 9, 10, 4293}};
    for (int i = 0; i < COUNT(by_hand); i++) {
        int64_t at = mx_blackwell_offset(by_hand[i][0], by_hand[i][1], by_hand[i][2]);
        CHECK(at == by_hand[i][3], "(%lld, %lld) lies at %lld", (long long)by_hand[i][0], (long long)by_hand[i][1],
              (long long)at);
    }
    release_all();
}

// --- Goldens ---

static void* golden_bytes(const SafeTensors* st, const char* name, int64_t bytes) {
    const StTensor* t = st_find(st, name);
    void* out = kept_bytes(bytes);
    CHECK(t && t->bytes == bytes, "%s is missing or has another size", name);
    if (t && t->bytes == bytes) CHECK(st_read(st, t, 0, bytes / st_dtype_bytes(t->dtype), out) == 0, "%s", name);
    return out;
}

static void test_golden(void) {
    enum { ROWS = 64, COLUMNS = 96 };
    static const char* inputs[] = {"bf16", "float32"};
    static const char* modes[] = {"rceil", "floor"};
    char error[256], name[64];
    SafeTensors* st = st_open("tests/golden/mxfp8.safetensors", error, sizeof(error));
    CHECK(st, "%s", error);
    if (!st) return;
    Ctx* ctx = ctx_create(0);
    for (int input = 0; input < 2; input++) {
        real* x = kept_bytes(ROWS * COLUMNS * sizeof(real));
        snprintf(name, sizeof(name), "%s.x", inputs[input]);
        if (input == 0) {
            uint16_t* h = golden_bytes(st, name, ROWS * COLUMNS * 2);
            for (int i = 0; i < ROWS * COLUMNS; i++) x[i] = from_bits((uint32_t)h[i] << 16);
        } else {
            float* f = golden_bytes(st, name, ROWS * COLUMNS * 4);
            for (int i = 0; i < ROWS * COLUMNS; i++) x[i] = f[i];
        }
        for (int mode = 0; mode < 2; mode++)
            for (int down = 0; down < 2; down++) {
                // Along rows: bytes and scales. Down the columns: the values that these stand for.
                const int64_t blocks = (down ? ROWS : COLUMNS) / 32, rows = down ? COLUMNS : ROWS;
                snprintf(name, sizeof(name), "%s.%s.%s.q", inputs[input], modes[mode], down ? "columns" : "rows");
                uint8_t* q = golden_bytes(st, name, ROWS * COLUMNS);
                snprintf(name, sizeof(name), "%s.%s.%s.scale", inputs[input], modes[mode], down ? "columns" : "rows");
                uint8_t *scales = golden_bytes(st, name, rows * blocks), *scale = kept_bytes(rows * blocks);
                if (!down) {
                    Cast c = {.x = x, .rows = ROWS, .columns = COLUMNS, .recipe = {mode, 1}};
                    run_quantize(&c);
                    for (int64_t i = 0; i < rows * blocks; i++) scale[i] = c.scale[i / blocks * 16 + i % blocks];
                    CHECK_BYTES(c.q, q, ROWS * COLUMNS, "%s, bytes", name);
                    CHECK_BYTES(scale, scales, rows * blocks, "%s", name);
                    continue;
                }
                real *out = poisoned(ROWS * COLUMNS), *turned = poisoned(ROWS * COLUMNS);
                mx_round_weight(out, turned, x, 1, ROWS, COLUMNS, mode, ctx);
                for (int64_t i = 0; i < ROWS * COLUMNS; i++) {
                    float want = (float)oracle_value(q[i], scales[i / 32]), got = (float)turned[i];
                    CHECK(isnan(want) ? isnan(got) : got == want, "%s: value %d is %g, not %g", name, (int)i, got,
                          want);
                }
            }
    }
    ctx_destroy(ctx);
    st_close(st);
    release_all();
}

int main(void) {
    list_e4m3();
    RUN(test_every_bf16);
    RUN(test_float32);
    RUN(test_rounding);
    RUN(test_special_values);
    RUN(test_align);
    RUN(test_round_weight);
    RUN(test_tiles);
    RUN(test_both);
    RUN(test_dequantize);
    RUN(test_round_rows);
    RUN(test_dequantize_add);
    RUN(test_round_columns);
    RUN(test_blackwell_offset);
    RUN(test_golden);
    return test_summary();
}
