// Speed of Muon's orthogonalization (layers/muon.h): time and TFLOP/s for the matrices of one layer of `small` and 16b.
//
//   build/cuda/bench/muon [calls]
#include <algorithm>
#include <vector>

#include "bench/data.cuh"
#include "layers/matmul.h"
#include "layers/muon.h"

struct Shape {
    const char* what;
    int64_t count, rows, columns;
};

static const Shape shapes[] = {
    {"small: experts' gate and up", 64, 384, 512},
    {"small: experts' down", 32, 512, 384},
    {"16b: experts' gate and up", 128, 1408, 2048},
    {"16b: experts' down", 64, 2048, 1408},
    {"16b: Wq", 1, 3072, 2048},
    {"16b: Wo", 1, 2048, 2048},
    {"16b: Wkvb", 1, 4096, 512},
    {"16b: Wkva", 1, 576, 2048},
};

int main(int argc, char** argv) {
    const int calls = argc > 1 ? atoi(argv[1]) : 20;
    Ctx* ctx = ctx_create(matmul_workspace());
    std::vector<cudaEvent_t> at((size_t)calls + 1);
    for (cudaEvent_t& event : at) CUDA_CHECK(cudaEventCreate(&event));

    printf("%s, median of %d calls\n| matrices | count x rows x columns | ms | TFLOP/s |\n|---|---|---|---|\n",
           ctx->name, calls);
    for (const Shape& s : shapes) {
        const int64_t n = s.count * s.rows * s.columns;
        floatX* x = (floatX*)device_alloc((size_t)n * sizeof(floatX), "x");
        floatX* work = (floatX*)device_alloc((size_t)muon_work(s.count, s.rows, s.columns) * sizeof(floatX), "work");
        fill<<<1024, 256, 0, ctx->stream>>>(x, n, 1);
        LAUNCH_CHECK();

        // Three calls to warm up, then the timed ones. The output of a call is the input of the next one.
        for (int i = 0; i < 3; i++) muon_orthogonalize(x, work, s.count, s.rows, s.columns, ctx);
        for (int i = 0; i <= calls; i++) {
            CUDA_CHECK(cudaEventRecord(at[(size_t)i], ctx->stream));
            if (i < calls) muon_orthogonalize(x, work, s.count, s.rows, s.columns, ctx);
        }
        ctx_sync(ctx);

        // The row of the table.
        std::vector<float> ms((size_t)calls);
        for (size_t i = 0; i < ms.size(); i++) CUDA_CHECK(cudaEventElapsedTime(&ms[i], at[i], at[i + 1]));
        std::sort(ms.begin(), ms.end());
        const double median = ms[ms.size() / 2];
        printf("| %s | %lld x %lld x %lld | %.3f | %.0f |\n", s.what, (long long)s.count, (long long)s.rows,
               (long long)s.columns, median, (double)s.count * muon_flops(s.rows, s.columns) / median * 1e-9);
        device_free(x), device_free(work);
    }
    ctx_destroy(ctx);
}
