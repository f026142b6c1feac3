// The whole file stays in memory, and the tokens point into it. A second table of them, sorted by length and bytes, is
// what encoding searches.
#include "data/tokenizer.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "device/files.h"

enum { MAGIC = 20240328, VERSION = 2, HEADER_BYTES = 1024, MAX_TOKENS = 1 << 24 };
static const size_t LIMIT = (size_t)1 << 30;  // bytes; those in use have some MiB

typedef struct Token {
    const char* bytes;
    int32_t length;
    int32_t id;
} Token;

struct Tokenizer {
    char* data;  // all tokens' bytes
    int32_t size;
    int32_t eot;
    Token* tokens;  // by id
    Token* sorted;  // by length, then bytes: what encode searches. Without empty tokens and end of text.
    int32_t sorted_count;
    int32_t longest;
};

// By length, then by bytes.
static int by_bytes(const void* a, const void* b) {
    const Token *x = (const Token*)a, *y = (const Token*)b;
    if (x->length != y->length) return x->length < y->length ? -1 : 1;
    return memcmp(x->bytes, y->bytes, (size_t)x->length);
}

// Fills the table that encoding searches.
static void build_sorted(Tokenizer* t) {
    t->sorted = (Token*)host_alloc((size_t)t->size * sizeof(Token));
    int32_t n = 0, unique = 0;
    for (int32_t id = 0; id < t->size; id++)
        if (t->tokens[id].length > 0) t->sorted[n++] = t->tokens[id];
    qsort(t->sorted, (size_t)n, sizeof(Token), by_bytes);

    // Of tokens with the same bytes the lowest id stays.
    for (int32_t i = 0; i < n; i++) {
        const Token* token = &t->sorted[i];
        if (unique && by_bytes(&t->sorted[unique - 1], token) == 0)
            t->sorted[unique - 1].id = (int32_t)min_i64(t->sorted[unique - 1].id, token->id);
        else
            t->sorted[unique++] = *token;
    }
    t->sorted_count = unique;
    t->longest = unique ? t->sorted[unique - 1].length : 0;
}

// Token i is byte i, and 256 is end of text.
static Tokenizer* open_bytes(void) {
    Tokenizer* t = (Tokenizer*)host_alloc(sizeof(Tokenizer));
    t->size = 257;
    t->eot = 256;
    t->data = (char*)host_alloc(257);
    t->tokens = (Token*)host_alloc(257 * sizeof(Token));
    for (int i = 0; i < 257; i++) {
        Token token = {.bytes = t->data + i, .length = i < 256, .id = i};
        t->data[i] = (char)(unsigned char)i;
        t->tokens[i] = token;
    }
    build_sorted(t);
    return t;
}

// The first four numbers: magic, version, how many tokens, and which of them ends a text.
static void check_header(const char* path, const uint32_t header[4]) {
    if (header[0] != MAGIC)
        die(EXIT_FAILED,
            "--tokenizer: %s: byte 0: magic number %u is not %d: not a tokenizer file; scripts/prepare_text.py writes "
            "one beside the shards",
            path, header[0], MAGIC);
    if (header[1] != VERSION)
        die(EXIT_FAILED, "--tokenizer: %s: byte 4: version %u, only %d is known", path, header[1], VERSION);
    if (header[2] == 0 || header[2] > MAX_TOKENS)
        die(EXIT_FAILED, "--tokenizer: %s: byte 8: %u tokens; a tokenizer has 1 to %d", path, header[2], MAX_TOKENS);
    if (header[3] >= header[2])
        die(EXIT_FAILED, "--tokenizer: %s: byte 12: end of text has id %u, but there are only %u tokens", path,
            header[3], header[2]);
}

Tokenizer* tokenizer_open(const char* path) {
    if (path[0] == 0) return open_bytes();
    Tokenizer* t = (Tokenizer*)host_alloc(sizeof(Tokenizer));
    size_t size, at = HEADER_BYTES;
    t->data = read_file(path, LIMIT, &size);
    if (!t->data) die(EXIT_FAILED, "--tokenizer: %s: cannot read: %s", path, file_error(errno));
    if (size < HEADER_BYTES)
        die(EXIT_FAILED, "--tokenizer: %s: byte %zu: the file ends inside the header of %d bytes", path, size,
            HEADER_BYTES);

    // Its header: magic number, version, tokens, end of text.
    uint32_t header[4];
    memcpy(header, t->data, sizeof(header));
    check_header(path, header);
    t->size = (int32_t)header[2];
    t->eot = (int32_t)header[3];

    // Its tokens, a length and so many bytes each. There is room for as many as the file can hold, whatever it claims:
    // a token takes a byte at least.
    size_t most = (size_t)min_i64(t->size, (int64_t)(size - HEADER_BYTES));
    t->tokens = (Token*)host_alloc(most * sizeof(Token));
    for (int32_t id = 0; id < t->size; id++) {
        size_t length = at < size ? (unsigned char)t->data[at] : 0;
        if (at >= size || length > size - at - 1)
            die(EXIT_FAILED, "--tokenizer: %s: byte %zu: the file ends inside token %d of %d: it was cut off", path,
                size, id, t->size);
        // End of text has a name in the file, but it is a mark and not text.
        Token token = {.bytes = t->data + at + 1, .length = id == t->eot ? 0 : (int32_t)length, .id = id};
        t->tokens[id] = token;
        at += 1 + length;
    }

    if (at != size)
        die(EXIT_FAILED, "--tokenizer: %s: byte %zu: %zu bytes after the last of %d tokens", path, at, size - at,
            t->size);
    build_sorted(t);
    return t;
}

void tokenizer_close(Tokenizer* tokenizer) {
    if (!tokenizer) return;
    free(tokenizer->data);
    free(tokenizer->tokens);
    free(tokenizer->sorted);
    free(tokenizer);
}

int32_t tokenizer_size(const Tokenizer* tokenizer) { return tokenizer->size; }
int32_t tokenizer_eot(const Tokenizer* tokenizer) { return tokenizer->eot; }

const char* tokenizer_decode(const Tokenizer* tokenizer, int32_t id, int* length) {
    bool known = id >= 0 && id < tokenizer->size;
    *length = known ? tokenizer->tokens[id].length : 0;
    return known ? tokenizer->tokens[id].bytes : NULL;
}

int64_t tokenizer_encode(const Tokenizer* tokenizer, const char* text, int32_t* ids, int64_t room) {
    size_t left = strlen(text);
    int64_t n = 0;
    while (left > 0 && n < room) {
        // The longest token that the rest of the text begins with.
        Token key = {text, tokenizer->longest, 0};
        if ((size_t)key.length > left) key.length = (int32_t)left;
        const Token* found = NULL;
        for (; key.length > 0 && !found; key.length--)
            found = (const Token*)bsearch(&key, tokenizer->sorted, (size_t)tokenizer->sorted_count, sizeof(Token),
                                          by_bytes);
        if (!found) return -1;
        ids[n++] = found->id;
        text += found->length;
        left -= (size_t)found->length;
    }
    return n;
}
