// Everything that a training run writes: lines on the terminal, the log, checkpoints and samples.
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

// Before and after the device gets a step: outputs_step prints and logs the results of the step before. In some steps
// it waits for this step too: for a validation, questions, a sample or a checkpoint. Returns 1 if a rank was asked to
// stop. Ends the run if it has diverged.
void outputs_start(Outputs* outputs, int64_t step);
int outputs_step(Outputs* outputs, int64_t step);

// The last checkpoint is on the disk. `stopped`: the run is to go on later.
void outputs_close(Outputs* outputs, int stopped);
