// A model's state on disk: which tensors a checkpoint holds, saving and resuming.
//
// Unit u (0 the embedding, then the blocks, the head, and the MTP module) has two files: block_%03d.safetensors (master
// weights under Hugging Face names, and the router's e_score_correction_bias) and block_%03d.adam.safetensors (moments:
// <name>.exp_avg and <name>.exp_avg_sq, or Muon's <name>.momentum_buffer). Softmax scores with --balance none have no
// bias, as in DeepSeek-V2.
#pragma once

#include "model/model.h"
#include "model/settings.h"
#include "parallel/checkpoint.h"

// The files of a checkpoint of this model, pointing at the slices in this rank's memory, in fresh memory. optimizer:
// the checkpoint's optimizer. If the run has another optimizer, Muon's matrices have no slice of moments here.
CheckpointFile* model_files(Model* model, int64_t optimizer, int* count);
void model_files_free(CheckpointFile* files, int count);

// The data of a run: a resumed run must have the same.
typedef struct DataHash {
    uint32_t shards;      // Shards.hash of --train
    uint32_t tokenizer;   // tokenizer_hash
    int32_t end_of_text;  // Tokenizer.eot
} DataHash;

// Saves the model after `step` (checkpoint_save). state: the host's copy of the device's StepState.
void model_save(Model* model, const Settings* settings, Saver* saver, int64_t step, DataHash data,
                const StepState* state);

// Loads the newest good checkpoint in --out. For each newer checkpoint a warning names its fault. Returns the step of
// the loaded checkpoint; 0: there is no checkpoint. Ends the run if no checkpoint is good, or if an option or the data
// differ that must be the same (model/record.h).
int64_t model_resume(Model* model, const Settings* settings, Ranks* world, DataHash data);

// Loads weights, selection biases and moments of the step of --init, for a new stage (--init-moments). The count of
// updates goes on from this step, because AdamW's bias correction depends on it: after n updates a moment is a sum with
// weights 1 - beta^n in all, whatever the stages. (Hence a stage keeps the betas.) Ends the run if a file is bad.
void model_stage(Model* model, const Settings* settings, Ranks* world);
