// The expert-parallel pipeline in the form in which torchao publishes it (benchmarks/prototype/moe_training/mxfp8/
// bench_ep_pipeline.py): dispatch, permute, one grouped product dim -> hidden, unpermute, combine. 131072 tokens a
// rank, 8 experts a rank, each token to one expert (top 1), every expert chosen equally often. Tokens lie in the order
// of their experts where they start, so that nothing is sorted before they leave, and how many go where is known.
// Beside it bench/ep_pipeline_torch.py, which does the same work in PyTorch.
//
// Order and overlap are those of moe/moe.c, but that x's rows are made while dy travels, where a model computes its
// shared MLP. MXFP8 is its usual set: products on bytes (fast), tokens and their gradients cast once where they start,
// bytes and scales in one transfer, outputs and dx back in bf16, weights' gradients in bf16 of what the bytes stand
// for; the last column rounds both operands of those along the tokens. Weights are cast once a step, not here. dW += in
// float32. Backward reads x as it was received and permutes it again; the row "rows kept" has the permuted rows (or
// bytes) from forward, as PyTorch does.
//
// Medians of events over 30 calls, bf16 and MXFP8 in turns, the slowest rank's. First, on a small size, samples of the
// bf16 results are compared with sums on the host, and MXFP8 with bf16 by SQNR.
//
//   mpirun -np 4 build/cuda/bench/ep_pipeline [tokens a rank]
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "bench/data.cuh"
#include "grouped/grouped_gemm.h"
#include "moe/moe.h"
#include "mx/grouped_gemm_mx.h"

enum { EL = 8, ROUNDS = 3, WARM = 3, CALLS = 10 };
enum Precision { BF16, MXFP8, MXFP8_WGRAD, PRECISIONS };
enum Seed { X = 1, DY = 2, W = 3 };

static Ranks* world;
static Ctx *ctx, *line;  // tokens travel on `line`
static Comm* comm;
static Event *ready, *there;
static double* sums;
static const MxCast CAST = {MX_RCEIL, MX_CHUNK};

// --- Data: every element follows from its index over all ranks, on the host too ---

// What travels to the experts, x or dy, C wide. "home": in the order in which the tokens of this rank start; "here": as
// received, rank after rank; "rows": by expert. N tokens start here and as many arrive.
struct Outward {
    int64_t C;
    floatX *home, *here, *rows;        // bf16
    MxRows home_mx, here_mx, rows_mx;  // MXFP8
    floatX* values;                    // what rows_mx stands for
};
// What travels back, y or dx.
struct Homeward {
    int64_t C;
    floatX *rows, *here, *home[PRECISIONS];
};

struct Pipeline {
    int64_t N;
    std::vector<int64_t> start, count;  // tokens to each rank, and from it
    Ragged r;
    int32_t *home_id, *here_id;
    Outward x, dy;
    Homeward y, dx;
    floatX* w;  // (EL, hidden, dim), as all of these
    MxRows w_mx;
    uint8_t* w_transposed;
    real* dw[PRECISIONS];
    std::vector<void*> memory;
};

template <typename T>
static void take(Pipeline& p, T*& to, int64_t count) {
    to = (T*)device_alloc((size_t)count * sizeof(T), "the benchmark");
    p.memory.push_back(to);
}

static void take_outward(Pipeline& p, Outward& o, int64_t C, Seed seed) {
    const int64_t N = p.N, capacity = p.r.capacity;
    o.C = C;
    take(p, o.home, N * C), take(p, o.here, N * C), take(p, o.rows, capacity * C), take(p, o.values, capacity * C);
    for (MxRows* mx : {&o.home_mx, &o.here_mx, &o.rows_mx})
        take(p, mx->q, capacity * C), take(p, mx->scale, capacity * mx_stride(C));
    fill<<<1024, 256, 0, ctx->stream>>>(o.home, N * C, seed, 1, ranks_index(world) * N * C);
    LAUNCH_CHECK();
}

static void take_homeward(Pipeline& p, Homeward& h, int64_t C) {
    h.C = C;
    take(p, h.rows, p.r.capacity * C), take(p, h.here, p.N * C);
    for (floatX*& home : h.home) take(p, home, p.N * C);
}

