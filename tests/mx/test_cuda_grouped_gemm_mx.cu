// The grouped GEMMs of MXFP8 values on the GPU against the reference in double, on the same values.
//
// Tolerances. In one step the tensor cores add 32 products to the running sum, with about 14 bits below the largest of
// them. So a chunk of 128 is off by some 2^-13 of its larger partial sums: about 1.25e-4 of the whole output in norm.
// Allowed: 4e-4, and for a single row, where sums may cancel, 4e-3 (a wrong scale is off by half of its chunk at
// least). y is rounded to bf16 after that: 2^-9 of an element at most, or 1.7e-3 of a norm. The bits that are cut off
// must not bias the result: the mean error along the sign of the output stays under 5e-5 of a row's rms. Rounding to
// bf16 has no bias, but noise: its mean over 100,000 elements or more is below 1.1e-5 (three standard deviations).
#include <cuda_fp8.h>

#include "mx/grouped_gemm_mx.h"
#include "mx/mxfp8.h"
#include "tests/ragged.cuh"

static const double ROW_TOLERANCE = 4e-3 + 0x1p-9, TENSOR_TOLERANCE = 4e-4 + 1.7e-3, BIAS_TOLERANCE = 5e-5 + 1.1e-5;

// Quantizes a block of elements (rows x columns inside a matrix) with one scale, RCEIL. Returns the scale.
static uint8_t quantize(uint8_t* q, const real* x, int64_t rows, int64_t columns, int64_t stride) {
    double most = 0;
    // The scale: the smallest power of two that brings the largest element to at most 448.
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) most = std::max(most, fabs((double)x[r * stride + c]));
    int scale = most > 0 ? std::max(0, (int)ceil(log2(most / 448)) + 127) : 0;

    // The elements divided by the scale, rounded.
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++)
            q[r * stride + c] =
                __nv_cvt_float_to_fp8((float)ldexp((double)x[r * stride + c], 127 - scale), __NV_SATFINITE, __NV_E4M3);
    return (uint8_t)scale;
}

// Operands of one GEMM. Rows of x are normal numbers; each row and each of its chunks has its own magnitude. In all
// other rows (pad rows, rows behind the last expert) values and scales are NaN.
struct Operands {
    int64_t IC, OC, chunks, columns;  // columns: of tiles
    Bytes x, x_scale, w, w_scale;
    int64_t stride_o, stride_c;

    Operands(const Layout& l, int64_t IC, int64_t OC, bool transposed_scales)
        : IC(IC),
          OC(OC),
          chunks(ceil_div(IC, 128)),
          columns(ceil_div(OC, 128)),
          x(l.held * IC, 0x7f),
          x_scale(l.held * mx_stride(IC), MX_NAN),
          w(l.El() * OC * IC, 0x7f),
          w_scale(l.El() * columns * chunks, MX_NAN) {
        stride_o = transposed_scales ? 1 : chunks, stride_c = transposed_scales ? columns : 1;

        // x: each chunk of a token's row has its own magnitude. Its scale is stored four times (a byte for each block
        // of 32), with zeros for blocks beyond the width.
        real* values = random_tensor(std::max(l.held, l.El() * OC) * IC, 1);
        for (int e = 0; e < l.El(); e++)
            for (int64_t r = l.start[e]; r < l.start[e] + l.rows[e]; r++)
                for (int64_t c = 0; c < chunks; c++) {
                    const int64_t depth = std::min<int64_t>(128, IC - c * 128), at = r * IC + c * 128;
                    const double u = random_uniform(7, (uint32_t)c, (uint64_t)r);
                    for (int64_t k = 0; k < depth; k++) values[at + k] *= (real)exp2((r % 7) - 3 + 2 * u);
                    uint8_t s = quantize(&x.host[(size_t)at], values + at, 1, depth, IC);
                    std::fill_n(&x_scale.host[(size_t)(r * mx_stride(IC) + c * 4)], depth / 32, s);
                    std::fill_n(&x_scale.host[(size_t)(r * mx_stride(IC) + c * 4 + depth / 32)], 4 - depth / 32,
                                (uint8_t)0);
                }
        free(values);

        // W: each tile has its own magnitude and one scale.
        values = random_tensor(l.El() * OC * IC, 2);
        for (int e = 0; e < l.El(); e++)
            for (int64_t o = 0; o < columns; o++)
                for (int64_t c = 0; c < chunks; c++) {
                    const int64_t at = (e * OC + o * 128) * IC + c * 128;
                    const int64_t height = std::min<int64_t>(128, OC - o * 128);
                    const int64_t depth = std::min<int64_t>(128, IC - c * 128);
                    for (int64_t j = 0; j < height; j++)
                        for (int64_t k = 0; k < depth; k++) values[at + j * IC + k] *= exp2f((float)((o + 2 * c) % 5));
                    w_scale.host[(size_t)(e * columns * chunks + o * stride_o + c * stride_c)] =
                        quantize(&w.host[(size_t)at], values + at, height, depth, IC);
                }
        free(values);
        send();
    }
    void send() { x.send(), x_scale.send(), w.send(), w_scale.send(); }
    void run(X& y, Layout& l) {
        grouped_gemm_mx(y.dev, {x.dev, x_scale.dev}, {w.dev, w_scale.dev, stride_o, stride_c}, l.device(), IC, OC, ctx);
    }
    void reference(X& y, Layout& l) {
        REFERENCE(grouped_gemm_mx)
        (y.ref(), {x.host.data(), x_scale.host.data()}, {w.host.data(), w_scale.host.data(), stride_o, stride_c},
         l.reference(), IC, OC, reference_ctx);
    }
};

