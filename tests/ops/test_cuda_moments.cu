// AdamW's kernel on moments in bf16 against the double reference. Tolerances: tests/cuda.cuh.
#include "layers/adamw.h"
#include "tests/cuda.cuh"

static StepState fetch_state(const StepState* dev) {
    StepState s;
    device_download(&s, dev, sizeof(s), ctx);
    return s;
}

// bf16 moments that begin 16 bytes behind a NaN, with NaN behind them: on the GPU, and as bits for the reference.
struct Narrow {
    X dev;
    std::vector<uint16_t> ref;

    Narrow(int64_t n, uint32_t stream, bool square) : dev(n + 16, stream), ref((size_t)n) {
        for (int64_t i = 0; i < n + 16; i++) {
            double& x = dev.host[(size_t)i];
            x = i < 8 || i >= n + 8 ? NAN : square ? x * x : x / 10;
        }
        dev.send();
        ref = bits();
    }
    floatX* start() { return dev.dev + 8; }
    std::vector<uint16_t> bits() const {
        std::vector<uint16_t> raw((size_t)dev.n);
        ctx_sync(ctx);
        CUDA_CHECK(cudaMemcpy(raw.data(), dev.dev, raw.size() * sizeof(uint16_t), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < 8; i++)
            CHECK((raw[i] & 0x7fff) > 0x7f80 && (raw[raw.size() - 1 - i] & 0x7fff) > 0x7f80, "the NaN beside is gone");
        return std::vector<uint16_t>(raw.begin() + 8, raw.end() - 8);
    }
    // The GPU computes in float32, the reference in double. Their roundings differ only near the middle of two bf16
    // numbers: in 14 * 2^-24 / 2^-8 of all elements, 2e-4. The two results are then neighbours, unless the terms of m
    // cancel. The difference of terms below 0.1 is off by 7 * 2^-24 * 0.2.
    void check(const char* name) {
        auto value = [](uint16_t x) { return __bfloat162float(__ushort_as_bfloat16(x)); };
        auto got = bits();
        int64_t differ = 0, n = (int64_t)got.size();
        for (size_t i = 0; i < got.size(); i++) {
            differ += got[i] != ref[i];
            const double apart = value(got[i]) - value(ref[i]);
            CHECK(abs(got[i] - ref[i]) <= 1 || fabs(apart) < 1e-7, "%s %lld is %04x, not %04x", name, (long long)i,
                  got[i], ref[i]);
        }
        CHECK(differ <= 2 + n / 1000, "%lld of %lld %s differ", (long long)differ, (long long)n, name);
        ref = got;  // both sides continue from the same numbers
    }
};

static void moments_case(int64_t n, int64_t n_decay) {
    Masters master(n, 1);
    X& weight = master.weight;
    R grad(n, 4, 3);
    Narrow m(n, 2, false), v(n, 3, true);
    // Clipped gradients are large enough to matter: with 0.95 times a bf16 alone one in twenty results would be the
    // middle of two.
    const AdamW opt = {1e-2f, 0.9f, 0.95f, 0.1f, 1000};
    AdamW* there = (AdamW*)device_alloc(sizeof(opt), "a test");
    device_upload(there, &opt, sizeof(opt), ctx);
    StepState* state = (StepState*)device_alloc(sizeof(StepState), "a test");
    StepState ref;
    memset(&ref, 0, sizeof(ref));
    for (int step = 0; step < 4; step++) {
        const bool bad = step == 2;
        auto keep = grad.host, start = master.host;
        auto m_before = m.bits(), v_before = v.bits();
        if (bad) grad.host[(size_t)(n / 2)] = INFINITY, grad.send();
        step_begin(state, ctx);
        REFERENCE(step_begin)(&ref, reference_ctx);
        grad_norm_add(state, grad.dev, nullptr, n, ctx);
        REFERENCE(grad_norm_add)(&ref, grad.ref(), nullptr, n, reference_ctx);
        step_decide(state, 1, there, ctx);
        REFERENCE(step_decide)(&ref, 1, &opt, reference_ctx);
        const AdamWBuffer buffer = {weight.dev, master.low, m.start(), v.start(), grad.dev, n, n_decay};
        const AdamWBuffer wanted = {weight.ref(), (Master*)master.ref(), m.ref.data(), v.ref.data(), grad.ref(), n,
                                    n_decay};
        adamw_update(&buffer, 1, 1, there, state, ctx);
        REFERENCE(adamw_update)(&wanted, 1, 1, &opt, &ref, reference_ctx);
        const StepState got = fetch_state(state);
        CHECK(got.ok == !bad && ref.ok == !bad, "step %d: ok %d, of the reference %d", step, got.ok, ref.ok);
        CHECK(!bad || (m.bits() == m_before && v.bits() == v_before), "a bad step changed a moment");
        m.check("m");
        v.check("v");
        CHECK_CLOSE(weight, BF16);
        CHECK_CLOSE(master, FLOAT);
        // Only the change, as in adamw_case. If moments were rounded before the update, it would be 2^-9 off.
        auto now = master.got();
        double off = 0, size = 0;
        for (int64_t i = 0; i < n; i++) {
            off += pow(now[(size_t)i] - master.host[(size_t)i], 2);
            size += pow(master.host[(size_t)i] - start[(size_t)i], 2);
        }
        CHECK(bad || sqrt(off / size) < 1e-4, "change off by %g", sqrt(off / size));
        master.host = now;
        if (bad) grad.host = keep, grad.send();
    }
    device_free(there);
    device_free(state);
}

static void test_moments(void) {
    moments_case(8, 8);
    moments_case(8 * 257, 8 * 100 + 3);
    moments_case(16384 * 20 + 24, 16384 * 15);
}

int main(void) {
    open_contexts((size_t)16 << 20);
    RUN(test_moments);
    return test_summary();
}
