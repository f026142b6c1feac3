// Wgrad of MXFP8 values on the GPU against the reference in double, on the same values. Also quantization and wgrad
// together against the slower way: rounding along tokens, then the GEMM in bf16.
//
// Tolerances are those of tests/mx/test_cuda_grouped_gemm_mx.cu, relative to the part added to dW. The tensor cores'
// short sums are off by 1.25e-4 of it in norm; 4e-4 is allowed. A single row or column of an expert's dW: 4e-3, where a
// wrong scale of one chunk is off by a good part of it. Bias: 5e-5 of a row's rms. dW is also rounded to 2^-24 of
// itself. This rounding is larger than the tolerance where little is added: a column of x or dy that is small in an
// expert's only row.
#include "grouped/grouped_gemm.h"
#include "layers/matmul.h"
#include "mx/grouped_gemm_mx.h"
#include "mx/mxfp8.h"
#include "tests/hold.cuh"
#include "tests/ragged.cuh"

static const double LINE_TOLERANCE = 4e-3, TENSOR_TOLERANCE = 4e-4, BIAS_TOLERANCE = 5e-5;

// One operand, quantized by the reference. Magnitudes change from chunk to chunk and from column to column, and some
// columns are zeros for long. Behind the last group values and scales are NaN.
struct Channels {
    int64_t C, length;
    Bytes q, scale;

    Channels(const Layout& l, Ragged reference, int64_t C, int32_t align, uint32_t stream)
        : C(C), length(round_up(l.held, 128)), q(C * length, 0x7f), scale(length / 128 * C, MX_NAN) {
        real* random = random_tensor(l.held * C, stream);
        std::vector<double> x((size_t)(l.held * C));
        for (int64_t i = 0; i < l.held * C; i++) {
            const int power = (int)(i / C / 128 * 3 % 5 + i % C % 7) - 5;
            const bool zero = i % C % 11 == 3 + i / C / 600 % 2;
            x[(size_t)i] = zero || l.expert(i / C) < 0 ? 0 : ldexp((double)random[i], power);
        }
        free(random);
        REFERENCE(mx_quantize_channels)
        ({q.host.data(), scale.host.data()}, (const floatX*)x.data(), length, reference, C, {MX_RCEIL, align},
         reference_ctx);
        q.send(), scale.send();
    }
};

// One GEMM. dW has one expert more than there are groups: its part must not be written.
struct Product {
    int64_t IC, OC;
    Layout l;
    Channels dy, x;
    R dw;
    std::vector<double> start;

    Product(const Rows& rows, int64_t IC, int64_t OC)
        : IC(IC),
          OC(OC),
          l(rows),
          dy(l, l.reference(), OC, 128, 1),
          x(l, l.reference(), IC, 512, 2),
          dw((l.El() + 1) * OC * IC, 3, 8.0),
          start(dw.host) {}
    void run(int accumulate = 1) {
        grouped_gemm_mx_wgrad(dw.dev, NULL, {dy.q.dev, dy.scale.dev}, {x.q.dev, x.scale.dev}, dy.length, l.device(), IC,
                              OC, accumulate, ctx);
    }
    // Overwrites dw on the host.
    void reference(int accumulate) {
        REFERENCE(grouped_gemm_mx_wgrad)
        ((real*)dw.ref(), NULL, {dy.q.host.data(), dy.scale.host.data()}, {x.q.host.data(), x.scale.host.data()},
         dy.length, l.reference(), IC, OC, accumulate, reference_ctx);
    }
    void reset() { dw.host = start, dw.send(); }
    // The rounded dW, beside the dW of run(0). The expert too many stays as it was.
    void check_rounding() {
        X rounded((l.El() + 1) * OC * IC, 3, 8.0);
        grouped_gemm_mx_wgrad(NULL, rounded.dev, {dy.q.dev, dy.scale.dev}, {x.q.dev, x.scale.dev}, dy.length,
                              l.device(), IC, OC, 0, ctx);
        check_rounded(rounded, dw);
    }
};

