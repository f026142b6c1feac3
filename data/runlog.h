// The run's log, log.jsonl: the first line is the configuration, then one object per step. Numbers are printed with
// %.9g (float32 survives the round trip), or as null if not finite. Every line is flushed.
//
//   {"model": "tiny", "layers": 4, "dim": 128, ...}
//   {"step": 1, "loss": 5.57, "grad_norm": 1.91, "lr": 3e-05, "ms": 71.2, "tokens_per_s": 28764, "mfu": null, ...}
#ifndef DATA_RUNLOG_H
#define DATA_RUNLOG_H

#include "device/types.h"

BEGIN_C

// Statistics of the quantization to MXFP8 of a layer's tensor in one step: shares of its nonzero elements, and the
// signal-to-noise ratio.
typedef struct QuantRecord {
    int64_t layer;  // counted from 0, as in the names of the checkpoint's tensors
    const char* tensor;
    double saturated, flushed, inexact;  // too large for the scale; rounded to 0; different from blocks of 32
    double snr_db;
} QuantRecord;

// Scores of a file of multiple-choice questions (pretrained/evaluate.h): fields <name>_acc and <name>_acc_norm.
typedef struct ScoreRecord {
    const char* name;
    double accuracy, normalised;
} ScoreRecord;

// The measurements of one step. The arrays belong to the caller.
typedef struct StepRecord {
    int64_t step;
    double loss;             // mean cross-entropy of the step's tokens in nats
    const double* mtp_loss;  // (modules): mean cross-entropy of each MTP module, mtp_loss_1, ...
    int64_t modules;
    double grad_norm, lr;
    double max_logit;  // largest attention logit
    double ms, tokens_per_s;
    double mfu;     // share of the device's bf16 peak; NaN if the peak is not known
    int validated;  // 1: val_loss was measured in this step; else its fields are omitted
    double val_loss;
    double val_bits_per_byte;           // 0: bytes per token are not known, the field is omitted
    double load_max_over_mean;          // of the worst MoE block: tokens of its most loaded expert over the mean
    const double *load_max, *load_min;  // (blocks): largest and smallest expert load over the mean; NaN if dense
    int64_t blocks;
    double mem_gib;
    double capacity;              // capacity factor of --dispatch windows, else 0; an overflow retry raises it
    int64_t tokens;               // trained on so far
    double time;                  // of the record, seconds since 1970
    const QuantRecord* mx_stats;  // (mx_stats_count); 0: the field is omitted
    int mx_stats_count;
    const ScoreRecord* scores;  // (score_count); 0: no evaluation in this step
    int score_count;
} StepRecord;

typedef struct RunLog RunLog;

// Starts `folder`/log.jsonl. Its first line is the current configuration. The lines of an existing log up to
// `last_step` follow (0, for a new run, keeps none). Unreadable lines go to log.jsonl.unreadable, with a warning. The
// run ends if the log cannot be written or is a link.
RunLog* runlog_open(const char* folder, const char* config_json, int64_t last_step);
void runlog_add(RunLog* log, const StepRecord* record);
// Flushes all lines to the disk, before a checkpoint that relies on them.
void runlog_sync(RunLog* log);
void runlog_close(RunLog* log);

END_C

#endif