// Every token's row close, every pad row zero, everything behind unchanged.
static void compare(const Rows& rows, int64_t IC, int64_t OC, bool transposed_scales = false) {
    int before = test_failures_here;
    Layout l(rows);
    Operands p(l, IC, OC, transposed_scales);

    X y(l.held * OC);
    p.run(y, l);
    p.reference(y, l);
    check_rows("y", y, l, OC, ROW_TOLERANCE, TENSOR_TOLERANCE);

    // The bias of the errors.
    auto got = y.got();
    double along = 0;
    int64_t count = 0;
    for (int64_t row = 0; row < l.end; row++) {
        if (l.expert(row) < 0) continue;
        double norm = 0, row_along = 0;
        for (int64_t c = row * OC; c < (row + 1) * OC; c++) {
            const double r = y.host[(size_t)c], d = got[(size_t)c] - r;
            norm += r * r, row_along += r > 0 ? d : -d, count++;
        }
        along += row_along / sqrt(norm / (double)OC);
    }

    const double bias = count ? fabs(along) / (double)count : 0;
    if (getenv("TEST_ERRORS")) printf("    bias %.3g of %.3g\n", bias, BIAS_TOLERANCE);
    CHECK(bias <= BIAS_TOLERANCE || count < 100000, "y is off by %g towards one side", bias);
    if (test_failures_here > before)
        printf("    with IC %lld, OC %lld, %d experts, %lld rows\n", (long long)IC, (long long)OC, l.El(),
               (long long)l.end);
}

// Trailing chunks of every depth, and widths below, at and beyond that of a tile of W.
static void test_small_sizes(void) {
    for (int64_t IC : {32, 64, 96, 128, 160, 224, 480})
        for (int64_t OC : {8, 24, 64, 120, 128, 136, 264, 392}) compare({129, 0, 1, 130}, IC, OC, OC == 264);
}

// Groups that end before, at and after a multiple of 64, 128 and 256 rows; experts without rows first, last and alone.
static void test_group_sizes(void) {
    for (int32_t n : {0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 400, 512}) {
        compare({n}, 160, 264);
        compare({1, n, 128}, 288, 136);
    }
    compare({0, 1, 127, 128, 129, 0, 383, 384}, 96, 640);
    compare({0, 0, 0}, 64, 128);
}

static void test_one_takes_all(void) {
    compare({0, 0, 0, 0, 0, 1111, 0, 0}, 352, 520);
    compare({2600, 0, 0, 0}, 544, 328);
}

static void test_experts(void) {
    compare(random_rows(3, 300, 1), 192, 392);
    compare(random_rows(8, 200, 2), 416, 200, true);
    compare(random_rows(64, 150, 3), 288, 768);  // more tiles than SMs: blocks take several
    compare(random_rows(64, 150, 3), 160, 904);
    compare(random_rows(64, 2, 4), 64, 96);
    compare(random_rows(160, 20, 5), 96, 64);
}

static void test_model_sizes(void) {
    compare({129, 0, 300, 1}, 2048, 2816);
    compare({129, 0, 300, 1}, 1408, 2048, true);
    compare({257, 1, 0, 100}, 2048, 1408);
    compare({140}, 5120, 3072);
    compare({1, 200}, 7168, 2048);
}

static void test_repeats(void) {
    Layout l(random_rows(24, 400, 7));
    Operands p(l, 544, 712, false);
    X y(l.held * p.OC);
    CHECK_REPEATS(y, p.run(y, l));
}

