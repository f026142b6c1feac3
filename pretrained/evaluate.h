// Measuring a model on text that it does not learn from.
#pragma once

#include "data/choices.h"
#include "data/shards.h"
#include "data/tokenizer.h"
#include "model/model.h"

// Mean loss over the first `windows`, in nats a token. All ranks together; all get it.
double evaluate_loss(Model* model, Shards* shards, int64_t windows);
// Scores of a file of multiple-choice questions.
typedef struct ScoreRecord {
    double accuracy, normalised;
} ScoreRecord;

// Accuracy on multiple-choice questions, as in lm-evaluation-harness. acc: the ending with the largest sum of
// log-probabilities after the context. acc_norm: that sum over the bytes of its text, without a leading blank. Ties go
// to the first ending, and endings of the same tokens tie. A context too long for --seq-len loses its beginning. A loss
// that is not finite ends the run. All ranks together.
ScoreRecord evaluate_choices(Model* model, const Choices* choices, const Tokenizer* tokenizer);

// Evaluates every file, and prints a line for each. `line`, unless it is NULL, gets members of a line of the log
// (data/runlog.h): the scores NAME_acc and NAME_acc_norm, and NAME_cut, the questions that are cut.
void evaluate_questions(char** line, Model* model, const Choices* files, int count, const Tokenizer* tokenizer);
