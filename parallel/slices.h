// What parallel/checkpoint.c (saving) and parallel/resume.c (loading) share: names, and what the ranks tell each other
// of the parts of files that each of them wrote or read. A file of three tensors that two ranks wrote:
//
//   | header | tensor 0        | tensor 1        | tensor 2 |
//   | rank 0 | rank 0 | rank 1 | rank 0 | rank 1 | rank 1   |      slices, each with a CRC-32 of its own
//
// crc32_combine joins the sums of two neighbours into the sum of both, so nobody reads the whole file.
#ifndef PARALLEL_SLICES_H
#define PARALLEL_SLICES_H

#include <stdbool.h>
#include <zlib.h>

#include "data/safetensors.h"
#include "device/files.h"
#include "parallel/ranks.h"

BEGIN_C

#define CHECKPOINT_FORMAT "train_moe checkpoint 1"
#define CHECKPOINT_MANIFEST_END ",\n\"manifest_crc32\": "  // the CRC-32 of all that stands before this follows

Path step_path(const char* out, int64_t step, const char* suffix);  // out/step_%08d<suffix>
int64_t step_number(const char* name, const char* suffix);          // whose name (without `out`) it is; -1: none's
uLong crc_of(const void* data, size_t bytes);

// The first of n elements that is not finite, or n.
int64_t first_not_finite(const void* values, int64_t n, StDtype dtype);

// A run of bytes of a file (counted from 0, in the checkpoint's order), its CRC-32, and the type of its elements.
typedef struct FileSlice {
    int64_t file, offset, bytes;
    uint64_t crc;
    int64_t dtype;
} FileSlice;

// The slices of all ranks in order, in fresh memory: rank 0 gets them, the others none.
FileSlice* slices_gather(Ranks* group, const FileSlice* mine, int64_t count, int64_t* total);

// *crc is that of the first `at` bytes of a file; joins those of the file's slices to it. Whether they cover the file's
// other bytes once each. *next is the first slice that is not used yet: calls are in the order of the files.
bool slices_join(const FileSlice** next, const FileSlice* end, int64_t file, int64_t at, int64_t bytes, uLong* crc);

// The lowest value of any rank; *who gets the first rank that has it.
int64_t ranks_lowest(Ranks* group, int64_t value, int* who);

// True on every rank if all are well. Else false on the first that is not, which must end the run. The others wait here
// meanwhile: one rank prints why, and none stumbles over what that one cleans up.
bool ranks_well(Ranks* group, bool well);

// Ends the run where a rank does not find in `out` what rank 0 finds there.
void ranks_must_share(Ranks* world, const char* out, bool same);

END_C

#endif
