// MTP modules: their loads, losses and weights. Their gradients are tested in tests/model/test_model.c and
// tests/model/test_golden.c, their layouts in tests/parallel/test_layouts.c.
#include "tests/model.h"

// Positions without a target count in no load. They count in no loss, except as the context of positions with a target.
// Module k has 20 - k positions of a sequence. The mean loss of a position is log(50), for 50 words, within a tenth at
// the start. The biases of the modules' routers follow the loads.
static void positions_without_target(void) {
    Model* m = small_model("--mtp 3 --balance deepseek");
    model_init(m, 3);
    int32_t ids[2 * 40];
    int64_t load[6 * 6];
    for (int i = 0; i < 80; i++) ids[i] = (int32_t)(random_uniform(99, 7, (uint64_t)i) * 50);
    model_step_begin(m, 1);
    model_batch(m, ids, ids + 40, 2, 20);
    model_micro_step(m, 1);
    device_download(load, m->step.load, sizeof(load), m->ctx);
    const StepState state = state_of(m);
    for (int k = 1; k <= 3; k++) {
        int64_t sum = 0;
        for (int64_t e = 0; e < 6; e++) sum += load[(2 + k) * 6 + e];
        CHECK(sum == 2 * (20 - k) * 2, "module %d counted %lld choices of 2 x %d tokens", k, (long long)sum, 20 - k);
        const double mean = state.mtp_sum[k - 1] / (2 * (20 - k));
        CHECK(fabs(mean / log(50) - 1) < 0.1, "module %d: loss %g a position", k, mean);
    }
    CHECK(state.mtp_sum[3] == 0, "there is no fourth module");
    model_update(m, 0);
    real* bias = host_copy(m, m->bias, 6 * 6);
    for (int64_t i = 6; i < 6 * 6; i++) {
        const int64_t choices = 2 * 2 * (20 - max_i64(i / 6 - 2, 0));
        const int64_t below = choices - 6 * load[i];
        CHECK((bias[i] > 0) == (below > 0) && (bias[i] < 0) == (below < 0), "block %lld: bias %g", (long long)i / 6,
              (double)bias[i]);
    }
    free(bias);
    finish(m);
}

// The weight before and after the switch, from the options and in a model, whose modules share the weight equally.
static void weights_of_modules(void) {
    Settings w = settings_of("--mtp 2 --mtp-weight 0.4 --mtp-weight-end 0.2 --mtp-switch 0.6 --steps 10 --warmup 1");
    for (int64_t step = 1; step <= 10; step++)
        CHECK(settings_mtp_weight(&w, step) == (step <= 6 ? 0.4 : 0.2), "step %lld: weight %g", (long long)step,
              settings_mtp_weight(&w, step));
    settings_free(&w);
    Model* m = small_model("--mtp 2 --mtp-weight 0.5 --mtp-weight-end 0.25 --mtp-switch 0.5 --steps 10 --warmup 1");
    model_init(m, 3);
    for (int64_t step = 5; step <= 6; step++) {
        model_step_begin(m, step);
        CHECK(m->step.mtp_weight == (step == 5 ? 0.25f : 0.125f), "step %lld: weight %g of each module", (long long)step,
              (double)m->step.mtp_weight);
    }
    finish(m);
}

int main(void) {
    RUN(positions_without_target);
    RUN(weights_of_modules);
    return test_summary();
}
