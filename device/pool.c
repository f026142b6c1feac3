#include "device/pool.h"

#include <stdlib.h>

#include "device/check.h"
#include "device/device.h"

// Heights 0 to first - 1 are in the caller's memory, heights from `first` on in `range`. top: where the next buffer
// begins. table: buffers to take next (pool_take_table).
struct Pool {
    const char* purpose;
    char *memory, *range;
    size_t first, mapped, most;  // bytes: the caller's, those of range that have memory, all of range
    size_t top, warned;
    double load;
    Arena table;
};

static double gib(size_t bytes) { return (double)bytes / 0x1p30; }

// Memory for `need` bytes of the range and, if it is there, a twentieth more: the next steps often need a little more.
static void grow(Pool* pool, size_t need) {
    ASSERT(need <= pool->most);
    const size_t sizes[] = {min_size(device_pages(need + need / 20), pool->most), device_pages(need)};
    for (int i = 0; i < 2; i++) {
        if (!device_map(pool->range + pool->mapped, sizes[i] - pool->mapped)) continue;
        pool->mapped = sizes[i];
        const size_t all = pool->first + pool->mapped;
        if (all < 2 * pool->warned) return;
        warn_here(
            "the %s grew from %.3f to %.3f GiB: this rank has %.2f times its share of routed tokens; --capacity sets "
            "the size at the start",
            pool->purpose, gib(pool->warned), gib(all), pool->load);
        pool->warned = all;
        return;
    }
    die(EXIT_FAILED,
        "out of memory: the %s has %.2f GiB and needs %.2f, %.2f are free: this rank has %.2f times its share of "
        "routed tokens; use --resume with a smaller --batch, or more of --shard and --recompute",
        pool->purpose, gib(pool->first + pool->mapped), gib(pool->first + need), gib(device_free_memory(1)),
        pool->load);
}

Pool* pool_create(const char* purpose, void* memory, size_t bytes, size_t most) {
    Pool* pool = (Pool*)host_alloc(sizeof(Pool));
    pool->purpose = purpose;
    pool->most = device_pages(most + 1);
    pool->range = device_reserve(pool->most);
    arena_init(&pool->table, purpose, BACKEND);
    if (memory)
        pool_move(pool, memory, bytes);
    else if (device_map(pool->range, device_pages(bytes)))
        pool->mapped = device_pages(bytes);
    else
        die(EXIT_FAILED, "out of memory: %.2f GiB for the %s, %.2f are free; --dry-run shows what needs how much",
            gib(bytes), purpose, gib(device_free_memory(1)));
    pool->warned = pool->first + pool->mapped;
    return pool;
}

void pool_move(Pool* pool, void* memory, size_t bytes) {
    pool->memory = (char*)memory;
    pool->first = bytes;
    pool->top = 0;
}

void pool_destroy(Pool* pool) {
    device_unreserve(pool->range, pool->mapped, pool->most);
    arena_free(&pool->table);
    free(pool);
}

void* pool_take(Pool* pool, size_t bytes) {
    bytes = (bytes + 255) / 256 * 256;
    // A buffer is in the caller's memory or in the range.
    size_t at = pool->top + bytes <= pool->first ? pool->top : max_size(pool->top, pool->first);
    pool->top = at + bytes;
    if (at < pool->first) return pool->memory + at;
    at -= pool->first;
    if (at + bytes > pool->mapped) grow(pool, at + bytes);
    return pool->range + at;
}

void pool_load(Pool* pool, double load) { pool->load = load; }

Arena* pool_table(Pool* pool) { return &pool->table; }

void pool_take_table(Pool* pool) {
    for (int i = 0; i < pool->table.count; i++) {
        const ArenaEntry* e = &pool->table.entries[i];
        *e->slot = pool_take(pool, (size_t)e->count * element_bytes(e->element, BACKEND));
    }
    pool->table.count = 0;
}

size_t pool_mark(const Pool* pool) { return pool->top; }
void pool_release(Pool* pool, size_t mark) { pool->top = mark; }
