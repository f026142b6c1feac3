// The grouped GEMMs on the GPU against the reference in double: the portable kernels, and Hopper's where the GPU has
// them.
//
// Tolerances. Outputs in bf16 (forward, dgrad), 8 significant bits: rounding moves an element by at most 2^-8 of
// itself. So no row may be off by more than 2^-8 in norm, plus 1e-5 for the float32 sums. Rounding errors are even over
// half a unit of the last place. Over a whole tensor they come to 1.5e-3 .. 1.7e-3; 2e-3 is allowed. dW:
// tests/ragged.cuh.
#include <sys/wait.h>
#include <unistd.h>

#include "grouped/experts.h"
#include "grouped/grouped_gemm.h"
#include "layers/matmul.h"
#include "tests/ragged.cuh"

static const double ROW_TOLERANCE = 0x1p-8 + 1e-5, TENSOR_TOLERANCE = 2e-3;

// All passes on the same groups; wgrad both writes dW and adds to it.
struct Products {
    int64_t IC, OC;
    Layout l;
    RowBuffer x, dy;
    X w, y, dx, rounded;  // rounded: dW in bf16
    R dw, start, added;   // start: what wgrad adds to

    Products(const Rows& rows, int64_t IC, int64_t OC)
        : IC(IC),
          OC(OC),
          l(rows),
          x(l, IC, 1),
          dy(l, OC, 2),
          w(l.El() * OC * IC, 3),
          y(l.held * OC),
          dx(l.held * IC),
          rounded(l.El() * OC * IC),
          dw(l.El() * OC * IC),
          start(l.El() * OC * IC, 4, 8.0),
          added(l.El() * OC * IC) {}
    // On the GPU, into poisoned outputs.
    void run() {
        y.poison_dev(), dx.poison_dev(), dw.poison_dev(), rounded.poison_dev();
        CUDA_CHECK(cudaMemcpy(added.dev, start.dev, (size_t)start.n * sizeof(real), cudaMemcpyDeviceToDevice));
        CUDA_CHECK(cudaDeviceSynchronize());
        grouped_gemm_forward(y.dev, x.dev, w.dev, l.device(), IC, OC, ctx);
        grouped_gemm_dgrad(dx.dev, dy.dev, w.dev, l.device(), IC, OC, ctx);
        grouped_gemm_wgrad(dw.dev, NULL, dy.dev, x.dev, ALL_BY_ROW, l.device(), IC, OC, 0, ctx);
        grouped_gemm_wgrad(added.dev, NULL, dy.dev, x.dev, ALL_BY_ROW, l.device(), IC, OC, 1, ctx);
        grouped_gemm_wgrad(NULL, rounded.dev, dy.dev, x.dev, ALL_BY_ROW, l.device(), IC, OC, 0, ctx);
    }
    std::vector<std::vector<double>> got() { return {y.got(), dx.got(), dw.got(), added.got(), rounded.got()}; }

    // On the host.
    void refer() {
        added.host = start.host;
        REFERENCE(grouped_gemm_forward)(y.ref(), x.ref(), w.ref(), l.reference(), IC, OC, reference_ctx);
        REFERENCE(grouped_gemm_dgrad)(dx.ref(), dy.ref(), w.ref(), l.reference(), IC, OC, reference_ctx);
        REFERENCE(grouped_gemm_wgrad)
        (dw.ref(), NULL, dy.ref(), x.ref(), ALL_BY_ROW, l.reference(), IC, OC, 0, reference_ctx);
        REFERENCE(grouped_gemm_wgrad)
        (added.ref(), NULL, dy.ref(), x.ref(), ALL_BY_ROW, l.reference(), IC, OC, 1, reference_ctx);
    }
    void check(const Rows& nan_in_rows = {}, const Rows& nan_in_weights = {}) {
        check_rows("y", y, l, OC, ROW_TOLERANCE, TENSOR_TOLERANCE, nan_in_rows);
        check_rows("dx", dx, l, IC, ROW_TOLERANCE, TENSOR_TOLERANCE, nan_in_rows);
        check_weights(dw, std::vector<double>((size_t)start.n), l, OC * IC, nan_in_weights);
        check_weights(added, start.host, l, OC * IC, nan_in_weights);
        check_rounded(rounded, dw);
    }
};

// Hopper's kernels where the GPU has them, then the portable ones.
template <typename Body>
static void each_kind(Body body) {
    const int own = ctx->portable;
    for (ctx->portable = own; ctx->portable <= 1; ctx->portable++) {
        int before = test_failures_here;
        body();
        if (test_failures_here > before) printf("    with %s kernels\n", ctx->portable ? "portable" : "Hopper's");
    }
    ctx->portable = own;
}

