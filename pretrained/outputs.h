// Everything that a run writes: lines on the terminal, the log, checkpoints and samples.
//
// The host runs one step ahead of the device: it queues step n + 1, then waits for the results of step n.
#pragma once

#include "model/model.h"
#include "pretrained/sources.h"

typedef struct Outputs Outputs;

// Takes the folder of --out; a folder that cannot be used ends the run. `build` is for the log (device/version.h). All
// functions here are collective.
Outputs* outputs_open(Ranks* world, const Settings* settings, const char* build);
// Opens the log and the saver of checkpoints. saved: the step whose weights the model has.
void outputs_begin(Outputs* outputs, const Sources* sources, Model* model, int64_t saved);

// Call it after `step` was queued on the device. Prints and logs the results of the step before. For a validation,
// questions, a sample or a checkpoint it also waits for `step`. Returns 1 if a rank was asked to stop before the last
// step. Ends the run if the run has diverged. A step's time is from the call before, or outputs_begin, to this call.
int outputs_step(Outputs* outputs, int64_t step);

// Waits until the last checkpoint is on disk, closes log and folder, and frees `outputs`. stopped 1: the run is to go
// on later.
void outputs_close(Outputs* outputs, int stopped);

// Output of a run that uses a model: prints a sample (--sample), or the results of --val and --eval (--evaluate).
void outputs_of_use(Ranks* world, const Settings* settings, const Sources* sources, Model* model);
