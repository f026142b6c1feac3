// The CUDA kernels of the memory-bound layers against the double reference.
//
// Bounds: an element rounded to bf16 once is off by at most 2^-8 = 3.9e-3 of itself, and so is the tensor's norm: BF16.
// Float outputs: sums of up to 1e5 random terms in float32 lose about 1e-6: FLOAT.
#include "layers/adamw.h"
#include "layers/embedding.h"
#include "layers/loss.h"
#include "layers/rmsnorm.h"
#include "layers/rope.h"
#include "layers/swiglu.h"
#include "tests/cuda.cuh"

#define BF16 4e-3
#define FLOAT 5e-6

// Copies to the GPU may still be under way when they return, and the ops' stream does not wait for them.
static void settle(void) { CUDA_CHECK(cudaDeviceSynchronize()); }

template <typename T>
static void restore(T& t, const decltype(t.host)& values) {
    t.host = values;
    t.send();
    settle();
}

static void embedding_case(int64_t N, int64_t V, int64_t C, int skew) {
    X table(V * C, 1), out(N * C), dout(N * C, 2);
    R dtable(V * C, 3);
    I32 token(N);
    for (int64_t n = 0; n < N; n++) {
        double u = random_uniform(7, 1, (uint64_t)n);
        token.host[(size_t)n] = (int32_t)((skew ? pow(u, 6) : u) * (double)V);
    }
    token.send();
    settle();
    embedding_forward(out.dev, token.dev, table.dev, N, C, ctx);
    REFERENCE(embedding_forward)(out.ref(), token.ref(), table.ref(), N, C, reference_ctx);
    CHECK_SAME(out);
    auto before = dtable.host;
    auto run = [&] { embedding_backward(dtable.dev, dout.dev, token.dev, N, V, C, ctx); };
    run();
    REFERENCE(embedding_backward)(dtable.ref(), dout.ref(), token.ref(), N, V, C, reference_ctx);
    CHECK_CLOSE(dtable, FLOAT);
    CHECK_REPEATS(dtable, (restore(dtable, before), run()));
}

static void test_embedding(void) {
    embedding_case(1, 5, 8, 0);
    embedding_case(3, 1, 40, 0);
    embedding_case(129, 7, 24, 0);
    embedding_case(1000, 257, 128, 1);
    embedding_case(1000, 600, 2048, 1);
    embedding_case(5000, 100000, 40, 1);  // two passes
    embedding_case(3000, 300000, 8, 0);   // three passes
    embedding_case(5000, 100000, 1000, 1);
    embedding_case(9000, 3, 264, 1);  // long runs
}

static void rmsnorm_case(int64_t N, int64_t C, int64_t stride) {
    X x(N * stride, 1), w(C, 2), y(N * C), dy(N * C, 3), dx(N * stride, 4);
    R rstd(N), dw(C, 5);
    settle();
    rmsnorm_forward(y.dev, rstd.dev, x.dev, stride, w.dev, N, C, ctx);
    REFERENCE(rmsnorm_forward)(y.ref(), rstd.ref(), x.ref(), stride, w.ref(), N, C, reference_ctx);
    CHECK_CLOSE(y, BF16);
    CHECK_CLOSE(rstd, FLOAT);
    rstd.send();
    auto dx_before = dx.host, dw_before = dw.host;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        restore(dx, dx_before);
        restore(dw, dw_before);
        auto run = [&] {
            rmsnorm_backward(dx.dev, dw.dev, dy.dev, x.dev, stride, w.dev, rstd.dev, N, C, accumulate, ctx);
        };
        run();
        REFERENCE(rmsnorm_backward)
        (dx.ref(), dw.ref(), dy.ref(), x.ref(), stride, w.ref(), rstd.ref(), N, C, accumulate, reference_ctx);
        CHECK_CLOSE(dx, BF16);
        CHECK_CLOSE(dw, FLOAT);
        if (stride > C) {  // what lies between the rows is left alone
            auto got = dx.got();
            for (int64_t i = 0; i < N * stride; i++)
                if (i % stride >= C) CHECK(got[(size_t)i] == dx_before[(size_t)i], "wrote between rows");
        }
        CHECK_REPEATS(dw, (restore(dx, dx_before), restore(dw, dw_before), run()));
    }
}