// NaN values and scales of x reach their rows. Those of W reach the columns and tiles of their expert. Nothing else
// becomes NaN.
static void test_nan_stays(void) {
    // NaN in x: a value of one row, a scale of another row. NaN in W: a value in a column of expert 1, a scale of the
    // last columns of expert 0.
    Layout l({130, 77, 300, 0, 129});
    Operands p(l, 288, 328, false);
    const int64_t IC = p.IC, OC = p.OC, row = l.start[2] + 70, scale_row = l.start[4] + 128, column = 200;
    p.x.host[(size_t)(row * IC + 131)] = 0x7f;
    p.x_scale.host[(size_t)(scale_row * mx_stride(IC) + 8)] = MX_NAN;
    p.w.host[(size_t)((1 * OC + column) * IC + 5)] = 0xff;
    p.w_scale.host[(size_t)(0 * p.columns * p.chunks + 2 * p.stride_o + 1)] = MX_NAN;  // columns from 256 on
    p.send();

    // These and no others are NaN.
    X y(l.held * OC);
    p.run(y, l);
    auto got = y.got();
    int64_t wrong = 0;
    for (int e = 0; e < l.El(); e++)
        for (int64_t i = l.start[e]; i < l.start[e] + l.rows[e]; i++)
            for (int64_t o = 0; o < OC; o++) {
                bool nan = i == row || i == scale_row || (e == 1 && o == column) || (e == 0 && o >= 256);
                wrong += isnan(got[(size_t)(i * OC + o)]) != nan;
            }
    CHECK(wrong == 0, "%lld elements are NaN that should not be, or the reverse", (long long)wrong);
}

// All scales, from 2^-127 to 2^127. The product of two may leave float32's range (mx/grouped_gemm_mx.h).
static void test_extreme_scales(void) {
    const int scales[] = {0, 1, 2, 100, 104, 105, 106, 126, 127, 128, 200, 227, 247, 254};
    const int n = (int)(sizeof(scales) / sizeof(scales[0]));
    Layout l({n});
    for (int sw : scales) {
        // Every row of x has another scale, and W has this one.
        Operands p(l, 128, 64, false);
        for (int r = 0; r < n; r++) std::fill_n(&p.x_scale.host[(size_t)(r * mx_stride(128))], 4, (uint8_t)scales[r]);
        p.w_scale.host[0] = (uint8_t)sw;
        p.send();
        X y(l.held * p.OC);
        p.run(y, l);
        p.reference(y, l);
        auto got = y.got();

        // NaN where the scales' product is beyond float32. Near the reference where it is well inside.
        for (int r = 0; r < n; r++) {
            double diff = 0, norm = 0, most = 0;
            int64_t nans = 0;
            for (int64_t i = r * p.OC; i < (r + 1) * p.OC; i++) {
                const double d = got[(size_t)i] - y.host[(size_t)i];
                diff += d * d, norm += y.host[(size_t)i] * y.host[(size_t)i], nans += isnan(got[(size_t)i]);
                most = std::max(most, fabs(y.host[(size_t)i]));
            }
            if (scales[r] + sw - 254 >= 128)
                CHECK(nans == p.OC, "scales %d, %d: %lld of %lld are NaN", scales[r], sw, (long long)nans,
                      (long long)p.OC);
            else if (most < 0x1p127)
                CHECK(sqrt(diff) <= ROW_TOLERANCE * sqrt(norm) + 0x1p-120, "scales %d, %d: off by %g of %g", scales[r],
                      sw, sqrt(diff), sqrt(norm));
        }
    }
}

// `small` is for compute-sanitizer.
int main(int argc, char** argv) {
    if (device_available()) open_contexts(1 << 20);
    if (argc > 1 && !strcmp(argv[1], "small")) {
        compare({129, 0, 1, 130}, 96, 136);
        compare({1, 300, 128}, 160, 264);
        return test_failures_here != 0;
    }
    if (ctx && ctx->capability != 90) {
        SKIP(grouped_gemm_mx, "the kernel is Hopper's; what Blackwell has is tests/mx/test_cuda_blackwell.cu's");
        return test_summary();
    }
    RUN(test_small_sizes);
    RUN(test_group_sizes);
    RUN(test_one_takes_all);
    RUN(test_experts);
    RUN(test_model_sizes);
    RUN(test_repeats);
    RUN(test_nan_stays);
    RUN(test_extreme_scales);
    return test_summary();
}
