// The grouped products on the GPU against the reference in double. The reference holds the groups without pad rows, the
// GPU at starts that are multiples of 128: rows are compared one by one.
//
// Tolerances. Outputs in bf16 (forward, dgrad), 8 significant bits: rounding moves an element by at most 2^-8 of
// itself, so no row may be off by more than 2^-8 in norm, with 1e-5 for the float32 sums; over a whole tensor the
// rounding errors, even over half a unit of the last place, come to 1.5e-3 .. 1.7e-3: 2e-3 from 1000 elements on.
// Outputs in float32 (wgrad): the tensor cores add 16 products at a time and cut the running sum off at 24 bits, at
// most 2^-23 of it each time, and partial sums are no larger than the final one on average; dW is then added with one
// rounding: (rows / 16 + 4) * 2^-23 for every expert.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "moe/grouped_gemm.h"
#include "tests/cuda.cuh"
#include "tests/hold.cuh"

typedef std::vector<int32_t> Rows;

static const double ROW_TOLERANCE = 0x1p-8 + 1e-5, TENSOR_TOLERANCE = 2e-3;
static double weight_tolerance(int64_t rows) { return ((double)rows / 16 + 4) * 0x1p-23; }

// The same groups in both layouts.
struct Layout {
    Rows rows;
    std::vector<int64_t> start, reference_start;
    int64_t capacity, used, true_rows;
    I64 device_start;
    I32 device_rows;

    explicit Layout(const Rows& r) : rows(r), device_start((int64_t)r.size() + 1), device_rows((int64_t)r.size()) {
        int64_t at = 0, reference_at = 0;
        for (int32_t n : rows) {
            start.push_back(at), reference_start.push_back(reference_at);
            at += ceil_div(n, 128) * 128, reference_at += n;
        }
        start.push_back(at), reference_start.push_back(reference_at);
        used = at, true_rows = reference_at, capacity = at + 200;  // ends inside a tile
        device_start.host = start, device_rows.host = rows;
        device_start.send(), device_rows.send();
    }
    int El() const { return (int)rows.size(); }
    Ragged device() {
        Ragged r = {};
        r.El = El(), r.capacity = capacity, r.group_start = device_start.dev, r.group_rows = device_rows.dev;
        return r;
    }
    Ragged reference() {
        Ragged r = {};
        r.El = El(), r.capacity = true_rows, r.group_start = reference_start.data(), r.group_rows = rows.data();
        return r;
    }
};

// A row buffer: random rows, zeros in pad rows, NaN behind the last expert.
struct RowBuffer : X {
    RowBuffer(const Layout& l, int64_t C, uint32_t stream) : X(l.capacity * C, stream) {
        for (int e = 0; e < l.El(); e++)
            std::fill(host.begin() + (l.start[e] + l.rows[e]) * C, host.begin() + l.start[e + 1] * C, 0.0);
        std::fill(host.begin() + l.used * C, host.end(), (double)NAN);
        send();
    }
    std::vector<double> compact(const Layout& l, int64_t C) const {
        std::vector<double> out((size_t)(l.true_rows * C + 1));
        for (int e = 0; e < l.El(); e++)
            std::copy_n(host.begin() + l.start[e] * C, l.rows[e] * C, out.begin() + l.reference_start[e] * C);
        return out;
    }
};

static bool is_nan_expert(const Rows& nan_experts, int e) {
    for (int i : nan_experts)
        if (i == e) return true;
    return false;
}

