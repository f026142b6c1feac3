// The CUDA kernels of the routers' centering. Sums of inputs are whole numbers, so they are those of the reference;
// what follows from them is as close as float32 is.
#include "layers/adamw.h"
#include "moe/center.h"
#include "tests/cuda.cuh"

static void copy_there(I64& to, const int64_t* values) {
    memcpy(to.host.data(), values, (size_t)to.n * sizeof(int64_t));
    to.send();
}

static void center_case(int64_t N, int64_t E, int64_t C, double x_scale) {
    X x(N * C, 1, x_scale), weight(E * C);
    R w(E * C, 2), u(C), u_again(C);
    I64 sum(C), along(E), other(E);
    StepState host = {}, *state = (StepState*)device_alloc(sizeof(StepState), "a test");
    const std::vector<int64_t> zeros((size_t)std::max(C, E), 0);

    // The sums, in two pieces.
    copy_there(sum, zeros.data());
    const int64_t half = N / 3;
    center_add(sum.dev, x.dev, half, C, ctx);
    center_add(sum.dev, x.dev + half * C, N - half, C, ctx);
    REFERENCE(center_add)(sum.ref(), x.ref(), N, C, reference_ctx);
    CHECK_SAME(sum);

    // Their direction: u in float32.
    center_direction(u.dev, sum.dev, C, ctx);
    REFERENCE(center_direction)(u.ref(), sum.ref(), C, reference_ctx);
    CHECK_CLOSE(u, 1e-7);
    u.host = u.got();  // from here on both have the same

    // Rows along it, whole and as two ranks have them. Products in double of the same numbers.
    const int64_t cut = E * C / 2 + 3;
    center_along(along.dev, w.dev, u.dev, 0, E * C, E, C, ctx);
    REFERENCE(center_along)(along.ref(), w.ref(), u.ref(), 0, E * C, E, C, reference_ctx);
    CHECK_SAME(along);
    const std::vector<int64_t> whole = along.got();
    along.poison();
    center_along(along.dev, w.dev, u.dev, 0, cut, E, C, ctx);
    center_along(other.dev, w.dev + cut, u.dev, cut, E * C - cut, E, C, ctx);
    std::vector<int64_t> first = along.got(), second = other.got();
    for (int64_t e = 0; e < E; e++)
        CHECK(first[(size_t)e] + second[(size_t)e] == whole[(size_t)e], "row %lld in parts differs", (long long)e);
    copy_there(along, whole.data());

    // What is left, in float32 and rounded to bf16; nothing in a bad step.
    std::vector<double> before = w.host;
    for (host.ok = 0; host.ok < 2; host.ok++) {
        device_upload(state, &host, sizeof(host), ctx);
        center_apply(weight.dev, w.dev, along.dev, u.dev, 0, cut, C, state, ctx);
        center_apply(weight.dev + cut, w.dev + cut, along.dev, u.dev, cut, E * C - cut, C, state, ctx);
        if (host.ok) break;
        CHECK(w.got() == before, "a bad step moved a weight");
        CHECK(isnan(weight.got()[0]), "a bad step wrote a weight");
    }
    REFERENCE(center_apply)(weight.ref(), w.ref(), along.ref(), u.ref(), 0, E * C, C, &host, reference_ctx);
    CHECK_CLOSE(w, 1.5e-7);  // along u rounded, and the difference: 2^-24 each of some twice the row's part
    CHECK_CLOSE(weight, 4e-3);
    device_free(state);
}

static void test_center(void) {
    center_case(1, 1, 8, 1);
    center_case(129, 8, 24, 1);
    center_case(2048, 32, 512, 1);
    center_case(4099, 64, 2048, 8);
    center_case(300, 256, 7168, 1);
    center_case(70000, 5, 136, 100);  // held at 128; more rows than a warp takes at once
}

// No tokens: no direction, and nothing to lose.
static void test_center_nothing(void) {
    R u(16);
    I64 sum(16);
    const std::vector<int64_t> zeros(16, 0);
    copy_there(sum, zeros.data());
    center_add(sum.dev, nullptr, 0, 16, ctx);
    center_direction(u.dev, sum.dev, 16, ctx);
    for (double x : u.got()) CHECK(x == 0, "u is %g", x);
}

int main(void) {
    open_contexts((size_t)1 << 20);
    RUN(test_center);
    RUN(test_center_nothing);
    return test_summary();
}
