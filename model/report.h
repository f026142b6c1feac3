// What a run will be: parameters, FLOPs and memory, for people.
#ifndef MODEL_REPORT_H
#define MODEL_REPORT_H

#include "dist/ranks.h"
#include "model/model.h"

BEGIN_C

// "15.71e9 parameters (2.66e9 active a token), 16.41e9 FLOPs a token"
void report_model(const Settings* settings);
// --dry-run: configuration, model, and the memory of a rank item by item, for the CPU and the CUDA build.
void report_dry_run(const Settings* settings);
// Before the device is chosen's first allocation: ends the run where its ranks need more memory than is free, with both
// numbers and the options with which they would fit. All ranks call it.
void check_memory(const Settings* settings, Ranks* world);

END_C

#endif