// Every true row close, every pad row zero, everything behind as it was. Rows of `nan_experts` are not compared.
static void check_rows(const char* what, const X& out, const std::vector<double>& expected, const Layout& l, int64_t C,
                       const Rows& nan_experts = {}) {
    auto got = out.got();
    double worst = 0, all_diff = 0, all_norm = 0;
    int64_t pads = 0, behind = 0;
    for (int e = 0; e < l.El(); e++) {
        for (int64_t i = 0; i < l.rows[e] && !is_nan_expert(nan_experts, e); i++) {
            double diff = 0, norm = 0;
            for (int64_t c = 0; c < C; c++) {
                double r = expected[(size_t)((l.reference_start[e] + i) * C + c)];
                double d = got[(size_t)((l.start[e] + i) * C + c)] - r;
                diff += d * d, norm += r * r;
            }
            all_diff += diff, all_norm += norm;
            double error = sqrt(diff / norm);
            if (!(error <= worst)) worst = isfinite(error) ? error : INFINITY;
        }
        for (int64_t i = (l.start[e] + l.rows[e]) * C; i < l.start[e + 1] * C; i++) pads += got[(size_t)i] != 0;
    }
    for (int64_t i = l.used * C; i < l.capacity * C; i++) behind += !isnan(got[(size_t)i]);
    if (getenv("TEST_ERRORS"))
        printf("    %s: rows %.3g of %.3g, all %.3g of %.3g\n", what, worst, ROW_TOLERANCE,
               all_norm > 0 ? sqrt(all_diff / all_norm) : 0, TENSOR_TOLERANCE);
    CHECK(worst <= ROW_TOLERANCE, "%s: a row is off by %g", what, worst);
    double all = all_norm > 0 ? sqrt(all_diff / all_norm) : 0;
    CHECK(all <= TENSOR_TOLERANCE || l.true_rows * C < 1000, "%s is off by %g", what, all);
    CHECK(pads == 0, "%s: %lld elements of pad rows are not zero", what, (long long)pads);
    CHECK(behind == 0, "%s: %lld elements behind the last expert were written", what, (long long)behind);
}

static void check_weights(const R& dw, const std::vector<double>& start, const Layout& l, int64_t size,
                          const Rows& nan_experts = {}) {
    auto got = dw.got();
    for (int e = 0; e < l.El(); e++) {
        if (is_nan_expert(nan_experts, e)) continue;
        const double *g = got.data() + e * size, *r = dw.host.data() + e * size;
        double diff = 0, norm = 0;
        for (int64_t i = 0; i < size; i++) diff += (g[i] - r[i]) * (g[i] - r[i]), norm += r[i] * r[i];
        double error = sqrt(diff / norm), tolerance = weight_tolerance(l.rows[e]);
        if (getenv("TEST_ERRORS") && l.rows[e]) printf("    dw: %.3g of %.3g\n", error, tolerance);
        CHECK(error <= tolerance, "dW of expert %d (%d rows) is off by %g", e, l.rows[e], error);
        if (l.rows[e] == 0)
            CHECK(memcmp(g, start.data() + e * size, (size_t)size * sizeof(double)) == 0,
                  "dW of expert %d changed without rows", e);
    }
}

// All three products on the same groups.
static void compare(const Rows& rows, int64_t IC, int64_t OC) {
    int before = test_failures_here;
    Layout l(rows);
    RowBuffer x(l, IC, 1), dy(l, OC, 2);
    X w(l.El() * OC * IC, 3), y(l.capacity * OC), dx(l.capacity * IC);
    R dw(l.El() * OC * IC, 4, 8.0);
    std::vector<double> dw_start = dw.host;
    grouped_gemm_forward(y.dev, x.dev, w.dev, l.device(), IC, OC, ctx);
    grouped_gemm_dgrad(dx.dev, dy.dev, w.dev, l.device(), IC, OC, ctx);
    grouped_gemm_wgrad(dw.dev, dy.dev, x.dev, l.device(), IC, OC, ctx);

    std::vector<double> cx = x.compact(l, IC), cdy = dy.compact(l, OC);
    std::vector<double> cy((size_t)(l.true_rows * OC + 1)), cdx((size_t)(l.true_rows * IC + 1));
    REFERENCE(grouped_gemm_forward)
    ((floatX*)cy.data(), (floatX*)cx.data(), w.ref(), l.reference(), IC, OC, reference_ctx);
    REFERENCE(grouped_gemm_dgrad)
    ((floatX*)cdx.data(), (floatX*)cdy.data(), w.ref(), l.reference(), IC, OC, reference_ctx);
    REFERENCE(grouped_gemm_wgrad)
    (dw.ref(), (floatX*)cdy.data(), (floatX*)cx.data(), l.reference(), IC, OC, reference_ctx);
    check_rows("y", y, cy, l, OC);
    check_rows("dx", dx, cdx, l, IC);
    check_weights(dw, dw_start, l, OC * IC);
    if (test_failures_here > before)
        printf("    with IC %lld, OC %lld, %d experts, %lld rows\n", (long long)IC, (long long)OC, l.El(),
               (long long)l.true_rows);
}

static Rows random_rows(int El, int mean, uint32_t stream) {
    Rows rows;
    for (int e = 0; e < El; e++) {
        double u = random_uniform(99, stream, (uint64_t)e);
        rows.push_back(u < 0.15 ? 0 : (int32_t)(u * 2 * mean));
    }
    return rows;
}

