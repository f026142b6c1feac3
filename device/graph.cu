// CUDA graphs by stream capture. During capture, work queued on the stream becomes a graph and does not run. Capture
// includes side streams that follow the stream by events. PDL launches (device/cuda.cuh) become edges of the graph.
// Other threads (a save) are not affected. A call that cannot be captured ends the run with its name.
#include <stdlib.h>

#include "device/cuda.cuh"
#include "device/graph.h"

struct Graph {
    int64_t runs;  // started so far
    cudaGraphExec_t exec;
};

Graph* graph_create(void) { return (Graph*)host_alloc(sizeof(Graph)); }

void graph_destroy(Graph* graph) {
    if (graph && graph->exec) CUDA_CHECK(cudaGraphExecDestroy(graph->exec));
    free(graph);
}

static cudaGraphExec_t record(void (*work)(void* argument), void* argument, Ctx* ctx) {
    cudaGraph_t recorded;
    cudaGraphExec_t exec;
    CUDA_CHECK(cudaStreamBeginCapture(ctx->stream, cudaStreamCaptureModeThreadLocal));
    work(argument);
    CUDA_CHECK(cudaStreamEndCapture(ctx->stream, &recorded));
    CUDA_CHECK(cudaGraphInstantiate(&exec, recorded, 0));
    CUDA_CHECK(cudaGraphDestroy(recorded));
    return exec;
}

void graph_run(Graph* graph, void (*work)(void* argument), void* argument, Ctx* ctx) {
    if (!graph || graph->runs++ == 0) return work(argument);
    if (!graph->exec) graph->exec = record(work, argument, ctx);
    CUDA_CHECK(cudaGraphLaunch(graph->exec, ctx->stream));
}
