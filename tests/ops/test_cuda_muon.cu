// Muon's kernels against the reference in float64: momentum and update, and whole orthogonalizations.
//
// Newton-Schulz in bf16: each X is rounded to 2^-9 of its elements (rms 1.1e-3 of its norm). The iteration multiplies
// small singular values by up to 3.4445 in a step, and with them the rounding in their directions. Random matrices have
// few of those: 5e-2 of the whole is allowed. The size of an update matters most, so its root mean square has a smaller
// tolerance.
#include "layers/muon.h"
#include "tests/cuda.cuh"

static const double ORTHOGONAL = 5e-2;

static void orthogonalize_case(int64_t count, int64_t rows, int64_t columns) {
    const int64_t n = rows * columns;
    X x(count * n, 1), work(muon_work(count, rows, columns));
    for (int64_t i = 0; i < count * n; i++) x.host[(size_t)i] *= pow(10, (double)(i / n % 3) * 3 - 4);
    if (count > 2)
        for (int64_t i = n; i < 2 * n; i++) x.host[(size_t)i] = 0;  // as for an expert without tokens so far
    x.send();
    settle();
    const auto before = x.host;
    auto run = [&] { muon_orthogonalize(x.dev, work.dev, count, rows, columns, ctx); };
    run();
    std::vector<double> reference_work((size_t)(count * (2 * std::min(rows, columns) * std::min(rows, columns) + n)));
    REFERENCE(muon_orthogonalize)(x.ref(), (floatX*)reference_work.data(), count, rows, columns, reference_ctx);
    // Every matrix against the reference: its elements, and its size.
    const auto got = x.got();
    for (int64_t k = 0; k < count; k++) {
        double diff = 0, norm = 0, size = 0;
        for (int64_t i = k * n; i < (k + 1) * n; i++) {
            const double a = got[(size_t)i], b = x.host[(size_t)i];
            diff += (a - b) * (a - b), norm += b * b, size += a * a;
        }
        if (count > 2 && k == 1) {
            CHECK(size == 0, "a matrix of zeros became %g", sqrt(size));
            continue;
        }
        if (getenv("TEST_ERRORS"))
            printf("    %lld x %lld: %.3g, size %.4g\n", (long long)rows, (long long)columns, sqrt(diff / norm),
                   sqrt(size / norm));
        CHECK(sqrt(diff / norm) <= ORTHOGONAL, "matrix %lld of %lld x %lld is off by %g", (long long)k, (long long)rows,
              (long long)columns, sqrt(diff / norm));
        CHECK(fabs(sqrt(size / norm) - 1) <= 1e-2, "matrix %lld has %g of its size", (long long)k, sqrt(size / norm));
    }
    // The same bits in a second call.
    const auto first = got;
    x.host = before;
    x.send();
    settle();
    run();
    CHECK(x.got() == first, "%lld x %lld does not repeat", (long long)rows, (long long)columns);
}

static void test_orthogonalize(void) {
    orthogonalize_case(1, 8, 8);
    orthogonalize_case(1, 8, 256);
    orthogonalize_case(2, 256, 8);
    orthogonalize_case(4, 64, 64);
    orthogonalize_case(3, 80, 128);
    orthogonalize_case(5, 384, 512);
    orthogonalize_case(3, 512, 384);
    orthogonalize_case(1, 576, 2048);
}

