// Weights from a Hugging Face folder: DeepSeek's own checkpoints, a folder that transformers saved, or a step of a run.
//
//   folder/config.json                   sizes of the model (model/hub.h)
//   folder/model.safetensors             all tensors
//   folder/model.safetensors.index.json  if there is no such file: the files that hold the tensors
//
// Tensors are F32, F16, BF16, or F8_E4M3 with a float32 factor for each 128 x 128 elements in <name>_scale_inv
// (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Every rank reads the slices that it holds, so no rank holds the
// model.
#pragma once

#include "model/model.h"

// Loads the weights and the router's biases of `folder`, which --option names. Moments stay zero. With --mtp 1 the MTP
// module is read, or drawn if the folder has none. Without --mtp all modules are left out, and a message reports this.
// The module's embed_tokens and shared_head.head, which DeepSeek's checkpoints repeat, must be the main model's. Ends
// the run if a tensor is missing, of another shape or type, not finite, or not this model's; the message names file and
// tensor. Also ends the run if a file differs from a step's manifest, or if --mtp 1 finds several modules in the
// folder.
void import_weights(Model* model, Ranks* world, const char* option, const char* folder);
