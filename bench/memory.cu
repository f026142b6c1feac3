// Speed of the memory-bound ops at the sizes of the 16b model; some also at the sizes of a model of byte tokens. The
// table has time, bytes per second, and the share of a device-to-device copy in the same run. Every input is counted as
// read once and every output as written once. A time is the median of 20 batches of calls, measured with CUDA events.
// Calls use three sets of buffers in turn, so that no input is in L2.
//
//   build/cuda/bench/memory [tokens [part of an op's name]]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "bench/data.cuh"
#include "device/cuda.cuh"
#include "grouped/experts.h"
#include "grouped/permute.h"
#include "layers/adamw.h"
#include "layers/embedding.h"
#include "layers/loss.h"
#include "layers/rmsnorm.h"
#include "layers/rope.h"
#include "layers/swiglu.h"
#include "moe/balance.h"

enum { SETS = 3, CALLS = 6, BATCHES = 20 };

static Ctx* ctx;
static double copy_rate;  // bytes per second
static const char* only = "";

static uint64_t random_state = 1;
static uint32_t random32(void) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(random_state >> 33);
}
static double uniform(void) { return (random32() + 0.5) / 2147483648.0; }

// SETS buffers of n elements, approximately normal.
template <typename T>
struct Buffers {
    T* p[SETS];
    explicit Buffers(int64_t n, float scale = 1) {
        static uint64_t seed;
        for (T*& b : p) {
            b = (T*)device_alloc((size_t)n * sizeof(T), "the benchmark");
            fill<<<1024, 256, 0, ctx->stream>>>(b, n, ++seed, scale);
        }
        ctx_sync(ctx);
    }
    ~Buffers() {
        for (T* b : p) device_free(b);
    }
    T* operator[](int i) const { return p[i]; }
};
typedef Buffers<floatX> X;
typedef Buffers<float> R;

template <typename T>
static T* upload(const std::vector<T>& host) {
    T* p = (T*)device_alloc(host.size() * sizeof(T), "the benchmark");
    device_upload(p, host.data(), host.size() * sizeof(T), ctx);
    return p;
}

