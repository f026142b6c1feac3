// Weights from a Hugging Face folder: DeepSeek's own checkpoints, what transformers saves, or a step of a run.
//
//   folder/config.json                   which model it is (model/hub.h)
//   folder/model.safetensors.index.json  the files that hold the tensors; without it model.safetensors holds all
//
// Tensors are F32, BF16, or F8_E4M3 with a float32 factor for each 128 x 128 elements in <name>_scale_inv (DeepSeek-V3,
// arXiv 2412.19437, section 3.3.2). Every rank reads the slices that it holds, so no rank holds the model.
#ifndef MODEL_IMPORT_H
#define MODEL_IMPORT_H

#include "model/model.h"

BEGIN_C

// The weights that a run begins with: drawn by --seed, or of the folder that an option names. Of a folder it sets the
// weights and the router's biases; moments stay zero. A step of a run with softmax scores has its biases in the files
// of moments. Of modules that predict further tokens those of --mtp are read, or drawn by --seed where the folder has
// no tensor of them; others are left out: each with a word. Their embed_tokens and shared_head.head, which DeepSeek's
// checkpoints repeat, must be the main model's. Ends the run, naming file and tensor, where one is missing, of another
// shape or type, not finite, or none of this model's, or where a file is not as the manifest of a step says.
void model_begin(Model* model, Ranks* world);

END_C

#endif
