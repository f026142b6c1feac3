// Output for the terminal and the log: model, data and device at the start, and the results of a step.
#pragma once

#include "data/runlog.h"
#include "data/shards.h"
#include "data/tokenizer.h"
#include "model/model.h"
#include "model/settings.h"

// The options that differ from their defaults, then report_model.
void report_settings(const Settings* settings);
// "15.71e9 parameters (2.66e9 active a token), 16.41e9 FLOPs a token"
void report_model(const Settings* settings);
// The training shards and the epochs of the run, and the tokenizer.
void report_data(const Settings* settings, const Shards* train, const Tokenizer* tokenizer);
// For a run that is resumed after `step` with other --steps: prints a line if the new --steps change the next step's
// learning rate or MTP loss weight.
void report_schedule(const Settings* settings, int64_t step);
// The device, and whether steps run as CUDA graphs.
void report_device(const Model* model);

// Mean loss of the MTP module in a step, in nats a token.
double report_mtp(const RunConfig* run, const StepState* state);

// The functions below append members to a step's line in the log (data/runlog.h).
// Loads of a step (L + mtp, E): tokens of each block's fullest and emptiest expert over the mean, NaN for dense blocks.
// Returns the largest ratio of all blocks.
double report_load(char** line, const ModelConfig* config, const int64_t* load);
// Statistics (L + mtp, BLOCK_STATS) of each tensor that was quantized in a step: its layer, counted from 0 as in the
// names of the checkpoint's tensors; shares of its nonzero elements that were too large for the scale, rounded to 0, or
// different from blocks of 32; and the signal-to-noise ratio.
void report_quantization(char** line, const Model* model, const QuantizationStats* sums);
