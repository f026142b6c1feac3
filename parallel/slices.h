// Shared by parallel/checkpoint.c (saving) and parallel/resume.c (loading): names of checkpoints, and slices, the parts
// of files that a rank wrote or read. A file of three tensors that two ranks wrote:
//
//   | header | tensor 0        | tensor 1        | tensor 2 |
//   | rank 0 | rank 0 | rank 1 | rank 0 | rank 1 | rank 1   |      slices, each with a CRC-32 of its own
//
// crc32_combine joins the CRC-32s of two neighbouring slices into that of both, so no rank reads the whole file.
#pragma once

#include <zlib.h>

#include "data/safetensors.h"
#include "device/files.h"
#include "parallel/ranks.h"

#define CHECKPOINT_FORMAT "train_moe checkpoint 2"
#define CHECKPOINT_MANIFEST_END ",\n\"manifest_crc32\": "  // followed by the CRC-32 of all bytes before this

Path step_path(const char* out, int64_t step, const char* suffix);  // out/step_%08d<suffix>
int64_t step_number(const char* name, const char* suffix);          // the step of a name without `out`; -1: none
uLong crc_of(const void* data, size_t bytes);

// The first of n elements that is not finite, or n. Bytes (ST_U8) are always finite.
int64_t first_not_finite(const void* values, int64_t n, StDtype dtype);

// A contiguous range of bytes of a file, its CRC-32 and its element type. Files are numbered in the checkpoint's order,
// from 0.
typedef struct FileSlice {
    int64_t file, offset, bytes;
    uint64_t crc;
    int64_t dtype;     // ST_U8: text
    const char* data;  // only on the rank that has the slice
} FileSlice;

// All-gather of the ranks' slices, sorted by file and offset, in fresh memory; *total gets their number.
FileSlice* slices_gather(Ranks* group, const FileSlice* mine, int64_t count, int64_t* total);

// *crc gets the CRC-32 of a file, joined from the CRC-32s of its slices. Returns whether the slices cover each byte of
// the file once. *next is the first unused slice: calls are in the order of the files.
bool slices_join(const FileSlice** next, const FileSlice* end, int64_t file, int64_t bytes, uLong* crc);

// True on every rank if all ranks are well. Else false on the first rank that is not well: this rank must end the run.
// All other ranks then wait in this call and never return. So one rank alone prints the reason, and no rank uses files
// that this rank removes.
bool ranks_well(Ranks* group, bool well);

// On every rank the reason of the first rank that has one, in fresh memory; NULL: none has one. Frees `why`.
char* ranks_reason(Ranks* group, char* why);

// Ends the run if `same` is false on a rank: that rank does not see the same contents of `out` as rank 0.
void ranks_must_share(Ranks* world, const char* out, bool same);
