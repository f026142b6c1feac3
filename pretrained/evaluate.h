// Measuring a model on text that it does not learn from.
#pragma once

#include "data/choices.h"
#include "data/shards.h"
#include "data/tokenizer.h"
#include "model/model.h"

// Mean loss over the first `windows` of the shards, in nats a token. Collective: all ranks get the mean.
double evaluate_loss(Model* model, Shards* shards, int64_t windows);
// Scores of a file of multiple-choice questions, each the share of right answers.
typedef struct ScoreRecord {
    double accuracy, normalised;
} ScoreRecord;

// Accuracy on multiple-choice questions, as in lm-evaluation-harness. For acc the answer is the ending with the largest
// sum of log-probabilities after the context. For acc_norm the sum is first divided by the bytes of the ending's text,
// without a leading blank. Ties go to the first ending, and endings of the same tokens tie. A context too long for
// --seq-len loses its beginning. A loss that is not finite ends the run. All ranks together.
ScoreRecord evaluate_choices(Model* model, const Choices* choices, const Tokenizer* tokenizer);

// Evaluates every file, and prints a line for each. `line`, unless it is NULL, gets members of a line of the log
// (data/runlog.h): the scores NAME_acc and NAME_acc_norm, and NAME_cut, the questions that are cut.
void evaluate_questions(char** line, Model* model, const Choices* files, int count, const Tokenizer* tokenizer);
