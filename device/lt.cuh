// GEMMs by NVIDIA's library cuBLASLt: row-major matrices of bf16, float32 accumulation. Used by the dense GEMMs
// (layers/matmul.cu), and by ops without a kernel of their own for this GPU (mx/grouped_gemm_blackwell.cu).
//
// A GEMM is described once; the plan is cached in the Ctx. The plan's algorithm is the first of the library's heuristic
// without in-place split-K, whose order of summation is not fixed. There is no autotuning by timing: the same shapes
// give the same bits on every run.
#pragma once

#include <stdlib.h>
#include <string.h>

#include "device/cuda.cuh"

enum { LT_WORKSPACE = 8 << 20 };

// A row-major matrix; rows are `ld` elements apart.
struct LtMatrix {
    const void* p;
    int64_t ld;
};

// A strided batch: `count` GEMMs of the same shape. Consecutive matrices are a, b and d elements apart.
struct LtBatch {
    int64_t count = 1, a = 0, b = 0, d = 0;
};

// D (m, n) = alpha op(A) (m, k) op(B) (k, n) + beta C, or D += op(A) op(B) with accumulate
struct LtProduct {
    int64_t m, n, k;
    bool transpose_a = false, transpose_b = false;  // stored (k, m), (n, k)
    bool real_out = false;                          // D is float32, else bf16
    bool accumulate = false;
    float alpha = 1, beta = 0;
    const void* c = NULL;  // bf16, with the strides of D; NULL: D itself
    LtBatch batch = {};
    int64_t workspace = LT_WORKSPACE;  // bytes at the start of the Ctx's workspace, for split-K sums
    // NULL: A and B are bf16. Else both are MXFP8 (mx/grouped_gemm_blackwell.cu).
    const uint8_t *a_scale = NULL, *b_scale = NULL;
};

// The key of a cached plan: everything that the choice of an algorithm depends on. Keys are compared bytewise: all
// fields have one size, so that there is no padding.
struct LtOperand {
    int64_t ld, alignment;
};
struct LtKey {
    int64_t m, n, k, transpose_a, transpose_b, real_out, workspace, scaled;
    LtOperand a, b, d;
    LtBatch batch;
};

struct LtPlan {
    LtKey key;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    LtPlan* next;
};

template <typename T>
static inline void lt_set(cublasLtMatmulDesc_t op, cublasLtMatmulDescAttributes_t attribute, T value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(op, attribute, &value, sizeof(value)));
}

template <typename T>
static inline void lt_set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
                          T value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
}

// An operand for the key: its stride, and its alignment in bytes.
static inline LtOperand lt_operand(LtMatrix x) {
    int64_t alignment = 256;
    while ((uintptr_t)x.p % alignment) alignment /= 2;
    return {x.ld, alignment};
}

// The layout of a row-major (rows, columns) matrix: to the library it is a column-major (columns, rows) one.
static inline cublasLtMatrixLayout_t lt_layout(LtOperand x, cudaDataType_t type, int64_t rows, int64_t columns,
                                               int64_t count, int64_t apart) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)columns, (uint64_t)rows, x.ld));
    if (count == 1) return layout;
    const int32_t batch = (int32_t)count;
    CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch)));
    CUBLAS_CHECK(
        cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &apart, sizeof(apart)));
    return layout;
}

// The library computes, column-major, D^T = op(B)^T op(A)^T: the library's A is our B, and the library's B is our A.
static inline void lt_set_scales(cublasLtMatmulDesc_t op, const LtProduct& p) {
    lt_set(op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale);
    lt_set(op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale);
}

static inline cublasLtMatmulAlgo_t lt_choose(const LtPlan& plan, Ctx* ctx) {
    const LtKey& key = plan.key;
    // Constraints of the algorithm: workspace size, sums in a fixed order, alignments.
    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    lt_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (size_t)key.workspace);
    lt_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           (uint32_t)(CUBLASLT_REDUCTION_SCHEME_MASK & ~CUBLASLT_REDUCTION_SCHEME_INPLACE));
    lt_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)key.b.alignment);
    lt_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)key.a.alignment);
    lt_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)key.d.alignment);
    lt_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)key.d.alignment);

    // The first choice of the library's heuristic.
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(ctx->lt, plan.op, plan.b, plan.a, plan.d, plan.d, preference, 1, &found, &count);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0)
        die(EXIT_FAILED, "cuBLASLt refuses %s GEMM of %lld x %lld x %lld on %s (%s); %s",
            key.scaled ? "an MXFP8" : "a bf16", (long long)key.m, (long long)key.n, (long long)key.k, ctx->name,
            cublasLtGetStatusString(status),
            key.scaled ? "--precision mxfp8-exact does without" : "it takes dimensions that are multiples of 8");
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    return found.algo;
}

static inline LtPlan* lt_make_plan(const LtKey& key, const LtProduct& p, Ctx* ctx) {
    LtPlan* plan = (LtPlan*)host_alloc(sizeof(LtPlan));
    plan->key = key;

    // The GEMM.
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    lt_set(plan->op, CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    lt_set(plan->op, CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (key.scaled) {
        lt_set(plan->op, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, (int32_t)CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
        lt_set(plan->op, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, (int32_t)CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
        lt_set_scales(plan->op, p);
    }

    // The matrices.
    const cudaDataType_t in = key.scaled ? CUDA_R_8F_E4M3 : CUDA_R_16BF, out = p.real_out ? CUDA_R_32F : CUDA_R_16BF;
    plan->a = lt_layout(key.a, in, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.batch.count, p.batch.a);
    plan->b = lt_layout(key.b, in, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.batch.count, p.batch.b);
    plan->d = lt_layout(key.d, out, p.m, p.n, p.batch.count, p.batch.d);

    // The algorithm.
    plan->algo = lt_choose(*plan, ctx);
    plan->next = ctx->lt_plans;
    return ctx->lt_plans = plan;
}

static inline void lt_multiply(LtMatrix d, LtMatrix a, LtMatrix b, const LtProduct& p, Ctx* ctx) {
    if (p.m == 0 || p.n == 0 || p.k == 0) return;

    // The cached plan of this GEMM, or a new one.
    const bool scaled = p.a_scale != NULL;
    const LtKey key = {p.m,         p.n,    p.k,           p.transpose_a, p.transpose_b, p.real_out,
                       p.workspace, scaled, lt_operand(a), lt_operand(b), lt_operand(d), p.batch};
    LtPlan* plan = ctx->lt_plans;
    while (plan && memcmp(&plan->key, &key, sizeof(key)) != 0) plan = plan->next;
    if (!plan) plan = lt_make_plan(key, p, ctx);

    // Scales have new addresses in each call.
    if (scaled) lt_set_scales(plan->op, p);
    const float alpha = p.alpha, beta = p.accumulate ? 1 : p.beta;
    const void* c = p.c ? p.c : d.p;
    void* workspace = ctx_workspace<char>(ctx, p.workspace);
    CUBLAS_CHECK(cublasLtMatmul(ctx->lt, plan->op, &alpha, b.p, plan->b, a.p, plan->a, &beta, c, plan->d, (void*)d.p,
                                plan->d, &plan->algo, workspace, (size_t)p.workspace, ctx->stream));
}

// Frees the cached plans of ctx.
static inline void lt_forget(Ctx* ctx) {
    while (ctx->lt_plans) {
        LtPlan* plan = ctx->lt_plans;
        ctx->lt_plans = plan->next;
        CUBLAS_CHECK(cublasLtMatmulDescDestroy(plan->op));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->a));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->b));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->d));
        free(plan);
    }
}
