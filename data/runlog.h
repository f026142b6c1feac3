// The run's log, log.jsonl: the first line is the configuration, then one object per step. Numbers are printed with
// %.9g (float32 survives the round trip), or as null if not finite. Every line is flushed.
//
//   {"model": "tiny", "layers": 4, "dim": 128, ...}
//   {"step": 1, "loss": 5.57, "grad_norm": 1.91, "lr": 3e-05, "ms": 71.2, "tokens_per_s": 28764, "mfu": null, ...}
//
// docs/files.md lists the members.
#pragma once

#include "device/types.h"

typedef struct RunLog RunLog;

// Starts `folder`/log.jsonl. The first line of the log is config_json, the current configuration. The lines of an
// existing log up to step `last_step` follow; 0, for a new run, keeps no line. Unreadable lines go to
// log.jsonl.unreadable, with a warning. The run ends if the log cannot be written or is a link.
RunLog* runlog_open(const char* folder, const char* config_json, int64_t last_step);
// Appends a line, which is one JSON object. A log that was removed, replaced, truncated or extended meanwhile is
// written again, with all lines of the run and a warning. A file that has taken the log's name becomes
// log.jsonl.replaced, and replaces an earlier file of that name.
void runlog_add(RunLog* log, const char* line);
// Flushes all lines to the disk, before a checkpoint that relies on the lines. If any byte of the log has changed since
// it was written, the log is written again too.
void runlog_sync(RunLog* log);
void runlog_close(RunLog* log);

// Appends a member to *line, an allocated string that may move: a number with nine digits, null if not finite.
void runlog_number(char** line, const char* name, double x);
// Appends a member to *line: a list of n numbers with four digits each.
void runlog_list(char** line, const char* name, const double* x, int64_t n);
