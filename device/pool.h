// Device memory for arrays whose size is known only in the step, such as the rows of the experts. It is a stack. A
// block keeps its saved tensors until the next micro-step, which begins with an empty pool. Other buffers are released
// at the end of the function that took them. The size is planned. A step that needs more allocates another chunk, with
// a warning; no tokens are dropped:
//
//   chunk 0 (planned)                          chunk 1 (allocated in the step that needed it)
//   | layer 1 | layer 2 | layer 3 | too small | | layer 4      | free        |
//                                                              ^ top {chunk 1, at}
#pragma once

#include "device/arena.h"

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
// A table of buffers: pool_take_table takes all buffers in it at once, sets their slots and empties it. So plan and
// allocation use the same table.
Arena* pool_table(Pool* pool);
void pool_take_table(Pool* pool);
PoolMark pool_mark(const Pool* pool);
void pool_release(Pool* pool, PoolMark mark);  // frees all memory taken since the mark
