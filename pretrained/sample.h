// Samples of text from the model, token by token.
#pragma once

#include "data/tokenizer.h"
#include "model/model.h"
#include "model/settings.h"

// Draws an index with probabilities in proportion to exp(logit / temperature): the first index at which the running sum
// reaches u times the total, u in (0, 1). Only the top_k largest logits count, of equal logits the first. temperature
// 0: the largest logit, of equal logits the first. Overwrites the logits (V).
int32_t sample_draw(real* logits, int64_t V, double temperature, int64_t top_k, double u);

enum { SAMPLE_TOP_K = 50 };  // transformers 4's default

// Continues the end-of-text token and --prompt by --sample-tokens tokens, each drawn at --temperature among the
// SAMPLE_TOP_K likeliest, and stops early at an end-of-text token. Returns the text in fresh memory, prompt included,
// with control characters as host_printable writes them. The context is the last seq_len tokens. Every new token runs
// the whole context through the model, without a cache, so samples are for a look, not for inference. The draws depend
// on the seed and `step` only. Overwrites the model's current batch. Collective over `world` (NULL: one rank). All
// ranks take rank 0's draws, because the last bits of logits may differ from rank to rank.
char* model_sample(Model* model, const Settings* settings, Ranks* world, const Tokenizer* tokenizer, int64_t step);
