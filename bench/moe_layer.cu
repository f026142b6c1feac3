// Speed of the MoE layer on one GPU, by stages: bf16, random routing, without router and plan.
//
//   build/cuda/bench/moe_layer [shapes, default "abc"]
//   python3 bench/moe_layer_torch.py           the same layer in PyTorch
//
// A time is the median of 20 calls after 60 ms of warm-up, measured with CUDA events. TFLOP/s count the rows of tokens,
// not pad rows: 6 T K C F FLOP in forward, 12 T K C F in backward. Stages are the calls of moe/moe.c in its order.
// "By row" stages first permute x or dy into rows, as with several ranks or on GPUs before Hopper.
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "bench/data.cuh"
#include "device/pool.h"
#include "grouped/grouped_gemm.h"
#include "moe/moe.h"
#include "moe/moe_buffers.h"

static Ctx* ctx;

static double measure(const std::function<void()>& call) {
    enum { CALLS = 20 };
    static cudaEvent_t at[CALLS + 1];
    for (cudaEvent_t& e : at)
        if (!e) CUDA_CHECK(cudaEventCreate(&e));
    auto ms = [](cudaEvent_t from, cudaEvent_t to) {
        float t;
        CUDA_CHECK(cudaEventElapsedTime(&t, from, to));
        return (double)t;
    };

    // Warm-up: five calls tell how many are 60 ms.
    CUDA_CHECK(cudaEventRecord(at[0], ctx->stream));
    for (int i = 0; i < 5; i++) call();
    CUDA_CHECK(cudaEventRecord(at[1], ctx->stream));
    ctx_sync(ctx);
    const int more = std::min(2000, (int)(60 / (ms(at[0], at[1]) / 5)) + 1);
    for (int i = 0; i < more; i++) call();

    CUDA_CHECK(cudaEventRecord(at[0], ctx->stream));
    for (int i = 1; i <= CALLS; i++) {
        call();
        CUDA_CHECK(cudaEventRecord(at[i], ctx->stream));
    }
    ctx_sync(ctx);
    std::vector<double> t;
    for (int i = 0; i < CALLS; i++) t.push_back(ms(at[i], at[i + 1]));
    std::sort(t.begin(), t.end());
    return (t[CALLS / 2 - 1] + t[CALLS / 2]) / 2;
}

struct Case {
    const char* name;
    int64_t T, C, F;
    int32_t E, K;
};

template <typename T>
static T* room(int64_t n) {
    T* p = (T*)device_alloc((size_t)n * sizeof(T), "the benchmark");
    device_zero(p, (size_t)n * sizeof(T), ctx);
    return p;
}
static floatX* filled(int64_t n, uint64_t seed, float scale) {
    floatX* p = room<floatX>(n);
    fill<<<2048, 256, 0, ctx->stream>>>(p, n, seed, scale);
    LAUNCH_CHECK();
    return p;
}

