// Checkpoints on disk: a folder `step_%08d` of safetensors files and a manifest.json.
//
// A checkpoint is written beside (`step_%08d.tmp`), flushed, its manifest last, and renamed: whatever happens, a folder
// with the right name is whole. The manifest holds step, data position, options, and of every file its size and CRC-32;
// it ends with a CRC-32 of itself. What does not match is refused by name, and the next older checkpoint is tried.
// Tensors are stored in real (float32), so bf16 and quantized weights are derived again after loading.
#ifndef DIST_CHECKPOINT_H
#define DIST_CHECKPOINT_H

#include "data/json.h"
#include "device/device.h"

BEGIN_C

typedef struct CheckpointTensor {
    char name[128];
    int rank;
    int64_t shape[2];
    real* data;  // device memory, contiguous
} CheckpointTensor;

typedef struct CheckpointFile {
    char name[64];
    int count;
    CheckpointTensor* tensors;
} CheckpointFile;

// What a run needs besides its tensors to go on.
typedef struct CheckpointRecord {
    int64_t step;     // updates done
    int64_t window;   // next window of the run (data/shards.h)
    int64_t updates;  // StepState.updates and .bad_in_a_row
    int64_t bad_in_a_row;
    int64_t data_hash;  // shards_hash of the training shards
} CheckpointRecord;

// Writes out/step_%08d; removes the oldest ones beyond `keep` and what unfinished saves left. Ends the run on any error,
// leaving older ones as they are.
void checkpoint_save(const char* out, const CheckpointRecord* record, const char* options_json,
                     const CheckpointFile* files, int count, int keep, Ctx* ctx);

// Steps of the checkpoints in `out`, newest first, in fresh memory; *count gets their number.
int64_t* checkpoint_list(const char* out, int* count);

// Opens the manifest of one and checks it. NULL with the reason in `error`. Record and options are read from it.
Json* checkpoint_manifest(const char* out, int64_t step, CheckpointRecord* record, char* error, size_t error_size);

// Checks every file against the manifest and loads every tensor. 0, or -1 with the reason in `error`; then some tensors
// may have been overwritten.
int checkpoint_load(const char* out, int64_t step, const Json* manifest, const CheckpointFile* files, int count,
                    Ctx* ctx, char* error, size_t error_size);

END_C

#endif
