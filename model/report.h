// Output for the terminal: parameters, FLOPs and memory of a run, and the results of a step. --dry-run prints a table
// of the memory, after a summary:
//
//   activations kept for backward                          48.727 MiB
//     residual before attention            x 4              4.000 MiB        2048.0 bytes a token
//     norm before attention                x 4              4.000 MiB        2048.0 bytes a token
//     ...
//   total                                                 134.417 MiB = 0.131 GiB
#pragma once

#include "data/runlog.h"
#include "data/shards.h"
#include "data/tokenizer.h"
#include "model/model.h"

// "15.71e9 parameters (2.66e9 active a token), 16.41e9 FLOPs a token"
void report_model(const Settings* settings);
// --dry-run: model, memory in both builds and whether it fits, and checkpoints; then the configuration, and the memory
// of a rank item by item. The plan is this build's, for the GPU or machine at hand; with --gpu-memory it is the CUDA
// build's, for such a GPU. Nothing is known of the machines for other --ranks than the `running` ones. Ends the run
// with EXIT_FAILED if it does not fit.
void report_dry_run(const Settings* settings, int running);
// The training shards and the epochs of the run, and the tokenizer.
void report_data(const Settings* settings, const Shards* train, const Tokenizer* tokenizer);
// A run that goes on after `step` with other --steps: a line where these change the learning rate, or the weight of the
// MTP losses, of the next step.
void report_schedule(const Settings* settings, int64_t step);
// The device, and whether steps run as CUDA graphs.
void report_device(const Model* model);
// On the device that was chosen, before any rank of this machine takes memory: ends the run where `rank` needs more
// than is free, with both numbers and the options with which it would fit.
void check_memory(const Settings* settings, int rank);

// Mean loss of MTP module k (1 is the first) in a step, in nats a token.
double report_mtp(const Settings* settings, const StepState* state, int64_t k);

// Members of a step's line in the log (data/runlog.h).
// Loads of a step (L + mtp, E): tokens of each block's fullest and emptiest expert over the mean, NaN for dense blocks.
// Returns the largest of all blocks.
double report_load(char** line, const ModelConfig* config, const int64_t* load);
// Statistics (L + mtp, BLOCK_STATS) of each tensor that was quantized in a step: its layer, counted from 0 as in the
// names of the checkpoint's tensors; shares of its nonzero elements that were too large for the scale, rounded to 0, or
// different from blocks of 32; and the signal-to-noise ratio.
void report_quantization(char** line, const Model* model, const QuantizationStats* sums);