// The worst of `lines` errors, each (||got - ref|| - 2^-24 ||ref||) / ||ref - start|| over `n` elements `step` apart.
static double worst_line(const double* got, const double* ref, const double* start, int64_t lines, int64_t line_step,
                         int64_t n, int64_t step) {
    double worst = 0;
    for (int64_t line = 0; line < lines; line++) {
        double diff = 0, norm = 0, size = 0;
        for (int64_t i = 0; i < n; i++) {
            const int64_t at = line * line_step + i * step;
            diff += (got[at] - ref[at]) * (got[at] - ref[at]), norm += (ref[at] - start[at]) * (ref[at] - start[at]);
            size += ref[at] * ref[at];
        }
        const double beyond = sqrt(diff) - ldexp(sqrt(size), -24), error = beyond <= 0 ? 0 : beyond / sqrt(norm);
        if (!(error <= worst)) worst = isfinite(error) ? error : INFINITY;
    }
    return worst;
}

// dW = or += on the groups. The old contents of dW are not small.
static void compare(const Rows& rows, int64_t IC, int64_t OC, int accumulate) {
    const int before = test_failures_here;
    Product p(rows, IC, OC);
    p.run(accumulate);
    auto got = p.dw.got();
    if (!accumulate) p.check_rounding();
    p.reference(accumulate);
    const std::vector<double> zeros(p.start.size()), &added_to = accumulate ? p.start : zeros;

    // Every expert's dW as a whole, by rows and by columns, and the bias of its errors.
    const int64_t size = OC * IC, El = p.l.El();
    double along = 0, count = 0;
    for (int e = 0; e < El; e++) {
        const double *g = &got[(size_t)(e * size)], *r = &p.dw.host[(size_t)(e * size)],
                     *s = &added_to[(size_t)(e * size)];
        if (p.l.rows[e] == 0) {
            CHECK(!memcmp(g, s, (size_t)size * sizeof(double)), "dW of expert %d without rows is not %s", e,
                  accumulate ? "as before" : "0");
            continue;
        }
        const double all = worst_line(g, r, s, 1, 0, size, 1), row = worst_line(g, r, s, OC, IC, IC, 1);
        const double column = worst_line(g, r, s, IC, 1, OC, IC);
        if (getenv("TEST_ERRORS"))
            printf("    %d rows: %.3g, a row %.3g, a column %.3g\n", p.l.rows[e], all, row, column);
        CHECK(all <= TENSOR_TOLERANCE, "dW of expert %d (%d rows) is off by %g", e, p.l.rows[e], all);
        CHECK(row <= LINE_TOLERANCE, "a row of dW of expert %d (%d rows) is off by %g", e, p.l.rows[e], row);
        CHECK(column <= LINE_TOLERANCE, "a column of dW of expert %d (%d rows) is off by %g", e, p.l.rows[e], column);
        for (int64_t o = 0; o < OC; o++) {
            double norm = 0, one_way = 0;
            for (int64_t i = o * IC; i < (o + 1) * IC; i++)
                norm += (r[i] - s[i]) * (r[i] - s[i]), one_way += r[i] > s[i] ? g[i] - r[i] : r[i] - g[i];
            if (norm > 0) along += one_way / sqrt(norm / (double)IC), count += (double)IC;
        }
    }
    CHECK(fabs(along) <= BIAS_TOLERANCE * count || count < 10000, "dW is off by %g towards one side", along / count);
    CHECK(!memcmp(&got[(size_t)(El * size)], &p.start[(size_t)(El * size)], (size_t)size * sizeof(double)),
          "dW behind the last expert was written");
    if (test_failures_here > before)
        printf("    with IC %lld, OC %lld, %d experts, %lld rows, accumulate %d\n", (long long)IC, (long long)OC,
               (int)El, (long long)p.l.end, accumulate);
}

static void compare(const Rows& rows, int64_t IC, int64_t OC) {
    for (int accumulate : {0, 1}) compare(rows, IC, OC, accumulate);
}

// Widths below, at and beyond those of boxes and tiles, for every shape of work item.
static void test_small_sizes(void) {
    const int64_t sizes[] = {32, 64, 96, 128, 160, 256, 288, 416};
    for (int64_t IC : sizes)
        for (int64_t OC : sizes) compare({129, 0, 1, 130}, IC, OC);
}

// Groups that end before, at and after a chunk's end, with fewer and with more chunks than stages; experts without rows
// first, last and alone.
static void test_group_sizes(void) {
    for (int32_t n : {0, 1, 63, 127, 128, 129, 256, 257, 400, 512, 513, 700, 1500}) {
        compare({n}, 160, 288);
        compare({1, n, 128}, 288, 160);
    }
    compare({0, 1, 127, 128, 129, 0, 383, 384}, 96, 640);
    compare({0, 0, 0}, 64, 128);
}

