// The beginning of a run: its options, its data, and the first weights of its model.
#pragma once

#include "data/choices.h"
#include "data/tokenizer.h"
#include "model/persist.h"

// The options (settings_read), with --resume also from the record of the newest good checkpoint in --out. *resumes:
// there is such a checkpoint. Options that do not fit end the run. Collective. settings_free frees the result.
Settings sources_settings(Ranks* world, int argc, char** argv, bool* resumes);

// The data of a run, or of the use of a model.
typedef struct Sources {
    Shards *train, *val;  // NULL: without
    Loader* loader;       // of train
    Tokenizer* tokenizer;
    DataHash hash;        // of train and tokenizer
    int64_t val_windows;  // windows of a validation: the first --val-tokens of val, one window at least
    double val_bytes;     // bytes of text a validation token; 0: a token has no text, or no tokenizer is known
    Choices* questions;   // of --eval: question_files files, of different names
    int question_files;
} Sources;

// Opens the data of the options; sources_close frees them. The data must be the same on all ranks, and have one
// tokenizer: that of --tokenizer. Without --tokenizer, tokens are bytes with --vocab up to 257, with --evaluate, or if
// --train begins with tokens up to 256 alone. Else the tokenizer has no tokens. Ends the run if
//
//   tokenizers differ      of a shard, a file of questions, or the model of --init, --sample or --evaluate; a run that
//                          resumes does not read the folder of --init
//   samples are no text    the tokenizer does not fit the model, or has no tokens; a prompt needs tokens that are bytes
//   questions do not fit   the model knows no such ids, an ending has a token without bytes
//
// A file that is in both --train and --val gets a warning.
Sources sources_open(Ranks* world, const Settings* settings, bool resumes);
void sources_close(Sources* sources);

// Sets the first weights: from the newest good checkpoint with --resume, else new weights or from a folder
// (pretrained/import.h). Prints the source. Returns the step of the checkpoint; 0: there was none.
int64_t sources_weights(const Sources* sources, const Settings* settings, Ranks* world, Model* model);
