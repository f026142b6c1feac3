// The grouped products of MXFP8 bytes beside a cuBLAS call per expert on the bf16 numbers the bytes were made of; both
// in turns of blocks long enough (80 ms) that the card's power limit has its say. Casts are not timed. Median of the
// calls' times by CUDA events. The last column is the difference of the two results, ||a - b|| / ||b||: what e4m3
// costs, 3.7e-2.
//
//   build/cuda/bench/grouped_gemm_mx [rows [block_ms]]
#include <cublas_v2.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "device/cuda.cuh"
#include "moe/grouped_gemm_mx.h"
#include "moe/mxfp8.h"

static __device__ uint32_t hash(uint64_t x) {
    x ^= x >> 31, x *= 0x7fb5d329728ea185ull, x ^= x >> 27, x *= 0x81dadef4bc2dd44dull, x ^= x >> 33;
    return (uint32_t)x;
}

// About normal with variance 1; rows whose mark is 0 become zeros (mark NULL: none).
static __global__ void fill(floatX* p, int64_t rows, int64_t cols, const char* mark, uint64_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < rows * cols;
         i += gridDim.x * (int64_t)blockDim.x) {
        float sum = 0;
        for (int k = 0; k < 4; k++) sum += (float)hash(i * 4 + k + (seed << 40)) * 0x1p-32f - 0.5f;
        p[i] = mark && !mark[i / cols] ? (floatX)0.0f : (floatX)(sum * 1.7320508f);
    }
}

static __global__ void difference(const floatX* a, const floatX* b, int64_t n, double* sums) {
    double diff = 0, norm = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (int64_t)blockDim.x) {
        double x = (double)(float)a[i], y = (double)(float)b[i];
        diff += (x - y) * (x - y), norm += y * y;
    }
    atomicAdd(sums, diff), atomicAdd(sums + 1, norm);
}

static cudaStream_t stream;
static double* sums;
static double block_ms = 80;

static double median(std::vector<double> t) {
    std::sort(t.begin(), t.end());
    return t[t.size() / 2];
}

// Adds the times in ms of a block of calls to `times`.
static void run_block(const std::function<void()>& call, std::vector<double>& times) {
    enum { MOST = 400 };
    static cudaEvent_t at[MOST + 1];
    if (!at[0])
        for (cudaEvent_t& e : at) CUDA_CHECK(cudaEventCreate(&e));
    float once;
    CUDA_CHECK(cudaEventRecord(at[0], stream));
    for (int i = 0; i < 2; i++) call();
    CUDA_CHECK(cudaEventRecord(at[1], stream));
    CUDA_CHECK(cudaEventSynchronize(at[1]));
    CUDA_CHECK(cudaEventElapsedTime(&once, at[0], at[1]));
    int calls = std::max(3, std::min((int)MOST, (int)(2 * block_ms / once)));
    for (int i = 0; i < calls; i++) {
        CUDA_CHECK(cudaEventRecord(at[i], stream));
        call();
    }
    CUDA_CHECK(cudaEventRecord(at[calls], stream));
    CUDA_CHECK(cudaEventSynchronize(at[calls]));
    for (int i = calls / 4; i < calls; i++) {  // the first calls still run at the other's clock
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, at[i], at[i + 1]));
        times.push_back(ms);
    }
}

