// The options of a run as its log and its checkpoints record them, and which of them a run that goes on may change.
//
//   record          {"model": "tiny", "layers": 4, ...}     "options" in a manifest.json
//   command line    --out FOLDER --resume --steps 2000
//   the run         --steps 2000, the rest as recorded; an OPTION_FIXED that is given must be as recorded
//
// The record of an older program lacks newer options: they were at their defaults. One that lacks --balance had a
// selection bias with --bias-rate as --balance deepseek has, or with rate 0 none.
#pragma once

#include "model/settings.h"
#include "parallel/ranks.h"

// All options as one JSON object, in fresh memory, and as its last member "warmup-steps", the steps of the warm-up.
char* record_json(const Settings* settings);
// The log's first line: the same, and "build", "host" (this one) and "device". In fresh memory.
char* record_line(const Settings* settings, const char* build, const char* device);

// The newest manifest in rank 0's folder `out` (NULL: none) that is good; NULL where there is no checkpoint. Ends the
// run if there are some and all are bad, or if a rank does not see the one that rank 0 sees. Collective.
Json* record_manifest(Ranks* world, const char* out);

// Options that are not given get their recorded values, except those that a given --precision sets. (--model and the
// options that it sets are recorded one by one.) The warm-up is the recorded one, whatever --steps.
void record_recall(const Json* record, Settings* settings);

// The optimizer of a record: AdamW where it names none.
int64_t record_optimizer(const Json* record);

// Ends the run if options differ that must not, with a message that lists them all. The data are compared by their
// hash, not by --train.
void record_check(const Json* record, const Settings* settings);
