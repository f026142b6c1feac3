// The sums and decisions of a step; test_adamw.c has more of them, with the update.
#include "layers/adamw.h"
#include "tests/oracle.h"

// Sums over more than one block of any backend. The result does not depend on the number of threads.
static void test_norm_of_large_buffers(void) {
    enum { N = 70001 };
    real *x = tensor(N, 1), *y = tensor(N, 2);
    double ref = dot(doubles(x, N), doubles(x, N), N) + dot(doubles(y, 5000), doubles(y, 5000), 5000), sum = 0;
    for (int i = 0; i < N; i++) sum += x[i];
    StepState states[2];
    memset(states, 0, sizeof(states));
    for (int k = 0; k < 2; k++) {
        omp_set_num_threads(1 + 2 * k);
        Ctx* ctx = ctx_create(step_workspace(N));
        step_begin(&states[k], ctx);
        grad_norm_add(&states[k], x, NULL, N, ctx);
        grad_norm_add(&states[k], y, NULL, 5000, ctx);
        loss_add(&states[k].loss_sum, x, N, ctx);
        ctx_sync(ctx);
        ctx_destroy(ctx);
    }
    CHECK(fabs(states[0].grad_sq - ref) <= TOL(1e-6, 1e-12) * ref, "squares %.17g, expected %.17g", states[0].grad_sq,
          ref);
    CHECK(fabs(states[0].loss_sum - sum) <= TOL(1e-6, 1e-13) * sqrt((double)N), "sum %.12g, expected %.12g",
          states[0].loss_sum, sum);  // numbers of random signs: sqrt(N) roundings of size 1
    CHECK_BITS(&states[0], &states[1], sizeof(StepState));
    release_all();
}

// A step that overflows the capacity counts neither as good nor as bad. Later steps change nothing until the capacity
// is larger (overflow is cleared).
static void test_no_room(void) {
    Ctx* ctx = ctx_create(0);
    StepState* state = kept_bytes(sizeof(StepState));
    memset(state, 0, sizeof(*state));
    const AdamW opt = {1e-3f, 0.9f, 0.95f, 1e-8f, 0, 1};
    const int want[4] = {1, 0, 0, 1};
    for (int step = 0; step < 4; step++) {
        step_begin(state, ctx);
        state->loss_sum = 1, state->grad_sq = 1;
        if (step == 1) state->overflow = 3;
        if (step == 3) state->overflow = 0;
        step_decide(state, 1, &opt, ctx);
        CHECK(state->ok == want[step] && state->bad_in_a_row == 0, "step %d: ok %d, %d in a row", step, state->ok,
              state->bad_in_a_row);
    }
    CHECK(state->updates == 2, "%lld updates", (long long)state->updates);
    ctx_destroy(ctx);
    release_all();
}

int main(void) {
    RUN(test_norm_of_large_buffers);
    RUN(test_no_room);
    return test_summary();
}
