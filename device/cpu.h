// Shared parts of the reference ops (x.c): the CPU's Ctx, bf16 conversion, and GEMM. Not for host code.
#pragma once

#ifdef __CUDACC__
#error "a CPU reference in the CUDA build: its .cu is missing"
#endif

#include <cblas.h>
#include <omp.h>
#include <string.h>
#include <tgmath.h>

#include "device/check.h"
#include "device/device.h"
#include "device/values.h"

// glibc's libmvec has exp for whole vectors (4 ulp). glibc's headers declare these under -ffast-math only, which the
// Makefile does not set.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((simd("notinbranch"))) float(expf)(float);
__attribute__((simd("notinbranch"))) double(exp)(double);
#endif

static inline real sigmoid(real x) { return 1 / (1 + exp(-x)); }

// Rounds x, as a float32, to nearest even. NaN stays NaN.
static inline uint16_t to_bf16(real x) {
    const float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(f == f ? rounded : 0x7fff);
}

// Element i of the moments of an optimizer, which are real or bf16.
static inline real moment(const void* moments, int bf16, int64_t i) {
    return bf16 ? bf16_value(((const uint16_t*)moments)[i]) : ((const real*)moments)[i];
}
static inline void set_moment(void* moments, int bf16, int64_t i, real value) {
    if (bf16)
        ((uint16_t*)moments)[i] = to_bf16(value);
    else
        ((real*)moments)[i] = value;
}

struct Ctx {
    char* workspace;
    size_t workspace_bytes;
    char name[128];
};

// Parallelism is over tiles of the output. A tile's size never depends on the number of threads, so the output's bits
// do not either.
enum { TILE = 128 };

// Elements of a flat buffer that a thread takes at a time. The compiler may use other fused multiply-adds at the end of
// a vector loop. With blocks of fixed size, the ends of loops, and so the bits, do not depend on the number of threads.
enum { BLOCK = 4096 };

// The workspace as `count` elements of real; ends the run if `count` exceeds the size that the op's x_workspace
// returned.
static inline real* ctx_workspace(Ctx* ctx, int64_t count) {
    ASSERT((size_t)count * sizeof(real) <= ctx->workspace_bytes);
    return (real*)ctx->workspace;
}

// The kernels to request from OpenBLAS if OpenBLAS chose the family `chosen` on a processor with AVX2 and FMA, or also
// AVX-512 (F, CD, BW, DQ, VL). NULL: OpenBLAS's choice is kept.
const char* blas_kernels(const char* chosen, int avx2, int avx512);

// C (m x n, row stride ldc) = alpha * op(A) op(B) + beta * C, row-major, by one thread.
static inline void gemm(int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k, real alpha, const real* a,
                        int64_t lda, const real* b, int64_t ldb, real beta, real* c, int64_t ldc) {
    if (m == 0 || n == 0) return;
    enum CBLAS_TRANSPOSE ta = transpose_a ? CblasTrans : CblasNoTrans, tb = transpose_b ? CblasTrans : CblasNoTrans;
#ifdef F64
    cblas_dgemm(CblasRowMajor, ta, tb, (int)m, (int)n, (int)k, alpha, a, (int)lda, b, (int)ldb, beta, c, (int)ldc);
#else
    cblas_sgemm(CblasRowMajor, ta, tb, (int)m, (int)n, (int)k, alpha, a, (int)lda, b, (int)ldb, beta, c, (int)ldc);
#endif
}