static void test_small_sizes(void) {
    const int64_t sizes[] = {8, 24, 40, 64, 96, 128, 136, 264};
    for (int64_t IC : sizes)
        for (int64_t OC : sizes) compare({129, 0, 1, 130}, IC, OC);
}

static void test_group_sizes(void) {
    for (int32_t n : {0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 400}) {
        compare({n}, 136, 264);
        compare({1, n, 128}, 264, 136);
    }
    compare({0, 1, 127, 128, 129, 0, 383, 384}, 96, 640);
    compare({0, 0, 0}, 64, 128);
}

static void test_one_takes_all(void) {
    compare({0, 0, 0, 0, 0, 1111, 0, 0}, 328, 520);
    compare({1300, 0, 0, 0}, 520, 328);
}

static void test_experts(void) {
    compare(random_rows(3, 300, 1), 200, 392);
    compare(random_rows(8, 200, 2), 392, 200);
    compare(random_rows(64, 150, 3), 264, 768);  // more tiles than SMs: blocks take several
    compare(random_rows(64, 2, 4), 64, 96);
    compare(random_rows(160, 20, 5), 96, 64);
    compare(random_rows(256, 60, 6), 136, 136);
}

static void test_model_sizes(void) {
    compare({129, 0, 300, 1}, 2048, 2816);
    compare({129, 0, 300, 1}, 1408, 2048);
    compare({257, 1, 0, 100}, 2048, 1408);
    compare({0, 4000, 3, 700}, 512, 2048);  // long sums in wgrad
}

static void test_repeats(void) {
    Layout l(random_rows(24, 400, 7));
    const int64_t IC = 520, OC = 712;
    RowBuffer x(l, IC, 1), dy(l, OC, 2);
    X w(l.El() * OC * IC, 3), y(l.capacity * OC), dx(l.capacity * IC);
    R dw(l.El() * OC * IC, 4);
    std::vector<std::vector<double>> first;
    for (int run = 0; run < 4; run++) {
        y.poison(), dx.poison(), dw.send();
        grouped_gemm_forward(y.dev, x.dev, w.dev, l.device(), IC, OC, ctx);
        grouped_gemm_dgrad(dx.dev, dy.dev, w.dev, l.device(), IC, OC, ctx);
        grouped_gemm_wgrad(dw.dev, dy.dev, x.dev, l.device(), IC, OC, ctx);
        std::vector<std::vector<double>> now = {y.got(), dx.got(), dw.got()};
        if (run == 0) first = now;
        for (int i = 0; i < 3; i++)
            CHECK(memcmp(first[i].data(), now[i].data(), now[i].size() * sizeof(double)) == 0,
                  "product %d differs in run %d", i, run);
    }
}

// Blocks that start late, because their SMs are held, leave their share to the others, and no bit changes. With 16 of
// 132 SMs held the forward product should take 1.14 times as long, or 1.33 where each one held costs a cluster (8
// rounds of units, not 6); with a share for every block nearly twice as long, since the late ones begin when the others
// end (1.7 seen): 1.5 is allowed.
static void test_late_blocks(void) {
    Layout l({5000, 0, 1000, 5500, 1, 500});
    const int64_t IC = 1024, OC = 2048;
    RowBuffer x(l, IC, 1), dy(l, OC, 2);
    X w(l.El() * OC * IC, 3), y(l.capacity * OC), dx(l.capacity * IC);
    R dw(l.El() * OC * IC, 4);
    std::vector<std::vector<double>> free;
    float free_ms = 0;
    for (int sms : {0, 16, 112}) {
        y.poison(), dx.poison(), dw.send();
        float ms;
        {
            HeldSms held(sms);
            ms = least_ms([&] { grouped_gemm_forward(y.dev, x.dev, w.dev, l.device(), IC, OC, ctx); }, ctx->stream);
            grouped_gemm_dgrad(dx.dev, dy.dev, w.dev, l.device(), IC, OC, ctx);
            grouped_gemm_wgrad(dw.dev, dy.dev, x.dev, l.device(), IC, OC, ctx);
            ctx_sync(ctx);
        }
        std::vector<std::vector<double>> now = {y.got(), dx.got(), dw.got()};
        if (getenv("TEST_ERRORS")) printf("    %d SMs held: %.3f ms\n", sms, ms);
        if (sms == 0) free = now, free_ms = ms;
        for (int i = 0; i < 3; i++)
            CHECK(memcmp(free[i].data(), now[i].data(), now[i].size() * sizeof(double)) == 0,
                  "product %d differs where %d SMs are held", i, sms);
        CHECK(ms <= 1.5f * free_ms || sms > 16, "%g ms where %d SMs are held, %g without", ms, sms, free_ms);
    }
}