static void compare(const Rows& rows, int64_t IC, int64_t OC) {
    int before = test_failures_here;
    Products p(rows, IC, OC);
    p.refer();
    each_kind([&] {
        p.run();
        p.check();
    });
    if (test_failures_here > before)
        printf("    with IC %lld, OC %lld, %d experts, %lld rows\n", (long long)IC, (long long)OC, p.l.El(),
               (long long)p.l.end);
}

// Widths below, at and beyond those of boxes, k blocks and tiles, and tiles of every shape.
static void test_small_sizes(void) {
    const int64_t sizes[] = {8, 24, 40, 64, 96, 128, 136, 264};
    for (int64_t IC : sizes)
        for (int64_t OC : sizes) compare({129, 0, 1, 130}, IC, OC);
}

// Groups that end before, at and after a tile's end; experts without rows first, last and alone.
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

// More rows of tiles than a band has: rows of the buffer in forward and dgrad, rows of OC in wgrad.
static void test_bands(void) {
    compare({2300, 0, 4400}, 40, 392);
    compare({130, 0, 40}, 392, 4232);
    compare({130, 0, 40}, 4232, 136);
}

static void test_repeats(void) {
    Products p(random_rows(24, 400, 7), 520, 712);
    each_kind([&] {
        p.run();
        auto first = p.got();
        for (int run = 1; run < 4; run++) {
            p.run();
            auto now = p.got();
            for (size_t i = 0; i < now.size(); i++)
                CHECK(!memcmp(first[i].data(), now[i].data(), now[i].size() * sizeof(double)),
                      "product %zu differs in run %d", i, run);
        }
    });
}

// NaN in the weights of one expert and in the rows of another reaches nothing else, and no pad row.
static void test_nan_stays(void) {
    // Expert 1 has NaN in W, expert 2 in x and dy.
    Products p({130, 77, 300, 0, 129}, 200, 328);
    const int64_t IC = p.IC, OC = p.OC;
    const Layout& l = p.l;
    auto fill = [](X& t, int64_t from, int64_t to) {
        std::fill(t.host.begin() + from, t.host.begin() + to, (double)NAN);
    };
    fill(p.w, 1 * OC * IC, 2 * OC * IC);
    fill(p.x, l.start[2] * IC, (l.start[2] + l.rows[2]) * IC);
    fill(p.dy, l.start[2] * OC, (l.start[2] + l.rows[2]) * OC);
    p.w.send(), p.x.send(), p.dy.send();

    p.refer();
    each_kind([&] {
        // Results without NaN operands are as usual.
        p.run();
        p.check({1, 2}, {2});

        // Results with NaN operands are NaN.
        auto got = p.y.got();
        int64_t finite = 0;
        for (int e = 1; e <= 2; e++)
            for (int64_t i = l.start[e] * OC; i < (l.start[e] + l.rows[e]) * OC; i++) finite += !isnan(got[(size_t)i]);
        CHECK(finite == 0, "%lld elements of rows that met NaN are not NaN", (long long)finite);
    });
}

// Operands by token: the same bits as from permute_rows and the GEMMs by row, and SwiGLU as its own kernel computes it.
// The order of each sum is the same, so nothing may differ. The tokens of rows behind the last group are no tokens: a
// kernel that reads them faults. Tokens are counted from `far` on: no token before is read, so these need no memory.
struct ByToken {
    enum { N = 77 };
    int64_t IC, OC, far;
    Layout l;
    I32 token;
    X x, dy, x_rows, dy_rows, w, w13, own_h, h, own_a, a, own_rounded, rounded;
    X dap, w2, own_dh, dh, own_gated, gated;
    R own_dw, dw, row_gate, own_dgate, dgate;

