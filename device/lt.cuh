// One product through cuBLASLt, for ops whose own kernels the GPU at hand does not know (Ctx::blackwell): row-major
// matrices, one or a batch of them; bf16, or MXFP8 bytes with their scales; sums in float32. Simple rather than fast: a
// product is described anew each time, and the library keeps what its heuristic found. That heuristic's first algorithm
// without in-place split-K is taken, never one chosen by timing: the same shapes give the same bits on every run.
#ifndef DEVICE_LT_CUH
#define DEVICE_LT_CUH

#include "device/cuda.cuh"

// Rows are `ld` elements apart, members of a batch `step` (0: they are all the same).
struct LtMatrix {
    const void* p;
    int64_t ld, step;
};

// D (m, n) = op(A) (m, k) op(B) (k, n) + beta D
struct LtProduct {
    int64_t m, n, k;
    bool transpose_a, transpose_b;  // stored (k, m), (n, k)
    int64_t batch;
    bool real_out;  // D is float32, else bf16
    float beta;
    // NULL: A and B are bf16. Else they are e4m3 with k along their rows (B transposed), and these the scales of every
    // 32 of them, laid out as mx_blackwell_offset (mx/mxfp8.h) says and on 16 bytes, zeros in what is padding
    // (CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0). cuBLAS documentation 13, "Narrow Precision Data Types Usage":
    // compute capability 10.0 and up; pointers on 16 bytes, dimensions that are multiples of 16.
    const uint8_t *a_scale = NULL, *b_scale = NULL;
};

enum { LT_WORKSPACE = 8 << 20 };  // bytes for the library's split sums

template <typename T>
static inline void lt_set(cublasLtMatmulDesc_t op, cublasLtMatmulDescAttributes_t attribute, T value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(op, attribute, &value, sizeof(value)));
}

template <typename T>
static inline void lt_prefer(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
                             T value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
}

// A row-major (rows, columns) matrix is a column-major (columns, rows) one.
static inline cublasLtMatrixLayout_t lt_layout(LtMatrix x, cudaDataType_t type, int64_t rows, int64_t columns,
                                               int64_t batch) {
    cublasLtMatrixLayout_t layout;
    int32_t count = (int32_t)batch;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)columns, (uint64_t)rows, x.ld));
    CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)));
    CUBLAS_CHECK(
        cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &x.step, sizeof(x.step)));
    return layout;
}

// What every member of a batch lies on, in bytes.
static inline uint32_t lt_alignment(LtMatrix x, int64_t element) {
    uint32_t align = 256;
    while (((uintptr_t)x.p | (uintptr_t)(x.step * element)) % align) align /= 2;
    return align;
}

static inline void lt_multiply(LtMatrix d, LtMatrix a, LtMatrix b, const LtProduct& p, void* workspace, Ctx* ctx) {
    if (p.m == 0 || p.n == 0 || p.k == 0 || p.batch == 0) return;
    const bool scaled = p.a_scale != NULL;
    const cudaDataType_t in = scaled ? CUDA_R_8F_E4M3 : CUDA_R_16BF, out = p.real_out ? CUDA_R_32F : CUDA_R_16BF;
    // In the library's columns D^T = op(B)^T op(A)^T: its A is B and its B is A.
    cublasLtMatmulDesc_t op;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    lt_set(op, CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    lt_set(op, CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (scaled) {
        lt_set(op, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, (int32_t)CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
        lt_set(op, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, (int32_t)CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
        lt_set(op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale);
        lt_set(op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale);
    }
    const cublasLtMatrixLayout_t of_a = lt_layout(a, in, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.batch);
    const cublasLtMatrixLayout_t of_b = lt_layout(b, in, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.batch);
    const cublasLtMatrixLayout_t of_d = lt_layout(d, out, p.m, p.n, p.batch);

    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    lt_prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (size_t)LT_WORKSPACE);
    lt_prefer(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
              (uint32_t)(CUBLASLT_REDUCTION_SCHEME_MASK & ~CUBLASLT_REDUCTION_SCHEME_INPLACE));
    const uint32_t align_d = lt_alignment(d, p.real_out ? 4 : 2);
    lt_prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, lt_alignment(b, scaled ? 1 : 2));
    lt_prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, lt_alignment(a, scaled ? 1 : 2));
    lt_prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align_d);
    lt_prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align_d);
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(ctx->lt, op, of_b, of_a, of_d, of_d, preference, 1, &found, &count);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0)
        die(EXIT_FAILED, "cuBLASLt refuses %s product of %lld x %lld x %lld on %s (%s)%s",
            scaled ? "an MXFP8" : "a bf16", (long long)p.m, (long long)p.n, (long long)p.k, ctx->name,
            cublasLtGetStatusString(status), scaled ? "; --mx-gemm exact does without" : "");
    const float one = 1;
    CUBLAS_CHECK(cublasLtMatmul(ctx->lt, op, &one, b.p, of_b, a.p, of_a, &p.beta, d.p, of_d, (void*)d.p, of_d,
                                &found.algo, workspace, LT_WORKSPACE, ctx->stream));
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(of_a));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(of_b));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(of_d));
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(op));
}

#endif