// More matrices than a grid has rows: copies of seven, of which each becomes what it becomes in a list of seven.
static void test_many_matrices(void) {
    const int64_t few = 7, rows = 8, columns = 16, n = rows * columns, count = 65536 + 9;
    X one(few * n, 1), x(count * n), work(muon_work(count, rows, columns));
    for (int64_t i = 0; i < count * n; i++) x.host[(size_t)i] = one.host[(size_t)(i % (few * n))];
    x.send(), settle();
    muon_orthogonalize(x.dev, work.dev, count, rows, columns, ctx);
    muon_orthogonalize(one.dev, work.dev, few, rows, columns, ctx);
    const auto got = x.got(), want = one.got();
    double worst = 0;
    for (int64_t k = 0; k < count; k++) {
        double diff = 0, norm = 0;
        for (int64_t i = 0; i < n; i++) {
            const double a = got[(size_t)(k * n + i)], b = want[(size_t)(k % few * n + i)];
            diff += (a - b) * (a - b), norm += b * b;
        }
        if (!(sqrt(diff / norm) <= worst)) worst = isfinite(diff / norm) ? sqrt(diff / norm) : INFINITY;
    }
    CHECK(worst <= ORTHOGONAL, "a matrix of many is off by %g", worst);
}

// With `is_rounded` the gradient is in bf16. Its values are the same.
static void elements_case(int64_t n, int bf16, bool is_rounded) {
    X u(n), x(n, 4), rounded(n, 1);
    Masters master(n, 3);
    X& weight = master.weight;
    R grad(n), m(n, 2);
    grad.host = rounded.host, grad.send();
    X half(n, 2);  // the momentum in bf16
    const Muon opt = {0.01f, 0.1f};
    StepState host, *state = (StepState*)device_alloc(sizeof(StepState), "a test");
    Muon* option = (Muon*)device_alloc(sizeof(Muon), "a test");
    memset(&host, 0, sizeof(host));
    host.grad_scale = 0.25;
    device_upload(option, &opt, sizeof(opt), ctx);
    for (int ok = 0; ok < 2; ok++) {
        host.ok = ok;
        device_upload(state, &host, sizeof(host), ctx);
        settle();
        // Buffers of 8, 16, 24 elements and so on; more than one launch takes.
        std::vector<MuonBuffer> list;
        for (int64_t at = 0, size = 8; at < n; at += size, size = list.size() < 40 ? size + 8 : n)
            list.push_back({u.dev + at, bf16 ? (void*)(half.dev + at) : (void*)(m.dev + at),
                            is_rounded ? nullptr : grad.dev + at, weight.dev + at, master.low + at,
                            std::min(size, n - at), is_rounded ? rounded.dev + at : nullptr});
        muon_momentum(list.data(), (int)list.size(), bf16, state, ctx);
        for (MuonBuffer& buffer : list) buffer.x = x.dev + (buffer.x - u.dev);
        muon_update(list.data(), (int)list.size(), option, state, ctx);
        auto& moments = bf16 ? half.host : m.host;
        const auto got_m = bf16 ? half.got() : m.got(), got_u = u.got(), got_w = master.got(), working = weight.got();
        double worst = 0;
        for (size_t i = 0; i < (size_t)n; i++) {
            const double g = 0.25 * grad.host[i], after = ok ? (double)MUON_MOMENTUM * moments[i] + g : moments[i];
            const double w =
                ok ? master.host[i] - (double)0.01f * (x.host[i] + (double)0.1f * master.host[i]) : master.host[i];
            worst = fmax(worst, fabs(got_w[i] - w));
            worst = fmax(worst, fabs(got_m[i] - after) - (bf16 ? 0x1p-8 * fabs(after) : 0));
            if (!ok) continue;
            worst = fmax(worst, fabs(got_u[i] - (g + (double)MUON_MOMENTUM * after)) - 0x1p-8 * fabs(got_u[i]));
            worst = fmax(worst, fabs(working[i] - w) - 0x1p-8 * fabs(w));
        }
        CHECK(worst <= 2e-6, "ok %d, bf16 %d: off by %g", ok, bf16, worst);
    }
    device_free(state);
    device_free(option);
}

static void test_elements(void) {
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (int64_t n : {8, 1000, 100000})
            for (bool rounded : {false, true}) elements_case(n, bf16, rounded);
}

int main(void) {
    open_contexts((size_t)64 << 20);
    RUN(test_orthogonalize);
    RUN(test_many_matrices);
    RUN(test_elements);
    return test_summary();
}
