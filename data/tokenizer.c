// Tokenizer tables in llm.c's layout. The file's bytes stay in memory, and the tokens point into them. tokenizer.json
// is read by data/tokenizer_json.c.
#include "data/tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include "data/json.h"
#include "device/check.h"
#include "device/files.h"

enum { VERSION = 2, HEADER_BYTES = 1024, MAX_TOKENS = 1 << 24 };
static const size_t LIMIT = (size_t)1 << 30, CONFIG_LIMIT = (size_t)1 << 17;  // bytes; usual tables have some MiB

// The byte tokenizer: token i is byte i, and 256 is end of text.
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
    return t;
}

// The ids are of a tokenizer that is not known.
static Tokenizer* open_nothing(void) {
    Tokenizer* t = (Tokenizer*)host_alloc(sizeof(Tokenizer));
    t->eot = -1;
    return t;
}

// Checks the first four numbers: magic, version, number of tokens, end-of-text id.
static void check_header(const char* path, const uint32_t header[4]) {
    if (header[0] != TOKENIZER_MAGIC)
        die(EXIT_FAILED,
            "--tokenizer: %s: byte 0: magic number %u is not %d: not a tokenizer file; scripts/prepare_text.py writes "
            "one beside the shards",
            path, header[0], TOKENIZER_MAGIC);
    if (header[1] != VERSION)
        die(EXIT_FAILED, "--tokenizer: %s: byte 4: version %u, only %d is known", path, header[1], VERSION);
    if (header[2] == 0 || header[2] > MAX_TOKENS)
        die(EXIT_FAILED, "--tokenizer: %s: byte 8: %u tokens; a tokenizer has 1 to %d", path, header[2], MAX_TOKENS);
    if (header[3] >= header[2])
        die(EXIT_FAILED, "--tokenizer: %s: byte 12: end of text has id %u, but there are only %u tokens", path,
            header[3], header[2]);
}

// Reads a table in llm.c's layout.
static Tokenizer* open_table(const char* path) {
    // The file.
    Tokenizer* t = (Tokenizer*)host_alloc(sizeof(Tokenizer));
    size_t size, at = HEADER_BYTES;
    t->data = read_file(path, LIMIT, &size);
    if (!t->data) die(EXIT_FAILED, "--tokenizer: %s: cannot read: %s", path, file_error(errno));
    if (size < HEADER_BYTES)
        die(EXIT_FAILED, "--tokenizer: %s: byte %zu: the file ends inside the header of %d bytes", path, size,
            HEADER_BYTES);

    // The header: magic number, version, number of tokens, end-of-text id.
    // The file is little-endian, as is the machine (device/types.h checks it).
    uint32_t header[4];
    memcpy(header, t->data, sizeof(header));
    check_header(path, header);
    t->size = (int32_t)header[2];
    t->eot = (int32_t)header[3];

    // The tokens: one length byte and the token's bytes each. A token takes at least one byte, so the file's size, not
    // the header's count, bounds the allocation.
    size_t most = (size_t)min_i64(t->size, (int64_t)(size - HEADER_BYTES));
    t->tokens = (Token*)host_alloc(most * sizeof(Token));
    for (int32_t id = 0; id < t->size; id++) {
        size_t length = at < size ? (unsigned char)t->data[at] : 0;
        if (at >= size || length > size - at - 1)
            die(EXIT_FAILED, "--tokenizer: %s: byte %zu: the file ends inside token %d of %d: it was cut off", path,
                size, id, t->size);
        // End of text has a name in the file, but it decodes to no text.
        Token token = {.bytes = t->data + at + 1, .length = id == t->eot ? 0 : (int32_t)length, .id = id};
        t->tokens[id] = token;
        at += 1 + length;
    }

    // Nothing may follow.
    if (at != size)
        die(EXIT_FAILED, "--tokenizer: %s: byte %zu: %zu bytes after the last of %d tokens", path, at, size - at,
            t->size);
    return t;
}

// True if the path ends with `end`.
static bool ends_with(const char* path, const char* end) {
    size_t length = strlen(path), n = strlen(end);
    return length >= n && strcmp(path + length - n, end) == 0;
}

