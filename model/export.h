// A checkpoint is a Hugging Face model: beside its weights, which carry the names of DeepSeek's own checkpoints, lie
//
//   config.json                   DeepSeek-V3's keys where scores are sigmoid, V2's where they are softmax
//   generation_config.json        the token that ends a text
//   model.safetensors.index.json  which file holds which tensor of the model (moments and manifest are none of it)
//   tokenizer.json, tokenizer_config.json   as they lie beside --tokenizer: NAME_tokenizer.json for NAME_tokenizer.bin
//
// so that transformers' AutoModelForCausalLM.from_pretrained takes the folder as it is. Modules of --mtp are layers
// after the last one, as DeepSeek-V3's are, and transformers passes over them. They share embedding and lm_head, which
// are not repeated under their names: each would be V x C more numbers a module in every checkpoint, and they could
// come to differ. scripts/export.py repeats them in a release.
#ifndef MODEL_EXPORT_H
#define MODEL_EXPORT_H

#include "data/tokenizer.h"
#include "model/model.h"
#include "parallel/checkpoint.h"

BEGIN_C

// Every checkpoint of this saver gets these files. Prints what a Hugging Face model cannot say of this one.
void export_files(Saver* saver, Model* model, const Tokenizer* tokenizer);

END_C

#endif
