// Token shards, the order in which training reads them, and the loader.
//
// A shard is a 1024-byte header of 256 little-endian int32, then the tokens:
//   {20240520, 1, n}  uint16 tokens (llm.c, modded-nanogpt, the public FineWeb shards)
//   {20240801, 7, n}  uint32 tokens
//
// A window, one training sequence, is T + 1 tokens of one shard: T inputs, and the same shifted by one as targets.
// Window i starts at token i * T. A shard has floor((n - 1) / T) windows. With T = 4 and 10 tokens:
//
//   token      0  1  2  3  4  5  6  7  8  9
//   window 0   i  i  i  i
//                 t  t  t  t
//   window 1               i  i  i  i           token 9 is in no window
//                             t  t  t  t
//
// In a set of `windows` windows, window w of the run belongs to epoch w / windows, and is window order_permute(seed,
// epoch, w % windows) of the set. The order has no state (data/order.h), so a run can resume anywhere, with any number
// of ranks. Several sets with weights: data/mixture.h.
#pragma once

#include "data/mixture.h"
#include "device/files.h"

// The shards of one option's value. Nothing changes after shards_open, so several threads may read windows.
typedef struct Shards {
    const char* option;  // of the command line, for messages
    int64_t T;
    int count;
    struct ShardFile* files;
    int64_t windows, tokens;  // of all shards
    uint32_t hash;            // equal for runs on the same data: CRC-32 (zlib) over names (without folder), sizes and
                              // headers, and the parts of several sets
    Mixture mixture;
} Shards;

// Opens every file that matches `text`, a pattern (glob(3), sorted by name) or several patterns with weights, and
// checks header and size. An error ends the run. The message names the option, file, offset and reason. The string
// `option` must outlive the shards, which shards_close frees. Errors: no match; unreadable file; wrong magic or
// version; a size that differs from the header's count; no window of T + 1 tokens in a set; a file in two sets, by
// whatever name or pattern.
Shards* shards_open(const char* option, const char* text, int64_t T);
void shards_close(Shards* shards);

// The path of the first shard of the first pattern in `text`; empty if no file matches.
Path shards_first(const char* option, const char* text);
// The tokenizer file that belongs to the shard `path`. With mark "_train_", text_train_000000.bin has
// text_tokenizer.bin in the same folder. Empty: this file is missing, or the shard's name has no mark. Without this
// file, text_tokenizer.json or .bin.tmp shows that the set is not whole, and ends the run. The file `of_run` of
// --tokenizer does not count as such a trace.
Path shards_tokenizer(const char* path, const char* mark, const char* of_run);

const char* shards_path(const Shards* shards, int index);
// The path of a file of `shards` that `others` have too, by whatever name or pattern; NULL: none.
const char* shards_shared(const Shards* shards, const Shards* others);

// CRC-32 of Shards.hash and of 64 windows, evenly spread from the first window to the last. Ranks compare this number,
// because a rank's copy of the shards may be incomplete. Other windows are not compared.
uint32_t shards_sample(const Shards* shards);

// Reads window `index` (0 .. windows - 1, in file order): input[t] = token t, target[t] = token t + 1. A file that
// cannot be read, or an id not below V, ends the run; the message names file, byte offset and id.
void shards_read(const Shards* shards, int64_t index, int32_t V, int32_t* input, int32_t* target);

// The loader reads micro-batches of `batch` windows. While a micro-batch is in use, the operating system prefetches the
// next.
typedef struct Loader Loader;

// The windows that one rank loads. All numbers count windows of the run, except the seed.
typedef struct LoaderOrder {
    uint64_t seed;
    int64_t first;   // the first window of the run that is loaded
    int64_t stride;  // windows from one micro-batch of this rank to its next
    int64_t wrap;    // > 0: windows are taken modulo `wrap` (--overfit repeats one step's windows)
} LoaderOrder;

// Micro-batch n is the windows w .. w + batch - 1 of the run, w = first + n stride.
Loader* loader_start(const Shards* shards, int64_t batch, int32_t V, LoaderOrder order);
void loader_stop(Loader* loader);
// Reads micro-batch n, counted from 0. *input and *target, (batch, T) each, are valid until the next call or
// loader_stop.
void loader_read(Loader* loader, int64_t n, const int32_t** input, const int32_t** target);
