// A model's sizes into Hugging Face's config.json and out of it. The model_type is transformers' deepseek_v3 where the
// router's scores are sigmoid and deepseek_v2 where they are softmax. A model that neither can compute has the type
// train_moe with the same keys: --init and scripts/to_gguf.py read it, and transformers refuses it by that name. Where
// the type is another's, as kimi_k2, the class in "architectures" decides.
#pragma once

#include "model/settings.h"

// config.json of this model, in fresh memory. end_of_text: id of the token that begins and ends texts, -1: not known.
char* hub_config(const Settings* settings, int32_t end_of_text);
// The members of config.json and generation_config.json that name it, without a comma at the end; in fresh memory.
char* hub_end_of_text(int32_t end_of_text);

// Why transformers' DeepSeek models cannot compute this model, or NULL: they can.
const char* hub_misfit(const Settings* settings);

// The model of `folder`/config.json. Ends the run, naming the key, where it cannot be represented here. `option` is the
// one that named the folder.
ModelConfig hub_read_config(const char* option, const char* folder);

// The sequence length of its training: from a run's manifest, else config.json's limit, at most 4096.
int64_t hub_length(const char* folder);
// The tokenizer_hash (data/tokenizer.h) of its training, from a run's manifest; 0: not known.
int64_t hub_tokenizer(const char* folder);
// The eos_token_id of its config.json, -1 where that is no number.
int64_t hub_end_of_text_id(const char* folder);
