// Shared code of the grouped GEMM benchmarks: random operands, uneven groups, rounds in turns with a yardstick (mostly
// cuBLAS), and a row of the table.
//
// Our kernel and the yardstick run in turns, each for a round of some 80 ms. A round is long enough for the card's
// power limit to take effect. A number in the table is the median of the calls' times over all rounds, measured with
// CUDA events.
#ifndef BENCH_GROUPED_CUH
#define BENCH_GROUPED_CUH

#include <cublas_v2.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "bench/data.cuh"
#include "grouped/permute.h"
#include "tests/hold.cuh"

// Approximately normal; rows with mark 0 become zeros.
static __global__ void fill_rows(floatX* p, int64_t rows, int64_t cols, const char* mark, uint64_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < rows * cols;
         i += gridDim.x * (int64_t)blockDim.x)
        p[i] = mark[i / cols] ? (floatX)normal(i, seed) : (floatX)0.0f;
}

static Ctx* ctx;
static cublasHandle_t cublas;
static cudaStream_t stream;
static double* sums;  // of difference() (bench/data.cuh)
static double round_ms = 80;

static double median(std::vector<double> t) {
    std::sort(t.begin(), t.end());
    return t[t.size() / 2];
}

// Adds the times in ms of a round of calls to `times`.
static void run_round(const std::function<void()>& call, std::vector<double>& times) {
    enum { MOST = 400 };
    static cudaEvent_t at[MOST + 1];
    if (!at[0])
        for (cudaEvent_t& e : at) CUDA_CHECK(cudaEventCreate(&e));

    // The number of calls in a round.
    float once;
    CUDA_CHECK(cudaEventRecord(at[0], stream));
    for (int i = 0; i < 2; i++) call();
    CUDA_CHECK(cudaEventRecord(at[1], stream));
    CUDA_CHECK(cudaEventSynchronize(at[1]));
    CUDA_CHECK(cudaEventElapsedTime(&once, at[0], at[1]));
    int calls = std::max(3, std::min((int)MOST, (int)(2 * round_ms / once)));

    // The calls: one event before each, one after the last.
    for (int i = 0; i < calls; i++) {
        CUDA_CHECK(cudaEventRecord(at[i], stream));
        call();
    }
    CUDA_CHECK(cudaEventRecord(at[calls], stream));
    CUDA_CHECK(cudaEventSynchronize(at[calls]));

    // The times, without the first quarter of the calls: these still run at the clock of the previous round.
    for (int i = calls / 4; i < calls; i++) {
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

// Uneven groups of M rows: shares between 0.4 and 1.6 of the mean, as in bench/grouped_gemm_torch.py.
struct Groups {
    Ragged r = {};
    std::vector<int32_t> rows;
    std::vector<int64_t> start;
    char* marks;  // 0: pad row, 1: other rows

    // The last expert has the remaining rows of M. Starts are multiples of 128.
    Groups(int El, int64_t M) : rows(El), start(El + 1) {
        auto share = [](int e) { return 0.4 + 1.2 * fmod((e + 1) * 0.6180339887, 1.0); };
        double total = 0;
        for (int e = 0; e < El; e++) total += share(e);
        int64_t left = M;
        for (int e = 0; e < El; e++) {
            rows[e] = e == El - 1 ? (int32_t)left : (int32_t)((double)M * share(e) / total);
            left -= rows[e];
            start[e + 1] = start[e] + ceil_div(rows[e], 128) * 128;
        }

        // The groups on the GPU.
        std::vector<char> mark(start[El], 0);
        for (int e = 0; e < El; e++) std::fill_n(mark.begin() + start[e], rows[e], 1);
        r.El = El, r.capacity = start[El];
        r.group_start = (int64_t*)device_alloc((El + 1) * sizeof(int64_t), "starts");
        r.group_rows = (int32_t*)device_alloc(El * sizeof(int32_t), "rows");
        marks = (char*)device_alloc(r.capacity, "marks");
        device_upload(r.group_start, start.data(), (El + 1) * sizeof(int64_t), ctx);
        device_upload(r.group_rows, rows.data(), El * sizeof(int32_t), ctx);
        device_upload(marks, mark.data(), r.capacity, ctx);
    }
    ~Groups() { device_free(r.group_start), device_free(r.group_rows), device_free(marks); }
};

// Times both in turns and prints a row of the table. M is the number of rows; `sums` has the difference of the two
// results. The last column is the slowdown of our kernel while 16 SMs are held, as by communication between GPUs. A
// loss of just these 16 of 132 SMs would be a slowdown of 1.14.
static void compare(int64_t M, int64_t OC, int64_t IC, int El, const char* pass, const std::function<void()>& mine,
                    const std::function<void()>& library) {
    // Rounds in turns, then one round of our kernel with SMs held.
    double error[2];
    device_download(error, sums, sizeof(error), ctx);
    std::vector<double> t, t_library, t_held;
    for (int round = 0; round < 3; round++) run_round(library, t_library), run_round(mine, t);
    {
        HeldSms held(16);
        run_round(mine, t_held);
    }

    // The row of the table.
    double work = 2.0 * (double)M * (double)OC * (double)IC * 1e-9;  // GFLOP; over ms: TFLOP/s
    printf("| %lld x %lld | %d | %s | %.3f | %.*f | %.0f | %.3f | %.1e | %.2f |\n", (long long)OC, (long long)IC, El,
           pass, median(t), work / median(t) < 10, work / median(t), work / median(t_library),
           median(t_library) / median(t), sqrt(error[0] / error[1]), median(t_held) / median(t));
    fflush(stdout);
}

// Runs bench(OC, IC, El, M) for the shapes; arguments: [rows [round_ms]].
static int run_shapes(int argc, char** argv, const char* yardstick,
                      const std::vector<std::pair<int64_t, int64_t>>& shapes,
                      void (*bench)(int64_t OC, int64_t IC, int El, int64_t M)) {
    // Set up everything that all shapes share.
    int64_t M = argc > 1 ? atoll(argv[1]) : 131072;
    if (argc > 2) round_ms = atof(argv[2]);
    ctx = ctx_create((size_t)1 << 20);
    stream = ctx->stream;
    sums = (double*)device_alloc(16, "sums");
    CUBLAS(cublasCreate(&cublas));
    CUBLAS(cublasSetStream(cublas, stream));
    void* workspace = device_alloc((size_t)64 << 20, "cuBLAS");
    CUBLAS(cublasSetWorkspace(cublas, workspace, (size_t)64 << 20));

    // The table.
    printf("%s, %lld rows in uneven groups\n", device_name(ctx), (long long)M);
    printf(
        "| OC x IC | groups | pass | ms | TFLOP/s | %s | ratio | difference | 16 SMs held |\n"
        "|---|---|---|---|---|---|---|---|---|\n",
        yardstick);
    for (int El : {8, 64})
        for (auto& s : shapes) bench(s.first, s.second, El, M);

    CUBLAS(cublasDestroy(cublas));
    ctx_destroy(ctx);
    return 0;
}

#endif