// Replaces a table by the tokenizer.json of the same name, if that exists. Both must have the same tokens.
static Tokenizer* open_beside(Tokenizer* table, const char* path) {
    // x.json next to x.bin.
    if (!ends_with(path, ".bin")) return table;
    Path json_path = path_of("%.*s.json", (int)(strlen(path) - strlen(".bin")), path);
    if (access(json_path.text, F_OK) != 0 && errno == ENOENT) return table;
    // It must have the table's tokens.
    Tokenizer* t = tokenizer_read_json(json_path.text, table->eot);
    char* differs = tokenizer_difference(table, t);
    if (differs)
        die(EXIT_FAILED, "--tokenizer: %s and %s beside it must be of one tokenizer: %s", path, json_path.text,
            differs);

    // tokenizer.json also has the bytes of tokens that are too long for a table.
    tokenizer_close(table);
    return t;
}

// Reads a tokenizer.json. That of a model's folder has its end of text in config.json, the first of several.
static Tokenizer* open_json(const char* path) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    Path config = path_of("%.*sconfig.json", (int)(name - path), path);
    size_t size;
    char* text = strcmp(name, "tokenizer.json") == 0 ? read_file(config.text, CONFIG_LIMIT, &size) : NULL;
    Json* json = text ? json_parse(text, size, NULL, 0) : NULL;
    const Json* eot = json_get(json, "eos_token_id");
    if (eot && eot->type == JSON_ARRAY) eot = eot->child;
    Tokenizer* t = tokenizer_read_json(path, eot && eot->type == JSON_NUMBER ? (int32_t)eot->integer : -1);
    if (t->eot >= t->size)
        die(EXIT_FAILED, "--tokenizer: %s has %d tokens, but end of text has id %d in %s", path, t->size, t->eot,
            config.text);
    json_free(json);
    free(text);
    return t;
}

Tokenizer* tokenizer_open(const char* path) {
    return !path                      ? open_nothing()
           : path[0] == 0             ? open_bytes()
           : ends_with(path, ".json") ? open_json(path)
                                      : open_beside(open_table(path), path);
}

void tokenizer_close(Tokenizer* tokenizer) {
    if (!tokenizer) return;
    free(tokenizer->data);
    free(tokenizer->tokens);
    free(tokenizer);
}

int32_t tokenizer_size(const Tokenizer* tokenizer) { return tokenizer->size; }
int32_t tokenizer_eot(const Tokenizer* tokenizer) { return tokenizer->eot; }

// The bytes that a table has of a token: none where there are more than 255.
static Bytef table_length(const Token* token) { return (Bytef)(token->length > 255 ? 0 : token->length); }

uint32_t tokenizer_hash(const Tokenizer* tokenizer) {
    uLong crc = 0;
    for (int32_t id = 0; id < tokenizer->size; id++) {
        const Bytef length = table_length(&tokenizer->tokens[id]);
        crc = crc32(crc, &length, 1);
        if (length) crc = crc32(crc, (const Bytef*)tokenizer->tokens[id].bytes, length);
    }
    return (uint32_t)crc;
}

char* tokenizer_difference(const Tokenizer* a, const Tokenizer* b) {
    if (a->size != b->size) return host_format("%d tokens, not %d", a->size, b->size);
    if (a->eot != b->eot) return host_format("end of text is token %d, not %d", a->eot, b->eot);
    for (int32_t id = 0; id < a->size; id++) {
        const Bytef length = table_length(&a->tokens[id]);
        if (length != table_length(&b->tokens[id]) || memcmp(a->tokens[id].bytes, b->tokens[id].bytes, length) != 0)
            return host_format("the bytes of token %d differ", id);
    }
    return NULL;
}

const char* tokenizer_decode(const Tokenizer* tokenizer, int32_t id, int* length) {
    bool known = id >= 0 && id < tokenizer->size;
    *length = known ? tokenizer->tokens[id].length : 0;
    return known ? tokenizer->tokens[id].bytes : NULL;
}
