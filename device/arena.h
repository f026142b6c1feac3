// Memory as a table. All buffers of a purpose are listed first, then allocated at once. --dry-run prints the same table
// for either backend. So prediction and allocation cannot differ.
//
//   arena_init       purpose "activations kept", backend
//   ARENA            "residual"  floatX  N * C   -> &block->residual     a line for each buffer
//   ARENA            "rstd"      real    N       -> &block->rstd
//   arena_allocate   one allocation; the address of each buffer is stored where its line points
#pragma once

#include <assert.h>

#include "device/types.h"

typedef enum { ELEMENT_X, ELEMENT_REAL, ELEMENT_BF16, ELEMENT_I32, ELEMENT_I64, ELEMENT_BYTE } Element;

// Bytes of one element on a backend (BACKEND_CPU or BACKEND_CUDA). floatX: bf16 on CUDA, else real.
size_t element_bytes(Element element, Backend backend);

typedef struct ArenaEntry {
    const char* name;
    Element element;
    int64_t count;
    int per_token;  // 1: grows with the tokens of a micro-batch (--dry-run divides by them)
    void** slot;    // receives the address; NULL for a buffer that is only listed and allocated elsewhere
} ArenaEntry;

typedef struct Arena {
    const char* purpose;
    Backend backend;
    int count, capacity;
    ArenaEntry* entries;
    char* memory;
} Arena;

void arena_init(Arena* arena, const char* purpose, Backend backend);
// Adds a buffer of `count` elements. arena_allocate sets *slot, unless slot is NULL.
void arena_add(Arena* arena, const char* name, Element element, int64_t count, int per_token, void** slot);
// Bytes of one element in this build, as a constant. ARENA does not check ELEMENT_BYTE, because structs use it too.
#define ELEMENT_SIZE(element)                                                                                          \
    ((element) == ELEMENT_X      ? sizeof(floatX)                                                                      \
     : (element) == ELEMENT_REAL ? sizeof(real)                                                                        \
     : (element) == ELEMENT_BF16 ? 2                                                                                   \
     : (element) == ELEMENT_I32  ? sizeof(int32_t)                                                                     \
                                 : sizeof(int64_t))
// arena_add with the address of a typed pointer. An element of another size is an error of compilation.
#define ARENA(arena, name, element, count, per_token, pointer)                                                         \
    do {                                                                                                               \
        static_assert((element) == ELEMENT_BYTE || sizeof(**(pointer)) == ELEMENT_SIZE(element), "element's size");    \
        arena_add(arena, name, element, count, per_token, (void**)(pointer));                                          \
    } while (0)

size_t arena_bytes(const Arena* arena);  // of all buffers, each rounded up to 256 bytes
// Allocates all buffers as one zeroed block of device memory and sets every slot; without memory the run ends.
void arena_allocate(Arena* arena);
void arena_free(Arena* arena);
