// Text from the model, to see what it has learned.
#ifndef MODEL_SAMPLE_H
#define MODEL_SAMPLE_H

#include "data/tokenizer.h"
#include "model/model.h"

BEGIN_C

// Continues the end-of-text token and --prompt by --sample-tokens tokens, drawn at --temperature among the
// --sample-top-k likeliest, and returns the text (prompt included, control
// characters as host_printable writes them) in fresh memory. Stops early at an end-of-text
// token. The context is the last seq_len tokens. Every token runs the whole context through the model: a look now and
// then, no inference engine. The draws depend on the seed and `step` only. Overwrites the batch in work.
char* model_sample(Model* model, const Tokenizer* tokenizer, int64_t step);

END_C

#endif
