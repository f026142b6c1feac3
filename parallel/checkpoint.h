// Sharded checkpoints on disk: a folder `step_%08d` of safetensors files and a manifest.json. The files do not depend
// on the number of ranks: every rank writes its slices of each tensor in place, and reads the slices that it owns.
//
// A checkpoint is written into a temporary folder (`step_%08d.tmp`) and flushed, its manifest last, and then renamed.
// So a folder with the right name is complete, even after a crash. The manifest has step, data position and options,
// and each file's size and CRC-32, joined from the CRC-32s of the slices. The manifest ends with a CRC-32 of itself. A
// checkpoint that does not match its manifest is refused by the name of the file, and the next older checkpoint is
// tried.
//
// Tensors are stored in the type that a run keeps them in: real (float32), or bf16 for the moments of --moments bf16.
// Working weights are not stored: they are derived from the masters after loading.
//
// Only a checkpoint, a folder whose manifest can be read, is ever replaced, or removed for its age. Anything else with
// a checkpoint's name is renamed to `step_%08d.aside` (or .aside2, ...) when the run saves that step.
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

// The most bytes that the path of a checkpoint's file adds to `out`: /step_N.tmp/NAME, where N may have 19 digits.
enum { CHECKPOINT_NAMES = 96 };

static const StDtype CHECKPOINT_DTYPE = sizeof(real) == 8 ? ST_F64 : ST_F32;  // of tensors of real

// A tensor of a file, and the slice of it that this rank has. Every rank lists every tensor, in the same order.
typedef struct CheckpointTensor {
    char name[128];
    StDtype dtype;  // CHECKPOINT_DTYPE; moments may be ST_BF16
    int rank;       // dimensions of shape
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
    int64_t updates;         // StepState.updates: updates of all stages (--init-moments)
    int64_t data_hash;       // Shards.hash of the training shards
    int64_t tokenizer_hash;  // 0: not known
} CheckpointRecord;

// Writes checkpoints into folder `out`, one at a time, on a thread. saver_create is collective. It ends the run if the
// ranks do not share the folder, and removes unfinished saves of killed runs. Each change in the folder comes after a
// folder_check.
typedef struct Saver Saver;
Saver* saver_create(Ranks* world, const char* out, int keep);
// Adds a file with a copy of these bytes to every later checkpoint. All ranks add the same files, at most 8.
void saver_add_file(Saver* saver, const char* name, const char* data, size_t bytes);
// Waits for the last save, then frees the saver.
void saver_destroy(Saver* saver);

// Waits for the last save, copies this rank's slices to host memory, and returns. The thread then writes out/step_%08d,
// removes the oldest checkpoints beyond `keep` and prints "saved PATH". At least two checkpoints remain, because the
// model of the newest may have diverged. Any error ends the run on every rank and leaves older checkpoints unchanged.
void checkpoint_save(Saver* saver, const CheckpointRecord* record, const char* options_json,
                     const CheckpointFile* files, int count, Ctx* ctx);
void checkpoint_wait(Saver* saver);  // until the last save is on disk
// For a complete run: waits for the last save, and removes the oldest checkpoints beyond `keep`.
void checkpoint_finish(Saver* saver);
// For a run that diverged: no step after `step` was finite. Renames the checkpoint of `step` to step_%08d.diverged, so
// that --resume loads an older checkpoint. Call it after checkpoint_wait. Returns true on rank 0 after renaming. The
// oldest checkpoint stays, and other ranks do nothing: false.
bool checkpoint_set_aside(Saver* saver, int64_t step);

// Steps of the checkpoints in `out`, newest first, in fresh memory; *count gets their number. A folder that cannot be
// listed ends the run; with checkpoint_try_list *count is -1, for the reason in errno.
int64_t* checkpoint_list(const char* out, int* count);
int64_t* checkpoint_try_list(const char* out, int* count);

// The functions below return or set a reason, in fresh memory; NULL: all is good.

// Reads the manifest of a checkpoint and checks it. NULL on errors, with the reason in *why.
Json* checkpoint_manifest(const char* out, int64_t step, char** why);
// checkpoint_manifest for a path of the checkpoint itself; *out gets the folder that the checkpoint is in.
Json* checkpoint_manifest_in(const char* folder, Path* out, char** why);

// Checks every file against the manifest (the ranks share the files), and loads every slice. All ranks return the same
// reason; after a fault some tensors may have been overwritten. why: a reason to refuse the checkpoint before (manifest
// NULL), else NULL; it is freed. Ends the run if a rank passes another step or manifest than rank 0.
char* checkpoint_load(Ranks* world, const char* out, int64_t step, const Json* manifest, const CheckpointFile* files,
                      int count, Ctx* ctx, char* why);

// Checks files of `folder` against its manifest, like checkpoint_load. A folder without a manifest passes.
char* checkpoint_check(Ranks* world, const char* folder, const char** names, int count);

// Loads this rank's slice of a tensor from `found`, a tensor of a file, whose shape must be the same. For a tensor of
// real, `found` may have any type of floating point. For fp8, `scales` has a factor for each FP8_BLOCK x FP8_BLOCK
// elements. Every number must be finite.
enum { FP8_BLOCK = 128 };
char* checkpoint_read(const CheckpointTensor* tensor, const SafeTensors* st, const StTensor* found, const float* scales,
                      Ctx* ctx);
