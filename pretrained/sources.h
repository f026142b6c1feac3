// The beginning of a run: its options, its data, and the first weights of its model.
#pragma once

#include "data/choices.h"
#include "data/tokenizer.h"
#include "model/persist.h"

// The options (settings_read), and with --resume those of the newest good checkpoint in --out. *resumes: there is one.
// Ends the run on options that do not fit. All ranks together.
Settings sources_settings(Ranks* world, int argc, char** argv, bool* resumes);

// The data of a run, or of the use of a model.
typedef struct Sources {
    Shards *train, *val;  // NULL: without
    Loader* loader;       // of train
    Tokenizer* tokenizer;
    DataHash hash;        // of train and tokenizer
    int64_t val_windows;  // that a validation reads: the first --val-tokens of val, one window at least
    double val_bytes;     // of text, a token of these; 0: some token has no text, or the tokenizer is not known
    Choices* questions;   // of --eval: question_files of them, of different names
    int question_files;
} Sources;

// Opens the data of the options. All of it is the same on all ranks, and there is one tokenizer: that of --tokenizer.
// Without one, tokens are bytes if the model has no others (--vocab up to 257), with --evaluate, or if none of the
// first in --train is beyond 256; else the tokenizer has no tokens. Ends the run where
//
//   tokenizers differ      a shard's, that of a file of questions, that of the model of --init, --sample or --evaluate;
//                          not where resumes: then the folder of --init is not read
//   samples are no text    the tokenizer does not fit the model, or has no tokens; a prompt needs tokens that are bytes
//   questions do not fit   the model knows no such ids, an ending has a token without bytes
//
// A file that is in both --train and --val gets a warning.
Sources sources_open(Ranks* world, const Settings* settings, bool resumes);
void sources_close(Sources* sources);

// The first weights: of the newest good checkpoint with --resume, else new or of a folder (pretrained/import.h). Prints
// which. Returns the step of the checkpoint, 0 without.
int64_t sources_weights(const Sources* sources, const Settings* settings, Ranks* world, Model* model);
