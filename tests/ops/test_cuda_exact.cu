// MXFP8 `exact` is the bf16 GEMM of dequantized values. This test compares its accuracy with the best possible for
// bf16: on dequantized operands, against float64, with float32 output. It uses wgrad, whose sums are those of all
// passes (the other passes round them to bf16 at the end).
//
// Tolerances, of the norm, at a contraction of K. The tensor cores add 16 products at a time and cut the running sum
// off behind its 24th bit, towards zero. The loss is half of 2^-23 over the sum's mantissa (0.72 on average): 4.3e-8 of
// the current sum. The current sum is sqrt(k / K) of the result, 2/3 on average. There are K / 16 of these losses, all
// of one sign: 1.8e-9 K. Allowed: 2e-9 K, and 5e-7 for roundings that do not grow with K. Sums in bf16 would show 1e-3,
// fp8 products 1e-4. On every GPU the library's bf16 GEMM of the same operands has the same loss: at most 1.2 times its
// error is allowed.
#include "grouped/grouped_gemm.h"
#include "layers/matmul.h"
#include "mx/mxfp8.h"
#include "tests/cuda.cuh"

enum { OC = 2048, IC = 1408 };

// Fake quantization of x (rows, columns) column-wise.
static void cast_columns(X& x, Ragged r, int64_t columns, MxRecipe recipe) {
    mx_round_columns(x.dev, x.dev, r, columns, recipe, ctx);
    x.host = x.got();
}

static double error_of_product(int64_t K, int32_t align) {
    X dy(K * OC, 1), x(K * IC, 2);
    R dw(OC * IC), library(OC * IC);
    I64 start(2);
    I32 rows(1);
    start.host = {0, K}, rows.host = {(int32_t)K};
    start.send(), rows.send();
    Ragged r = {};
    r.El = 1, r.capacity = K, r.group_start = start.dev, r.group_rows = rows.dev;
    cast_columns(dy, r, OC, {MX_RCEIL, align});
    cast_columns(x, r, IC, {MX_RCEIL, align});
    grouped_gemm_wgrad(dw.dev, NULL, dy.dev, x.dev, ALL_BY_ROW, r, IC, OC, 0, ctx);
    matmul_wgrad(library.dev, dy.dev, x.dev, K, IC, OC, 0, ctx);
    REFERENCE(matmul_wgrad)((real*)dw.ref(), (floatX*)dy.ref(), (floatX*)x.ref(), K, IC, OC, 0, reference_ctx);
    library.host = dw.host;
    const double error = tensor_error(dw), of_library = tensor_error(library);
    if (getenv("TEST_ERRORS"))
        printf("    K %lld: %.2e, cuBLAS %.2e, allowed %.2e\n", (long long)K, error, of_library,
               2e-9 * (double)K + 5e-7);
    CHECK(error <= 1.2 * of_library, "K %lld: %g, cuBLAS %g", (long long)K, error, of_library);
    return error;
}

static void test_exact(void) {
    for (int64_t K : {(int64_t)128, (int64_t)1408, (int64_t)2048, (int64_t)7168})
        for (int32_t align : {(int32_t)1, (int32_t)MX_CHUNK}) {
            const double error = error_of_product(K, align);
            CHECK(error > 0 && error < 2e-9 * (double)K + 5e-7, "K %lld: %g", (long long)K, error);
        }
}

int main(void) {
    if (device_available()) open_contexts(matmul_workspace());
    RUN(test_exact);
    return test_summary();
}
