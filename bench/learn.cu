// Speed of the ladder of docs/cuda.md against the program's own kernel, grouped/grouped_gemm.cu. A row for each step of
// the ladder has the TFLOP/s of both, their ratio, and the difference of the two results. Timing is explained in
// bench/grouped.cuh. Step 1 takes most of the time: with 32768 rows the benchmark runs for half a minute.
//
//   build/cuda/bench/learn [rows [round_ms]]
#include "bench/grouped.cuh"
#include "grouped/grouped_gemm.h"
#include "learn/learn.h"

static void bench(int64_t OC, int64_t IC, int El, int64_t M) {
    // Operands and both outputs.
    Groups g(El, M);
    const int64_t capacity = g.r.capacity;
    floatX* x = (floatX*)device_alloc(capacity * IC * 2, "x");
    floatX* w = (floatX*)device_alloc(El * OC * IC * 2, "w");
    floatX* ours = (floatX*)device_alloc(capacity * OC * 2, "ours");
    floatX* theirs = (floatX*)device_alloc(capacity * OC * 2, "theirs");
    fill_rows<<<1024, 256, 0, stream>>>(x, capacity, IC, g.marks, 1);
    fill<<<1024, 256, 0, stream>>>(w, El * OC * IC, 2);
    LAUNCH_CHECK();

    // One step after another; the last two need Hopper.
    LearnStep* steps[] = {learn_1, learn_2, learn_3, learn_4, learn_5};
    const char* names[] = {"step 1", "step 2", "step 3", "step 4", "step 5"};
    for (int i = 0; i < (ctx->capability == 90 ? 5 : 3); i++) {
        auto step = [&] { steps[i](ours, x, w, g.r, IC, OC, ctx); };
        auto product = [&] { grouped_gemm_forward(theirs, x, w, g.r, IC, OC, ctx); };
        device_zero(sums, 16, ctx);
        step(), product();
        difference<<<512, 256, 0, stream>>>(ours, theirs, capacity * OC, sums);
        LAUNCH_CHECK();
        compare(M, OC, IC, El, names[i], step, product);
    }
    for (void* p : {x, w, ours, theirs}) device_free(p);
}

int main(int argc, char** argv) { return run_shapes(argc, argv, "grouped_gemm.cu", {{2816, 2048}}, bench); }
