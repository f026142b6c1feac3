// Tokenized shards and the order in which training reads them.
//
// A shard is a 1024-byte header of 256 little-endian int32, then the tokens:
//   {20240520, 1, n}  uint16 tokens (llm.c, modded-nanogpt, the public FineWeb shards)
//   {20240801, 7, n}  uint32 tokens
//
// A window is T + 1 tokens inside one shard: T inputs, and the same shifted by one as targets. Window i starts at token
// i * T, and a shard has floor((n - 1) / T) windows. With T = 4, of 10 tokens:
//
//   token      0  1  2  3  4  5  6  7  8  9
//   window 0   i  i  i  i
//                 t  t  t  t
//   window 1               i  i  i  i           token 9 is in no window
//                             t  t  t  t
//
// Window w of the run belongs to epoch w / windows. It is the window permute(seed, epoch, w % windows) of the set. No
// state is kept, so a run resumes anywhere, and the order does not depend on the ranks.
#ifndef DATA_SHARDS_H
#define DATA_SHARDS_H

#include "device/types.h"

BEGIN_C

typedef struct Shards Shards;

// Opens every file that matches `pattern` (glob(3), sorted by name), and checks header and size. Ends the run (die)
// naming `option`, the file, the offset and the reason on: no match, unreadable, wrong magic or version, size that does
// not fit the header's count, no window of T + 1 tokens in the whole set.
Shards* shards_open(const char* option, const char* pattern, int64_t T);
void shards_close(Shards* shards);

// The tokenizer file that lies beside the first shard of `pattern`, in fresh memory: text_tokenizer.bin beside
// text_train_000000.bin, where `mark` is "_train_". NULL: none, or a shard of another name.
char* shards_tokenizer(const char* pattern, const char* mark);

int64_t shards_windows(const Shards* shards);
int64_t shards_tokens(const Shards* shards);
int shards_count(const Shards* shards);

// CRC-32 (zlib) over names (without folder), sizes and headers: tells whether two runs see the same data.
uint32_t shards_hash(const Shards* shards);

// Reads window `index` (0 .. windows - 1, in file order): input[t] = token t, target[t] = token t + 1. Every id is
// checked against V before it is handed out: die() names file, byte offset and id.
void shards_read(const Shards* shards, int64_t index, int32_t V, int32_t* input, int32_t* target);

// The permutation of 0..n-1 that epoch `epoch` of `seed` uses, at position i: a Feistel network over the next even
// power of two, walked until it lands below n (cycle walking; Black & Rogaway 2002).
int64_t shards_permute(uint64_t seed, int64_t epoch, int64_t i, int64_t n);

// The loader reads ahead on a thread: while one micro-batch is in use, the next ones are read. `batch` windows at a
// time.
typedef struct Loader Loader;

typedef struct LoaderOrder {
    uint64_t seed;
    int64_t first;   // window of the run that the first call gives
    int64_t stride;  // windows from one micro-batch of this rank to its next
    int64_t wrap;    // > 0: windows are taken modulo `wrap` (--overfit: one step's windows, again and again)
} LoaderOrder;

// A micro-batch is the windows w .. w + batch - 1 of the run; w starts at `first` and moves on by `stride` each call.
Loader* loader_start(const Shards* shards, int64_t batch, int32_t V, LoaderOrder order);
void loader_stop(Loader* loader);
// Waits for the next micro-batch; the pointers ((batch, T) each) are valid until the next call.
void loader_next(Loader* loader, const int32_t** input, const int32_t** target);

END_C

#endif
