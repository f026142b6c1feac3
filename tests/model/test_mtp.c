// The MTP module: its loads, loss and weight. Its gradients are tested in tests/model/test_model.c and
// tests/model/test_golden.c, its layouts in tests/parallel/test_layouts.c.
#include "tests/model.h"

// Positions without a target count in no load. They count in no loss, except as the context of positions with a target.
// The module has 19 positions of a sequence. The mean loss of a position is log(50), for 50 words, within a tenth at
// the start. The biases of the module's router follow the loads.
static void positions_without_target(void) {
    Model* m = small_model("--mtp 1 --balance deepseek");
    model_init(m, 3);
    int32_t ids[2 * 40];
    int64_t load[4 * 6], sum = 0;
    for (int i = 0; i < 80; i++) ids[i] = (int32_t)(random_uniform(99, 7, (uint64_t)i) * 50);
    model_step_begin(m, 1);
    model_batch(m, ids, ids + 40, 2, 20);
    model_micro_step(m, 1);
    device_download(load, m->step.load, sizeof(load), m->ctx);
    const StepState state = state_of(m);
    for (int64_t e = 0; e < 6; e++) sum += load[3 * 6 + e];
    CHECK(sum == 2 * 19 * 2, "the module counted %lld choices of 2 x 19 tokens", (long long)sum);
    const double mean = state.mtp_sum / (2 * 19);
    CHECK(fabs(mean / log(50) - 1) < 0.1, "the module's loss is %g a position", mean);
    model_update(m, 0);
    real* bias = host_copy(m, m->bias, 4 * 6);
    for (int64_t i = 6; i < 4 * 6; i++) {
        const int64_t choices = 2 * 2 * (i / 6 == 3 ? 19 : 20);
        const int64_t below = choices - 6 * load[i];
        CHECK((bias[i] > 0) == (below > 0) && (bias[i] < 0) == (below < 0), "block %lld: bias %g", (long long)i / 6,
              (double)bias[i]);
    }
    free(bias);
    model_destroy(m);
}

// The weight in the first 0.67 of the steps and after them, from the options and in a model.
static void weight_of_module(void) {
    Settings w = settings_of("--mtp 1 --mtp-weight 0.4 --steps 10 --warmup 1");
    for (int64_t step = 1; step <= 10; step++)
        CHECK(run_mtp_weight(&w.run, step) == (step <= 6 ? 0.4 : 0.1), "step %lld: weight %g", (long long)step,
              run_mtp_weight(&w.run, step));
    settings_free(&w);
    Model* m = small_model("--mtp 1 --mtp-weight 0.5 --steps 10 --warmup 1");
    model_init(m, 3);
    for (int64_t step = 6; step <= 7; step++) {
        model_step_begin(m, step);
        CHECK(m->step.mtp_weight == (step == 6 ? 0.5f : 0.1f), "step %lld: weight %g", (long long)step,
              (double)m->step.mtp_weight);
    }
    model_destroy(m);
}

int main(void) {
    RUN(positions_without_target);
    RUN(weight_of_module);
    return test_summary();
}
