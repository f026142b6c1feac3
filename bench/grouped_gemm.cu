// Speed of the grouped GEMM against one cuBLAS call per expert. cuBLAS gets the group sizes on the host. Timing is
// explained in bench/grouped.cuh. The difference of the two results is ||a - b|| / ||b||. The last column is the
// slowdown of our kernel while 16 SMs are held.
//
//   [TRAIN_MOE_KERNELS=portable] build/cuda/bench/grouped_gemm [rows [round_ms]]
#include "bench/grouped.cuh"
#include "grouped/grouped_gemm.h"

static void bench(int64_t OC, int64_t IC, int El, int64_t M) {
    // Operands, and one buffer for the output of each implementation, large enough for every pass.
    Groups g(El, M);
    const int64_t capacity = g.r.capacity;
    floatX* x = (floatX*)device_alloc(capacity * IC * 2, "x");
    floatX* y = (floatX*)device_alloc(capacity * OC * 2, "y");
    floatX* w = (floatX*)device_alloc(El * OC * IC * 2, "w");
    size_t out_bytes = std::max(capacity * std::max(IC, OC) * 2, El * OC * IC * 4);
    void *ours = device_alloc(out_bytes, "ours"), *theirs = device_alloc(out_bytes, "theirs");
    fill_rows<<<1024, 256, 0, stream>>>(x, capacity, IC, g.marks, 1);
    fill_rows<<<1024, 256, 0, stream>>>(y, capacity, OC, g.marks, 2);
    fill<<<1024, 256, 0, stream>>>(w, El * OC * IC, 3);
    LAUNCH_CHECK();

    const float one = 1, zero = 0;
    // y = W x, dx = W^T dy and dW += dy x^T, each with our kernel and with the library.
    const char* names[] = {"forward", "dgrad", "wgrad"};
    for (int pass = 0; pass < 3; pass++) {
        auto mine = [&] {
            if (pass == 0) grouped_gemm_forward((floatX*)ours, x, w, g.r, IC, OC, ctx);
            if (pass == 1) grouped_gemm_dgrad((floatX*)ours, y, w, g.r, IC, OC, ctx);
            if (pass == 2) grouped_gemm_wgrad((real*)ours, NULL, y, x, ALL_BY_ROW, g.r, IC, OC, 1, ctx);
        };
        auto library = [&] {
            for (int e = 0; e < El; e++) {
                floatX *xe = x + g.start[e] * IC, *ye = y + g.start[e] * OC, *we = w + e * OC * IC;
                if (pass == 0)
                    CUBLAS(cublasGemmEx(cublas, CUBLAS_OP_T, CUBLAS_OP_N, (int)OC, g.rows[e], (int)IC, &one, we,
                                        CUDA_R_16BF, (int)IC, xe, CUDA_R_16BF, (int)IC, &zero,
                                        (floatX*)theirs + g.start[e] * OC, CUDA_R_16BF, (int)OC, CUBLAS_COMPUTE_32F,
                                        CUBLAS_GEMM_DEFAULT));
                if (pass == 1)
                    CUBLAS(cublasGemmEx(cublas, CUBLAS_OP_N, CUBLAS_OP_N, (int)IC, g.rows[e], (int)OC, &one, we,
                                        CUDA_R_16BF, (int)IC, ye, CUDA_R_16BF, (int)OC, &zero,
                                        (floatX*)theirs + g.start[e] * IC, CUDA_R_16BF, (int)IC, CUBLAS_COMPUTE_32F,
                                        CUBLAS_GEMM_DEFAULT));
                if (pass == 2)
                    CUBLAS(cublasGemmEx(cublas, CUBLAS_OP_N, CUBLAS_OP_T, (int)IC, (int)OC, g.rows[e], &one, xe,
                                        CUDA_R_16BF, (int)IC, ye, CUDA_R_16BF, (int)OC, &one,
                                        (float*)theirs + e * OC * IC, CUDA_R_32F, (int)IC, CUBLAS_COMPUTE_32F,
                                        CUBLAS_GEMM_DEFAULT));
            }
        };

        // The difference of the results, then the times.
        device_zero(ours, out_bytes, ctx), device_zero(theirs, out_bytes, ctx), device_zero(sums, 16, ctx);
        mine(), library();
        if (pass == 2)
            difference<<<512, 256, 0, stream>>>((float*)ours, (float*)theirs, El * OC * IC, sums);
        else
            difference<<<512, 256, 0, stream>>>((floatX*)ours, (floatX*)theirs, capacity * (pass ? IC : OC), sums);
        compare(M, OC, IC, El, names[pass], mine, library);
    }
    for (void* p : {(void*)x, (void*)y, (void*)w, ours, theirs}) device_free(p);
}

int main(int argc, char** argv) {
    return run_shapes(argc, argv, "cuBLAS per expert",
                      {{2816, 2048}, {2048, 1408}, {1408, 2048}, {7168, 2048}, {8192, 5120}}, bench);
}