static void test_one_takes_all(void) {
    compare({0, 0, 0, 0, 0, 1111, 0, 0}, 352, 544);
    compare({2600, 0, 0, 0}, 544, 352);
}

static void test_experts(void) {
    compare(random_rows(3, 300, 1), 192, 416);
    compare(random_rows(8, 200, 2), 416, 192);
    compare(random_rows(64, 150, 3), 288, 768);  // more tiles than SMs: blocks take several
    compare(random_rows(64, 150, 3), 160, 896);
    compare(random_rows(64, 2, 4), 64, 96);
    compare(random_rows(160, 20, 5), 96, 64);
    compare(random_rows(256, 60, 6), 160, 160);
}

static void test_model_sizes(void) {
    compare({129, 0, 300, 1}, 2048, 2816);
    compare({129, 0, 300, 1}, 1408, 2048);
    compare({0, 4000, 3, 700}, 512, 2048);  // long sums
}

// No bit depends on the run or on which blocks start late.
static void test_repeats(void) {
    Product p(random_rows(24, 400, 7), 544, 704);
    std::vector<double> first;
    for (int sms : {0, 0, 0, 16, 112}) {
        p.reset();
        {
            HeldSms held(sms);
            p.run();
            ctx_sync(ctx);
        }
        auto now = p.dw.got();
        if (first.empty()) first = now;
        CHECK(!memcmp(first.data(), now.data(), now.size() * sizeof(double)), "dW differs where %d SMs are held", sms);
    }
}

// NaN values and scales reach their row or column of the dW of their expert, and nothing else.
static void test_nan_stays(void) {
    Product p({130, 77, 300, 0, 129}, 288, 352);
    const int64_t IC = p.IC, OC = p.OC, length = p.dy.length;
    p.dy.q.host[(size_t)(70 * length + p.l.start[2] + 200)] = 0x7f;           // expert 2, row 70 of dW
    p.x.q.host[(size_t)(280 * length + p.l.start[1])] = 0xff;                 // expert 1, column 280
    p.dy.scale.host[(size_t)((p.l.start[4] / 128 + 1) * OC + 351)] = MX_NAN;  // expert 4, row 351
    p.x.scale.host[(size_t)(p.l.start[0] / 128 * IC + 129)] = MX_NAN;         // expert 0, column 129
    p.dy.q.send(), p.x.q.send(), p.dy.scale.send(), p.x.scale.send();
    p.run();
    auto got = p.dw.got();
    int64_t wrong = 0;
    for (int64_t i = 0; i < p.l.El() * OC * IC; i++) {
        const int64_t e = i / (OC * IC), o = i / IC % OC, c = i % IC;
        const bool nan = (e == 2 && o == 70) || (e == 1 && c == 280) || (e == 4 && o == 351) || (e == 0 && c == 129);
        wrong += isnan(got[(size_t)i]) != nan;
    }
    CHECK(wrong == 0, "%lld elements are NaN that should not be, or the reverse", (long long)wrong);
}

// From rows in bf16 to dW: up to the short sums as exact as the GEMM of dequantized values. The values of dy are the
// same to the bit. The values of x are rounded in chunks there and in runs here. With RCEIL this matters only to
// elements below 2^-14 of a run's largest.
static void test_against_values(void) {
    Layout l({300, 0, 1, 128, 2000, 77});
    const int64_t IC = 416, OC = 672, size = l.El() * OC * IC;
    RowBuffer x(l, IC, 1), dy(l, OC, 2);
    R by_values(size), by_bytes(size);
    for (R* dw : {&by_values, &by_bytes}) {
        std::fill(dw->host.begin(), dw->host.end(), 0.0);
        dw->send();
    }

    // Quantized column-wise, then the rows rounded in place.
    Ragged r = l.device();
    r.capacity = l.end;
    Bytes qx(IC * l.end, 0), sx(l.end / 128 * IC, 0), qdy(OC * l.end, 0), sdy(l.end / 128 * OC, 0);
    mx_quantize_channels({qx.dev, sx.dev}, x.dev, l.end, r, IC, {MX_RCEIL, 512}, ctx);
    mx_quantize_channels({qdy.dev, sdy.dev}, dy.dev, l.end, r, OC, {MX_RCEIL, 128}, ctx);
    grouped_gemm_mx_wgrad(by_bytes.dev, NULL, {qdy.dev, sdy.dev}, {qx.dev, sx.dev}, l.end, r, IC, OC, 1, ctx);
    mx_round_columns(x.dev, x.dev, r, IC, {MX_RCEIL, 128}, ctx);
    mx_round_columns(dy.dev, dy.dev, r, OC, {MX_RCEIL, 128}, ctx);
    grouped_gemm_wgrad(by_values.dev, NULL, dy.dev, x.dev, ALL_BY_ROW, r, IC, OC, 1, ctx);
    by_bytes.host = by_values.got();
    CHECK_CLOSE(by_bytes, TENSOR_TOLERANCE);
}

