// Speed of the expert-parallel pipeline as torchao publishes it (benchmarks/prototype/moe_training/mxfp8/
// bench_ep_pipeline.py): dispatch, permute, one grouped GEMM dim -> hidden, unpermute, combine. The yardstick is
// bench/ep_pipeline_torch.py, the same work in PyTorch.
//
// A rank has 131072 tokens and 8 experts. Each token is routed to one expert (top 1), and all experts get the same
// number of tokens. The tokens of a rank are already in the order of their experts, so nothing is sorted before
// dispatch. The numbers of rows to each rank are known too.
//
// The functions are those of moe/moe.c and moe/dispatch.c: comm_exchange, rows_permute, grouped GEMMs, unpermute_rows
// (parallel/comm.h, linear/rows.h, linear/linear.h, grouped/permute.h). While dy is in flight nothing is computed; a
// model computes its shared MLP there.
//
// MXFP8 uses the usual formats of the program:
//
//   GEMMs            on quantized operands (fast); the weights are quantized once per step, which is not timed
//   dispatch         tokens and dy are quantized once, on their own rank; values and scales are one transfer
//   combine          outputs and dx in bf16
//   wgrad            in bf16, on the dequantized values
//   the last column  wgrad on MXFP8 operands, both quantized along tokens
//
// dW is += in float32. Backward reads x as it was received and permutes it again. In the row "rows kept" it has the
// permuted rows (bf16 or MXFP8) from forward, as the PyTorch yardstick does.
//
// Times are medians over 30 calls of the slowest rank, bf16 and MXFP8 in turns, measured with CUDA events. Results are
// checked first, at a small size: samples of bf16 against sums on the host, and MXFP8 against bf16 by SQNR.
//
//   mpirun -np 4 build/cuda/bench/ep_pipeline [tokens a rank]
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "bench/data.cuh"
#include "linear/quantized.h"
#include "mx/formats.h"
#include "parallel/comm.h"

enum { EL = 8, ROUNDS = 3, WARM = 3, CALLS = 10 };
enum Precision { BF16, MXFP8, MXFP8_WGRAD, PRECISIONS };
enum Seed { X = 1, DY = 2, W = 3 };

static Ranks* world;
static Ctx *ctx, *side;  // side: the stream of the all-to-all
static Event *ready, *there;
static Comm* comm;
static double* sums;
static const Format* mxfp8() { return format_of_id(FORMAT_MXFP8, MX_RCEIL); }

// --- Data: an element is a function of its index over all ranks, on the host too ---

// Buffers of rows of one width, (N, C).
struct Travel {
    Rows sent;      // rows to dispatch; in combine the rows that come back
    Rows received;  // dy as it arrives; in combine the sums to send back
};

// The pipeline in one precision. x has the width dim, dy and y have the width hidden.
struct Pass {
    Travel x, dy;              // combine of dx uses the buffers of x, combine of y those of dy
    Rows kept;                 // x as it was received
    Rows x_rows, dy_rows;      // (capacity, dim), (capacity, hidden), sorted by expert
    Rows x_values, dy_values;  // their dequantized values, or quantized column-wise
    Ragged ragged;
    floatX *y, *dx;  // (capacity, hidden), (capacity, dim)
    Weight w;        // (EL, hidden, dim)
};

struct Pipeline {
    int64_t N, dim, hidden;
    floatX *x, *dy, *w;  // x, dy: tokens of this rank in the order of their experts
    Pass pass[2];        // BF16; MXFP8
    real* dw[PRECISIONS];
    // (N): the numbers and gates of the experts, which are sent with x
    int32_t *sent_expert, *received_expert;
    real *sent_gate, *received_gate;
    GemmWorkspace workspace;
    Arena arena;
};

static Pass& pass_of(Pipeline& p, int v) { return p.pass[v != BF16]; }

