// Device memory for arrays whose size only a step knows, such as the rows of the experts. It is a stack: forward takes
// from it, and backward gives back in reverse order. Its size is planned. A step that needs more gets another chunk,
// with a warning; nothing is ever dropped:
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

// The stack's first `bytes` lie in `memory`, which stays the caller's. pool_move: from now on in another piece, and
// what was added is given back; nothing is taken.
Pool* pool_create(const char* purpose, void* memory, size_t bytes);
void pool_move(Pool* pool, void* memory, size_t bytes);
void pool_destroy(Pool* pool);
void* pool_take(Pool* pool, size_t bytes);  // aligned to 256 bytes, contents undefined
// A table to name buffers in, and all that it names taken at once, its slots set: what is planned is what is taken.
Arena* pool_table(Pool* pool);
void pool_take_table(Pool* pool);
PoolMark pool_mark(const Pool* pool);
void pool_release(Pool* pool, PoolMark mark);  // all that was taken since the mark is free again

END_C

#endif
