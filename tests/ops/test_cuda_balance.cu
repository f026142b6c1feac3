// The update of the selection biases on the GPU against the double reference. The counts are in test_cuda_router.cu.
#include "layers/step.h"
#include "moe/balance.h"
#include "tests/cuda.cuh"

// Updates of several layers; one layer counted nothing. A quantile in another bin would be off by a multiple of the
// bin's width. Float32 rounds the bias and the mean.
static void test_balance(void) {
    for (int32_t E : {1, 7, 64, 256, 500}) {
        enum { LAYERS = 4, EMPTY = 2, TOKENS = 3000 };
        const int32_t K = E < 8 ? 1 : 8;
        R by_quantile(LAYERS * E, 1), by_sign(LAYERS * E, 2);
        I64 load(LAYERS * E), margins((int64_t)LAYERS * E * MARGIN_BINS);
        StepState host, *state = (StepState*)device_alloc(sizeof(StepState), "a test");
        memset(&host, 0, sizeof(host));
        for (auto& l : load.host) l = 0;
        for (auto& m : margins.host) m = 0;
        for (int32_t i = 0; i < LAYERS * E; i++) {
            if (i / E == EMPTY) continue;
            load.host[(size_t)i] = 1000 * (1 + i / E) + draw_below(30, i, 3);
            // Margins around a middle of the expert's own, most of them within 0.1.
            for (int n = 0; n < TOKENS; n++) {
                const double u = draw_below(31, (int64_t)i * TOKENS + n, 1 << 20) / (double)(1 << 19) - 1;
                const double middle = 0.2 * (draw_below(32, i, 100) / 50.0 - 1);
                const int64_t bin = margin_bin((float)(middle + 0.5 * u * u * u));
                margins.host[(size_t)((i / E * MARGIN_BINS + bin) * E + i % E)]++;
            }
        }
        load.send(), margins.send();
        settle();
        const auto quantile_before = by_quantile.got(), sign_before = by_sign.got();
        // Against the reference. Without ok, and in the layer without counts, no bias moves.
        for (int ok = 0; ok < 2; ok++) {
            host.ok = ok;
            device_upload(state, &host, sizeof(host), ctx);
            balance_quantile(by_quantile.dev, margins.dev, LAYERS, E, K, state, ctx);
            REFERENCE(balance_quantile)(by_quantile.ref(), margins.ref(), LAYERS, E, K, &host, reference_ctx);
            balance_sign(by_sign.dev, load.dev, LAYERS, E, 1e-3f, state, ctx);
            REFERENCE(balance_sign)(by_sign.ref(), load.ref(), LAYERS, E, 1e-3f, &host, reference_ctx);
            CHECK_CLOSE(by_quantile, 1e-6);
            CHECK_CLOSE(by_sign, 1e-6);
            const auto quantile = by_quantile.got(), sign = by_sign.got();
            for (int32_t i = 0; i < LAYERS * E; i++) {
                const bool still = !ok || i / E == EMPTY;
                CHECK(!still || quantile[(size_t)i] == quantile_before[(size_t)i], "bias %d moved with ok %d", i, ok);
                CHECK(!still || sign[(size_t)i] == sign_before[(size_t)i], "bias %d moved by sign with ok %d", i, ok);
                if (!still && E > 1) CHECK(quantile[(size_t)i] != quantile_before[(size_t)i], "bias %d stayed", i);
            }
        }
        device_free(state);
    }
}

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_balance);
    return test_summary();
}
