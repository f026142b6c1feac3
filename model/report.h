// What the program tells people: what a run will be (parameters, FLOPs, memory), and what a step was. --dry-run prints
// a table for each build:
//
//   activations kept for backward                          48.727 MiB
//     residual before attention            x 4              4.000 MiB        2048.0 bytes a token
//     norm before attention                x 4              4.000 MiB        2048.0 bytes a token
//     ...
//   total                                                 134.417 MiB = 0.131 GiB
#ifndef MODEL_REPORT_H
#define MODEL_REPORT_H

#include "data/runlog.h"
#include "model/model.h"

BEGIN_C

// "15.71e9 parameters (2.66e9 active a token), 16.41e9 FLOPs a token"
void report_model(const Settings* settings);
// --dry-run: configuration, model, and the memory of a rank item by item, for the CPU and the CUDA build; then whether
// it fits on a GPU of --gpu-memory GiB, or on the one found, and if not what would.
void report_dry_run(const Settings* settings);
// What the model runs on, and whether its steps are replayed.
void report_device(const Model* model);
// On the device that was chosen, before any rank of this machine takes memory: ends the run where `rank` needs more
// than is free, with both numbers and the options with which it would fit.
void check_memory(const Settings* settings, int rank);

// Of a step, the mean loss of each module's predictions, in nats a token. Returns how many modules there are.
int64_t report_mtp(double mtp_loss[MTP_MAX], const Settings* settings, const StepState* state);
// Of a step's loads (L + mtp, E): the tokens of each block's fullest and emptiest expert over the mean, NaN for dense
// blocks. The result is that of the worst block's fullest.
double report_load(double* most, double* least, const ModelConfig* config, const int64_t* load);
// A record for each tensor that was cast in a step, from the sums (L + mtp, BLOCK_STATS) that its casts left. *records
// gets them in fresh memory; the result is how many.
int report_casts(CastRecord** records, const Model* model, const MxStats* sums);

END_C

#endif
