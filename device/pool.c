// A stack in chunks. Chunks never move while memory is taken, so addresses stay valid. A mark is a chunk and a height
// in it; release goes back to a mark.
#include "device/pool.h"

#include <stdlib.h>

#include "device/check.h"
#include "device/device.h"

// A range of device memory; bytes is its whole size.
typedef struct Chunk {
    char* memory;
    size_t bytes;
} Chunk;

// The pool grows by a sixteenth or more each time, so it has 14 times its first size before the list is full.
enum { MOST_CHUNKS = 48 };

// top: where the next buffer begins. table: buffers to take next (pool_take_table).
struct Pool {
    const char* purpose;
    Chunk chunks[MOST_CHUNKS];  // the first belongs to the caller
    int count;
    PoolMark top;
    Arena table;
};

static void add_chunk(Pool* pool, void* memory, size_t bytes) {
    const Chunk chunk = {(char*)memory, bytes};
    ASSERT(pool->count < MOST_CHUNKS);
    pool->chunks[pool->count++] = chunk;
}

Pool* pool_create(const char* purpose, void* memory, size_t bytes) {
    Pool* pool = (Pool*)host_alloc(sizeof(Pool));
    pool->purpose = purpose;
    arena_init(&pool->table, purpose, BACKEND);
    add_chunk(pool, memory, bytes);
    return pool;
}

// Frees the chunks that were added.
static void free_added(Pool* pool) {
    while (pool->count > 1) device_free(pool->chunks[--pool->count].memory);
}

// The caller frees the old first chunk, because it belongs to the caller.
void pool_move(Pool* pool, void* memory, size_t bytes) {
    const PoolMark bottom = {0, 0};
    free_added(pool);
    pool->count = 0;
    add_chunk(pool, memory, bytes);
    pool->top = bottom;
}

void pool_destroy(Pool* pool) {
    free_added(pool);
    arena_free(&pool->table);
    free(pool);
}

// Adds a chunk of at least `need` bytes, and at least a sixteenth of the pool. Steps that need more are often followed
// by others that need a little more.
static void grow(Pool* pool, size_t need) {
    size_t all = 0, megabyte = (size_t)1 << 20;
    for (int i = 0; i < pool->count; i++) all += pool->chunks[i].bytes;
    size_t bytes = (max_size(need, all / 16) + megabyte - 1) / megabyte * megabyte;
    warn_here("the %s grew by %.0f MiB to %.2f GiB: expert loads are uneven; --capacity sets its first size",
              pool->purpose, (double)bytes / 0x1p20, (double)(all + bytes) / 0x1p30);
    add_chunk(pool, device_alloc(bytes, pool->purpose), bytes);
}

// A buffer does not span chunks. The rest of a chunk stays empty if the buffer does not fit.
void* pool_take(Pool* pool, size_t bytes) {
    bytes = (bytes + 255) / 256 * 256;
    while (bytes > pool->chunks[pool->top.chunk].bytes - pool->top.at) {
        if (pool->top.chunk + 1 == pool->count) grow(pool, bytes);
        pool->top.chunk++;
        pool->top.at = 0;
    }
    pool->top.at += bytes;
    return pool->chunks[pool->top.chunk].memory + pool->top.at - bytes;
}

Arena* pool_table(Pool* pool) { return &pool->table; }

void pool_take_table(Pool* pool) {
    for (int i = 0; i < pool->table.count; i++) {
        const ArenaEntry* e = &pool->table.entries[i];
        *e->slot = pool_take(pool, (size_t)e->count * element_bytes(e->element, BACKEND));
    }
    pool->table.count = 0;
}

PoolMark pool_mark(const Pool* pool) { return pool->top; }
void pool_release(Pool* pool, PoolMark mark) { pool->top = mark; }
