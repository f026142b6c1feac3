// --dispatch windows in a training run (moe/dispatch_windows.h): the pool of the MoE blocks is in symmetric memory. A
// step that overflows runs again with a larger capacity (retry). All ranks of the run make all calls together. Without
// windows they do nothing.
#pragma once

#include "model/model.h"

// The symmetric memory of the pool, NULL without windows. Sets model->windows and no_windows.
void* windows_pool(Model* model);
void windows_close(Model* model);

// After the last forward of a step: starts the copy of the overflow to the host.
void windows_fetch(Model* model);
// Waits for that copy, while backward still runs. On overflow it multiplies the capacity by 1.125 times the overflow,
// at most to that for all tokens of all ranks, and returns 1.
int windows_overflowed(Model* model, int64_t step);
