// Speed of the MXFP8 grouped GEMM against one cuBLAS call per expert in bf16, on the same values before quantization.
// Timing is explained in bench/grouped.cuh. Quantization is not timed. The difference of the two results is ||a - b|| /
// ||b||, the error of e4m3: 3.7e-2. The last column is the slowdown of our kernel while 16 SMs are held.
//
// The yardstick of wgrad is our own bf16 GEMM instead, on the rows before quantization. casts.cu measures the time of
// the quantization.
//
//   build/cuda/bench/grouped_gemm_mx [rows [round_ms]]
#include "bench/grouped.cuh"
#include "grouped/grouped_gemm.h"
#include "mx/grouped_gemm_mx.h"
#include "mx/mxfp8.h"

static void bench(int64_t OC, int64_t IC, int El, int64_t M) {
    // Operands in bf16 and in MXFP8. W is quantized once for both passes; dgrad uses the transposed copy.
    Groups g(El, M);
    const int64_t capacity = g.r.capacity;
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
    fill<<<1024, 256, 0, stream>>>(w, El * OC * IC, 3);
    LAUNCH_CHECK();
    mx_quantize_tiles(qw, qw_transposed, sw, w, El, OC, IC, MX_RCEIL, ctx);

    const float one = 1, zero = 0;
    for (int dgrad = 0; dgrad < 2; dgrad++) {
        const int64_t K = dgrad ? OC : IC, N = dgrad ? IC : OC;
        // x in forward, dy in dgrad.
        fill_rows<<<1024, 256, 0, stream>>>(x, capacity, K, g.marks, 1);
        LAUNCH_CHECK();
        mx_quantize({qx, sx}, x, capacity, K, {MX_RCEIL, 128}, ctx);

        // y = W x or dx = W^T dy: our kernel in MXFP8, the library in bf16.
        auto mine = [&] {
            grouped_gemm_mx(ours, {qx, sx}, {dgrad ? qw_transposed : qw, sw, dgrad ? 1 : tiles_i, dgrad ? tiles_i : 1},
                            g.r, K, N, ctx);
        };
        auto library = [&] {
            for (int e = 0; e < El; e++)
                CUBLAS(cublasGemmEx(cublas, dgrad ? CUBLAS_OP_N : CUBLAS_OP_T, CUBLAS_OP_N, (int)N, g.rows[e], (int)K,
                                    &one, w + e * OC * IC, CUDA_R_16BF, (int)IC, x + g.start[e] * K, CUDA_R_16BF,
                                    (int)K, &zero, theirs + g.start[e] * N, CUDA_R_16BF, (int)N, CUBLAS_COMPUTE_32F,
                                    CUBLAS_GEMM_DEFAULT));
        };

        // The difference of the results, then the times.
        device_zero(theirs, capacity * N * 2, ctx), device_zero(sums, 16, ctx);
        mine(), library();
        difference<<<512, 256, 0, stream>>>(ours, theirs, capacity * N, sums);
        compare(M, OC, IC, El, dgrad ? "dgrad" : "forward", mine, library);
    }
    for (void* p : {(void*)x, (void*)w, (void*)qx, (void*)sx, (void*)qw, (void*)qw_transposed, (void*)sw, (void*)ours,
                    (void*)theirs})
        device_free(p);
}

// dW += dy^T x.
static void bench_wgrad(int64_t OC, int64_t IC, int El, int64_t M) {
    // Rows in bf16, and quantized column-wise (along tokens).
    Groups g(El, M);
    const int64_t capacity = g.r.capacity, chunks = capacity / 128, size = El * OC * IC;
    floatX* dy = (floatX*)device_alloc(capacity * OC * 2, "dy");
    floatX* x = (floatX*)device_alloc(capacity * IC * 2, "x");
    uint8_t* qdy = (uint8_t*)device_alloc(capacity * OC, "dy as bytes");
    uint8_t* qx = (uint8_t*)device_alloc(capacity * IC, "x as bytes");
    uint8_t* sdy = (uint8_t*)device_alloc(chunks * OC, "scales of dy");
    uint8_t* sx = (uint8_t*)device_alloc(chunks * IC, "scales of x");
    real* ours = (real*)device_alloc(size * 4, "ours");
    real* theirs = (real*)device_alloc(size * 4, "theirs");
    fill_rows<<<1024, 256, 0, stream>>>(dy, capacity, OC, g.marks, 1);
    fill_rows<<<1024, 256, 0, stream>>>(x, capacity, IC, g.marks, 2);
    LAUNCH_CHECK();
    mx_quantize_channels({qdy, sdy}, dy, capacity, g.r, OC, {MX_RCEIL, 128}, ctx);
    mx_quantize_channels({qx, sx}, x, capacity, g.r, IC, {MX_RCEIL, 512}, ctx);

    // MXFP8 and bf16: the difference of the results, then the times.
    auto mine = [&] { grouped_gemm_mx_wgrad(ours, NULL, {qdy, sdy}, {qx, sx}, capacity, g.r, IC, OC, 1, ctx); };
    auto bf16 = [&] { grouped_gemm_wgrad(theirs, NULL, dy, x, ALL_BY_ROW, g.r, IC, OC, 1, ctx); };
    device_zero(ours, size * 4, ctx), device_zero(theirs, size * 4, ctx), device_zero(sums, 16, ctx);
    mine(), bf16();
    difference<<<512, 256, 0, stream>>>(ours, theirs, size, sums);
    compare(M, OC, IC, El, "wgrad, beside ours in bf16", mine, bf16);
    for (void* p : {(void*)dy, (void*)x, (void*)qdy, (void*)qx, (void*)sdy, (void*)sx, (void*)ours, (void*)theirs})
        device_free(p);
}

int main(int argc, char** argv) {
    return run_shapes(argc, argv, "cuBLAS bf16 per expert", {{8192, 5120}, {7168, 2048}, {2048, 1408}, {2816, 2048}},
                      [](int64_t OC, int64_t IC, int El, int64_t M) {
                          bench(OC, IC, El, M);
                          bench_wgrad(OC, IC, El, M);
                      });
}