static void bench(const Case& c) {
    // Shapes, data, and the pool that the program plans for one block.
    const int64_t N = c.T, C = c.C, F = c.F, E = c.E, K = c.K;
    MoeShape s = {};
    s.router = {N, N, C, c.E, c.K, 1, 1, SCORE_SOFTMAX, 1, 1, 0};
    s.F = F, s.ep = 1;
    const float s13 = 1 / sqrtf((float)C), s2 = 1 / sqrtf((float)F);
    floatX *x = filled(N * C, 1, 1), *dy = filled(N * C, 2, 1), *wr = filled(E * C, 3, s13);
    floatX *y = room<floatX>(N * C), *dx = room<floatX>(N * C), *rounded13 = room<floatX>(E * 2 * F * C),
           *rounded2 = room<floatX>(E * C * F);
    real *bias = room<real>(E), *grad13 = room<real>(E * 2 * F * C), *grad2 = room<real>(E * C * F);
    Weight w13 = {}, w2 = {};
    w13.w = filled(E * 2 * F * C, 4, s13), w13.count = E, w13.OC = 2 * F, w13.IC = C, w13.grad = grad13;
    w2.w = filled(E * C * F, 5, s2), w2.count = E, w2.OC = C, w2.IC = F, w2.grad = grad2;
    auto gradients_in_bf16 = [&](bool yes) {
        w13.rounded_grad = yes ? rounded13 : NULL;
        w2.rounded_grad = yes ? rounded2 : NULL;
    };
    gradients_in_bf16(true);
    Arena plan;
    arena_init(&plan, "the benchmark", BACKEND);
    moe_plan(&plan, s, 1);
    const size_t bytes = arena_bytes(&plan);
    arena_free(&plan);
    void* memory = device_alloc(bytes, "pool");
    Pool* pool = pool_create("pool of the benchmark", memory, bytes, (size_t)1 << 30);
    Dispatch* d = dispatch_create(NULL, pool, NULL, ctx);

    const double gflop = 2e-9 * (double)(N * K) * (double)C * (double)F;  // of a GEMM with C x F over all rows
    auto row = [&](const char* stage, double products, const std::function<void()>& call) {
        const double ms = measure(call);
        printf("| %s | %s | %.4f |", c.name, stage, ms);
        if (products > 0)
            printf(" %.0f |\n", products * gflop / ms);
        else
            printf(" |\n");
        fflush(stdout);
    };

    // Forward.
    MoeSaved m;
    MoeForwardBuffers t;
    moe_take_choices(pool, &m, s);
    router_forward(m.scores, m.route.expert, m.route.gate, x, wr, bias, s.router, ctx);
    dispatch_counts(d, &m.route, ctx);
    const size_t mark = moe_take_forward(pool, &t, &m, s);
    dispatch_pack(d, &m.route, &t.exchange, x, &m.x, ctx);
    m.x = dispatch_receive(d, &m.route, &t.exchange, ctx);
    const Ragged r = m.ragged;
    permute_plan(r, m.route.expert, m.route.gate, N, c.K, ctx);
    Rows rows, act;
    const Sums sums = {t.out_rows, r, m.route.gate, NULL, 0};
    auto gather = [&] { rows = rows_permute(t.x_rows, m.x, r, ctx); };
    auto first = [&] {
        act = grouped_forward_swiglu(t.a, m.h, rows_gathered(t.x_rows, m.x, NULL, r, ctx), &w13, &w2, r, ctx);
    };
    auto second = [&] { grouped_forward(t.out_rows, act, &w2, r, ctx); };
    auto sum = [&] { combine_receive(d, &m.route, &t.exchange, sums, y, 0, NULL, ctx); };
    row("**forward**", 3, [&] { first(), second(), sum(); });
    row("by row: x permuted", 0, gather);
    row("by row: W13", 2, [&] { grouped_forward(m.h, rows, &w13, r, ctx); });
    row("by row: SwiGLU", 0, [&] { experts_swiglu_forward(t.a.value, m.h, r, F, ctx); });
    row("W13 with SwiGLU, x gathered", 2, first);
    row("W2", 1, second);
    row("weighted sum", 0, sum);

    // Backward.
    pool_release(pool, mark);
    MoeBackwardBuffers b;
    moe_take_backward(pool, &b, &m, s);
    const Rows dy_here = {N, C, NULL, ROWS_VALUES_BY_TOKEN, dy, {NULL, NULL}},
               gated = rows_of_values(b.experts.a, r.capacity, F);
    Rows dy_rows = dy_here, dh, dh_wgrad;
    const ExpertsBackward tensors = {b.experts.dh, b.experts.a, b.drow_gate, b.experts.da, m.h};
    Sums sums_dx = {b.dx_rows, r, NULL, b.drow_gate, 1};
    auto dgrad2 = [&] {
        dh = grouped_dgrad_swiglu(b.dh_quantized, &dh_wgrad, &sums_dx.gate_parts, tensors, b.experts.da, dy_rows, &w2,
                                  &w13, r, ctx);
    };
    auto first_dgrad = [&] { dy_rows = rows_gathered(b.dy_rows, dy_here, NULL, r, ctx), dgrad2(); };
    auto dgrad13 = [&] { grouped_dgrad(b.dx_rows, dh, &w13, r, ctx); };
    auto sum_dx = [&] { combine_receive(d, &m.route, &b.exchange, sums_dx, dx, 0, b.dgate, ctx); };
    auto wgrad2 = [&] { grouped_wgrad(&w2, dy_rows, b.wgrad_dy, gated, b.wgrad_a, r, ctx); };
    auto wgrad13 = [&] { grouped_wgrad(&w13, dh_wgrad, b.wgrad_dh, m.x, b.wgrad_x, r, ctx); };
    auto backward = [&] { first_dgrad(), dgrad13(), sum_dx(), wgrad2(), wgrad13(); };
    row("**backward**, dW in bf16", 6, backward);
    gradients_in_bf16(false);
    row("**backward**, dW in float32", 6, backward);
    gradients_in_bf16(true);
    row("dy's rows, dgrad W2 with SwiGLU backward", 1, first_dgrad);
    row("dgrad W13", 2, dgrad13);
    row("sum of dx, dgate", 0, sum_dx);
    row("wgrad W2", 1, wgrad2);
    row("x's rows, wgrad W13", 2, wgrad13);

    // The same by row, with kernels of their own, and by token whatever the width.
    const ExpertsBackward by_row = {b.experts.dh, b.experts.a, b.drow_gate, b.experts.da, m.h};
    row("by row: dy permuted", 0, [&] { dy_rows = rows_permute(b.dy_rows, dy_here, r, ctx); });
    row("by row: dgrad W2", 1, [&] { grouped_dgrad(b.experts.da, dy_rows, &w2, r, ctx); });
    row("by row: SwiGLU backward", 0, [&] { experts_swiglu_backward(by_row, r, F, ctx); });
    row("by row: dgrad W2 with SwiGLU backward", 1, dgrad2);
    row("by row: wgrad W2", 1, wgrad2);
    const Rows x_rows = rows_permute(b.x_rows, m.x, r, ctx);
    row("by row: wgrad W13", 2, [&] { grouped_wgrad(&w13, dh_wgrad, b.wgrad_dh, x_rows, b.wgrad_x, r, ctx); });
    dy_rows = dy_here;
    row("by token: dgrad W2 with SwiGLU backward", 1, dgrad2);
    row("by token: wgrad W2", 1,
        [&] { grouped_gemm_wgrad(NULL, rounded2, dy, gated.value, DY_BY_TOKEN, r, F, C, 0, ctx); });
    row("by token: wgrad W13", 2,
        [&] { grouped_gemm_wgrad(NULL, rounded13, b.experts.dh, m.x.value, X_BY_TOKEN, r, C, 2 * F, 0, ctx); });

    ctx_sync(ctx);
    dispatch_destroy(d);
    pool_destroy(pool);
    for (const void* p : {(void*)x, (void*)dy, (void*)wr, (void*)w13.w, (void*)w2.w, (void*)y, (void*)dx, (void*)bias,
                          (void*)grad13, (void*)grad2, (void*)rounded13, (void*)rounded2, memory})
        device_free((void*)p);
}

int main(int argc, char** argv) {
    const std::string which = argc > 1 ? argv[1] : "abc";
    const Case cases[] = {
        {"a", 16384, 2048, 1408, 64, 6}, {"b", 16384, 512, 384, 32, 4}, {"c", 24576, 1536, 256, 128, 8}};
    size_t workspace = 0;
    for (const Case& c : cases) {
        MoeShape s = {};
        s.router = {c.T, c.T, c.C, c.E, c.K, 1, 1, SCORE_SOFTMAX, 1, 1, 0};
        s.F = c.F, s.ep = 1;
        workspace = std::max(workspace, moe_workspace(s));
    }
    ctx = ctx_create(workspace);
    printf("%s\n", device_name(ctx));
    for (const Case& c : cases) {
        if (which.find(c.name[0]) == std::string::npos) continue;
        printf("\n%s: T %lld, C %lld, F %lld, E %d, K %d\n\n| shape | stage | ms | TFLOP/s |\n|---|---|---|---|\n",
               c.name, (long long)c.T, (long long)c.C, (long long)c.F, c.E, c.K);
        bench(c);
    }
    ctx_destroy(ctx);
    return 0;
}
