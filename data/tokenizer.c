// The file's bytes stay in memory, and the tokens point into these bytes.
#include "data/tokenizer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include "device/check.h"

enum { BYTE_LENGTHS = 2, WORD_LENGTHS = 3, HEADER_BYTES = 1024, MAX_TOKENS = 1 << 24 };

// The byte tokenizer: token i is byte i, and 256 is end of text.
static void open_bytes(Tokenizer* t) {
    t->size = 257;
    t->eot = 256;
    t->data = (char*)host_alloc(257);
    t->tokens = (Token*)host_alloc(257 * sizeof(Token));
    for (int i = 0; i < 257; i++) {
        Token token = {.bytes = t->data + i, .length = i < 256};
        t->data[i] = (char)(unsigned char)i;
        t->tokens[i] = token;
    }
}

// Checks the first four numbers: magic, version, number of tokens, end-of-text id.
static void check_header(const char* path, const uint32_t header[4]) {
    if (header[0] != TOKENIZER_MAGIC)
        die(EXIT_FAILED,
            "--tokenizer: %s: byte 0: magic number %u is not %d: not a tokenizer file; scripts/prepare_text.py writes "
            "one beside the shards",
            path, header[0], TOKENIZER_MAGIC);
    if (header[1] != BYTE_LENGTHS && header[1] != WORD_LENGTHS)
        die(EXIT_FAILED, "--tokenizer: %s: byte 4: version %u, only %d and %d are known", path, header[1], BYTE_LENGTHS,
            WORD_LENGTHS);
    if (header[2] == 0 || header[2] > MAX_TOKENS)
        die(EXIT_FAILED, "--tokenizer: %s: byte 8: %u tokens; a tokenizer has 1 to %d", path, header[2], MAX_TOKENS);
    if (header[3] >= header[2])
        die(EXIT_FAILED, "--tokenizer: %s: byte 12: end of text has id %u, but there are only %u tokens", path,
            header[3], header[2]);
}

static void open_table(Tokenizer* t, const char* path) {
    // The file.
    size_t size, at = HEADER_BYTES;
    t->data = read_file(path, TOKENIZER_LIMIT, &size);
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

    // The tokens: a length and the token's bytes each. A token takes at least one byte, so the file's size, not the
    // header's count, bounds the allocation.
    const size_t width = header[1] == BYTE_LENGTHS ? 1 : sizeof(uint32_t);
    size_t most = (size_t)min_i64(t->size, (int64_t)((size - HEADER_BYTES) / width));
    t->tokens = (Token*)host_alloc(most * sizeof(Token));
    for (int32_t id = 0; id < t->size; id++) {
        uint32_t length = 0;
        if (size - at >= width) memcpy(&length, t->data + at, width);
        if (size - at < width + length)
            die(EXIT_FAILED, "--tokenizer: %s: byte %zu: the file ends inside token %d of %d: it was cut off", path,
                size, id, t->size);
        // End of text has a name in the file, but it decodes to no text.
        Token token = {.bytes = t->data + at + width, .length = id == t->eot ? 0 : (int32_t)length};
        t->tokens[id] = token;
        at += width + length;
    }

    // Nothing may follow.
    if (at != size)
        die(EXIT_FAILED, "--tokenizer: %s: byte %zu: %zu bytes after the last of %d tokens", path, at, size - at,
            t->size);
}

Tokenizer* tokenizer_open(const char* path) {
    const char* end = path ? strrchr(path, '.') : NULL;
    if (end && strcmp(end, ".json") == 0)
        die(EXIT_USAGE,
            "--tokenizer: %s is for transformers; train_moe reads the .bin of the same name, --tokenizer '%.*s.bin', "
            "which this makes: python3 scripts/tokenizer_json.py '%s'",
            path, (int)(end - path), path, path);
    Tokenizer* t = (Tokenizer*)host_alloc(sizeof(Tokenizer));
    t->eot = -1;
    if (path && *path) open_table(t, path);
    if (path && !*path) open_bytes(t);
    return t;
}

Path tokenizer_of_folder(const char* option, const char* folder) {
    Path table = path_of("%s/tokenizer.bin", folder), none = {""};
    if (access(table.text, F_OK) == 0) return table;
    if (access(path_of("%s/tokenizer.json", folder).text, F_OK) == 0)
        die(EXIT_USAGE,
            "--%s: %s has a tokenizer.json and no tokenizer.bin; this makes it: python3 scripts/tokenizer_json.py '%s'",
            option, folder, folder);
    return none;
}

void tokenizer_close(Tokenizer* tokenizer) {
    if (!tokenizer) return;
    free(tokenizer->data);
    free(tokenizer->tokens);
    free(tokenizer);
}

// The length that counts: version 2 has none of more than 255 bytes.
static Bytef hashed_length(const Token* token) { return (Bytef)(token->length > 255 ? 0 : token->length); }

uint32_t tokenizer_hash(const Tokenizer* tokenizer) {
    uLong crc = 0;
    for (int32_t id = 0; id < tokenizer->size; id++) {
        const Bytef length = hashed_length(&tokenizer->tokens[id]);
        crc = crc32(crc, &length, 1);
        if (length) crc = crc32(crc, (const Bytef*)tokenizer->tokens[id].bytes, length);
    }
    return (uint32_t)crc;
}

char* tokenizer_difference(const Tokenizer* a, const Tokenizer* b) {
    if (a->size != b->size) return host_format("%d tokens, not %d", a->size, b->size);
    if (a->eot != b->eot) return host_format("end of text is token %d, not %d", a->eot, b->eot);
    for (int32_t id = 0; id < a->size; id++) {
        const Bytef length = hashed_length(&a->tokens[id]);
        if (length != hashed_length(&b->tokens[id]) || memcmp(a->tokens[id].bytes, b->tokens[id].bytes, length) != 0)
            return host_format("the bytes of token %d differ", id);
    }
    return NULL;
}

const char* tokenizer_decode(const Tokenizer* tokenizer, int32_t id, int* length) {
    const Token* token = id >= 0 && id < tokenizer->size ? &tokenizer->tokens[id] : NULL;
    *length = token ? token->length : 0;
    return *length || (token && id == tokenizer->eot) ? token->bytes : NULL;
}
