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

int main(void) {
    RUN(test_norm_of_large_buffers);
    return test_summary();
}
