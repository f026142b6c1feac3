// The options of a run as its log and its checkpoints record them, and which of them a run that goes on may change.
//
//   record          {"model": "tiny", "layers": 4, ...}     "options" in a manifest.json
//   command line    --out FOLDER --resume --steps 2000
//   the run         --steps 2000, the rest as recorded; an OPTION_FIXED that is given must be as recorded
//
// A new stage, --out NEW --init FOLDER --init-moments, begins with the record of FOLDER in the same way.
//
// The record of an older program lacks newer options: they were at their defaults. It may have options that this
// program has as constants: they must have been at these. One that lacks --balance had a selection bias with
// --bias-rate as --balance deepseek has, or with rate 0 none.
#pragma once

#include "model/settings.h"
#include "parallel/ranks.h"

// All options as one JSON object, in fresh memory. Its last members:
//
//   warmup-steps     the steps of the warm-up
//   updates-before   the updates of the stages before (--init-moments)
//   tokens-before    the tokens of the stages before
//   fp4-rounding     the revision of the rounding to four bits (mx/fp4.h); 1 in a record without it
//   mixture-order    the revision of the order of mixtures (data/mixture.h); 1 in a record without it
char* record_json(const Settings* settings);
// The log's first line: the same, and "flops-per-token" (the numerator of MFU), "build", "host" (this one) and
// "device". In fresh memory.
char* record_line(const Settings* settings, const char* build, const char* device);

// The newest manifest in rank 0's folder `out` (NULL: none) that is good; NULL where there is no checkpoint. Ends the
// run if there are some and all are bad, or if a rank does not see the one that rank 0 sees. Collective.
Json* record_manifest(Ranks* world, const char* out);

// The manifest of the step that --init-moments begins with. Ends the run if --init names none that is good.
Json* record_stage(const Settings* settings);

// Options that are not given get their recorded values, except those that a given --precision sets. (--model and the
// options that it sets are recorded one by one.) The warm-up is the recorded one, whatever --steps. stage: the record
// is that of --init, and not of the run in --out.
void record_recall(const Json* record, bool stage, Settings* settings);

// Ends the run if options differ that must not (with `stage`, only an OPTION_KEPT must not), with a message that lists
// them all. Without `stage` it also compares the revisions: of the order of mixtures if --train has several sets, of
// the rounding if a format has four bits. The data are compared by their hash, not by --train.
void record_check(const Json* record, bool stage, const Settings* settings);