    ByToken(const Rows& rows, int64_t IC, int64_t OC, int64_t far)
        : IC(IC),
          OC(OC),
          far(far),
          l(rows),
          token(l.held),
          x(N * IC, 11),
          dy(N * OC, 12),
          x_rows(l.held * IC),
          dy_rows(l.held * OC),
          w(l.El() * OC * IC, 13),
          w13(l.El() * 2 * OC * IC, 14),
          own_h(l.held * 2 * OC),
          h(l.held * 2 * OC),
          own_a(l.held * OC),
          a(l.held * OC),
          own_rounded(l.El() * OC * IC),
          rounded(l.El() * OC * IC),
          dap(l.held * OC),
          w2(l.El() * IC * OC, 16),
          own_dh(l.held * 2 * OC),
          dh(l.held * 2 * OC),
          own_gated(l.held * OC),
          gated(l.held * OC),
          own_dw(l.El() * OC * IC),
          dw(l.El() * OC * IC),
          row_gate(l.held, 17),
          own_dgate(l.held),
          dgate(l.held * grouped_gemm_gate_parts(OC)) {
        for (int64_t r = 0; r < l.held; r++)
            token.host[(size_t)r] = r >= l.end        ? INT32_MAX
                                    : l.expert(r) < 0 ? -1
                                                      : (int32_t)(far + draw_below(15, r, N)),
            row_gate.host[(size_t)r] = l.expert(r) < 0 ? 0 : row_gate.host[(size_t)r];
        token.send(), row_gate.send();
        for (X* t : {&own_h, &h, &own_a, &a, &own_rounded, &rounded, &x_rows, &dy_rows, &dap}) t->poison_dev();
        for (R* t : {&own_dw, &dw}) t->poison_dev();
        settle();
    }
    // An operand by token, from token 0 on.
    const floatX* from_token_0(const X& tokens, int64_t width) const {
        return (const floatX*)((uintptr_t)tokens.dev - (uintptr_t)(far * width) * sizeof(floatX));
    }
    // Dgrad of W2 from x as its dy, and the backward of SwiGLU. The gates' gradients are sums of the same products in
    // another order: float32 sums of OC terms, so within 1e-5 in norm.
    void backward(Ragged r) {
        grouped_gemm_dgrad(dap.dev, x_rows.dev, w2.dev, r, OC, IC, ctx);
        own_dh.poison_dev(), own_gated.poison_dev(), own_dgate.poison_dev(), settle();
        experts_swiglu_backward({own_dh.dev, own_gated.dev, own_dgate.dev, dap.dev, own_h.dev}, r, OC, ctx);
        const int parts = grouped_gemm_gate_parts(OC);
        for (const GroupedRows order : {ALL_BY_ROW, DY_BY_TOKEN}) {
            dh.poison_dev(), gated.poison_dev(), dgate.poison_dev(), settle();
            grouped_gemm_dgrad_swiglu({dh.dev, gated.dev, dgate.dev, nullptr, h.dev},
                                      order == DY_BY_TOKEN ? from_token_0(x, IC) : x_rows.dev, w2.dev, order, r, IC, OC,
                                      ctx);
            equal("dh", own_dh, dh), equal("gate * a", own_gated, gated);
            const auto one = own_dgate.got(), other = dgate.got();
            double diff = 0, norm = 1e-300;
            int64_t behind = 0;
            for (int64_t i = 0; i < l.held; i++) {
                double sum = 0;
                for (int p = 0; p < parts; p++) sum += other[(size_t)(i * parts + p)];
                if (i >= l.end)
                    behind += !isnan(sum);
                else
                    diff += (sum - one[(size_t)i]) * (sum - one[(size_t)i]), norm += one[(size_t)i] * one[(size_t)i];
            }
            CHECK(sqrt(diff / norm) <= 1e-5, "the gates' gradients are off by %g", sqrt(diff / norm));
            CHECK(behind == 0, "%lld of the gates' gradients behind the last expert were written", (long long)behind);
        }
    }
    template <typename T>
    void equal(const char* what, const T& one, const T& other) {
        const auto p = one.got(), q = other.got();
        CHECK(!memcmp(p.data(), q.data(), p.size() * sizeof(double)), "%s differs by token", what);
    }
    void check() {
        Ragged r = l.device();
        r.row_token = token.dev, r.row_gate = row_gate.dev;
        if (far) r.capacity = 2 * far;
        const floatX *x_tokens = from_token_0(x, IC), *dy_tokens = from_token_0(dy, OC);
        permute_rows(x_rows.dev, x_tokens, r, (size_t)IC * sizeof(floatX), ctx);
        permute_rows(dy_rows.dev, dy_tokens, r, (size_t)OC * sizeof(floatX), ctx);

        grouped_gemm_forward(own_h.dev, x_rows.dev, w13.dev, r, IC, 2 * OC, ctx);
        experts_swiglu_forward(own_a.dev, own_h.dev, r, OC, ctx);
        grouped_gemm_swiglu(h.dev, a.dev, x_tokens, w13.dev, X_BY_TOKEN, r, IC, OC, ctx);
        equal("h", own_h, h), equal("a", own_a, a);

        backward(r);

        grouped_gemm_wgrad(own_dw.dev, NULL, dy_rows.dev, x_rows.dev, ALL_BY_ROW, r, IC, OC, 0, ctx);
        grouped_gemm_wgrad(NULL, own_rounded.dev, dy_rows.dev, x_rows.dev, ALL_BY_ROW, r, IC, OC, 0, ctx);
        for (const GroupedRows order : {DY_BY_TOKEN, X_BY_TOKEN}) {
            const floatX *of_dy = order == DY_BY_TOKEN ? dy_tokens : dy_rows.dev,
                         *of_x = order == X_BY_TOKEN ? x_tokens : x_rows.dev;
            dw.poison_dev(), rounded.poison_dev(), settle();
            grouped_gemm_wgrad(dw.dev, NULL, of_dy, of_x, order, r, IC, OC, 0, ctx);
            grouped_gemm_wgrad(NULL, rounded.dev, of_dy, of_x, order, r, IC, OC, 0, ctx);
            equal("dW", own_dw, dw), equal("rounded dW", own_rounded, rounded);
            grouped_gemm_wgrad(dw.dev, NULL, of_dy, of_x, order, r, IC, OC, 1, ctx);  // twice
            const auto once = own_dw.got(), twice = dw.got();
            int64_t wrong = 0;
            for (size_t i = 0; i < once.size(); i++) wrong += twice[i] != 2 * once[i];
            CHECK(wrong == 0, "%lld of dW were not added to", (long long)wrong);
        }
    }
};

