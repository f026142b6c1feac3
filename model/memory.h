// The memory of a run, from a plan (model_plan): printed by --dry-run, and checked before a run takes any. --dry-run
// prints a summary, `--dry-run all` then a table:
//
//   activations kept for backward                          48.727 MiB
//     residual before attention            x 4              4.000 MiB        2048.0 bytes a token
//     norm before attention                x 4              4.000 MiB        2048.0 bytes a token
//     ...
//   total                                                 134.417 MiB = 0.131 GiB
#pragma once

#include "model/settings.h"
#include "parallel/ranks.h"

// --dry-run, on one screen: whether the run fits, and options with which it would; model, size of checkpoints and
// predicted time of a step. `--dry-run all` goes on with the configuration, and the memory of a rank item by item. The
// plan is this build's, for the GPU or machine at hand; with --gpu-memory it is the CUDA build's, for such a GPU.
// Nothing is known of the machines for other --ranks than the `running` ones. Ends the run with EXIT_FAILED if it does
// not fit.
void memory_report(const Settings* settings, int running);
// On the device that was chosen: ends the run where this rank needs more memory than is free, with both numbers and the
// options with which it would fit. Returns when all ranks have read the free memory: none takes any before.
void memory_check(const Settings* settings, Ranks* world);
