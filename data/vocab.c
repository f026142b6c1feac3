// A vocabulary is sorted by length, then by bytes, and searched by bisection.
#include "data/vocab.h"

#include <stdlib.h>
#include <string.h>

#include "device/check.h"

// Compares by length, then by bytes.
static int by_bytes(const void* a, const void* b) {
    const Token *x = (const Token*)a, *y = (const Token*)b;
    if (x->length != y->length) return x->length < y->length ? -1 : 1;
    return memcmp(x->bytes, y->bytes, (size_t)x->length);
}

Vocab* vocab_new(const Token* tokens, int32_t n) {
    // Sort all tokens that are not empty.
    Vocab* v = (Vocab*)host_alloc(sizeof(Vocab));
    v->sorted = (Token*)host_alloc((size_t)n * sizeof(Token));
    int32_t filled = 0, unique = 0;
    for (int32_t i = 0; i < n; i++)
        if (tokens[i].length > 0) v->sorted[filled++] = tokens[i];
    qsort(v->sorted, (size_t)filled, sizeof(Token), by_bytes);

    // Remove repeated tokens; the lowest id remains.
    for (int32_t i = 0; i < filled; i++) {
        const Token* token = &v->sorted[i];
        if (unique && by_bytes(&v->sorted[unique - 1], token) == 0)
            v->sorted[unique - 1].id = (int32_t)min_i64(v->sorted[unique - 1].id, token->id);
        else
            v->sorted[unique++] = *token;
    }
    v->count = unique;
    v->repeats = unique < filled;
    v->longest = unique ? v->sorted[unique - 1].length : 0;
    return v;
}

void vocab_free(Vocab* vocab) {
    if (!vocab) return;
    free(vocab->sorted);
    free(vocab);
}

const Token* vocab_find(const Vocab* vocab, const char* bytes, size_t length) {
    if (length > (size_t)vocab->longest) return NULL;
    // The id takes no part in the comparison.
    Token key = {bytes, (int32_t)length, 0};
    return (const Token*)bsearch(&key, vocab->sorted, (size_t)vocab->count, sizeof(Token), by_bytes);
}

const Token* vocab_longest(const Vocab* vocab, const char* text, size_t length) {
    // Each length takes one bisection.
    const Token* found = NULL;
    if (length > (size_t)vocab->longest) length = (size_t)vocab->longest;
    for (; length > 0 && !found; length--) found = vocab_find(vocab, text, length);
    return found;
}
