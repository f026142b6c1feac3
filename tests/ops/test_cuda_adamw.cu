// The CUDA kernels of AdamW, with the sums and decisions of a step, against the double reference. Tolerances:
// tests/cuda.cuh.
#include "layers/adamw.h"
#include "tests/cuda.cuh"

static StepState fetch_state(const StepState* dev) {
    StepState s;
    device_download(&s, dev, sizeof(s), ctx);
    return s;
}

static bool close_to(double a, double b) { return fabs(a - b) <= 1e-12 * fabs(b); }

// Each weight is the bf16 number nearest to its master, and of two as near the larger one.
static void check_rounding(const std::vector<double>& masters, const std::vector<double>& weights) {
    int64_t wrong = 0;
    for (size_t i = 0; i < masters.size(); i++) {
        const float master = (float)masters[i];
        uint32_t bits, above;
        memcpy(&bits, &master, 4);
        bits &= 0xffff0000, above = bits + 0x10000;
        float low, high;
        memcpy(&low, &bits, 4), memcpy(&high, &above, 4);
        const double want = fabs(masters[i] - low) < fabs(high - masters[i]) ? low : high;
        wrong += weights[i] != want;
    }
    CHECK(wrong == 0, "%lld weights are not the rounded master", (long long)wrong);
}

// Sums over a block, one right after another. Warps take turns in being late.
static __global__ void sums_kernel(int* wrong) {
    for (int i = 0; i < 3000; i++) {
        if (i % 16 == 0 && (int)threadIdx.x / 32 == i / 16 % 32) __nanosleep(100);
        const double sum = block_sum((double)(i + (int)threadIdx.x));
        if (sum != 1024.0 * i + 1024 * 1023 / 2) atomicAdd(wrong, 1);
    }
}

static void test_block_sums(void) {
    I32 wrong(1);
    wrong.host[0] = 0, wrong.send();
    launch(sums_kernel, 2 * ctx->sms, 1024, 0, ctx, wrong.dev);
    CHECK(wrong.got()[0] == 0, "%d of the sums of threads are wrong", wrong.got()[0]);
}

// Masters survive the way to the GPU and back to the last bit: every lower half under six upper halves (1, its
// negative, the smallest and the largest numbers, zero, NaN). Infinity remains, and NaN remains a NaN.
static void test_masters(void) {
    static const uint32_t highs[6] = {0x3f80, 0xbf80, 0x0001, 0x7f7e, 0x0000, 0x7fff};
    const int64_t n = 6 * 65536 + 2;
    std::vector<float> there((size_t)n), back((size_t)n);
    for (int64_t i = 0; i < n - 2; i++) {
        const uint32_t bits = highs[i / 65536] << 16 | (uint32_t)(i % 65536);
        memcpy(&there[(size_t)i], &bits, 4);
    }
    there[(size_t)n - 2] = INFINITY, there[(size_t)n - 1] = -INFINITY;
    X weight(n);
    Master* low = (Master*)device_alloc((size_t)n * sizeof(Master), "a test");
    masters_upload(low, weight.dev, there.data(), n, ctx);
    masters_download(back.data(), low, weight.dev, n, ctx);
    const auto weights = weight.got();
    const size_t nan = 5 * 65536, end = (size_t)n - 2;
    CHECK(memcmp(there.data(), back.data(), nan * sizeof(float)) == 0, "masters have other bits");
    CHECK(memcmp(&there[end], &back[end], 2 * sizeof(float)) == 0, "infinity is %g, %g", back[end], back[end + 1]);
    check_rounding(std::vector<double>(there.begin(), there.begin() + nan),
                   std::vector<double>(weights.begin(), weights.begin() + nan));
    int64_t lost = 0;
    for (size_t i = nan; i < end; i++) lost += !isnan(back[i]) || !isnan(weights[i]);
    CHECK(lost == 0, "%lld NaN became numbers", (long long)lost);
    device_free(low);
}