#define CUBLAS(call)                                                                                                   \
    do {                                                                                                               \
        cublasStatus_t status_ = (call);                                                                               \
        if (status_ != CUBLAS_STATUS_SUCCESS) die(EXIT_FAILED, "%s: status %d", #call, (int)status_);                  \
    } while (0)

static void bench(Ctx* ctx, cublasHandle_t cublas, int64_t OC, int64_t IC, int El, int64_t M) {
    // Uneven groups: shares between 0.4 and 1.6 of the mean, the same as bench/grouped_gemm.cu takes.
    std::vector<int32_t> rows(El);
    std::vector<int64_t> start(El + 1);
    double total = 0;
    for (int e = 0; e < El; e++) total += 0.4 + 1.2 * fmod((e + 1) * 0.6180339887, 1.0);
    int64_t left = M;
    for (int e = 0; e < El; e++) {
        rows[e] = e == El - 1 ? (int32_t)left
                              : (int32_t)((double)M * (0.4 + 1.2 * fmod((e + 1) * 0.6180339887, 1.0)) / total);
        left -= rows[e];
        start[e + 1] = start[e] + ceil_div(rows[e], 128) * 128;
    }
    int64_t capacity = start[El];
    std::vector<char> mark(capacity, 0);
    for (int e = 0; e < El; e++) std::fill_n(mark.begin() + start[e], rows[e], 1);

    Ragged r = {};
    r.El = El, r.capacity = capacity;
    r.group_start = (int64_t*)device_alloc((El + 1) * sizeof(int64_t), "starts");
    r.group_rows = (int32_t*)device_alloc(El * sizeof(int32_t), "rows");
    char* marks = (char*)device_alloc(capacity, "marks");
    device_upload(r.group_start, start.data(), (El + 1) * sizeof(int64_t), ctx);
    device_upload(r.group_rows, rows.data(), El * sizeof(int32_t), ctx);
    device_upload(marks, mark.data(), capacity, ctx);
    const int64_t most = std::max(IC, OC), tiles_i = ceil_div(IC, 128), tiles_o = ceil_div(OC, 128);
    floatX* x = (floatX*)device_alloc(capacity * most * 2, "x");
    floatX* w = (floatX*)device_alloc(El * OC * IC * 2, "w");
    uint8_t* qx = (uint8_t*)device_alloc(capacity * most, "x as bytes");
    uint8_t* sx = (uint8_t*)device_alloc(capacity * mx_stride(most), "scales of x");
    uint8_t* qw = (uint8_t*)device_alloc(El * OC * IC, "w as bytes");
    uint8_t* qw_transposed = (uint8_t*)device_alloc(El * OC * IC, "w as bytes, transposed");
    uint8_t* sw = (uint8_t*)device_alloc(El * tiles_i * tiles_o, "scales of w");
    floatX* ours = (floatX*)device_alloc(capacity * most * 2, "ours");
    floatX* theirs = (floatX*)device_alloc(capacity * most * 2, "theirs");
    fill<<<1024, 256, 0, stream>>>(w, El * OC, IC, nullptr, 3);
    LAUNCH_CHECK();
    mx_quantize_tiles(qw, qw_transposed, sw, w, El, OC, IC, MX_RCEIL, ctx);

    const float one = 1, zero = 0;
    for (int dgrad = 0; dgrad < 2; dgrad++) {
        const int64_t K = dgrad ? OC : IC, N = dgrad ? IC : OC;
        fill<<<1024, 256, 0, stream>>>(x, capacity, K, marks, 1);
        LAUNCH_CHECK();
        mx_quantize(qx, sx, x, capacity, K, {MX_RCEIL, 128}, ctx);
        auto mine = [&] {
            grouped_gemm_mx(ours, nullptr, qx, sx, dgrad ? qw_transposed : qw, sw, dgrad ? 1 : tiles_i,
                            dgrad ? tiles_i : 1, r, K, N, ctx);
        };
        auto library = [&] {
            for (int e = 0; e < El; e++)
                CUBLAS(cublasGemmEx(cublas, dgrad ? CUBLAS_OP_N : CUBLAS_OP_T, CUBLAS_OP_N, (int)N, rows[e], (int)K,
                                    &one, w + e * OC * IC, CUDA_R_16BF, (int)IC, x + start[e] * K, CUDA_R_16BF, (int)K,
                                    &zero, theirs + start[e] * N, CUDA_R_16BF, (int)N, CUBLAS_COMPUTE_32F,
                                    CUBLAS_GEMM_DEFAULT));
        };
        device_zero(theirs, capacity * N * 2, ctx), device_zero(sums, 16, ctx);
        mine(), library();
        difference<<<512, 256, 0, stream>>>(ours, theirs, capacity * N, sums);
        double error[2];
        device_download(error, sums, sizeof(error), ctx);
        std::vector<double> t, t_library;
        for (int round = 0; round < 3; round++) run_block(library, t_library), run_block(mine, t);
        double work = 2.0 * (double)M * (double)OC * (double)IC * 1e-9;  // GFLOP; over ms: TFLOP/s
        printf("| %lld x %lld | %d | %s | %.3f | %.0f | %.0f | %.3f | %.1e |\n", (long long)OC, (long long)IC, El,
               dgrad ? "dgrad" : "forward", median(t), work / median(t), work / median(t_library),
               median(t_library) / median(t), sqrt(error[0] / error[1]));
        fflush(stdout);
    }
    for (void* p : {(void*)x, (void*)w, (void*)qx, (void*)sx, (void*)qw, (void*)qw_transposed, (void*)sw, (void*)ours,
                    (void*)theirs, (void*)marks, (void*)r.group_start, (void*)r.group_rows})
        device_free(p);
}

int main(int argc, char** argv) {
    int64_t M = argc > 1 ? atoll(argv[1]) : 131072;
    if (argc > 2) block_ms = atof(argv[2]);
    Ctx* ctx = ctx_create((size_t)1 << 20);
    stream = ctx->stream;
    sums = (double*)device_alloc(16, "sums");
    cublasHandle_t cublas;
    CUBLAS(cublasCreate(&cublas));
    CUBLAS(cublasSetStream(cublas, stream));
    void* workspace = device_alloc((size_t)64 << 20, "cuBLAS");
    CUBLAS(cublasSetWorkspace(cublas, workspace, (size_t)64 << 20));
    printf("%s, %lld rows in uneven groups\n", device_name(ctx), (long long)M);
    printf(
        "| OC x IC | groups | pass | ms | TFLOP/s | cuBLAS bf16 per expert | ratio | difference "
        "|\n|---|---|---|---|---|---|---|---|\n");
    const int64_t shapes[][2] = {{8192, 5120}, {7168, 2048}, {2048, 1408}, {2816, 2048}};
    for (int El : {8, 64})
        for (auto& s : shapes) bench(ctx, cublas, s[0], s[1], El, M);
    CUBLAS(cublasDestroy(cublas));
    ctx_destroy(ctx);
    return 0;
}
