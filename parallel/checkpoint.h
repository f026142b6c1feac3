// Sharded checkpoints on disk: a folder `step_%08d` of safetensors files and a manifest.json. The files do not depend
// on the number of ranks: every rank writes its slices of each tensor in place, and reads the slices that it owns.
//
// A checkpoint is written into a temporary folder (`step_%08d.tmp`) and flushed, its manifest last, and then renamed.
// So a folder with the right name is complete, even after a crash. The manifest has step, data position and options,
// and each file's size and CRC-32, joined from those of the slices. It ends with a CRC-32 of itself. A checkpoint that
// does not match its manifest is refused, the message names the file, and the next older checkpoint is tried.
//
// Tensors are stored in the type that a run keeps them in: real (float32), or bf16 for the moments of --moments bf16.
// Working weights are not stored: they are derived from the masters after loading.
//
// Only a checkpoint, a folder whose manifest can be read, is ever replaced or removed for its age. Anything else with
// the name of one is renamed to `step_%08d.aside` (or .aside2, ...) when the run saves that step.
//
// Training waits only while the tensors are copied to host memory. A thread writes the files while training goes on:
//
//   step 10              step 11        step 12        step 20
//   | ... | copy |       | ...          | ...          | ... | wait for the thread | copy |
//                | thread: files, flush, manifest, rename      |                   | thread ...
#pragma once

#include "data/json.h"
#include "data/safetensors.h"
#include "device/device.h"
#include "device/files.h"
#include "parallel/ranks.h"

// Bytes that names of files in a checkpoint add to that of `out`, at most: /step_N.tmp/NAME, and N may have 19 digits.
enum { CHECKPOINT_NAMES = 96 };

static const StDtype CHECKPOINT_DTYPE = sizeof(real) == 8 ? ST_F64 : ST_F32;  // of tensors of real

// A tensor of a file, and the slice of it that this rank has. Every rank lists every tensor, in the same order.
typedef struct CheckpointTensor {
    char name[128];
    StDtype dtype;  // CHECKPOINT_DTYPE; moments may be ST_BF16
    int rank;
    int64_t shape[2];
    int64_t first, count;            // elements first .. first + count - 1 of the tensor; count may be 0
    int64_t save_first, save_count;  // the elements that this rank writes; over all ranks each element once
    void* data;                      // device memory of the slice, contiguous
    floatX* weight;                  // not NULL: the slice is master weights, and data their Master
} CheckpointTensor;

// A safetensors file of the checkpoint. The tensors belong to the caller.
typedef struct CheckpointFile {
    char name[64];
    int count;
    CheckpointTensor* tensors;
} CheckpointFile;

// The state of a run other than its tensors, needed to resume: members of the manifest.
typedef struct CheckpointRecord {
    int64_t step;            // updates done
    int64_t window;          // next window of the run (data/shards.h)
    int64_t updates;         // StepState.updates: those of all stages (--init-moments)
    int64_t data_hash;       // Shards.hash of the training shards
    int64_t tokenizer_hash;  // 0: not known
} CheckpointRecord;

// Writes checkpoints into folder `out`, one at a time, on a thread. saver_create is collective; it ends the run if the
// ranks do not share the folder. It removes unfinished saves of killed runs from the folder. folder_check comes before
// each change in it.
typedef struct Saver Saver;
Saver* saver_create(Ranks* world, const char* out, int keep);
// Adds a file of these bytes to every checkpoint from now on, written by rank 0. All ranks add the same ones.
void saver_add_file(Saver* saver, const char* name, const char* data, size_t bytes);
// Waits for the last save, then frees the saver.
void saver_destroy(Saver* saver);

// Waits for the last save, copies this rank's slices to host memory, and returns. The thread then writes
// out/step_%08d, removes the oldest checkpoints beyond `keep` and prints "saved PATH". At least two remain, because the
// model of the newest may have diverged. Any error ends the run on every rank and leaves older checkpoints unchanged.
void checkpoint_save(Saver* saver, const CheckpointRecord* record, const char* options_json,
                     const CheckpointFile* files, int count, Ctx* ctx);
void checkpoint_wait(Saver* saver);  // until the last save is on disk
// For a complete run: waits, and removes the oldest checkpoints beyond `keep`.
void checkpoint_finish(Saver* saver);
// For a run that diverged: no step after this one was finite. The checkpoint gets the suffix .diverged, so that
// --resume loads the one before it. Call it after checkpoint_wait. True if rank 0 did so; false for the oldest one.
bool checkpoint_set_aside(Saver* saver, int64_t step);

// Steps of the checkpoints in `out`, newest first, in fresh memory; *count gets their number. A folder that cannot be
// listed ends the run; with checkpoint_try_list *count is -1, for the reason in errno.
int64_t* checkpoint_list(const char* out, int* count);
int64_t* checkpoint_try_list(const char* out, int* count);

// The functions below return or set a reason, in fresh memory; NULL: all is good.

// Reads the manifest of a checkpoint and checks it. NULL on errors, with the reason in *why.
Json* checkpoint_manifest(const char* out, int64_t step, char** why);
// The same of a checkpoint's own folder; *out gets the folder that it is in.
Json* checkpoint_manifest_in(const char* folder, Path* out, char** why);

// Checks every file against the manifest (the ranks share the files), and loads every slice. All ranks return the same
// reason; then some tensors may have been overwritten. Where there is no manifest, `why` is the reason, and is freed.
// Ends the run if a rank passes another step or manifest than rank 0.
char* checkpoint_load(Ranks* world, const char* out, int64_t step, const Json* manifest, const CheckpointFile* files,
                      int count, Ctx* ctx, char* why);

// Checks files of a folder in the same way if it is a checkpoint: without a manifest there is nothing to check.
char* checkpoint_check(Ranks* world, const char* folder, const char** names, int count);

// Loads this rank's slice of a tensor from `found`, a tensor of a file, whose shape must be the same. A tensor of real
// may be of any type of floating point there; of fp8 `scales` has a factor for each FP8_BLOCK x FP8_BLOCK elements.
// Every number must be finite.
enum { FP8_BLOCK = 128 };
char* checkpoint_read(const CheckpointTensor* tensor, const SafeTensors* st, const StTensor* found, const float* scales,
                      Ctx* ctx);
