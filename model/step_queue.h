// The training steps of a run in flight. The host queues step n + 1 while the device computes step n, and only then
// waits for the results of step n.
#pragma once

#include "data/shards.h"
#include "model/model.h"

typedef struct StepQueue StepQueue;

// The results of a step on the host. The arrays are valid until the next step but one is queued.
typedef struct StepResults {
    StepState state;
    double seconds;           // on the device
    const int64_t* load;      // as Step.load
    const MxStats* mx_stats;  // as Step.mx_stats; NULL: the step did not measure them
} StepResults;

// Steps take their micro-batches from `shards`, in the order of the settings.
StepQueue* step_queue_create(Model* model, Ranks* world, const Shards* shards);
void step_queue_destroy(StepQueue* queue);
// Queues a whole step: its micro-steps, the update, and copies of its results to the host. stop: see StepState.
void step_queue_add(StepQueue* queue, int64_t step, int stop);
// Waits for the results of `step`, the newest one or the one before it. A step that overflowed its capacity
// (moe/dispatch.h) runs again first.
StepResults step_queue_wait(StepQueue* queue, int64_t step);
