// Weights from a Hugging Face folder: DeepSeek's own checkpoints, what transformers saves, or a step of a run.
//
//   folder/config.json                   which model it is (model/hub.h)
//   folder/model.safetensors             all tensors
//   folder/model.safetensors.index.json  without it: the files that hold the tensors
//
// Tensors are F32, F16, BF16, or F8_E4M3 with a float32 factor for each 128 x 128 elements in <name>_scale_inv
// (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Every rank reads the slices that it holds, so no rank holds the
// model.
#pragma once

#include "model/model.h"

// The weights of `folder`, which --option names, with the router's biases. Moments stay zero. The MTP module of --mtp 1
// is read, or drawn where the folder has none; without --mtp all modules are left out. A message reports it. Its
// embed_tokens and shared_head.head, which DeepSeek's checkpoints repeat, must be the main model's. Ends the run,
// naming file and tensor, if a tensor is missing, of another shape or type, not finite, or none of this model's. Also
// ends it if a file differs from the manifest of a step, or with --mtp 1 and more than one module in the folder.
void import_weights(Model* model, Ranks* world, const char* option, const char* folder);