// With `rounded` the gradient is in bf16. Its values are the same.
static void adamw_case(int64_t n, int64_t n_decay, int64_t N, float clip, bool is_rounded) {
    X rounded(n, 4, 3);
    Masters master(n, 1);
    X& weight = master.weight;
    R m(n, 2, 0.1), v(n, 3), grad(n), loss(N, 5);
    for (auto& x : v.host) x = x * x;
    v.send();
    grad.host = rounded.host, grad.send();
    const real* exact = is_rounded ? nullptr : grad.dev;
    const floatX* in_bf16 = is_rounded ? rounded.dev : nullptr;
    const real* exact_rest = is_rounded ? nullptr : grad.dev + 8;
    const floatX* bf16_rest = is_rounded ? rounded.dev + 8 : nullptr;
    const AdamW opt = {1e-2f, 0.9f, 0.95f, 0.1f, clip};
    AdamW* there = (AdamW*)device_alloc(sizeof(opt), "a test");
    device_upload(there, &opt, sizeof(opt), ctx);
    StepState* state = (StepState*)device_alloc(sizeof(StepState), "a test");
    StepState ref;
    memset(&ref, 0, sizeof(ref));
    for (int step = 0; step < 4; step++) {
        // A step on both sides, with two micro-steps. In step 2 one gradient is not finite.
        const bool bad = step == 2;
        auto keep = grad.host;
        auto send = [&] { rounded.host = grad.host, grad.send(), rounded.send(); };
        if (bad) grad.host[(size_t)(n / 2)] = step % 2 ? NAN : INFINITY, send();
        auto start = master.host;
        auto weight_before = weight.got(), master_before = master.got(), m_before = m.got(), v_before = v.got();
        settle();
        step_begin(state, ctx);
        REFERENCE(step_begin)(&ref, reference_ctx);
        loss_add(&state->loss_sum, loss.dev, N, ctx);
        loss_add(&state->loss_sum, loss.dev, N, ctx);
        REFERENCE(loss_add)(&ref.loss_sum, loss.ref(), N, reference_ctx);
        REFERENCE(loss_add)(&ref.loss_sum, loss.ref(), N, reference_ctx);
        grad_norm_add(state, exact, in_bf16, n, ctx);
        grad_norm_add(state, exact_rest, bf16_rest, n - 8, ctx);
        REFERENCE(grad_norm_add)(&ref, grad.ref(), nullptr, n, reference_ctx);
        REFERENCE(grad_norm_add)(&ref, (real*)((double*)grad.ref() + 8), nullptr, n - 8, reference_ctx);
        step_decide(state, 2 * N, there, ctx);
        REFERENCE(step_decide)(&ref, 2 * N, &opt, reference_ctx);
        // More buffers than one launch takes. All but one have no parameters; that one is in the first or in the second
        // launch.
        const AdamWBuffer buffer = {weight.dev, master.low, m.dev, v.dev, exact, n, n_decay, in_bf16};
        const AdamWBuffer wanted = {weight.ref(), (Master*)master.ref(), m.ref(), v.ref(), grad.ref(), n, n_decay};
        std::vector<AdamWBuffer> list(35, AdamWBuffer{});
        list[step % 2 ? 33 : 31] = buffer;
        adamw_update(list.data(), 35, 0, there, state, ctx);
        REFERENCE(adamw_update)(&wanted, 1, 0, &opt, &ref, reference_ctx);
        // The decision of the step, and a step that is not finite changes nothing.
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
            send();
            continue;
        }
        CHECK(close_to(got.grad_norm, ref.grad_norm), "norm %.17g for %.17g", got.grad_norm, ref.grad_norm);
        CHECK(close_to(got.grad_scale, ref.grad_scale) && close_to(got.correction1, ref.correction1) &&
                  close_to(got.correction2, ref.correction2),
              "scale %.17g, corrections %.17g %.17g", got.grad_scale, got.correction1, got.correction2);
        // The tensors.
        CHECK_CLOSE(weight, BF16);
        CHECK_CLOSE(master, FLOAT);
        CHECK_CLOSE(m, FLOAT);
        CHECK_CLOSE(v, FLOAT);
        // Only the change is compared: masters of size 1 keep 2^-24 of themselves, so changes of 1e-2 keep 1e-5.
        auto now = master.got();
        double off = 0, size = 0;
        for (int64_t i = 0; i < n; i++) {
            double change = master.host[(size_t)i] - start[(size_t)i];
            off += pow(now[(size_t)i] - master.host[(size_t)i], 2);
            size += change * change;
        }
        CHECK(sqrt(off / size) < 1e-4, "change off by %g", sqrt(off / size));
        check_rounding(now, weight.got());
        // Both sides continue from the same numbers.
        master.host = now, m.host = m.got(), v.host = v.got();
    }
    settle();
    // The same sums every time.
    StepState first, second;
    for (StepState* s : {&first, &second}) {
        step_begin(state, ctx);
        loss_add(&state->loss_sum, loss.dev, N, ctx);
        grad_norm_add(state, exact, in_bf16, n, ctx);
        *s = fetch_state(state);
    }
    CHECK(memcmp(&first, &second, sizeof(first)) == 0, "sums differ from run to run");
    device_free(there);
    device_free(state);
}

static void test_adamw(void) {
    for (bool rounded : {false, true}) {
        adamw_case(64, 64, 1, 0, rounded);
        adamw_case(192, 61, 3, 1, rounded);
        adamw_case(64 * 1000, 64 * 900, 129, 1e9f, rounded);
        adamw_case(16384 * 40 + 64, 16384 * 30, 16384 * 2 + 5, 1, rounded);
    }
}

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_block_sums);
    RUN(test_masters);
    RUN(test_adamw);
    return test_summary();
}