static void residual_case(int64_t N, int64_t C, int in_place) {
    X a(N * C, 1), b(N * C, 2), w(C, 3), other(N * C), y(N * C);
    R rstd(N);
    X& sum = in_place ? a : other;
    settle();
    residual_rmsnorm_forward(sum.dev, y.dev, rstd.dev, a.dev, b.dev, w.dev, N, C, ctx);
    for (int64_t i = 0; i < N * C; i++) sum.host[(size_t)i] = a.host[(size_t)i] + b.host[(size_t)i];
    CHECK_CLOSE(sum, BF16);
    // The norm is that of the rounded sum.
    sum.host = sum.got();
    REFERENCE(rmsnorm_forward)(y.ref(), rstd.ref(), sum.ref(), C, w.ref(), N, C, reference_ctx);
    CHECK_CLOSE(y, BF16);
    CHECK_CLOSE(rstd, FLOAT);
}

static void test_rmsnorm(void) {
    int device, shared;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    const int64_t widths[] = {8, 24, 40, 128, 512, 1000, 2048, 2056, 5120, 7168, 16384, 1544};
    for (int64_t C : widths) {
        if (C > 8192 && shared < 192 << 10) continue;
        rmsnorm_case(3, C, C);
        residual_case(3, C, 0);
        residual_case(C > 5000 ? 17 : 129, C, 1);
        rmsnorm_case(C > 3000 ? 600 : 1000, C, C + 64);
    }
    rmsnorm_case(129, 512, 576);
    rmsnorm_case(129, 512, 584);
    rmsnorm_case(9001, 128, 128);
    rmsnorm_case(4100, 2048, 2048);  // several rows a block
    rmsnorm_case(1000, 4096, 4096);
    rmsnorm_case(2500, 1024, 1024);
}

static void rope_case(int64_t N, int64_t T, int64_t heads, int64_t D, int64_t head_stride, int64_t stride,
                      int64_t offset) {
    X x(N * stride + offset, 1);
    R table(T * D);
    RopeConfig config = {(int)D, 10000, D > 8, 40, 0.707, 4096};
    REFERENCE(rope_table)(table.ref(), T, &config);
    std::vector<float> own((size_t)(T * D));
    rope_table(own.data(), T, &config);
    for (int64_t i = 0; i < T * D; i++)
        CHECK(fabs(own[(size_t)i] - table.host[(size_t)i]) < 1e-7, "table differs at %lld", (long long)i);
    table.send();
    settle();
    const RopeShape shape = {N, T, heads, D, stride, head_stride}, none = {};
    for (int direction = 1; direction >= -1; direction -= 2) {
        auto before = x.host;
        rope_apply(x.dev + offset, shape, x.dev, none, table.dev, direction, ctx);
        REFERENCE(rope_apply)
        ((floatX*)((double*)x.ref() + offset), shape, (floatX*)x.ref(), none, table.ref(), direction, reference_ctx);
        CHECK_CLOSE(x, BF16);
        auto got = x.got();
        int64_t touched = 0;
        for (int64_t i = 0; i < x.n; i++) {
            int64_t at = i - offset, in_token = at < 0 ? -1 : at % stride, in_head = in_token % head_stride;
            bool mine = at >= 0 && in_token / head_stride < heads && in_head < D;
            if (!mine) touched += got[(size_t)i] != before[(size_t)i];
        }
        CHECK(touched == 0, "%lld elements beside the heads changed", (long long)touched);
        x.host = got;
    }
}