static Pipeline make(int64_t N, int64_t dim, int64_t hidden) {
    Pipeline p = {};
    const int64_t ranks = ranks_count(world), E = EL * ranks, weights = EL * hidden * dim;
    if (N <= 0 || N % E)
        die(EXIT_USAGE, "%lld tokens a rank: must be a multiple of %lld experts", (long long)N, (long long)E);
    p.N = N;
    for (int64_t j = 0; j < ranks; j++) p.start.push_back(j * (N / ranks)), p.count.push_back(N / ranks);
    p.r.El = EL, p.r.capacity = ragged_rows(N, EL, BACKEND);
    take(p, p.r.group_start, EL + 1), take(p, p.r.group_rows, EL);
    take(p, p.r.row_token, p.r.capacity), take(p, p.r.token_row, N);
    take(p, p.home_id, N), take(p, p.here_id, N);
    take_outward(p, p.x, dim, X), take_outward(p, p.dy, hidden, DY);
    take_homeward(p, p.y, hidden), take_homeward(p, p.dx, dim);
    take(p, p.w, weights), take(p, p.w_mx.q, weights), take(p, p.w_transposed, weights);
    take(p, p.w_mx.scale, EL * ceil_div(hidden, MX_CHUNK) * ceil_div(dim, MX_CHUNK));
    for (real*& dw : p.dw) take(p, dw, weights);
    fill<<<1024, 256, 0, ctx->stream>>>(p.w, weights, W, 1, ranks_index(world) * weights);
    LAUNCH_CHECK();
    mx_quantize_tiles(p.w_mx.q, p.w_transposed, p.w_mx.scale, p.w, EL, hidden, dim, CAST.scale, ctx);
    std::vector<int32_t> id((size_t)N);  // of the experts of the rank that a token goes to
    for (int64_t n = 0; n < N; n++) id[(size_t)n] = (int32_t)(n / (N / E) % EL);
    device_upload(p.home_id, id.data(), id.size() * sizeof(int32_t), ctx);
    return p;
}

static void forget(Pipeline& p) {
    ctx_sync(ctx);
    for (void* m : p.memory) device_free(m);
}

// --- The pipeline: moe_forward and moe_backward with one product, and nothing to sort where tokens start ---

static void leave(const ExchangeBuffer* buffers, int count, const Pipeline& p) {
    // As many go to a rank as come from it: the same outward and homeward.
    ExchangeRows rows = {p.start.data(), p.count.data(), p.start.data(), p.count.data()};
    event_record(ready, ctx);
    event_wait(ready, line);
    comm_exchange(comm, buffers, count, rows, line);
    event_record(there, line);
}

static void arrive(void) { event_wait(there, ctx); }

static void leave_outward(const Pipeline& p, const Outward& o, int v, bool ids) {
    ExchangeBuffer buffers[3];
    int count = 0;
    if (v == BF16) {
        buffers[count++] = {o.here, o.home, (size_t)o.C * sizeof(floatX)};
    } else {
        mx_quantize(o.home_mx.q, o.home_mx.scale, o.home, p.N, o.C, CAST, ctx);
        buffers[count++] = {o.here_mx.q, o.home_mx.q, (size_t)o.C};
        buffers[count++] = {o.here_mx.scale, o.home_mx.scale, (size_t)mx_stride(o.C)};
    }
    if (ids) buffers[count++] = {p.here_id, p.home_id, sizeof(int32_t)};
    leave(buffers, count, p);
}

static void leave_homeward(const Pipeline& p, const Homeward& h, int v) {
    unpermute_rows(h.here, h.rows, NULL, p.r, p.N, 1, h.C, 0, ctx);
    ExchangeBuffer buffer = {h.home[v], h.here, (size_t)h.C * sizeof(floatX)};
    leave(&buffer, 1, p);
}

static void permute(const Pipeline& p, const Outward& o, int v) {
    if (v == BF16) {
        permute_rows(o.rows, o.here, p.r, (size_t)o.C * sizeof(floatX), ctx);
        return;
    }
    permute_rows(o.rows_mx.q, o.here_mx.q, p.r, (size_t)o.C, ctx);
    permute_rows(o.rows_mx.scale, o.here_mx.scale, p.r, (size_t)mx_stride(o.C), ctx);
}

// The operand of dW, from the rows as they were received or as they were permuted.
static floatX* operand(const Pipeline& p, const Outward& o, int v, bool permuted) {
    if (v == BF16) {
        if (!permuted) permute(p, o, v);
        return o.rows;
    }
    if (permuted)
        mx_dequantize(o.values, o.rows_mx.q, o.rows_mx.scale, p.r.capacity, o.C, ctx);
    else
        mx_dequantize_rows(o.values, o.here_mx.q, o.here_mx.scale, p.r, o.C, ctx);
    return o.values;
}

static void forward(const Pipeline& p, int v) {
    const int64_t dim = p.x.C, hidden = p.y.C;
    leave_outward(p, p.x, v, true);
    arrive();
    permute_plan(p.r, p.here_id, NULL, p.N, 1, ctx);
    permute(p, p.x, v);
    if (v == BF16)
        grouped_gemm_forward(p.y.rows, p.x.rows, p.w, p.r, dim, hidden, ctx);
    else
        grouped_gemm_mx(p.y.rows, NULL, p.x.rows_mx.q, p.x.rows_mx.scale, p.w_mx.q, p.w_mx.scale,
                        ceil_div(dim, MX_CHUNK), 1, p.r, dim, hidden, ctx);
    leave_homeward(p, p.y, v);
    arrive();
}

