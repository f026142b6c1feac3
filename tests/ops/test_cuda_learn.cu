// The steps of docs/cuda.md against the reference in double. Steps 4 and 5 are for Hopper only.
//
// Tolerances, as in test_cuda_grouped_gemm.cu. Outputs in bf16, 8 significant bits: rounding moves an element by at
// most 2^-8 of itself. So no row may be off by more than 2^-8 in norm, plus 1e-5 for the float32 sums. Over a whole
// tensor the rounding errors come to 1.5e-3 .. 1.7e-3; 2e-3 is allowed.
#include "grouped/grouped_gemm.h"
#include "layers/matmul.h"
#include "learn/learn.h"
#include "tests/ragged.cuh"

static const double ROW_TOLERANCE = 0x1p-8 + 1e-5, TENSOR_TOLERANCE = 2e-3;

static LearnStep* step;  // the step that the tests call

// Compares y of the groups, in a poisoned output. nan_weights, nan_rows: experts whose weights or rows are NaN (-1:
// none).
static void compare(const Rows& rows, int64_t IC, int64_t OC, int nan_weights = -1, int nan_rows = -1) {
    // Operands.
    int before = test_failures_here;
    Layout l(rows);
    RowBuffer x(l, IC, 1);
    X w(l.El() * OC * IC, 2), y(l.held * OC);
    Rows touched;
    if (nan_weights >= 0) {
        std::fill_n(w.host.begin() + nan_weights * OC * IC, OC * IC, (double)NAN);
        touched.push_back(nan_weights);
    }
    if (nan_rows >= 0) {
        std::fill_n(x.host.begin() + l.start[nan_rows] * IC, l.rows[nan_rows] * IC, (double)NAN);
        touched.push_back(nan_rows);
    }
    x.send(), w.send();

    // Both sides.
    step(y.dev, x.dev, w.dev, l.device(), IC, OC, ctx);
    REFERENCE(grouped_gemm_forward)(y.ref(), x.ref(), w.ref(), l.reference(), IC, OC, reference_ctx);
    check_rows("y", y, l, OC, ROW_TOLERANCE, TENSOR_TOLERANCE, touched);

    // Results with NaN operands are NaN.
    auto got = y.got();
    int64_t finite = 0;
    for (int e : touched)
        for (int64_t i = l.start[e] * OC; i < (l.start[e] + l.rows[e]) * OC; i++) finite += !isnan(got[(size_t)i]);
    CHECK(finite == 0, "%lld elements of rows that met NaN are not NaN", (long long)finite);
    if (test_failures_here > before)
        printf("    with IC %lld, OC %lld, %d experts, %lld rows\n", (long long)IC, (long long)OC, l.El(),
               (long long)l.end);
}

// Widths below, at and beyond those of vectors, k blocks, stages of the ring and tiles.
static void test_sizes(void) {
    for (int64_t IC : {8, 16, 24, 64, 72, 136, 192, 264})
        for (int64_t OC : {8, 24, 40, 128, 136, 264}) compare({129, 0, 1, 130}, IC, OC);
}

// Groups that end before, at and after a tile's end; experts without rows first, last and alone.
static void test_group_sizes(void) {
    for (int32_t n : {0, 1, 7, 8, 9, 127, 128, 129, 257}) {
        compare({n}, 136, 264);
        compare({1, n, 128}, 264, 136);
    }
    compare({0, 1, 127, 128, 129, 0, 383, 0}, 96, 640);
    compare({0, 0, 0}, 64, 128);
}

static void test_one_takes_all(void) {
    compare({0, 0, 0, 0, 0, 1111, 0, 0}, 328, 520);
    compare({1300, 0, 0, 0}, 520, 328);
}

static void test_experts(void) {
    compare(random_rows(8, 200, 2), 392, 200);
    compare(random_rows(64, 150, 3), 264, 768);
    compare(random_rows(160, 20, 5), 96, 64);
    compare({129, 0, 300, 1}, 2048, 2816);
}

// NaN stays in the rows of its expert and out of pad rows.
static void test_nan_stays(void) { compare({130, 77, 300, 0, 129}, 200, 328, 1, 2); }

int main(void) {
    LearnStep* steps[] = {learn_1, learn_2, learn_3, learn_4, learn_5};
    if (device_available()) open_contexts(matmul_workspace());
    for (int i = 0; i < 5; i++) {
        printf("step %d\n", i + 1);
        if (ctx && i >= 3 && ctx->capability != 90) {
            SKIP(all, "this step is for Hopper, compute capability 9.0");
            continue;
        }
        step = steps[i];
        RUN(test_sizes);
        RUN(test_group_sizes);
        RUN(test_one_takes_all);
        RUN(test_experts);
        RUN(test_nan_stays);
    }
    return test_summary();
}
