// Device memory for arrays whose size is known only in the step, such as the rows of the experts. It is a stack. A
// block keeps its saved tensors until the next micro-step, which begins with an empty pool. Other buffers are released
// at the end of the function that took them. No tokens are dropped: the pool has addresses for the most that a step can
// need, and memory at the first of them. A step that needs more gets more, and nothing moves:
//
//   | block 1 | block 2 | block 3 | free | addresses without memory |
//                                 ^ top  ^ has memory               ^ most
#pragma once

#include "device/arena.h"

typedef struct Pool Pool;

// A pool with `bytes` of memory at first, and up to `most` as steps need it. memory: the first bytes are the caller's
// (symmetric memory), and up to `most` more follow. pool_move replaces them and empties the stack.
Pool* pool_create(const char* purpose, void* memory, size_t bytes, size_t most);
void pool_move(Pool* pool, void* memory, size_t bytes);
void pool_destroy(Pool* pool);

// Aligned to 256 bytes, contents undefined. A pool that grows has at most 1.05 times the most that was taken so far,
// and 2 MiB, or what it had at first. It warns each time that it has doubled. Without memory the run ends with a
// message that has the load: this rank's choices over their mean, set by pool_load.
void* pool_take(Pool* pool, size_t bytes);
void pool_load(Pool* pool, double load);

// A table of buffers: pool_take_table takes all buffers in it at once, sets their slots and empties it. So plan and
// allocation use the same table.
Arena* pool_table(Pool* pool);
void pool_take_table(Pool* pool);

size_t pool_mark(const Pool* pool);          // the height of the stack, in bytes; 0: empty
void pool_release(Pool* pool, size_t mark);  // frees all memory taken since the mark
