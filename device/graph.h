// Captures work that is the same every time, such as a training step, and replays it as a whole without the host's
// part. On the GPU this is a CUDA graph.
//
//   run 1            runs normally (libraries choose their algorithms, kernels are loaded)
//   run 2            captured, and replayed at once
//   run 3, 4, ...    replayed
//
// A replay repeats launches, copies and memsets with the arguments of the capture. Host code of `work` is not repeated.
// So values that differ from run to run must be in device memory, and are written there before the run.
#pragma once

#include "device/device.h"

typedef struct Graph Graph;

Graph* graph_create(void);
void graph_destroy(Graph* graph);

// work(argument) queues work on ctx, and on side streams that wait for ctx and that ctx waits for in the end. It
// allocates no memory, waits for nothing on the host and uploads nothing. With graph NULL it runs normally, and nothing
// is captured.
void graph_run(Graph* graph, void (*work)(void* argument), void* argument, Ctx* ctx);