static void plan_pass(Pipeline& p, Pass& q, const Format* format) {
    Arena* a = &p.arena;
    rows_plan(a, "x or dx, sent", &q.x.sent, 1, format, p.N, p.dim);
    rows_plan(a, "dx, received", &q.x.received, 1, NULL, p.N, p.dim);
    rows_plan(a, "dy or y, sent", &q.dy.sent, 1, format, p.N, p.hidden);
    rows_plan(a, "dy or y, received", &q.dy.received, 1, format, p.N, p.hidden);
    rows_plan(a, "x, received", &q.kept, !format, format, p.N, p.dim);

    const int64_t capacity = ragged_rows(p.N, EL, BACKEND);
    q.ragged.El = EL, q.ragged.capacity = capacity;
    ARENA(a, "group starts", ELEMENT_I64, EL + 1, 0, &q.ragged.group_start);
    ARENA(a, "group rows", ELEMENT_I32, EL, 0, &q.ragged.group_rows);
    ARENA(a, "row -> token", ELEMENT_I32, capacity, 0, &q.ragged.row_token);
    ARENA(a, "token -> row", ELEMENT_I32, p.N, 0, &q.ragged.token_row);
    ARENA(a, "row gates", ELEMENT_REAL, capacity, 0, &q.ragged.row_gate);
    ARENA(a, "y", ELEMENT_X, capacity * p.hidden, 0, &q.y);
    ARENA(a, "dx", ELEMENT_X, capacity * p.dim, 0, &q.dx);
    rows_plan(a, "x by expert", &q.x_rows, !format, format, capacity, p.dim);
    rows_plan(a, "dy by expert", &q.dy_rows, !format, format, capacity, p.hidden);
    rows_plan(a, "x by expert, values", &q.x_values, format != NULL, format, capacity, p.dim);
    rows_plan(a, "dy by expert, values", &q.dy_values, format != NULL, format, capacity, p.hidden);
    q.w.count = EL, q.w.OC = p.hidden, q.w.IC = p.dim, q.w.format = format, q.w.workspace = &p.workspace;
    weight_plan(a, &q.w, 0);
}

static void make(Pipeline& p, int64_t N, int64_t dim, int64_t hidden) {
    const int64_t ranks = ranks_count(world), E = EL * ranks, weights = EL * hidden * dim, me = ranks_index(world);
    if (N <= 0 || N % E || N / ranks % row_align(BACKEND))
        die(EXIT_USAGE, "%lld tokens a rank: must be a multiple of %lld experts and of 128 a rank", (long long)N,
            (long long)E);

    // The buffers.
    memset(&p, 0, sizeof(p));
    p.N = N, p.dim = dim, p.hidden = hidden;
    arena_init(&p.arena, "the benchmark", BACKEND);
    ARENA(&p.arena, "x", ELEMENT_X, N * dim, 0, &p.x);
    ARENA(&p.arena, "dy", ELEMENT_X, N * hidden, 0, &p.dy);
    ARENA(&p.arena, "w", ELEMENT_X, weights, 0, &p.w);
    for (real*& dw : p.dw) ARENA(&p.arena, "dw", ELEMENT_REAL, weights, 0, &dw);
    plan_pass(p, p.pass[0], NULL);
    plan_pass(p, p.pass[1], mxfp8());
    ARENA(&p.arena, "sent experts", ELEMENT_I32, N, 0, &p.sent_expert);
    ARENA(&p.arena, "received experts", ELEMENT_I32, N, 0, &p.received_expert);
    ARENA(&p.arena, "sent gates", ELEMENT_REAL, N, 0, &p.sent_gate);
    ARENA(&p.arena, "received gates", ELEMENT_REAL, N, 0, &p.received_gate);
    arena_allocate(&p.arena);

    // The data. An expert's number is that on its rank.
    fill<<<1024, 256, 0, ctx->stream>>>(p.x, N * dim, X, 1, me * N * dim);
    fill<<<1024, 256, 0, ctx->stream>>>(p.dy, N * hidden, DY, 1, me * N * hidden);
    fill<<<1024, 256, 0, ctx->stream>>>(p.w, weights, W, 1, me * weights);
    LAUNCH_CHECK();
    std::vector<int32_t> expert((size_t)N);
    for (int64_t n = 0; n < N; n++) expert[(size_t)n] = (int32_t)(n / (N / E) % EL);
    device_upload(p.sent_expert, expert.data(), expert.size() * sizeof(int32_t), ctx);
    device_zero(p.sent_gate, (size_t)N * sizeof(real), ctx);
    for (Pass& q : p.pass) {
        q.w.w = p.w;
        weight_quantize(&q.w, ctx);
    }
}

static void forget(Pipeline& p) {
    ctx_sync(ctx);
    arena_free(&p.arena);
}

// --- The pipeline: moe_forward and moe_backward with one GEMM, and no sort before dispatch ---

