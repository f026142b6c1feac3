// Replayed work (device/graph.h) must do the same as in its first run, on the current contents of memory. It has
// kernels that start early: behind one another, behind a zeroing, a copy, a GEMM of the library and a wait for a side
// stream. Whole numbers small enough for bf16 make every result exact.
#include "device/cuda.cuh"
#include "device/graph.h"
#include "layers/matmul.h"
#include "mx/grouped_gemm_mx.h"
#include "tests/test.h"

enum { N = 64, RUNS = 6 };

typedef struct Work {
    Ctx *ctx, *side;
    Event *given, *done;
    int calls;                   // calls of the host function
    floatX *x, *w;               // (N, N) each
    real *in, *sum, *twice, *y;  // (N, N) each
} Work;

// in = x, which every run gets. y += x^T. twice = 2 in, from sum, on a side stream. y += twice.
static void work(void* argument) {
    Work* w = (Work*)argument;
    w->calls++;
    device_to_real(w->in, w->x, N * N, w->ctx);
    device_zero(w->sum, N * N * sizeof(real), w->ctx);
    device_add(w->sum, w->in, N * N, w->ctx);  // behind a zeroing
    device_add(w->sum, w->in, N * N, w->ctx);  // behind a kernel
    event_record(w->given, w->ctx);
    event_wait(w->given, w->side);
    device_copy(w->twice, w->sum, N * N * sizeof(real), w->side);
    matmul_wgrad(w->y, w->x, w->w, N, N, N, 1, w->ctx);
    event_record(w->done, w->side);
    event_wait(w->done, w->ctx);
    device_add(w->y, w->twice, N * N, w->ctx);  // behind a GEMM and another stream
}

static void check_runs(Graph* graph, int calls) {
    // On the device: w is the identity, so y gets x^T = in^T of each run.
    Ctx* ctx = ctx_create(matmul_workspace());
    Work w = {.ctx = ctx, .side = ctx_side(ctx, 0), .given = event_create(), .done = event_create()};
    real** reals[] = {&w.in, &w.sum, &w.twice, &w.y};
    for (real** p : reals) *p = (real*)device_alloc(N * N * sizeof(real), "a test");
    w.x = (floatX*)device_alloc(N * N * sizeof(floatX), "a test");
    w.w = (floatX*)device_alloc(N * N * sizeof(floatX), "a test");
    static real want[N * N], got[N * N];
    static floatX in[N * N];
    for (int i = 0; i < N * N; i++) in[i] = (floatX)(i % (N + 1) == 0), want[i] = 0;
    device_upload(w.w, in, sizeof(in), ctx);

    // Every run has its own input and adds to y.
    for (int run = 0; run < RUNS; run++) {
        for (int i = 0; i < N * N; i++) in[i] = (floatX)((i + 7 * run) % 31 - 15);
        for (int i = 0; i < N * N; i++) want[i] += (real)in[i % N * N + i / N] + 2 * (real)in[i];
        device_upload(w.x, in, sizeof(in), ctx);
        graph_run(graph, work, &w, ctx);
    }
    device_download(got, w.y, sizeof(got), ctx);
    int64_t wrong = 0;
    for (int i = 0; i < N * N; i++) wrong += got[i] != want[i];
    CHECK(wrong == 0, "%lld of %d sums are wrong", (long long)wrong, N * N);
    CHECK(w.calls == calls, "the host did its part %d times, not %d", w.calls, calls);

    for (real** p : reals) device_free(*p);
    device_free(w.x);
    device_free(w.w);
    event_destroy(w.given);
    event_destroy(w.done);
    graph_destroy(graph);
    ctx_destroy(w.side);
    ctx_destroy(ctx);
}

static void test_without_a_graph(void) { check_runs(NULL, RUNS); }
// The first run is done, the second recorded.
static void test_replays(void) { check_runs(graph_create(), 2); }

// If the host waits in GEMMs of MXFP8 values, all other work is replayed.
static void test_refusals(void) {
    Ctx hopper = {}, blackwell = {};
    hopper.capability = 90, blackwell.capability = 100;
    CHECK(!grouped_gemm_mx_unreplayed(&hopper), "MXFP8 on Hopper: %s", grouped_gemm_mx_unreplayed(&hopper));
    CHECK(grouped_gemm_mx_unreplayed(&blackwell), "MXFP8 on Blackwell");
}

int main(void) {
    RUN(test_without_a_graph);
    RUN(test_replays);
    RUN(test_refusals);
    return test_summary();
}
