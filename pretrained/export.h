// A checkpoint is a Hugging Face model folder. Its weights have the names of DeepSeek's checkpoints. Its other files:
//
//   config.json                   DeepSeek-V3's keys where scores are sigmoid, V2's where they are softmax
//   generation_config.json        the token that ends a text
//   model.safetensors.index.json  which file holds which tensor of the model (moments and manifest are none of it)
//   tokenizer.bin                 the file of --tokenizer, for --init, --sample and --evaluate
//   tokenizer.json, tokenizer_config.json   for transformers, from the same folder: NAME.json for NAME.bin
//
// transformers' AutoModelForCausalLM.from_pretrained loads the folder as it is. The MTP module is a layer after the
// last one, as in DeepSeek-V3, and transformers ignores it. It shares embedding and lm_head, which are not repeated
// under its names: each copy would be V x C more elements in every checkpoint. scripts/export.py repeats them in a
// release.
#pragma once

#include "data/tokenizer.h"
#include "model/model.h"
#include "model/settings.h"
#include "parallel/checkpoint.h"

// Every checkpoint of this saver gets these files. Prints the properties that a Hugging Face model cannot express.
void export_files(Saver* saver, const Settings* settings, Model* model, const Tokenizer* tokenizer);