// Queues the all-to-all of rows, and of the choices if they are sent along, on the side stream. Every rank sends the
// same number of rows to each. Returns the rows as they arrive in the memory of `to`, after a wait for `there`.
static Rows travel(const Pipeline& p, Rows to, Rows from, bool choices) {
    to.format = from.format, to.form = rows_form(is_packed(from), 1);
    to.count = from.count, to.columns = from.columns;
    std::vector<ExchangeBuffer> buffers;
    if (is_packed(from)) {
        buffers.push_back({to.bytes.q, from.bytes.q, (size_t)from.columns});
        buffers.push_back({to.bytes.scale, from.bytes.scale, (size_t)mx_stride(from.columns)});
    } else {
        buffers.push_back({to.value, from.value, (size_t)from.columns * sizeof(floatX)});
    }
    if (choices) {
        buffers.push_back({p.received_expert, p.sent_expert, sizeof(int32_t)});
        buffers.push_back({p.received_gate, p.sent_gate, sizeof(real)});
    }

    const int64_t ranks = ranks_count(world);
    std::vector<int64_t> start, rows((size_t)ranks, p.N / ranks);
    for (int64_t i = 0; i < ranks; i++) start.push_back(i * p.N / ranks);
    event_record(ready, ctx);
    event_wait(ready, side);
    comm_exchange(comm, buffers.data(), (int)buffers.size(), {start.data(), rows.data(), start.data(), rows.data()},
                  side);
    event_record(there, side);
    return to;
}

// Sends the outputs back to their tokens' ranks: into t.sent, after a wait for `there`.
static void combine(const Pipeline& p, const Travel& t, const floatX* y, Ragged ragged, int64_t C) {
    unpermute_rows(t.received.value, y, NULL, ragged, p.N, 1, C, 0, ctx);
    travel(p, t.sent, rows_of_values(t.received.value, p.N, C), false);
}

static void forward(Pipeline& p, int v) {
    Pass& q = pass_of(p, v);
    const Rows x = rows_as(q.x.sent, rows_of_values(p.x, p.N, p.dim), q.w.format, ctx);
    q.kept = travel(p, q.kept, x, true);
    event_wait(there, ctx);
    permute_plan(q.ragged, p.received_expert, p.received_gate, p.N, 1, ctx);
    q.x_rows = rows_permute(q.x_rows, q.kept, q.ragged, ctx);
    grouped_forward(q.y, q.x_rows, &q.w, q.ragged, ctx);
    combine(p, q.dy, q.y, q.ragged, p.hidden);
    event_wait(there, ctx);
}

// Needs a forward in the same precision before it. kept: x_rows is reused from forward; else x is permuted again.
static void backward(Pipeline& p, int v, bool kept) {
    Pass& q = pass_of(p, v);
    const Rows dy = rows_as(q.dy.sent, rows_of_values(p.dy, p.N, p.hidden), q.w.format, ctx);
    const Rows dy_here = travel(p, q.dy.received, dy, false);
    event_wait(there, ctx);
    q.dy_rows = rows_permute(q.dy_rows, dy_here, q.ragged, ctx);
    grouped_dgrad(q.dx, q.dy_rows, &q.w, q.ragged, ctx);
    combine(p, q.x, q.dx, q.ragged, p.dim);
    // While dx is in flight: dW.
    Weight w = q.w;
    w.grad = p.dw[v];
    w.wgrad = v == MXFP8_WGRAD ? mxfp8() : NULL;
    grouped_wgrad(&w, q.dy_rows, q.dy_values, kept ? q.x_rows : q.kept, w.format ? q.x_values : q.x_rows, q.ragged,
                  ctx);
    event_wait(there, ctx);
}

static floatX* y_of(Pipeline& p, int v) { return pass_of(p, v).dy.sent.value; }
static floatX* dx_of(Pipeline& p, int v) { return pass_of(p, v).x.sent.value; }

// --- Check of the results ---

// The largest value over the ranks.
static double slowest(double mine) {
    std::vector<double> all((size_t)ranks_count(world));
    ranks_all_gather(world, all.data(), &mine, sizeof(mine));
    return *std::max_element(all.begin(), all.end());
}