// After a forward in the same precision. kept: x's rows are as forward left them.
static void backward(const Pipeline& p, int v, bool kept) {
    const int64_t dim = p.x.C, hidden = p.y.C;
    leave_outward(p, p.dy, v, false);
    floatX* x = operand(p, p.x, v, kept);  // while dy travels
    arrive();
    permute(p, p.dy, v);
    if (v == BF16)
        grouped_gemm_dgrad(p.dx.rows, p.dy.rows, p.w, p.r, dim, hidden, ctx);
    else
        grouped_gemm_mx(p.dx.rows, NULL, p.dy.rows_mx.q, p.dy.rows_mx.scale, p.w_transposed, p.w_mx.scale, 1,
                        ceil_div(dim, MX_CHUNK), p.r, hidden, dim, ctx);
    leave_homeward(p, p.dx, v);
    floatX* dy = operand(p, p.dy, v, true);  // from here on while dx travels
    if (v == MXFP8_WGRAD) {
        mx_round_columns(dy, p.r, hidden, CAST, ctx);
        mx_round_columns(x, p.r, dim, CAST, ctx);
    }
    grouped_gemm_wgrad(p.dw[v], dy, x, p.r, dim, hidden, ctx);
    arrive();
}

// --- Is it right? ---

// The largest over the ranks.
static double slowest(double mine) {
    std::vector<double> all((size_t)ranks_count(world));
    ranks_all_gather(world, all.data(), &mine, sizeof(mine));
    return *std::max_element(all.begin(), all.end());
}

// Prints the signal over the noise on the worst rank; ends the run where it is too little. No noise is wrong too.
static void verdict(const char* name, double signal, double noise, double least) {
    const double mine = 10 * log10(signal / noise), db = -slowest(isfinite(mine) ? -mine : 0);
    printf("| %s | %.1f | %.1f |\n", name, db, least);
    fflush(stdout);
    if (!(db >= least)) die(EXIT_FAILED, "%s: %.2f dB, must be at least %.1f", name, db, least);
}

template <typename T>
static void check_sqnr(const char* name, const T* a, const T* b, int64_t n, double least) {
    double s[2];
    device_zero(sums, sizeof(s), ctx);
    difference<<<512, 256, 0, ctx->stream>>>(a, b, n, sums);
    LAUNCH_CHECK();
    device_download(s, sums, sizeof(s), ctx);
    verdict(name, s[1], s[0], least);
}

static void check_sample(const char* name, const std::function<double(int64_t, double*)>& sample, double least) {
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < 64; i++) {
        double want = 0, ours = sample(i, &want);
        diff += (ours - want) * (ours - want), norm += want * want;
    }
    verdict(name, norm, diff, least);
}

template <typename T>
static double element(const T* from, int64_t i) {
    T x;
    device_download(&x, from + i, sizeof(x), ctx);
    return (double)(float)x;
}
static double at(int64_t i, Seed seed) { return (double)(float)(floatX)normal(i, seed); }

static void check(void) {
    const int64_t ranks = ranks_count(world), me = ranks_index(world), E = EL * ranks;
    const int64_t each = 100, N = each * E, dim = 1024, hidden = 704;  // groups with pad rows, half a chunk at the end
    Pipeline p = make(N, dim, hidden);
    for (int v = 0; v < PRECISIONS; v++) forward(p, v), backward(p, v, false);
    printf("| %lld tokens a rank, %lld x %lld | SQNR, dB | at least |\n|---|---|---|\n", (long long)N, (long long)dim,
           (long long)hidden);
    auto y = [&](int64_t i, double* want) {
        const int64_t n = (i * 509 + 3) % N, o = i * 37 % hidden, token = me * N + n, e = n / each;
        for (int64_t c = 0; c < dim; c++) *want += at(token * dim + c, X) * at((e * hidden + o) * dim + c, W);
        return element(p.y.home[BF16], n * hidden + o);
    };
    auto dx = [&](int64_t i, double* want) {
        const int64_t n = (i * 509 + 3) % N, c = i * 37 % dim, token = me * N + n, e = n / each;
        for (int64_t o = 0; o < hidden; o++) *want += at(token * hidden + o, DY) * at((e * hidden + o) * dim + c, W);
        return element(p.dx.home[BF16], n * dim + c);
    };
    auto dw = [&](int64_t i, double* want) {
        const int64_t l = i % EL, e = me * EL + l, o = i * 37 % hidden, c = i * 53 % dim;
        for (int64_t rank = 0; rank < ranks; rank++)
            for (int64_t t = rank * N + e * each; t < rank * N + (e + 1) * each; t++)
                *want += at(t * hidden + o, DY) * at(t * dim + c, X);
        return element(p.dw[BF16], (l * hidden + o) * dim + c);
    };
    check_sample("bf16, output, against the host", y, 50);
    check_sample("bf16, input gradient, against the host", dx, 50);
    check_sample("bf16, weight gradient, against the host", dw, 80);
    mx_dequantize(p.x.values, p.x.here_mx.q, p.x.here_mx.scale, N, dim, ctx);
    check_sqnr("MXFP8, after dispatch", p.x.values, p.x.here, N * dim, 31);
    check_sqnr("MXFP8, output", p.y.home[MXFP8], p.y.home[BF16], N * hidden, 28.2);
    check_sqnr("MXFP8, input gradient", p.dx.home[MXFP8], p.dx.home[BF16], N * dim, 28.2);
    check_sqnr("MXFP8, weight gradient", p.dw[MXFP8], p.dw[BF16], EL * hidden * dim, 28);
    check_sqnr("wgrad MXFP8 too, weight gradient", p.dw[MXFP8_WGRAD], p.dw[BF16], EL * hidden * dim, 28);
    forget(p);
}

