// A checkpoint is a Hugging Face model folder. The weights have the names of DeepSeek's checkpoints. The other files:
//
//   config.json                   DeepSeek-V3's keys where scores are sigmoid, V2's where they are softmax
//   generation_config.json        the token that ends a text
//   model.safetensors.index.json  which file holds which tensor of the model (not moments and manifest)
//   tokenizer.bin                 the file of --tokenizer, for --init, --sample and --evaluate
//   tokenizer.json, tokenizer_config.json   for transformers, from the same folder: NAME.json for NAME.bin
//
// transformers' AutoModelForCausalLM.from_pretrained loads the folder as it is. The MTP module is a layer after the
// last one, as in DeepSeek-V3, and transformers ignores it. The module shares embedding and lm_head with the main
// model. A checkpoint does not repeat the two matrices under the module's names, because each copy has V x C elements.
// A release by scripts/export.py repeats them.
#pragma once

#include "data/tokenizer.h"
#include "model/model.h"
#include "model/settings.h"
#include "parallel/checkpoint.h"

// Adds these files to every checkpoint of `saver`. Prints the properties that a Hugging Face model cannot express.
void export_files(Saver* saver, const Settings* settings, Model* model, const Tokenizer* tokenizer);
