// Device memory for arrays whose size is known only in the step, such as the rows of the experts. A pool is a stack. A
// block keeps its saved tensors until the next micro-step, which begins with an empty pool. Other buffers are released
// at the end of the function that took them. No tokens are dropped: the pool has addresses for the most that a step can
// need, and memory at the first of these addresses. A step that needs more memory gets more, and no buffer moves:
//
//   | block 1 | block 2 | block 3 | free | addresses without memory |
//                                 ^ top  ^ has memory               ^ most
#pragma once

#include "device/arena.h"

typedef struct Pool Pool;

// A pool with `bytes` of memory at first, and up to `most` as steps need it. If `memory` is not NULL, the first `bytes`
// are the caller's `memory` (symmetric memory), and up to `most` more follow. Call pool_move to replace the caller's
// memory and empty the stack. If the device lacks memory, pool_create ends the run.
Pool* pool_create(const char* purpose, void* memory, size_t bytes, size_t most);
void pool_move(Pool* pool, void* memory, size_t bytes);
void pool_destroy(Pool* pool);

// The next `bytes` of the stack, aligned to 256 bytes, contents undefined. A pool grows to a twentieth more than
// needed, rounded up to 2 MiB, and warns each time that its memory has doubled. If the device lacks memory, the run
// ends. Both messages have the load, this rank's choices over their mean, which pool_load sets.
void* pool_take(Pool* pool, size_t bytes);
void pool_load(Pool* pool, double load);

// A table of buffers: pool_take_table takes all buffers of the table at once, sets their slots and empties the table.
// So plan and allocation use the same table.
Arena* pool_table(Pool* pool);
void pool_take_table(Pool* pool);

size_t pool_mark(const Pool* pool);          // the height of the stack, in bytes; 0: empty
void pool_release(Pool* pool, size_t mark);  // frees all memory taken since the mark