// --- How fast is it? ---

// Median ms of each call, the slowest rank's. Calls are queued without a wait between them.
static std::vector<double> measure(const std::vector<std::function<void()>>& calls) {
    static Stopwatch* watch[CALLS];
    for (Stopwatch*& w : watch)
        if (!w) w = stopwatch_create();
    std::vector<std::vector<double>> times(calls.size());
    std::vector<double> ms;
    for (int round = 0; round < ROUNDS; round++)
        for (size_t c = 0; c < calls.size(); c++) {
            for (int i = 0; i < WARM; i++) calls[c]();
            for (int i = 0; i < CALLS; i++) {
                stopwatch_start(watch[i], ctx);
                calls[c]();
                stopwatch_stop(watch[i], ctx);
            }
            for (Stopwatch* w : watch) times[c].push_back(1e3 * stopwatch_seconds(w));
        }
    for (std::vector<double>& t : times) {
        std::sort(t.begin(), t.end());
        ms.push_back(slowest(t[t.size() / 2]));
    }
    return ms;
}

static void bench(int64_t N, int64_t dim, int64_t hidden) {
    Pipeline p = make(N, dim, hidden);
    forward(p, BF16), forward(p, MXFP8);  // what backward reads
    double total[2] = {};
    auto row = [&](const char* name, const std::vector<double>& ms) {
        printf("| %lld x %lld | %s | %.2f | %.2f | %.2f |", (long long)dim, (long long)hidden, name, ms[0], ms[1],
               ms[0] / ms[1]);
        printf(ms.size() > 2 ? " %.2f |\n" : " |\n", ms.back());
        fflush(stdout);
    };
    std::vector<double> ms = measure({[&] { forward(p, BF16); }, [&] { forward(p, MXFP8); }});
    row("forward", ms);
    for (int v = 0; v < 2; v++) total[v] += ms[(size_t)v];
    for (bool kept : {false, true}) {
        ms = measure({[&] { backward(p, BF16, kept); }, [&] { backward(p, MXFP8, kept); },
                      [&] { backward(p, MXFP8_WGRAD, kept); }});
        row(kept ? "backward, rows kept" : "backward", ms);
        for (int v = 0; v < 2 && !kept; v++) total[v] += ms[(size_t)v];
    }
    row("forward + backward", {total[0], total[1]});
    forget(p);
}

int main(int argc, char** argv) {
    world = ranks_start(&argc, &argv);
    const int64_t N = argc > 1 ? atoll(argv[1]) : 131072;
    device_choose(ranks_local());
    ctx = ctx_create(permute_workspace(std::max(N, (int64_t)131072), 1, EL));
    comm = comm_create(world, "benchmark", ctx);
    line = ctx_side(ctx);
    ready = event_create(), there = event_create();
    sums = (double*)device_alloc(2 * sizeof(double), "the benchmark");
    printf("%s, %d ranks, %d experts a rank, %lld tokens a rank, each to one expert, all equally often\n",
           device_name(ctx), ranks_count(world), (int)EL, (long long)N);
    check();
    printf("| dim x hidden | pass | bf16, ms | MXFP8, ms | ratio | wgrad MXFP8 too, ms |\n|---|---|---|---|---|---|\n");
    bench(N, 8192, 5120);
    bench(N, 7168, 2048);
    bench(N, 2048, 1408);
    device_free(sums);
    event_destroy(ready), event_destroy(there);
    comm_destroy(comm);
    ctx_destroy(line);
    ctx_destroy(ctx);
    ranks_end(world);
    return 0;
}
