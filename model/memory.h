// The memory of a run, from a plan (model_plan). --dry-run prints it, and a run checks it before it allocates memory.
// `--dry-run all` also prints a table:
//
//   activations kept for backward                          48.727 MiB
//     residual before attention            x 4              4.000 MiB        2048.0 bytes a token
//     norm before attention                x 4              4.000 MiB        2048.0 bytes a token
//     ...
//   total                                                 134.417 MiB = 0.131 GiB
#pragma once

#include "model/settings.h"
#include "parallel/ranks.h"

// Prints --dry-run's one screen: the model, size of checkpoints, predicted time of a step, whether the run fits in
// memory, and options with which it would fit. `--dry-run all` also prints the configuration, and the memory of a rank
// item by item. The plan is for this build and the GPU or machine at hand; with --gpu-memory for the CUDA build and a
// GPU with that memory. running: the ranks that were started. For other --ranks the machines are not known. If the run
// does not fit, the program ends with EXIT_FAILED.
void memory_report(const Settings* settings, int running);
// Ends the run if this rank needs more memory than its device has free. The message has both numbers, and options with
// which the run would fit. Returns when all ranks have read their free memory, so no rank allocates before.
void memory_check(const Settings* settings, Ranks* world);
