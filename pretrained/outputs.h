// Everything that a run writes: lines on the terminal, the log, checkpoints and samples.
//
// The host runs one step ahead of the device: it queues step n + 1, then waits for the results of step n.
#pragma once

#include "model/model.h"
#include "pretrained/sources.h"

typedef struct Outputs Outputs;

// Takes the folder of --out, which ends the run where it cannot be used. `build` is for the log (device/version.h). All
// ranks make all calls together.
Outputs* outputs_open(Ranks* world, const Settings* settings, const char* build);
// The model has the weights of step `saved`. Opens the log, and what checkpoints need.
void outputs_begin(Outputs* outputs, const Sources* sources, Model* model, int64_t saved);

// After the device got a step: prints and logs the results of the step before. In some steps it waits for this step
// too: for a validation, questions, a sample or a checkpoint. Returns 1 if a rank was asked to stop before the last
// step. Ends the run if it has diverged. The time of a step is from the call before, or outputs_begin, to this one.
int outputs_step(Outputs* outputs, int64_t step);

// The last checkpoint is on the disk. `stopped`: the run is to go on later.
void outputs_close(Outputs* outputs, int stopped);

// All that the use of a model writes: prints a sample of it (--sample), or the results of --val and --eval
// (--evaluate).
void outputs_of_use(Ranks* world, const Settings* settings, const Sources* sources, Model* model);
