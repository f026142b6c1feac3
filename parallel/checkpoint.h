// Checkpoints on disk: a folder `step_%08d` of safetensors files and a manifest.json. It is the same whatever number of
// ranks wrote it: every rank writes its slices of each tensor in place, and reads the slices that it holds.
//
// A checkpoint is written into a folder beside it (`step_%08d.tmp`) and flushed, its manifest last, and then renamed.
// So a folder with the right name is whole, whatever happens. The manifest holds step, data position and options, and
// each file's size and CRC-32 (joined from those of the slices). It ends with a CRC-32 of itself. What does not match
// is refused by name, and the next older checkpoint is tried. Tensors are stored as they are kept: in real
// (float32), the moments of --moments bf16 in bf16. Working weights are derived again after loading.
//
// Training waits while the tensors are copied to host memory; a thread writes them meanwhile.
//
//   step 10              step 11        step 12        step 20
//   | ... | copy |       | ...          | ...          | ... | wait for the thread | copy |
//                | thread: files, flush, manifest, rename      |                   | thread ...
#ifndef PARALLEL_CHECKPOINT_H
#define PARALLEL_CHECKPOINT_H

#include <stdbool.h>

#include "data/json.h"
#include "data/safetensors.h"
#include "device/device.h"
#include "parallel/ranks.h"

BEGIN_C

static const StDtype CHECKPOINT_DTYPE = sizeof(real) == 8 ? ST_F64 : ST_F32;  // of what is real

// A tensor of a file and the slice of it that this rank holds. Every rank lists every tensor, in the same order.
typedef struct CheckpointTensor {
    char name[128];
    StDtype dtype;  // CHECKPOINT_DTYPE or, of moments, ST_BF16
    int rank;
    int64_t shape[2];
    int64_t first, count;            // elements first .. first + count - 1 of the tensor; count may be 0
    int64_t save_first, save_count;  // those of them that this rank writes; over all ranks each element once
    void* data;                      // device memory of the slice, contiguous
} CheckpointTensor;

typedef struct CheckpointFile {
    char name[64];
    int count;
    CheckpointTensor* tensors;
} CheckpointFile;

// What a run needs besides its tensors to go on.
typedef struct CheckpointRecord {
    int64_t step;       // updates done
    int64_t window;     // next window of the run (data/shards.h)
    int64_t updates;    // StepState.updates
    int64_t data_hash;  // shards_hash of the training shards
} CheckpointRecord;

// Writes checkpoints into folder `out`, one at a time, on a thread. Made by all ranks together; ends the run if they do
// not share the folder. Removes what runs that were killed left unfinished there.
typedef struct Saver Saver;
Saver* saver_create(Ranks* world, const char* out, int keep);
// Every checkpoint from now on has this file too, written by rank 0. All ranks add the same ones.
void saver_add_text(Saver* saver, const char* name, const char* text);
// Waits for the last save, then ends.
void saver_destroy(Saver* saver);

// Waits for the last save, copies what this rank writes to host memory, and returns. The thread then writes
// out/step_%08d, removes the oldest ones beyond `keep` and prints "saved PATH". At least two stay: the newest may turn
// out to be that of a model that diverged. Any error ends the run on every rank and leaves older ones as they are.
void checkpoint_save(Saver* saver, const CheckpointRecord* record, const char* options_json,
                     const CheckpointFile* files, int count, Ctx* ctx);
void checkpoint_wait(Saver* saver);  // until the last save is on disk
// The run is complete: waits, and keeps no more than `keep`.
void checkpoint_finish(Saver* saver);
// No step after this one was finite: the checkpoint gets the suffix .diverged, so that --resume takes the one before
// it. After checkpoint_wait. Whether rank 0 could do so; false where it is the oldest.
bool checkpoint_set_aside(Saver* saver, int64_t step);

// Steps of the checkpoints in `out`, newest first, in fresh memory; *count gets their number.
int64_t* checkpoint_list(const char* out, int* count);

// Opens the manifest of one and checks it. NULL with the reason in `error`. Record and options are read from it.
Json* checkpoint_manifest(const char* out, int64_t step, CheckpointRecord* record, char* error, size_t error_size);

// Whether the manifest lists a file of this name. NULL lists none.
bool checkpoint_lists(const Json* manifest, const char* name);

// Checks every file against the manifest (the ranks share the bytes) and loads every slice. 0 on all ranks, or -1 on
// all with the same reason in `error`; then some tensors may have been overwritten. manifest NULL: none was found, and
// `error` says why. Ends the run where a rank was given another step or manifest than rank 0.
int checkpoint_load(Ranks* world, const char* out, int64_t step, const Json* manifest, const CheckpointFile* files,
                    int count, Ctx* ctx, char* error, size_t error_size);

// Checks files of a folder in the same way, if it is a checkpoint's: without a manifest there is nothing to check.
int checkpoint_check(Ranks* world, const char* folder, const char** names, int count, char* error, size_t error_size);

END_C

#endif
