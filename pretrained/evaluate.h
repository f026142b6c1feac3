// Measuring a model on text that it does not learn from.
#pragma once

#include "data/choices.h"
#include "data/shards.h"
#include "data/tokenizer.h"
#include "model/model.h"
#include "model/settings.h"

// The shards of --val, the same on all ranks; NULL without. Their tokenizer must be the run's. A file that is also in
// `train` (NULL: there is no training) gets a warning.
Shards* evaluate_shards(Ranks* world, const Settings* settings, const Tokenizer* tokenizer, const Shards* train);
// Ends the run where the tokenizer is another on some rank, or another than that of the folder of --init, --sample or
// --evaluate: by its tokenizer.bin, and by the hash in its manifest, if it has one. A folder with only a
// tokenizer.json is refused. resumed: the run goes on from a checkpoint of its own, so the folder is not read.
void evaluate_tokenizer(Ranks* world, const Settings* settings, const Tokenizer* tokenizer, bool resumed);
// Ends the run where a shard of --train or --val (`option`, without the dashes) has the file of another tokenizer. One
// without a file passes.
void evaluate_tokenizers(const char* option, const Shards* shards, const Settings* settings,
                         const Tokenizer* tokenizer);
// Windows of the shards that a validation reads: the first --val-tokens, one at least.
int64_t evaluate_windows(const Settings* settings, const Shards* shards);
// Mean loss over the first `windows`, in nats a token. All ranks together; all get it.
double evaluate_loss(Model* model, Shards* shards, int64_t windows);
// Mean bytes of text per token of a validation: loss / bytes / ln 2 is in bits a byte. 0 where the tokenizer does not
// know a token.
double evaluate_bytes(const Settings* settings, Shards* shards, const Tokenizer* tokenizer);

// Scores of a file of multiple-choice questions.
typedef struct ScoreRecord {
    double accuracy, normalised;
} ScoreRecord;

// Accuracy on multiple-choice questions, as in lm-evaluation-harness. acc: the ending with the largest sum of
// log-probabilities after the context. acc_norm: that sum over the bytes of its text, without a leading blank. Ties go
// to the first ending, and endings of the same tokens tie. A context too long for --seq-len loses its beginning. A loss
// that is not finite ends the run. All ranks together.
ScoreRecord evaluate_choices(Model* model, const Choices* choices, const Tokenizer* tokenizer);

// The questions of --eval, *count files of different names, the same on all ranks; NULL without. Their ids are the
// tokenizer's, and with its end of text the model's; no ending is longer than --seq-len or has a token without bytes. A
// file that names its tokenizer must name this one. A warning has the number of questions that are cut.
Choices* evaluate_open(Ranks* world, const Settings* settings, const Tokenizer* tokenizer, int* count);
// Evaluates every file, and prints a line for each. `line`, unless it is NULL, gets members of a line of the log
// (data/runlog.h): the scores NAME_acc and NAME_acc_norm, and NAME_cut, the questions that are cut.
void evaluate_questions(char** line, Model* model, const Choices* files, int count, const Tokenizer* tokenizer);
