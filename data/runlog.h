// log.jsonl: the first line is the configuration, then one object a step. Numbers are printed with %.9g (float32
// survives the round trip), what is not finite as null, and every line is flushed.
//
//   {"model": "tiny", "layers": 4, "dim": 128, ...}
//   {"step": 1, "loss": 5.57, "grad_norm": 1.91, "lr": 3e-05, "ms": 71.2, "tokens_per_s": 28764, "mfu": null, ...}
#ifndef DATA_RUNLOG_H
#define DATA_RUNLOG_H

#include "device/types.h"

BEGIN_C

// What a cast to MXFP8 did to a tensor of a layer in one step: shares of its elements that are not zero, and the
// signal over the noise.
typedef struct CastRecord {
    int64_t layer;  // counted from 0, as in the names of the checkpoint's tensors
    const char* tensor;
    double saturated, flushed, inexact;  // too large for the scale; rounded to 0; not what blocks of 32 give
    double snr_db;
} CastRecord;

// What a file of multiple-choice questions gave (model/evaluate.h): fields <name>_acc and <name>_acc_norm.
typedef struct ScoreRecord {
    const char* name;
    double accuracy, normalised;
} ScoreRecord;

typedef struct StepRecord {
    int64_t step;
    double loss;             // mean cross-entropy of the step's tokens in nats
    const double* mtp_loss;  // (modules): mean cross-entropy of each MTP module, mtp_loss_1, ...
    int64_t modules;
    double grad_norm, lr;
    double max_logit;  // largest attention logit
    double ms, tokens_per_s;
    double mfu;     // share of the device's bf16 peak; NaN where no peak is known
    int validated;  // 1: val_loss was measured in this step; else its fields are left out
    double val_loss;
    double val_bits_per_byte;           // 0 where a token's bytes are not known: left out
    double load_max_over_mean;          // of the worst MoE block: the fullest expert's tokens over the mean
    const double *load_max, *load_min;  // (blocks): of the fullest and the emptiest expert over the mean; NaN if dense
    int64_t blocks;
    double mem_gib;
    double capacity;          // of --dispatch windows, 0: not that; it grows where a step ran again
    int64_t tokens;           // seen so far
    double time;              // of the record, seconds since 1970
    const CastRecord* casts;  // cast_count of them; 0: the field is left out
    int cast_count;
    const ScoreRecord* scores;  // score_count of them; 0: no questions were asked in this step
    int score_count;
} StepRecord;

typedef struct RunLog RunLog;

// Starts `folder`/log.jsonl, or, where it exists, keeps its lines up to `last_step` (a run that starts: 0 keeps none)
// after a first line with the present configuration. Lines that cannot be read go to log.jsonl.unreadable, with a
// warning. Ends the run if it cannot be written, or is a link.
RunLog* runlog_open(const char* folder, const char* config_json, int64_t last_step);
void runlog_add(RunLog* log, const StepRecord* record);
// All lines so far are on the disk: before a checkpoint that counts on them.
void runlog_sync(RunLog* log);
void runlog_close(RunLog* log);

END_C

#endif