// Prints the SQNR (signal over noise) of the worst rank. Ends the run if it is below `least`, or if there is no noise.
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
    const int64_t each = 112, N = each * E, dim = 1024, hidden = 704;  // with pad rows; hidden ends in half a chunk
    Pipeline p;
    make(p, N, dim, hidden);
    for (int v = 0; v < PRECISIONS; v++) forward(p, v), backward(p, v, false);
    printf("| %lld tokens a rank, %lld x %lld | SQNR, dB | at least |\n|---|---|---|\n", (long long)N, (long long)dim,
           (long long)hidden);

    // Sample i of y, dx and dW; *want is its sum on the host.
    auto y = [&](int64_t i, double* want) {
        const int64_t n = (i * 509 + 3) % N, o = i * 37 % hidden, token = me * N + n, e = n / each;
        for (int64_t c = 0; c < dim; c++) *want += at(token * dim + c, X) * at((e * hidden + o) * dim + c, W);
        return element(y_of(p, BF16), n * hidden + o);
    };
    auto dx = [&](int64_t i, double* want) {
        const int64_t n = (i * 509 + 3) % N, c = i * 37 % dim, token = me * N + n, e = n / each;
        for (int64_t o = 0; o < hidden; o++) *want += at(token * hidden + o, DY) * at((e * hidden + o) * dim + c, W);
        return element(dx_of(p, BF16), n * dim + c);
    };
    auto dw = [&](int64_t i, double* want) {
        const int64_t l = i % EL, e = me * EL + l, o = i * 37 % hidden, c = i * 53 % dim;
        for (int64_t rank = 0; rank < ranks; rank++)
            for (int64_t t = rank * N + e * each; t < rank * N + (e + 1) * each; t++)
                *want += at(t * hidden + o, DY) * at(t * dim + c, X);
        return element(p.dw[BF16], (l * hidden + o) * dim + c);
    };

    // bf16 against the host, MXFP8 against bf16.
    check_sample("bf16, output, against the host", y, 50);
    check_sample("bf16, input gradient, against the host", dx, 50);
    check_sample("bf16, weight gradient, against the host", dw, 80);
    const Rows here = rows_as(p.pass[1].x_values, p.pass[1].kept, NULL, ctx);
    check_sqnr("MXFP8, after dispatch", here.value, p.pass[0].kept.value, N * dim, 31);
    check_sqnr("MXFP8, output", y_of(p, MXFP8), y_of(p, BF16), N * hidden, 28.2);
    check_sqnr("MXFP8, input gradient", dx_of(p, MXFP8), dx_of(p, BF16), N * dim, 28.2);
    check_sqnr("MXFP8, weight gradient", p.dw[MXFP8], p.dw[BF16], EL * hidden * dim, 28);
    check_sqnr("wgrad MXFP8 too, weight gradient", p.dw[MXFP8_WGRAD], p.dw[BF16], EL * hidden * dim, 28);
    forget(p);
}

// --- Timing ---

// Median ms of each call on the slowest rank. Calls are queued without a wait between them.
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
    Pipeline p;
    make(p, N, dim, hidden);
    forward(p, BF16), forward(p, MXFP8);  // backward reads their results
    double total[2] = {};
    auto row = [&](const char* name, const std::vector<double>& ms) {
        printf("| %lld x %lld | %s | %.2f | %.2f | %.2f |", (long long)dim, (long long)hidden, name, ms[0], ms[1],
               ms[0] / ms[1]);
        printf(ms.size() > 2 ? " %.2f |\n" : " |\n", ms.back());
        fflush(stdout);
    };

    // Each pass in all precisions in turns; backward with and without the rows of forward.
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
    if (ranks_count(world) == 1) die(EXIT_USAGE, "nothing travels on one rank: start more with mpirun");
    ctx = ctx_create(permute_workspace(ranks_count(world) * std::max(N, (int64_t)131072), 1, EL));
    side = ctx_side(ctx, 0);
    ready = event_create();
    there = event_create();
    comm = comm_create(world, "benchmark", ctx);
    sums = (double*)device_alloc(2 * sizeof(double), "the benchmark");
    printf("%s, %d ranks, %d experts a rank, %lld tokens a rank, each to one expert, all equally often\n",
           device_name(ctx), ranks_count(world), (int)EL, (long long)N);
    check();
    printf("| dim x hidden | pass | bf16, ms | MXFP8, ms | ratio | wgrad MXFP8 too, ms |\n|---|---|---|---|---|---|\n");
    bench(N, 8192, 5120);
    bench(N, 7168, 2048);
    bench(N, 2048, 1408);
    device_free(sums);
    comm_destroy(comm);
    event_destroy(ready);
    event_destroy(there);
    ctx_destroy(side);
    ctx_destroy(ctx);
    ranks_end(world);
    return 0;
}