// Queries and keys of one launch: more blocks of the one, then of the other.
static void rope_two_case(int64_t heads, int64_t other_heads) {
    const int64_t N = 130, T = 65, D = 16;
    X x(N * heads * 24, 1), y(N * other_heads * D, 2);
    R table(T * D);
    RopeConfig config = {(int)D, 10000, 0, 40, 0.707, 4096};
    REFERENCE(rope_table)(table.ref(), T, &config);
    table.send();
    settle();
    const RopeShape of_x = {N, T, heads, D, heads * 24, 24}, of_y = {N, T, other_heads, D, other_heads * D, D};
    rope_apply(x.dev + 8, of_x, y.dev, of_y, table.dev, 1, ctx);
    REFERENCE(rope_apply)
    ((floatX*)((double*)x.ref() + 8), of_x, (floatX*)y.ref(), of_y, table.ref(), 1, reference_ctx);
    CHECK_CLOSE(x, BF16);
    CHECK_CLOSE(y, BF16);
}

static void test_rope(void) {
    rope_two_case(8, 1);
    rope_two_case(1, 12);
    rope_case(1, 1, 1, 8, 8, 8, 0);
    rope_case(129, 43, 1, 64, 64, 576, 512);
    rope_case(1000, 250, 16, 64, 192, 16 * 192, 128);
    rope_case(130, 65, 5, 24, 40, 200, 0);
    rope_case(130, 65, 3, 8, 24, 72, 8);
    rope_case(300, 100, 128, 64, 192, 128 * 192, 128);
    rope_case(130, 65, 9, 24, 40, 400, 8);
    RopeConfig config = {64, 10000, 1, 40, 0.707, 4096};
    int low, high, low_ref, high_ref;
    rope_yarn_ramp(&low, &high, &config);
    REFERENCE(rope_yarn_ramp)(&low_ref, &high_ref, &config);
    CHECK(low == low_ref && high == high_ref, "ramp %d..%d", low, high);
    CHECK(rope_mscale(&config) == REFERENCE(rope_mscale)(&config), "mscale %g", rope_mscale(&config));
}

static void swiglu_case(int64_t N, int64_t F) {
    X h(N * 2 * F, 1, 2), a(N * F), da(N * F, 2), dh(N * 2 * F);
    h.host[0] = 90, h.host[1] = -100;  // exp over- and underflows
    h.send();
    settle();
    swiglu_forward(a.dev, h.dev, N, F, ctx);
    REFERENCE(swiglu_forward)(a.ref(), h.ref(), N, F, reference_ctx);
    CHECK_CLOSE(a, BF16);
    a.poison();
    swiglu_backward(dh.dev, a.dev, da.dev, h.dev, N, F, ctx);
    REFERENCE(swiglu_backward)(dh.ref(), a.ref(), da.ref(), h.ref(), N, F, reference_ctx);
    CHECK_CLOSE(dh, BF16);
    CHECK_CLOSE(a, BF16);
}

static void test_swiglu(void) {
    swiglu_case(1, 8);
    swiglu_case(3, 40);
    swiglu_case(129, 1408);
    swiglu_case(1000, 24);
    swiglu_case(100, 1000);
}

static void loss_case(int64_t N, int64_t V, int64_t Vp, double scale) {
    X logits(N * Vp, 1, scale);
    R loss(N);
    I32 target(N);
    for (int64_t n = 0; n < N; n++) {
        target.host[(size_t)n] = (int32_t)(random_uniform(7, 2, (uint64_t)n) * (double)V);
        if (n % 5 == 1) logits.host[(size_t)(n * Vp + target.host[(size_t)n])] = 8 * scale;  // a small loss
        if (n % 5 == 2) logits.host[(size_t)(n * Vp)] = -INFINITY, target.host[(size_t)n] = (int32_t)(V - 1);
        for (int64_t v = V; v < Vp; v++) logits.host[(size_t)(n * Vp + v)] = 1e30;
    }
    target.send();
    logits.send();
    auto run = [&](float dscale) { cross_entropy(loss.dev, logits.dev, target.dev, N, V, Vp, dscale, ctx); };
    auto before = logits.host;
    REFERENCE(cross_entropy)(loss.ref(), logits.ref(), target.ref(), N, V, Vp, 0, reference_ctx);
    settle();
    run(0);
    CHECK_CLOSE(loss, FLOAT);
    CHECK_SAME(logits);
    loss.poison();
    for (int64_t n = 0; n < N; n++)
        for (int64_t v = V; v < Vp; v++) logits.host[(size_t)(n * Vp + v)] = NAN;
    auto with_nan = logits.host;
    logits.send();
    settle();
    run(0.125f);
    REFERENCE(cross_entropy)(loss.ref(), logits.ref(), target.ref(), N, V, Vp, 0.125f, reference_ctx);
    CHECK_CLOSE(loss, FLOAT);
    CHECK_CLOSE(logits, BF16);
    auto got = logits.got();
    for (int64_t i = 0; i < N * Vp; i++)
        if (i % Vp >= V) CHECK(got[(size_t)i] == 0, "padding holds %g", got[(size_t)i]);
    CHECK_REPEATS(loss, (restore(logits, with_nan), run(0.125f)));
    // What is not finite does not get lost.
    const double bad[] = {NAN, INFINITY};
    for (double value : bad) {
        before[(size_t)((N - 1) * Vp + V / 2)] = value;
        restore(logits, before);
        run(0.125f);
        CHECK(!isfinite(loss.got()[(size_t)(N - 1)]), "a logit of %g went by", value);
    }
}