// NaN in the weights of one expert and in the rows of another touch nothing else, and no pad row.
static void test_nan_stays(void) {
    const int64_t IC = 200, OC = 328;
    Layout l({130, 77, 300, 0, 129});
    RowBuffer x(l, IC, 1), dy(l, OC, 2);
    X w(l.El() * OC * IC, 3), y(l.capacity * OC), dx(l.capacity * IC);
    R dw(l.El() * OC * IC, 4);
    std::vector<double> dw_start = dw.host;
    std::fill(w.host.begin() + 1 * OC * IC, w.host.begin() + 2 * OC * IC, (double)NAN);
    std::fill(x.host.begin() + l.start[2] * IC, x.host.begin() + (l.start[2] + l.rows[2]) * IC, (double)NAN);
    std::fill(dy.host.begin() + l.start[2] * OC, dy.host.begin() + (l.start[2] + l.rows[2]) * OC, (double)NAN);
    w.send(), x.send(), dy.send();
    grouped_gemm_forward(y.dev, x.dev, w.dev, l.device(), IC, OC, ctx);
    grouped_gemm_dgrad(dx.dev, dy.dev, w.dev, l.device(), IC, OC, ctx);
    grouped_gemm_wgrad(dw.dev, dy.dev, x.dev, l.device(), IC, OC, ctx);

    std::vector<double> cx = x.compact(l, IC), cdy = dy.compact(l, OC);
    std::vector<double> cy((size_t)(l.true_rows * OC)), cdx((size_t)(l.true_rows * IC));
    REFERENCE(grouped_gemm_forward)
    ((floatX*)cy.data(), (floatX*)cx.data(), w.ref(), l.reference(), IC, OC, reference_ctx);
    REFERENCE(grouped_gemm_dgrad)
    ((floatX*)cdx.data(), (floatX*)cdy.data(), w.ref(), l.reference(), IC, OC, reference_ctx);
    REFERENCE(grouped_gemm_wgrad)
    (dw.ref(), (floatX*)cdy.data(), (floatX*)cx.data(), l.reference(), IC, OC, reference_ctx);
    check_rows("y", y, cy, l, OC, {1, 2});
    check_rows("dx", dx, cdx, l, IC, {1, 2});
    check_weights(dw, dw_start, l, OC * IC, {2});
    auto got = y.got();
    int64_t finite = 0;
    for (int e = 1; e <= 2; e++)
        for (int64_t i = l.start[e] * OC; i < (l.start[e] + l.rows[e]) * OC; i++) finite += !isnan(got[(size_t)i]);
    CHECK(finite == 0, "%lld elements of rows that met NaN are not NaN", (long long)finite);
}

// A size TMA cannot take ends the run with exit code 2, before any work: tried in a process of its own.
static void test_refuses_sizes(void) {
    char self[4096], command[4200];
    ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    self[length < 0 ? 0 : length] = 0;
    snprintf(command, sizeof(command), "'%s' refuse 2>/dev/null", self);
    fflush(stdout);
    int status = system(command);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_USAGE, "IC 12 was not refused (status %d)", status);
}

int main(int argc, char** argv) {
    if (argc > 1 && !strcmp(argv[1], "refuse")) {
        grouped_gemm_forward(nullptr, nullptr, nullptr, Ragged{}, 12, 16, nullptr);
        return 0;
    }
    if (device_available()) open_contexts(1 << 20);
    if (argc > 1 && !strcmp(argv[1], "small")) {  // for compute-sanitizer
        compare({129, 0, 1, 130}, 72, 136);
        compare({1, 300, 128}, 136, 264);
        return test_failures_here != 0;
    }
    RUN(test_refuses_sizes);
    RUN(test_small_sizes);
    RUN(test_group_sizes);
    RUN(test_one_takes_all);
    RUN(test_experts);
    RUN(test_model_sizes);
    RUN(test_repeats);
    RUN(test_late_blocks);
    RUN(test_nan_stays);
    return test_summary();
}