// Several matrices over the rows of one group: the same bits as one matrix after another, written or added to, and
// nothing else.
static void compare_matrices(int32_t rows, std::vector<std::pair<int64_t, int64_t>> sizes) {
    Layout l({rows});
    std::vector<MxMatrix> list;
    int64_t of_dy = 0, of_x = 0, all = 0;
    for (auto [OC, IC] : sizes) {
        list.push_back({NULL, OC, IC, of_dy, of_x});
        of_dy += OC, of_x += IC, all += OC * IC + 32;
    }

    // Column-wise operands of all matrices, one behind the other. Both outputs have gaps between the matrices.
    const int64_t length = round_up(l.held, 128);
    Bytes qdy(of_dy * length, 0x7f), sdy(of_dy * length / 128, MX_NAN), qx(of_x * length, 0x7f),
        sx(of_x * length / 128, MX_NAN);
    for (size_t i = 0; i < list.size(); i++) {
        const MxMatrix& m = list[i];
        Channels dy(l, l.reference(), m.OC, 128, 2 * i + 1), x(l, l.reference(), m.IC, 512, 2 * i + 2);
        std::copy(dy.q.host.begin(), dy.q.host.end(), qdy.host.begin() + m.dy * length);
        std::copy(dy.scale.host.begin(), dy.scale.host.end(), sdy.host.begin() + m.dy * (length / 128));
        std::copy(x.q.host.begin(), x.q.host.end(), qx.host.begin() + m.x * length);
        std::copy(x.scale.host.begin(), x.scale.host.end(), sx.host.begin() + m.x * (length / 128));
    }
    // All matrices in one call, and one by one.
    for (Bytes* b : {&qdy, &sdy, &qx, &sx}) b->send();
    Ragged r = l.device();
    r.capacity = rows;
    for (int accumulate : {0, 1}) {
        R together(all, 5, 8.0), alone(all, 5, 8.0);
        for (R* dw : {&together, &alone}) {
            real* at = dw->dev;
            for (MxMatrix& m : list) m.dw = at, at += m.OC * m.IC + 32;
            auto call = dw == &together ? gemm_mx_wgrads : mx_one_by_one;
            call(list.data(), (int)list.size(), {qdy.dev, sdy.dev}, {qx.dev, sx.dev}, length, r, accumulate, ctx);
        }
        const auto a = together.got(), b = alone.got();
        CHECK(!memcmp(a.data(), b.data(), a.size() * sizeof(double)),
              "%d rows, %zu matrices, accumulate %d: together is not one after another", rows, list.size(), accumulate);
    }
}

static void test_matrices(void) {
    for (int32_t rows : {1, 128, 300, 1000}) {
        compare_matrices(rows, {{160, 96}});
        compare_matrices(rows, {{32, 416}, {416, 32}, {288, 128}, {128, 160}});
        compare_matrices(rows, {{128, 64}, {256, 256}, {96, 544}});
    }
    compare_matrices(3000, {{2048, 2048}, {4096, 512}, {3072, 2048}});
    compare_matrices(513, {{2048, 2816}, {5632, 2048}});
}

// `small` is for compute-sanitizer.
int main(int argc, char** argv) {
    if (device_available()) open_contexts(matmul_workspace());
    if (argc > 1 && !strcmp(argv[1], "small")) {
        compare({129, 0, 1, 130}, 96, 160);
        compare({1, 700, 128}, 160, 288);
        compare_matrices(300, {{160, 96}, {96, 288}});
        return test_failures_here != 0;
    }
    if (ctx && grouped_gemm_mx_missing(ctx)) {
        SKIP(grouped_gemm_mx_wgrad, "this GPU has no tensor cores for MXFP8");
        return test_summary();
    }
    RUN(test_small_sizes);
    RUN(test_group_sizes);
    RUN(test_one_takes_all);
    RUN(test_experts);
    RUN(test_model_sizes);
    RUN(test_repeats);
    RUN(test_nan_stays);
    RUN(test_against_values);
    RUN(test_matrices);
    return test_summary();
}