static void cross_entropy_cases(void) {
    loss_case(1, 5, 8, 1);
    loss_case(3, 33, 40, 1);
    loss_case(129, 257, 384, 3);
    loss_case(7, 50257, 50304, 1);
    loss_case(5, 102400, 102400, 30);
    loss_case(3, 129279, 129280, 4);
    loss_case(3, 450600, 450688, 3);  // too large for shared memory
    loss_case(600, 16390, 16448, 3);  // several rows a cluster
    // Of the kernels for small vocabularies.
    loss_case(100, 1000, 1000, 10);
    loss_case(600, 1030, 1088, 3);
    loss_case(700, 257, 264, 3);
    loss_case(1000, 9000, 9088, 3);
}

// The kernels of both kinds, where the GPU has Hopper's.
static void test_cross_entropy(void) {
    const int own = ctx->portable;
    for (ctx->portable = own; ctx->portable <= 1; ctx->portable++) cross_entropy_cases();
    ctx->portable = own;
}

static StepState fetch_state(const StepState* dev) {
    StepState s;
    device_download(&s, dev, sizeof(s), ctx);
    return s;
}

static bool close_to(double a, double b) { return fabs(a - b) <= 1e-12 * fabs(b); }

static void adamw_case(int64_t n, int64_t n_decay, int64_t N, float clip) {
    X weight(n);
    R master(n, 1), m(n, 2, 0.1), v(n, 3), grad(n, 4, 3), loss(N, 5);
    for (auto& x : v.host) x = x * x;
    v.send();
    const AdamW opt = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, clip};
    AdamW* there = (AdamW*)device_alloc(sizeof(opt), "a test");
    device_upload(there, &opt, sizeof(opt), ctx);
    StepState* state = (StepState*)device_alloc(sizeof(StepState), "a test");
    StepState ref;
    memset(&ref, 0, sizeof(ref));
    for (int step = 0; step < 4; step++) {
        const bool bad = step == 2;
        auto keep = grad.host;
        if (bad) grad.host[(size_t)(n / 2)] = step % 2 ? NAN : INFINITY, grad.send();
        auto start = master.host;
        auto weight_before = weight.got(), master_before = master.got(), m_before = m.got(), v_before = v.got();
        settle();
        step_begin(state, ctx);
        REFERENCE(step_begin)(&ref, reference_ctx);
        loss_add(&state->loss_sum, loss.dev, N, ctx);
        loss_add(&state->loss_sum, loss.dev, N, ctx);
        REFERENCE(loss_add)(&ref.loss_sum, loss.ref(), N, reference_ctx);
        REFERENCE(loss_add)(&ref.loss_sum, loss.ref(), N, reference_ctx);
        grad_norm_add(state, grad.dev, n, ctx);
        grad_norm_add(state, grad.dev + 4, n - 4, ctx);
        REFERENCE(grad_norm_add)(&ref, grad.ref(), n, reference_ctx);
        REFERENCE(grad_norm_add)(&ref, (real*)((double*)grad.ref() + 4), n - 4, reference_ctx);
        step_decide(state, 2 * N, there, ctx);
        REFERENCE(step_decide)(&ref, 2 * N, &opt, reference_ctx);
        // More buffers than go into a launch, all but one without parameters: that one in the first or the second.
        const AdamWBuffer buffer = {weight.dev, master.dev, m.dev, v.dev, grad.dev, n, n_decay};
        const AdamWBuffer wanted = {weight.ref(), master.ref(), m.ref(), v.ref(), grad.ref(), n, n_decay};
        std::vector<AdamWBuffer> list(35, AdamWBuffer{});
        list[step % 2 ? 33 : 31] = buffer;
        adamw_update(list.data(), 35, 0, there, state, ctx);
        REFERENCE(adamw_update)(&wanted, 1, 0, &opt, &ref, reference_ctx);
        StepState got = fetch_state(state);
        CHECK(got.ok == ref.ok && got.updates == ref.updates && got.bad_in_a_row == ref.bad_in_a_row,
              "step %d: ok %d, updates %lld, bad %d", step, got.ok, (long long)got.updates, got.bad_in_a_row);
        CHECK(close_to(got.loss, ref.loss), "loss %.17g for %.17g", got.loss, ref.loss);
        if (bad) {
            auto bits = [&](const std::vector<double>& a, const std::vector<double>& b) {
                return memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
            };
            CHECK(bits(weight.got(), weight_before) && bits(master.got(), master_before) && bits(m.got(), m_before) &&
                      bits(v.got(), v_before),
                  "a bad step changed something");
            grad.host = keep;
            grad.send();
            continue;
        }
        CHECK(close_to(got.grad_norm, ref.grad_norm), "norm %.17g for %.17g", got.grad_norm, ref.grad_norm);
        CHECK(close_to(got.grad_scale, ref.grad_scale) && close_to(got.correction1, ref.correction1) &&
                  close_to(got.correction2, ref.correction2),
              "scale %.17g, corrections %.17g %.17g", got.grad_scale, got.correction1, got.correction2);
        CHECK_CLOSE(weight, BF16);
        CHECK_CLOSE(master, FLOAT);
        CHECK_CLOSE(m, FLOAT);
        CHECK_CLOSE(v, FLOAT);
        // The change alone: masters of size 1 keep 2^-24 of themselves, changes of 1e-2 so 1e-5.
        auto now = master.got(), rounded = weight.got();
        double off = 0, size = 0;
        int64_t wrong = 0;
        for (int64_t i = 0; i < n; i++) {
            double change = master.host[(size_t)i] - start[(size_t)i];
            off += pow(now[(size_t)i] - master.host[(size_t)i], 2);
            size += change * change;
            wrong += rounded[(size_t)i] != (double)__bfloat162float(__float2bfloat16_rn((float)now[(size_t)i]));
        }
        CHECK(sqrt(off / size) < 1e-4 && wrong == 0, "change off by %g, %lld weights not the rounded master",
              sqrt(off / size), (long long)wrong);
        // Both go on from the same numbers.
        master.host = now, m.host = m.got(), v.host = v.got();
    }
    settle();
    // The same sums every time.
    StepState first, second;
    for (StepState* s : {&first, &second}) {
        step_begin(state, ctx);
        loss_add(&state->loss_sum, loss.dev, N, ctx);
        grad_norm_add(state, grad.dev, n, ctx);
        *s = fetch_state(state);
    }
    CHECK(memcmp(&first, &second, sizeof(first)) == 0, "sums differ from run to run");
    device_free(there);
    device_free(state);
}

static void test_adamw(void) {
    adamw_case(64, 64, 1, 0);
    adamw_case(192, 64, 3, 1);
    adamw_case(64 * 1000, 64 * 900, 129, 1e9f);
    adamw_case(16384 * 40 + 64, 16384 * 30, 16384 * 2 + 5, 1);
}

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_embedding);
    RUN(test_rmsnorm);
    RUN(test_rope);
    RUN(test_swiglu);
    RUN(test_cross_entropy);
    RUN(test_adamw);
    return test_summary();
}
