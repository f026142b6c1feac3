// Device memory for arrays whose size is known only in the step, such as the rows of the experts. It is a stack:
// forward takes memory, and backward releases it in reverse order. Its size is planned. A step that needs more
// allocates another chunk, with a warning; no tokens are dropped:
//
//   chunk 0 (planned)                          chunk 1 (allocated in the step that needed it)
//   | layer 1 | layer 2 | layer 3 | too small | | layer 4      | free        |
//                                                              ^ top {chunk 1, at}
#ifndef DEVICE_POOL_H
#define DEVICE_POOL_H

#include "device/arena.h"

BEGIN_C

typedef struct Pool Pool;
typedef struct PoolMark {  // a height of the stack
    int chunk;
    size_t at;
} PoolMark;

// Chunk 0 is `memory` of `bytes` bytes, which the caller owns. pool_move replaces chunk 0, frees the added chunks and
// empties the stack.
Pool* pool_create(const char* purpose, void* memory, size_t bytes);
void pool_move(Pool* pool, void* memory, size_t bytes);
void pool_destroy(Pool* pool);
void* pool_take(Pool* pool, size_t bytes);  // aligned to 256 bytes, contents undefined
// An arena that takes each buffer from the pool as it is added, and sets its slot. So plan and allocation use the same
// calls.
Arena* pool_table(Pool* pool);
PoolMark pool_mark(const Pool* pool);
void pool_release(Pool* pool, PoolMark mark);  // frees all memory taken since the mark

END_C

#endif