static void by_token(const Rows& rows, int64_t IC, int64_t OC, int64_t far = 0) {
    int before = test_failures_here;
    ByToken(rows, IC, OC, far).check();
    if (test_failures_here > before)
        printf("    with IC %lld, OC %lld, %zu experts\n", (long long)IC, (long long)OC, rows.size());
}

static void test_by_token(void) {
    if (!grouped_gemm_gathers(ctx)) return;
    const int64_t sizes[] = {8, 24, 64, 72, 128, 136, 264};
    for (int64_t IC : sizes)
        for (int64_t OC : sizes) by_token({129, 0, 1, 130}, IC, OC);
    for (int32_t n : {0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 400}) by_token({1, n, 128}, 264, 136);
    by_token({0, 0, 0, 0, 0, 1111, 0, 0}, 328, 520);
    by_token({0, 0, 0}, 64, 128);
    by_token(random_rows(64, 150, 3), 264, 768);
    by_token(random_rows(160, 20, 5), 96, 64);
    by_token({129, 0, 300, 1}, 2048, 1408);
    by_token({2300, 0, 4400}, 40, 392);
    by_token({130, 0, 40}, 392, 4232);
    by_token({130, 0, 40}, 4232, 136);
}

// The last tokens below 2^31 vectors of 16 bytes, and a capacity of more: a token has several rows.
static void test_far_tokens(void) {
    if (!grouped_gemm_gathers(ctx)) return;
    const int64_t far = INT32_MAX / (7168 / 8) - ByToken::N;
    by_token({129, 0, 300, 1}, 7168, 264, far);
    by_token({129, 0, 300, 1}, 136, 7168, far);
}

// Rows whose size is no multiple of 16 bytes end the run before any work. Tested in a process of its own.
static void test_refuses_sizes(void) {
    char self[4096], command[4200];
    ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    self[length < 0 ? 0 : length] = 0;
    snprintf(command, sizeof(command), "'%s' refuse 2>/dev/null", self);
    fflush(stdout);
    int status = system(command);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILED, "IC 12 was not refused (status %d)", status);
}

// `refuse` is for test_refuses_sizes, `small` for compute-sanitizer.
int main(int argc, char** argv) {
    if (argc > 1 && !strcmp(argv[1], "refuse")) {
        grouped_gemm_forward(nullptr, nullptr, nullptr, Ragged{}, 12, 16, nullptr);
        return 0;
    }
    if (device_available()) open_contexts(matmul_workspace());
    if (argc > 1 && !strcmp(argv[1], "small")) {
        compare({129, 0, 1, 130}, 72, 136);
        compare({1, 300, 128}, 136, 264);
        by_token({129, 0, 1, 130}, 72, 136);
        by_token({1, 300, 128}, 136, 264);
        return test_failures_here != 0;
    }
    RUN(test_refuses_sizes);
    RUN(test_small_sizes);
    RUN(test_group_sizes);
    RUN(test_one_takes_all);
    RUN(test_experts);
    RUN(test_model_sizes);
    RUN(test_bands);
    RUN(test_repeats);
    RUN(test_nan_stays);
    RUN(test_by_token);
    RUN(test_far_tokens);
    return test_summary();
}