static double seconds(const std::function<void(int)>& call) {
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    for (int i = 0; i < SETS; i++) call(i);
    std::vector<float> times;
    for (int b = 0; b < BATCHES; b++) {
        CUDA_CHECK(cudaEventRecord(start, ctx->stream));
        for (int i = 0; i < CALLS; i++) call(i % SETS);
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

static void row(const char* op, const char* shape, double bytes, const std::function<void(int)>& call) {
    if (!strstr(op, only)) return;
    double s = seconds(call);
    printf("| %s | %s | %.1f | %.2f | %.0f %% |\n", op, shape, s * 1e6, bytes / s * 1e-12, 100 * bytes / s / copy_rate);
    fflush(stdout);
}

static void bench_copy(void) {
    const size_t bytes = (size_t)1 << 30;
    Buffers<char> a((int64_t)bytes), b((int64_t)bytes);
    auto call = [&](int i) { CUDA_CHECK(cudaMemcpyAsync(a[i], b[i], bytes, cudaMemcpyDeviceToDevice, ctx->stream)); };
    copy_rate = 2 * (double)bytes / seconds(call);
    row("copy", "1 GiB", 2 * (double)bytes, call);
}

static void bench_embedding(int64_t N, int64_t V, int64_t C, const char* shape) {
    const double x = 2.0 * (double)(N * C);  // bytes of (N, C)
    std::vector<int32_t> tokens;
    for (int64_t n = 0; n < N; n++) tokens.push_back((int32_t)(pow((double)V, uniform()) - 1));  // Zipf
    std::vector<int32_t> sorted = tokens;
    std::sort(sorted.begin(), sorted.end());
    double unique = (double)(std::unique(sorted.begin(), sorted.end()) - sorted.begin());
    int32_t* token = upload(tokens);
    X table(V * C), out(N * C);
    R dtable(V * C);
    row("embedding_forward", shape, 2 * x, [&](int i) { embedding_forward(out[i], token, table[i], N, C, ctx); });
    row("embedding_backward", shape, x + 8 * unique * (double)C,
        [&](int i) { embedding_backward(dtable[i], out[i], token, N, V, C, ctx); });
    device_free(token);
}

static void bench_layers(int64_t N) {
    const int64_t C = 2048, H = 16, D = 64, T = 4096, F = 10944;
    const double x = 2.0 * (double)(N * C);  // bytes of (N, C)
    const double eps = 1e-6;
    // RMSNorm at the widths of 16b and 671b.
    {
        X a(N * C), b(N * C), sum(N * C), y(N * C), w(C);
        R rstd(N), dw(C);
        row("rmsnorm_forward", "N C", 2 * x,
            [&](int i) { rmsnorm_forward(y[i], rstd[i], a[i], C, w[i], eps, N, C, ctx); });
        row("residual_rmsnorm_forward", "N C", 4 * x,
            [&](int i) { residual_rmsnorm_forward(sum[i], y[i], rstd[i], a[i], b[i], w[i], eps, N, C, ctx); });
        row("rmsnorm_backward", "N C, dx =", 3 * x,
            [&](int i) { rmsnorm_backward(y[i], dw[i], b[i], a[i], C, w[i], rstd[i], N, C, 0, ctx); });
        row("rmsnorm_backward", "N C, dx +=", 4 * x,
            [&](int i) { rmsnorm_backward(y[i], dw[i], b[i], a[i], C, w[i], rstd[i], N, C, 1, ctx); });
    }
    {
        X a(N / 4 * 7168), y(N / 4 * 7168), w(7168), g(N / 4 * 7168);
        R rstd(N), dw(7168);
        const double wide_x = 2.0 * (double)(N / 4 * 7168);
        row("rmsnorm_forward", "N/4 7168", 2 * wide_x,
            [&](int i) { rmsnorm_forward(y[i], rstd[i], a[i], 7168, w[i], eps, N / 4, 7168, ctx); });
        row("rmsnorm_backward", "N/4 7168, dx +=", 4 * wide_x,
            [&](int i) { rmsnorm_backward(y[i], dw[i], g[i], a[i], 7168, w[i], rstd[i], N / 4, 7168, 1, ctx); });
    }
    // RoPE of the queries, and of the shared part of the keys.
    {
        X q(N * H * 192);
        std::vector<float> host((size_t)(T * D));
        RopeConfig config = {(int)D, 10000, 0, 40, 0.707, 4096};
        rope_table(host.data(), T, &config);
        float* table = upload(host);
        RopeShape heads = {N, T, H, D, H * 192, 192}, one = {N, T, 1, D, 576, 64}, none = {};
        row("rope_apply", "16 heads of 64", 4.0 * (double)(N * H * D),
            [&](int i) { rope_apply(q[i] + 128, heads, q[i], none, table, 1, ctx); });
        row("rope_apply", "1 head of 64", 4.0 * (double)(N * D),
            [&](int i) { rope_apply(q[i] + 512, one, q[i], none, table, 1, ctx); });
        device_free(table);
    }
    // SwiGLU of the dense MLP.
    {
        X h(N * 2 * F), a(N * F), da(N * F), dh(N * 2 * F);
        row("swiglu_forward", "N 10944", 6.0 * (double)(N * F), [&](int i) { swiglu_forward(a[i], h[i], N, F, ctx); });
        row("swiglu_backward", "N 10944", 12.0 * (double)(N * F),
            [&](int i) { swiglu_backward(dh[i], a[i], da[i], h[i], N, F, ctx); });
    }
    // Cross-entropy over a chunk of logits, at several vocabulary sizes.
    for (int64_t vocabulary : {(int64_t)320, (int64_t)8192, (int64_t)102400, (int64_t)129280}) {
        const int64_t chunk = vocabulary > 8192 ? 2560 : 16384;
        X logits(chunk * vocabulary, 2);
        R loss(chunk);
        std::vector<int32_t> host;
        for (int64_t n = 0; n < chunk; n++) host.push_back((int32_t)(random32() % vocabulary));
        int32_t* target = upload(host);
        char shape[32];
        snprintf(shape, sizeof(shape), "%lld x %lld", (long long)chunk, (long long)vocabulary);
        row("cross_entropy, loss", shape, 2.0 * (double)(chunk * vocabulary),
            [&](int i) { cross_entropy(loss[i], logits[i], target, chunk, vocabulary, vocabulary, 0, ctx); });
        row("cross_entropy, gradient", shape, 4.0 * (double)(chunk * vocabulary),
            [&](int i) { cross_entropy(loss[i], logits[i], target, chunk, vocabulary, vocabulary, 1, ctx); });
        device_free(target);
    }
}

static void bench_adamw(void) {
    const int64_t n = (int64_t)256 << 20;
    X weight(n), master(n);  // master: lower halves
    R m(n), v(n, 0), grad(n);
    StepState host, *state = (StepState*)device_alloc(sizeof(StepState), "the benchmark");
    memset(&host, 0, sizeof(host));
    host.ok = 1, host.updates = 1, host.grad_scale = 1, host.correction1 = 0.1, host.correction2 = 0.05;
    device_upload(state, &host, sizeof(host), ctx);
    const AdamW opt = {1e-4f, 0.9f, 0.95f, 0.1f, 1};
    AdamW* there = (AdamW*)device_alloc(sizeof(opt), "the benchmark");
    device_upload(there, &opt, sizeof(opt), ctx);
    for (int bf16 = 0; bf16 < 2; bf16++)
        row(bf16 ? "adamw_update, moments in bf16" : "adamw_update", "256 Mi parameters",
            (bf16 ? 20.0 : 28.0) * (double)n, [&](int i) {
                const AdamWBuffer buffer = {weight[i], (Master*)master[i], m[i], v[i], grad[i], n, n};
                adamw_update(&buffer, 1, bf16, there, state, ctx);
            });
    row("grad_norm_add", "256 Mi parameters", 4.0 * (double)n,
        [&](int i) { grad_norm_add(state, grad[i], nullptr, n, ctx); });
    device_free(there);
    device_free(state);
}

static void bench_moe(int64_t N) {
    const int64_t C = 2048, F = 1408;
    const int32_t E = 64, K = 6;
    const double x = 2.0 * (double)(N * C);
    Ragged r;
    r.El = E;
    r.capacity = ragged_capacity(N, K, E, BACKEND_CUDA);
    r.group_start = (int64_t*)device_alloc((E + 1) * sizeof(int64_t), "the benchmark");
    r.group_rows = (int32_t*)device_alloc(E * sizeof(int32_t), "the benchmark");
    r.row_token = (int32_t*)device_alloc((size_t)r.capacity * sizeof(int32_t), "the benchmark");
    r.token_row = (int32_t*)device_alloc((size_t)(N * K) * sizeof(int32_t), "the benchmark");
    r.row_gate = (float*)device_alloc((size_t)r.capacity * sizeof(float), "the benchmark");

    // Random choices with uneven loads: K different experts for each token.
    std::vector<int32_t> chosen;
    for (int64_t n = 0; n < N; n++)
        for (int32_t k = 0; k < K; k++) {
            int32_t e;
            do e = (int32_t)(E * pow(uniform(), 1.3));  // uneven
            while (std::find(chosen.begin() + n * K, chosen.end(), e) != chosen.end());
            chosen.push_back(e);
        }
    int32_t* expert = upload(chosen);

    // Permutation: its plan, tokens to rows, rows to tokens.
    R gate(N * K), drow_gate(r.capacity), dgate(N * K);
    row("permute_plan", "N 6 of 64", 4.0 * (double)(N * K) * 5,
        [&](int i) { permute_plan(r, expert, gate[i], N, K, ctx); });
    int64_t used;
    device_download(&used, r.group_start + E, sizeof(used), ctx);
    const double rows_x = 2.0 * (double)(N * K * C), used_x = 2.0 * (double)(used * C);
    {
        X tokens(N * C), rows(r.capacity * C);
        row("permute_rows", "N 6 of 64", x + used_x,
            [&](int i) { permute_rows(rows[i], tokens[i], r, (size_t)C * 2, ctx); });
        row("unpermute_rows, gates", "N 6 of 64", x + rows_x,
            [&](int i) { unpermute_rows(tokens[i], rows[i], gate[i], r, N, K, C, 0, ctx); });
        row("unpermute_rows, +=", "N 6 of 64", 2 * x + rows_x,
            [&](int i) { unpermute_rows(tokens[i], rows[i], NULL, r, N, K, C, 1, ctx); });
        row("unpermute_gates", "N 6 of 64", 12.0 * (double)(N * K),
            [&](int i) { unpermute_gates(dgate[i], drow_gate[i], 1, r, N, K, ctx); });
    }
    // SwiGLU of the experts.
    {
        X h(r.capacity * 2 * F), a(r.capacity * F), da(r.capacity * F), dh(r.capacity * 2 * F);
        row("experts_swiglu_forward", "6 N 1408", 6.0 * (double)(used * F),
            [&](int i) { experts_swiglu_forward(a[i], h[i], r, F, ctx); });
        row("experts_swiglu_backward", "6 N 1408", 12.0 * (double)(used * F), [&](int i) {
            experts_swiglu_backward({dh[i], a[i], drow_gate[i], da[i], h[i]}, r, F, ctx);
        });
    }
    // Router and balance counts of 16b; then of 671b with a quarter of the tokens.
    for (int large = 0; large < 2; large++) {
        RouterShape s = {N, 4096, C, E, K, 1, 1, SCORE_SOFTMAX, 0, 1, 0};
        if (large) s = {N / 4, 4096, 7168, 256, 8, 8, 4, SCORE_SIGMOID, 1, 2.5f, 0};
        const double sx = 2.0 * (double)(s.N * s.C), se = 4.0 * (double)(s.N * s.E);
        X in(s.N * s.C), dx(s.N * s.C), w(s.E * s.C, 0.02f);
        R scores(s.N * s.E), g(s.N * s.K), dg(s.N * s.K), bias(s.E, 0), dw(s.E * s.C);
        int32_t* id = (int32_t*)device_alloc((size_t)(s.N * s.K) * sizeof(int32_t), "the benchmark");
        int64_t* load = (int64_t*)device_alloc((size_t)s.E * sizeof(int64_t), "the benchmark");
        const char* shape = large ? "N/4 7168, 8 of 256" : "N C, 6 of 64";
        row("router_forward", shape, sx + se,
            [&](int i) { router_forward(scores[i], id, g[i], in[i], w[i], bias[i], s, ctx); });
        row("router_backward", shape, 3 * sx + se,
            [&](int i) { router_backward(dx[i], dw[i], dg[i], scores[i], id, g[i], in[i], w[i], 1e-3f, s, ctx); });
        int64_t* margins = (int64_t*)device_alloc((size_t)s.E * MARGIN_BINS * sizeof(int64_t), "the benchmark");
        row("balance_count, loads alone", shape, 4.0 * (double)(s.N * s.K), [&](int i) {
            balance_count({load, NULL}, scores[i], id, bias[i], s, ctx);
        });
        row("balance_count, with margins", shape, 4.0 * (double)(s.N * s.K) + se, [&](int i) {
            balance_count({load, margins}, scores[i], id, bias[i], s, ctx);
        });
        for (void* p : {(void*)id, (void*)load, (void*)margins}) device_free(p);
    }
    for (void* p : {(void*)r.group_start, (void*)r.group_rows, (void*)r.row_token, (void*)r.token_row,
                    (void*)r.row_gate, (void*)expert})
        device_free(p);
}

int main(int argc, char** argv) {
    const int64_t N = argc > 1 ? atoll(argv[1]) : 16384;
    if (argc > 2) only = argv[2];
    ctx = ctx_create((size_t)256 << 20);
    printf("%s; N = %lld, C = 2048\n", device_name(ctx), (long long)N);
    printf("| op | shape | us | TB/s | of a copy |\n|---|---|---|---|---|\n");
    bench_copy();
    bench_embedding(N, 102400, 2048, "N 2048, Zipf");
    bench_embedding(N, 257, 256, "N 256, bytes");
    bench_layers(N);
    bench_adamw();
    bench_moe(N);
    ctx_destroy(ctx);
    return 0;
}
