// Replays work that is the same every time, such as a training step's, as a whole: the host's part is left out. On the
// GPU this is a CUDA graph.
//
//   run 1            done as any work (libraries choose their algorithms, kernels are loaded)
//   run 2            recorded, and what was recorded is replayed at once
//   run 3, 4, ...    replayed
//
// A replay repeats launches, copies and zeroings, with the arguments that they had when they were recorded. What `work`
// does on the host is not done again. So what differs from run to run must lie in device memory, and is written there
// before the run.
#ifndef DEVICE_GRAPH_H
#define DEVICE_GRAPH_H

#include "device/device.h"

BEGIN_C

typedef struct Graph Graph;

// Why work cannot be replayed on ctx's device; NULL: it can. of_bytes 1: it has products of MXFP8 bytes
// (mx/grouped_gemm_mx.h), for which the host may wait.
const char* graph_refusal(int of_bytes, Ctx* ctx);

Graph* graph_create(void);
void graph_destroy(Graph* graph);

// work(argument) gives work to ctx, and to side streams that wait for ctx and that ctx waits for in the end. It takes
// no memory, waits for nothing on the host and uploads nothing. With graph NULL it is done, and nothing is kept.
void graph_run(Graph* graph, void (*work)(void* argument), void* argument, Ctx* ctx);

END_C

#endif
