// Writes and reads Hugging Face's config.json. With sigmoid scores the model_type is transformers' deepseek_v3, with
// softmax scores deepseek_v2. A model that neither class can compute has the model_type train_moe, with the same keys:
// --init and scripts/to_gguf.py read such a file, and transformers refuses it. If a file has another model_type, such
// as kimi_k2, the class in "architectures" decides.
#pragma once

#include "model/settings.h"

// config.json of this model, in fresh memory. end_of_text: id of the token that begins and ends texts, -1: not known.
char* hub_config(const Settings* settings, int32_t end_of_text);
// The end-of-text token's members of config.json and generation_config.json, without a last comma; in fresh memory.
char* hub_end_of_text(int32_t end_of_text);

// The reason why transformers' DeepSeek models cannot compute this model; NULL: they can.
const char* hub_misfit(const Settings* settings);

// The sizes of the model in `folder`/config.json. A key whose value this program cannot represent ends the run, and the
// message names the key. option: the option that named `folder`.
ModelConfig hub_read_config(const char* option, const char* folder);

// The sequence length of the model's training: from a run's manifest, else config.json's limit, at most 4096.
int64_t hub_length(const char* folder);
// The tokenizer_hash (data/tokenizer.h) of the model in `folder`, from a run's manifest; 0: not known.
int64_t hub_tokenizer(const char* folder);
// The eos_token_id in `folder`/config.json; -1: it is not a number.
int64_t hub_end_of_text_id(const char* folder);
