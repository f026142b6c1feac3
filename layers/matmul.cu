// Dense products through cuBLASLt: bf16 in, float32 accumulation, bf16 out (float32 for forward_real, and for wgrad,
// which adds to what is there).
//
// Row-major matrices are handed over as their column-major transposes: y^T (OC, N) = W x^T, and so on. The algorithm of
// a shape is chosen once, the first that the library's heuristic offers without in-place split-K (whose order of
// summation is not fixed), never by timing: the same shapes give the same bits on every run. Bound by the tensor cores
// at the model's sizes; the library reaches about 80 % of their dense peak there, so dense products are left to it.
#include <stdlib.h>
#include <string.h>

#include "device/cuda.cuh"
#include "layers/matmul.h"

typedef struct Product {
    int64_t m, n, k;  // D (m, n) = op(A) (m, k) op(B) (k, n), column-major
    int64_t lda, ldb, ldd;
    int32_t transpose_a, transpose_b;
    int32_t real_out;                    // D is float32, else bf16
    int32_t accumulate;                  // D += instead of D =
    uint32_t align_a, align_b, align_d;  // of the addresses, in bytes
    uint32_t unused;                     // keys are compared as bytes: no padding
} Product;

struct MatmulPlan {
    Product key;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    MatmulPlan* next;
};

size_t matmul_workspace(void) { return (size_t)32 << 20; }

static uint32_t alignment(const void* p) {
    uint32_t align = 256;
    while ((uintptr_t)p % align) align /= 2;
    return align;
}

template <typename T>
static void prefer(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
}

static MatmulPlan* make_plan(const Product& p, Ctx* ctx) {
    MatmulPlan* plan = (MatmulPlan*)host_alloc(sizeof(MatmulPlan));
    plan->key = p;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasOperation_t ta = p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, tb = p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof(ta)));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan->op, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof(tb)));
    CUBLAS_CHECK(
        cublasLtMatrixLayoutCreate(&plan->a, CUDA_R_16BF, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.lda));
    CUBLAS_CHECK(
        cublasLtMatrixLayoutCreate(&plan->b, CUDA_R_16BF, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.ldb));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan->d, p.real_out ? CUDA_R_32F : CUDA_R_16BF, p.m, p.n, p.ldd));

    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, matmul_workspace());
    prefer(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           (uint32_t)(CUBLASLT_REDUCTION_SCHEME_MASK & ~CUBLASLT_REDUCTION_SCHEME_INPLACE));
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.align_a);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.align_b);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.align_d);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.align_d);
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(ctx->lt, plan->op, plan->a, plan->b, plan->d, plan->d, preference, 1,
                                                &found, &count));
    if (count == 0)
        die(EXIT_FAILED,
            "cuBLASLt has no algorithm for a product of %lld x %lld x %lld; dimensions that are multiples of 8 always "
            "have one",
            (long long)p.m, (long long)p.n, (long long)p.k);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    plan->algo = found.algo;
    plan->next = ctx->matmul_plans;
    return ctx->matmul_plans = plan;
}

static void multiply(void* d, const floatX* a, const floatX* b, Product p, Ctx* ctx) {
    if (p.m == 0 || p.n == 0 || p.k == 0) return;
    p.align_a = alignment(a);
    p.align_b = alignment(b);
    p.align_d = alignment(d);
    p.unused = 0;
    MatmulPlan* plan = ctx->matmul_plans;
    while (plan && memcmp(&plan->key, &p, sizeof(p)) != 0) plan = plan->next;
    if (!plan) plan = make_plan(p, ctx);
    float alpha = 1, beta = p.accumulate ? 1 : 0;
    void* workspace = ctx_workspace<char>(ctx, (int64_t)matmul_workspace());
    CUBLAS_CHECK(cublasLtMatmul(ctx->lt, plan->op, &alpha, a, plan->a, b, plan->b, &beta, d, plan->d, d, plan->d,
                                &plan->algo, workspace, matmul_workspace(), ctx->stream));
}

void matmul_forward(floatX* y, const floatX* x, const floatX* w, int64_t N, int64_t IC, int64_t OC, Ctx* ctx) {
    Product p = {OC, N, IC, IC, IC, OC, 1, 0, 0, 0, 0, 0, 0, 0};
    multiply(y, w, x, p, ctx);
}

void matmul_forward_real(real* y, const floatX* x, const floatX* w, int64_t N, int64_t IC, int64_t OC, Ctx* ctx) {
    Product p = {OC, N, IC, IC, IC, OC, 1, 0, 1, 0, 0, 0, 0, 0};
    multiply(y, w, x, p, ctx);
}

void matmul_dgrad(floatX* dx, const floatX* dy, const floatX* w, int64_t N, int64_t IC, int64_t OC, int accumulate,
                  Ctx* ctx) {
    Product p = {IC, N, OC, IC, OC, IC, 0, 0, 0, accumulate, 0, 0, 0, 0};
    multiply(dx, w, dy, p, ctx);
}

void matmul_wgrad(real* dw, const floatX* dy, const floatX* x, int64_t N, int64_t IC, int64_t OC, Ctx* ctx) {
    Product p = {IC, OC, N, IC, OC, IC, 0, 1, 1, 1, 0, 0, 0, 0};
    multiply(dw, x, dy, p, ctx);
}

void matmul_forget(Ctx* ctx) {
    while (ctx->matmul_plans) {
        MatmulPlan* plan = ctx->matmul_plans;
        ctx->matmul_plans = plan->next;
        CUBLAS_CHECK(cublasLtMatmulDescDestroy(plan->op));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->a));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->b));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->d));
        free(plan);
    }
}
