// The options of a run as its log and its checkpoints record them. A resumed run may change some of them.
//
//   record          {"model": "tiny", "layers": 4, ...}     "options" in a manifest.json
//   command line    --out FOLDER --resume --steps 2000
//   the run         --steps 2000, the rest as recorded; a given OPTION_FIXED must have its recorded value
//
// A new stage, --out NEW --init FOLDER --init-moments, begins with the record of FOLDER in the same way.
//
// A record of an older program lacks newer options; the run had their defaults. A record may have options that are
// constants in this program; the recorded values must be the constants.
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
// The log's first line: record_json's members, and "flops-per-token" (the numerator of MFU), "build", "host" (this one)
// and "device". In fresh memory.
char* record_line(const Settings* settings, const char* build, const char* device);

// The newest good manifest in rank 0's folder `out` (NULL: no folder), for json_free. NULL: there is no checkpoint.
// Ends the run if all checkpoints are bad, or if a rank does not see rank 0's manifest. Collective.
Json* record_manifest(Ranks* world, const char* out);

// The manifest of the step that --init-moments begins with, for json_free. Ends the run if --init does not name a step
// with a good manifest.
Json* record_stage(const Settings* settings);

// Options that are not given get their recorded values, except those that a given --precision sets. (--model and the
// options that it sets are recorded one by one.) The warm-up is the recorded one, whatever --steps. With `stage` the
// record is of the step in --init, else of the run in --out.
void record_recall(const Json* record, bool stage, Settings* settings);

// Ends the run if an option that must have its recorded value has another; the message lists all such options. With
// `stage` only an OPTION_KEPT must have its recorded value. Without `stage` two revisions are also compared: the order
// of mixtures if --train has several sets, and the rounding if a format has four bits. The data are compared by their
// hash, not by --train.
void record_check(const Json* record, bool stage, const Settings* settings);
