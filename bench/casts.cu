// Speed of the MXFP8 quantization kernels at the sizes of 16b and 671b: time, bytes per second, and the share of two
// device-to-device copies in the same run. One copy has 1 GiB and measures the memory bandwidth. The other moves the
// same number of bytes as the op, so launch overhead counts for both.
//
// Every input is counted as read once and every output as written once, scales included. A time is the median of 20
// batches of calls, measured with CUDA events. Calls use several sets of buffers in turn; all sets together are too
// large for L2.
//
//   build/cuda/bench/casts [rows [part of an op's name]]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "bench/data.cuh"
#include "layers/matmul.h"
#include "mx/mx_stats.h"
#include "mx/mx_swiglu.h"

enum { CALLS = 6, BATCHES = 20 };

static Ctx* ctx;
static double copy_rate;  // of 1 GiB, bytes per second
static const char* only = "";

static double seconds(int sets, const std::function<void(int)>& call) {
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    for (int i = 0; i < sets; i++) call(i);
    std::vector<float> times;
    int set = 0;
    for (int b = 0; b < BATCHES; b++) {
        CUDA_CHECK(cudaEventRecord(start, ctx->stream));
        for (int i = 0; i < CALLS; i++) call(set++ % sets);
        CUDA_CHECK(cudaEventRecord(stop, ctx->stream));
        CUDA_CHECK(cudaEventSynchronize(stop));
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    return times[BATCHES / 2] / 1000.0 / CALLS;
}

// One buffer for each input and output, with all sets. Set i starts at i * elements, its scales at i * scales. `back`
// has `wide_out` bf16 outputs of all elements.
struct Buffers {
    int sets;
    floatX *x, *back;
    uint8_t *q, *turned, *scale;
    int64_t scales;

    Buffers(int64_t elements, int64_t scales, int wide_out) : scales(scales) {
        sets = (int)std::max((int64_t)3, ceil_div((int64_t)1 << 28, elements));
        auto room = [&](int64_t bytes) { return device_alloc((size_t)(sets * bytes), "the benchmark"); };
        x = (floatX*)room(elements * 2), q = (uint8_t*)room(elements), turned = (uint8_t*)room(elements);
        scale = (uint8_t*)room(scales), back = (floatX*)room(elements * 2 * wide_out);
        fill<<<1024, 256, 0, ctx->stream>>>(x, sets * elements, 1);
        ctx_sync(ctx);
    }
    ~Buffers() {
        for (void* p : {(void*)x, (void*)q, (void*)turned, (void*)scale, (void*)back}) device_free(p);
    }
};

// The time of a copy that moves `bytes` bytes: one half is read, the other half is written.
static double copy_seconds(double bytes, int sets) {
    const int64_t half = (int64_t)(bytes / 2) / 16 * 16;
    char* p = (char*)device_alloc((size_t)(2 * sets * half), "the benchmark");
    fill<<<1024, 256, 0, ctx->stream>>>((floatX*)p, sets * half, 1);
    const double s = seconds(sets, [&](int i) {
        CUDA_CHECK(
            cudaMemcpyAsync(p + i * half, p + (sets + i) * half, (size_t)half, cudaMemcpyDeviceToDevice, ctx->stream));
    });
    device_free(p);
    return s;
}

static void row(const char* op, const char* shape, double bytes, int sets, const std::function<void(int)>& call) {
    if (!strstr(op, only)) return;
    const double s = seconds(sets, call), copy = copy_seconds(bytes, sets);
    printf("| %s | %s | %.1f | %.2f | %.0f %% | %.0f %% |\n", op, shape, s * 1e6, bytes / s * 1e-12,
           100 * bytes / s / copy_rate, 100 * copy / s);
    fflush(stdout);
}

// Eight experts with equal numbers of rows (whole chunks). Tokens are routed in turns: expert e has the tokens e,
// e + 8, e + 16 ...
static Ragged mixed_rows(int64_t rows) {
    Ragged r = {};
    r.El = 8, r.capacity = rows;
    r.group_start = (int64_t*)device_alloc((size_t)(r.El + 1) * sizeof(int64_t), "the benchmark");
    r.row_token = (int32_t*)device_alloc((size_t)rows * sizeof(int32_t), "the benchmark");
    std::vector<int64_t> start;
    std::vector<int32_t> token;
    for (int64_t e = 0; e <= r.El; e++) start.push_back(rows / r.El / MX_CHUNK * MX_CHUNK * e);
    for (int64_t i = 0; i < rows; i++) token.push_back((int32_t)(i % (rows / r.El) * r.El + i / (rows / r.El)));
    device_upload(r.group_start, start.data(), start.size() * sizeof(int64_t), ctx);
    device_upload(r.row_token, token.data(), token.size() * sizeof(int32_t), ctx);
    return r;
}

// Activations: rows x columns.
static void bench_rows(int64_t rows, int64_t columns) {
    const int64_t n = rows * columns;
    char shape[64];
    snprintf(shape, sizeof(shape), "%lld x %lld", (long long)rows, (long long)columns);
    const double cast = 3.0 * (double)n + (double)(n / MX_BLOCK);
    Buffers b(n, rows * mx_stride(columns), 1);
    const Ragged mixed = mixed_rows(rows);

    // Row-wise: quantize, dequantize.
    for (int32_t align : {1, 128}) {
        MxRecipe how = {MX_RCEIL, align};
        row(align == 1 ? "mx_quantize" : "mx_quantize, 128", shape, cast, b.sets, [&](int i) {
            mx_quantize({b.q + i * n, b.scale + i * b.scales}, b.x + i * n, rows, columns, how, ctx);
        });
    }
    row("mx_dequantize", shape, cast, b.sets, [&](int i) {
        mx_dequantize(b.back + i * n, {b.q + i * n, b.scale + i * b.scales}, rows, columns, 0, ctx);
    });

    // Column-wise, then both layouts from one read of x.
    for (int32_t align : {128, 512})
        row(align == 128 ? "mx_quantize_channels" : "mx_quantize_channels, 512", shape,
            3.0 * (double)n + (double)(n / MX_CHUNK), b.sets, [&](int i) {
                mx_quantize_channels({b.turned + i * n, b.scale + i * b.scales}, b.x + i * n, rows, mixed, columns,
                                     {MX_RCEIL, align}, ctx);
            });
    row("mx_quantize_both", shape, 4.0 * (double)n + (double)(n / MX_BLOCK + n / MX_CHUNK), b.sets, [&](int i) {
        uint8_t* channels = (uint8_t*)(b.back + i * n);
        mx_quantize_both({b.q + i * n, b.scale + i * b.scales}, {channels, channels + n}, b.x + i * n, rows, rows,
                         columns, MX_RCEIL, ctx);
    });

    // From row-wise to column-wise. The input scales are arbitrary bytes; the output scales are written to b.back.
    for (int32_t align : {128, 512})
        row(align == 128 ? "mx_requantize_channels" : "mx_requantize_channels, 512", shape,
            2.0 * (double)n + (double)(n / MX_BLOCK + n / MX_CHUNK), b.sets, [&](int i) {
                mx_requantize_channels({b.turned + i * n, (uint8_t*)(b.back + i * n)},
                                       {b.q + i * n, b.scale + i * b.scales}, 1, rows, mixed, columns,
                                       {MX_RCEIL, align}, ctx);
            });

    // Fake quantization in blocks of 32, and the statistics of the quantization.
    row("mx_round_rows", shape, 4.0 * (double)n, b.sets, [&](int i) {
        mx_round_rows(b.back + i * n, b.x + i * n, rows, columns, {MX_RCEIL, 1}, ctx);
    });
    row("mx_round_columns", shape, 4.0 * (double)n, b.sets, [&](int i) {
        mx_round_columns(b.back + i * n, b.x + i * n, mixed, columns, {MX_RCEIL, 1}, ctx);
    });
    device_free(mixed.group_start), device_free(mixed.row_token);
    QuantizationStats* stats = (QuantizationStats*)device_alloc(sizeof(QuantizationStats), "the benchmark");
    row("mx_stats", shape, 2.0 * (double)n, b.sets, [&](int i) {
        mx_stats(stats, b.x + i * n, NULL, 1, rows, columns, {MX_RCEIL, 128}, ctx);
    });
    device_free(stats);
}

// The weights of all experts, in one launch.
static void bench_weights(int64_t experts, int64_t rows, int64_t columns) {
    const int64_t n = experts * rows * columns;
    char shape[64];
    snprintf(shape, sizeof(shape), "%lld x %lld x %lld", (long long)experts, (long long)rows, (long long)columns);
    Buffers b(n, experts * mx_tiles(rows) * mx_tiles(columns), 2);
    row("mx_round_weight", shape, 6.0 * (double)n, b.sets, [&](int i) {
        floatX* out = b.back + 2 * i * n;
        mx_round_weight(out, out + n, b.x + i * n, experts, rows, columns, MX_RCEIL, ctx);
    });
    row("mx_quantize_tiles", shape, 4.0 * (double)n, b.sets, [&](int i) {
        mx_quantize_tiles(b.q + i * n, b.turned + i * n, b.scale + i * b.scales, b.x + i * n, experts, rows, columns,
                          MX_RCEIL, ctx);
    });
}

// Eight experts with uneven numbers of rows.
static void bench_swiglu(int64_t rows, int64_t F) {
    const int32_t El = 8;
    std::vector<int64_t> start(1, 0);
    std::vector<int32_t> token;
    for (int32_t e = 0; e < El; e++) {
        const int64_t count = rows / El + (e % 3 - 1) * 333, end = start.back() + ceil_div(count, 128) * 128;
        for (int64_t r = start.back(); r < end; r++) token.push_back(r < start.back() + count ? 0 : -1);  // -1: pad
        start.push_back(end);
    }
    const int64_t used = start.back(), capacity = 2 * used, n = used * F;
    token.resize((size_t)capacity, -1);
    Ragged ragged = {};
    ragged.El = El, ragged.capacity = capacity;
    ragged.group_start = (int64_t*)device_alloc(start.size() * sizeof(int64_t), "the benchmark");
    ragged.row_token = (int32_t*)device_alloc(token.size() * sizeof(int32_t), "the benchmark");
    device_upload(ragged.group_start, start.data(), start.size() * sizeof(int64_t), ctx);
    device_upload(ragged.row_token, token.data(), token.size() * sizeof(int32_t), ctx);
    char shape[64];
    snprintf(shape, sizeof(shape), "%lld x %lld", (long long)used, (long long)F);
    Buffers b(2 * n, used * mx_stride(2 * F), 1);
    row("mx_swiglu_quantize", shape, 5.0 * (double)n + (double)(n / MX_BLOCK), b.sets, [&](int i) {
        mx_swiglu_quantize({b.q + i * n, b.scale + i * b.scales}, b.x + 2 * i * n, ragged, F, MX_RCEIL, ctx);
    });
    floatX* dap = (floatX*)device_alloc((size_t)(b.sets * n) * sizeof(floatX), "the benchmark");
    float* of_rows = (float*)device_alloc((size_t)(2 * capacity) * sizeof(float), "the benchmark");
    fill<<<1024, 256, 0, ctx->stream>>>(dap, b.sets * n, 2);
    fill<<<1024, 256, 0, ctx->stream>>>((floatX*)of_rows, 2 * capacity, 3);  // gates: arbitrary numbers
    ragged.row_gate = of_rows;
    row("experts_gate_backward", shape, 6.0 * (double)n + 12.0 * (double)used, b.sets, [&](int i) {
        experts_gate_backward({NULL, (floatX*)b.turned + i * n, of_rows + capacity, dap + i * n, NULL}, ragged, F, ctx);
    });
    ragged.capacity = used;  // no rows after the last group
    const double both = 12.0 * (double)n + (double)(n / (MX_BLOCK / 2)) + (double)(n / (MX_CHUNK / 2));
    row("mx_swiglu_backward_both", shape, both + 12.0 * (double)used, b.sets, [&](int i) {
        uint8_t* channels = (uint8_t*)(b.back + 2 * i * n);
        mx_swiglu_backward_both({b.q + 2 * i * n, b.scale + i * b.scales}, {channels, channels + 2 * n},
                                {NULL, (floatX*)b.turned + i * n, of_rows + capacity, dap + i * n, b.x + 2 * i * n},
                                used, ragged, F, MX_RCEIL, ctx);
    });
    row("mx_swiglu_backward_both, tokens", shape, both, b.sets, [&](int i) {
        uint8_t* channels = (uint8_t*)(b.back + 2 * i * n);
        mx_swiglu_backward_both({b.q + 2 * i * n, b.scale + i * b.scales}, {channels, channels + 2 * n},
                                {NULL, (floatX*)b.turned + i * n, NULL, dap + i * n, b.x + 2 * i * n}, used, {1, used},
                                F, MX_RCEIL, ctx);
    });
    row("mx_quantize_channels of dh", shape, 6.0 * (double)n + (double)(n / (MX_CHUNK / 2)), b.sets, [&](int i) {
        mx_quantize_channels({b.q + 2 * i * n, b.scale + i * b.scales}, b.back + 2 * i * n, used, ragged, 2 * F,
                             {MX_RCEIL, 128}, ctx);
    });
    device_free(dap);
    device_free(of_rows);
    device_free(ragged.group_start);
    device_free(ragged.row_token);
}

int main(int argc, char** argv) {
    const int64_t rows = argc > 1 ? atoll(argv[1]) : 131072;
    if (argc > 2) only = argv[2];
    ctx = ctx_create(matmul_workspace());
    copy_rate = 0x1p31 / copy_seconds(0x1p31, 3);
    printf("%s; a copy of 1 GiB: %.2f TB/s\n", device_name(ctx), copy_rate * 1e-12);
    printf("| op | shape | us | TB/s | of a copy | of a copy as large |\n|---|---|---|---|---|---|\n");
    for (int64_t columns : {1408, 2048, 7168}) bench_rows(rows, columns);
    bench_swiglu(rows, 1408);
    bench_swiglu(rows, 2048);
    for (int64_t experts : {1, 8, 64}) {
        bench_weights(experts, 2816, 2048);  // 16b: gate and up, down
        bench_weights(experts, 2048, 1408);
        if (experts == 64) continue;
        bench_weights(experts, 4096, 7168);  // 671b
        bench_weights(experts, 7168, 2048);
    }
    ctx_destroy(ctx);
    return 0;
}
