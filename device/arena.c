// The table is filled first and allocated once. So all sizes are known before the allocation, and the address of a
// buffer is the sum of the sizes before it.
#include "device/arena.h"

#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "device/device.h"

size_t element_bytes(Element element, Backend backend) {
    // Indexed by Element, then by Backend.
    static const size_t bytes[][2] = {{sizeof(real), 2}, {sizeof(real), 4}, {2, 2}, {4, 4}, {8, 8}, {1, 1}};
    return bytes[element][backend];
}

void arena_init(Arena* arena, const char* purpose, Backend backend) {
    Arena empty = {.purpose = purpose, .backend = backend};
    *arena = empty;
}

void arena_add(Arena* arena, const char* name, Element element, int64_t count, int per_token, void** slot) {
    if (arena->count == arena->capacity) {
        arena->capacity = arena->capacity ? 2 * arena->capacity : 64;
        arena->entries = (ArenaEntry*)realloc(arena->entries, (size_t)arena->capacity * sizeof(ArenaEntry));
        if (!arena->entries) die(EXIT_FAILED, "out of host memory for the table of buffers");
    }
    ArenaEntry entry = {.name = name, .element = element, .count = count, .per_token = per_token, .slot = slot};
    arena->entries[arena->count++] = entry;
}

// The size of a buffer in the arena, rounded up so that the next buffer is aligned as well.
static size_t entry_bytes(const Arena* arena, int i) {
    const ArenaEntry* e = &arena->entries[i];
    return (size_t)round_up(e->count * (int64_t)element_bytes(e->element, arena->backend), 256);
}

size_t arena_bytes(const Arena* arena) {
    size_t bytes = 0;
    for (int i = 0; i < arena->count; i++) bytes += entry_bytes(arena, i);
    return bytes;
}

// The buffers are contiguous, in the order of the table.
void arena_allocate(Arena* arena) {
    ASSERT(arena->backend == BACKEND);
    arena->memory = (char*)device_alloc(arena_bytes(arena), arena->purpose);
    size_t at = 0;
    for (int i = 0; i < arena->count; i++) {
        if (arena->entries[i].slot) *arena->entries[i].slot = arena->memory + at;
        at += entry_bytes(arena, i);
    }
}

void arena_free(Arena* arena) {
    if (arena->memory) device_free(arena->memory);  // else it was only laid out
    free(arena->entries);
    memset(arena, 0, sizeof(*arena));
}
