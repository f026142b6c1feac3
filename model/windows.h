// --dispatch windows in a training run (moe/dispatch_windows.h): the pool of the MoE blocks is in symmetric memory. A
// step that overflows runs again with a larger capacity (retry). All calls are collective over the run's ranks. Without
// windows they do nothing.
#pragma once

#include "model/model.h"

// The symmetric memory of the pool, NULL without windows. Sets model->windows and no_windows.
void* windows_pool(Model* model);
void windows_close(Model* model);

// After the last forward of a step: starts the copy of the overflow to the host.
void windows_fetch(Model* model);
// Waits for the copy of windows_fetch, while backward still runs. On overflow it multiplies the capacity by 1.125 times
// the overflow, at most up to a capacity for all tokens of all ranks. Returns 1 if the step must run again.
int windows_overflowed(Model* model, int64_t step);
