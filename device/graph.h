// Captures work that is the same every time, such as a training step, and replays it as a whole without the host's
// part. On the GPU a Graph is a CUDA graph; on the CPU `work` runs every time.
//
//   run 1            runs normally (libraries choose their algorithms, kernels are loaded)
//   run 2            captured, and replayed at once
//   run 3, 4, ...    replayed
//
// A replay repeats launches, copies and memsets with the arguments of the capture. Host code of `work` is not repeated.
// So values that differ from run to run must be in device memory, written before the run.
#pragma once

#include "device/device.h"

typedef struct Graph Graph;

Graph* graph_create(void);
void graph_destroy(Graph* graph);

// `work` queues kernels and copies on ctx. `work` may use side streams if they first wait for ctx, and ctx waits for
// them at the end. `work` allocates no memory, waits for nothing on the host and uploads nothing. With graph NULL,
// `work` runs normally and nothing is captured.
void graph_run(Graph* graph, void (*work)(void* argument), void* argument, Ctx* ctx);
