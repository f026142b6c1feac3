// Reader of Hugging Face's tokenizer.json.
//
//   model          vocab: tokens and their ids
//   added_tokens   more tokens, or names for some of them
//   normalizer, pre_tokenizer, decoder   their types tell how the texts of tokens stand for bytes
//
// The file is parsed into a JSON tree, which is freed when all is read. Entries are the tokens with their texts in the
// file: first the vocabulary, then the added tokens. Byte-level BPE writes each byte as a printable character; the
// tokens get the bytes back.
#include "data/tokenizer.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "data/utf8.h"
#include "device/check.h"
#include "device/files.h"

enum { MAX_TOKENS = 1 << 24 };
// In bytes: usual files have 1 to 40 MiB, and each byte may take 32 in memory.
static const size_t LIMIT = (size_t)256 << 20;

// Usual names of end of text, the same list as in scripts/prepare_text.py.
static const char* const EOT_NAMES[] = {
    "<|endoftext|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]",
    "<|im_end|>"};

// The state while a file is read. The entries point into the JSON tree, so they end with it.
typedef struct Reader {
    const char* path;
    size_t file_bytes;
    const Json *model, *added;
    Token* entries;              // texts as they are in the file
    int32_t model_count, count;  // entries of the model; all entries, with the added tokens
    Token* names;                // the model's entries, sorted by text, then by id
    Tokenizer* t;
} Reader;

// True if the tree has a part of this type, at any depth.
static bool has_type(const Json* json, const char* type) {
    if (!json) return false;
    const char* own = json_text(json, "type");
    if (own && strcmp(own, type) == 0) return true;
    bool found = false;
    for (const Json* child = json->child; child && !found; child = child->next) found = has_type(child, type);
    return found;
}

// ---- Tokens

// The byte that a character encodes in byte-level BPE, -1 if none. A printable byte is its own character; the other
// bytes are the characters from 256 on.
static int byte_of(uint32_t code) {
    bool printable = (code >= 0x21 && code <= 0x7e) || (code >= 0xa1 && code <= 0xff && code != 0xad);
    if (printable) return (int)code;
    // The other 68 bytes are numbered from 0: 0x00-0x20, then 0x7f-0xa0, then 0xad.
    const int n = (int)code - 0x100;
    if (n < 0 || n > 67) return -1;
    if (n <= 0x20) return n;
    return n <= 66 ? n - 0x21 + 0x7f : 0xad;
}

// Decodes a byte-level token; returns the number of bytes, -1 if it is not byte-level. The text is never shorter than
// the bytes.
static int32_t to_bytes(const char* text, char* out) {
    int32_t n = 0;
    for (uint32_t code; *text;) {
        text += utf8_read(text, strlen(text), &code);
        int byte = byte_of(code);
        if (byte < 0) return -1;
        out[n++] = (char)byte;
    }
    return n;
}

// Decodes a SentencePiece token: <0x0A> is a byte, U+2581 a space. Returns the number of bytes.
static int32_t to_piece(const char* text, char* out) {
    const bool is_byte = strlen(text) == 6 && strncmp(text, "<0x", 3) == 0 && text[5] == '>';
    if (is_byte && isxdigit((unsigned char)text[3]) && isxdigit((unsigned char)text[4])) {
        *out = (char)strtoul(text + 3, NULL, 16);
        return 1;
    }
    int32_t n = 0;
    // The mark of a space has 3 bytes and becomes 1, so the output is never longer than the text.
    while (*text) {
        bool space = strncmp(text, "\u2581", 3) == 0;
        out[n++] = space ? ' ' : *text;
        text += space ? 3 : 1;
    }
    return n;
}

// By text, then by id.
static int by_text(const void* a, const void* b) {
    const Token *x = (const Token*)a, *y = (const Token*)b;
    const int order = strcmp(x->bytes, y->bytes);
    return order ? order : (x->id > y->id) - (x->id < y->id);
}

// The model's entry with this text, of several the one with the lowest id; NULL if none.
static const Token* find_name(const Reader* r, const char* text) {
    int32_t low = 0, high = r->model_count;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (strcmp(r->names[middle].bytes, text) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low < r->model_count && strcmp(r->names[low].bytes, text) == 0 ? &r->names[low] : NULL;
}

// Appends an entry after checks of its text and id.
static void add_entry(Reader* r, const char* text, double id) {
    if (!text) die(EXIT_FAILED, "--tokenizer: %s: a token without text, after %d others", r->path, r->count);
    // A token takes at least one byte of the file, so the file's size bounds the ids.
    if (!(id >= 0 && id < MAX_TOKENS && id < (double)r->file_bytes && id == (int32_t)id))
        die(EXIT_FAILED, "--tokenizer: %s: token '%s': the id %g is not one of a file of %zu bytes (at most %d)",
            r->path, text, id, r->file_bytes, MAX_TOKENS - 1);
    Token entry = {text, (int32_t)strlen(text), (int32_t)id};
    r->entries[r->count++] = entry;
    if (entry.id >= r->t->size) r->t->size = entry.id + 1;
}

// Reads the vocabulary and the added tokens. A vocabulary is {"text": id} (BPE, WordPiece, WordLevel), or a list of
// ["text", score] in the order of ids (Unigram).
static void read_entries(Reader* r) {
    const Json* vocab = json_get(r->model, "vocab");
    if (!vocab || !vocab->child) die(EXIT_FAILED, "--tokenizer: %s: not a tokenizer.json: no model.vocab", r->path);
    r->entries = (Token*)host_alloc((size_t)(json_count(vocab) + json_count(r->added)) * sizeof(Token));
    for (const Json* j = vocab->child; j; j = j->next) {
        if (vocab->type == JSON_OBJECT)
            add_entry(r, j->key, j->type == JSON_NUMBER ? j->number : -1);
        else
            add_entry(r, j->child && j->child->type == JSON_STRING ? j->child->text : NULL, r->count);
    }

    // The added tokens follow. They may repeat a token of the vocabulary.
    r->model_count = r->count;
    for (const Json* j = r->added ? r->added->child : NULL; j; j = j->next)
        add_entry(r, json_text(j, "content"), (double)json_int(j, "id", -1));
    r->names = (Token*)host_alloc((size_t)r->model_count * sizeof(Token));
    memcpy(r->names, r->entries, (size_t)r->model_count * sizeof(Token));
    qsort(r->names, (size_t)r->model_count, sizeof(Token), by_text);
}

// Decodes all entries to the tokens' bytes.
static void read_tokens(Reader* r, const Json* file) {
    // The encoding of the texts: byte-level, SentencePiece, or plain.
    Tokenizer* t = r->t;
    const Json* fallback = json_get(r->model, "byte_fallback");
    bool byte_level = false, pieces = fallback && fallback->type == JSON_BOOL && fallback->number != 0;
    const char* const parts[] = {"normalizer", "pre_tokenizer", "decoder"};
    for (int i = 0; i < 3; i++) {
        const Json* part = json_get(file, parts[i]);
        byte_level |= has_type(part, "ByteLevel");
        pieces |= has_type(part, "ByteFallback") || has_type(part, "Metaspace");
    }

    // Added tokens are plain text. They come last because they may name a token of the vocabulary.
    t->tokens = (Token*)host_alloc((size_t)t->size * sizeof(Token));
    char* to = t->data = (char*)host_alloc(r->file_bytes);
    for (int32_t i = 0; i < r->count; i++) {
        const Token* entry = &r->entries[i];
        Token* token = &t->tokens[entry->id];
        bool added = i >= r->model_count;
        const Token* same = added ? find_name(r, entry->bytes) : NULL;
        // An id has one token, and a token has one id. Only an added token may repeat one of the vocabulary.
        if ((token->bytes && !same) || (same && same->id != entry->id))
            die(EXIT_FAILED,
                "--tokenizer: %s: token '%s', id %d: the id is another token's, or the token has another id", r->path,
                entry->bytes, entry->id);
        token->id = entry->id;
        token->bytes = to;
        // A byte-level entry with other characters falls through to plain text.
        token->length = byte_level && !added ? to_bytes(entry->bytes, to) : -1;
        // SentencePiece's byte tokens and runs of spaces may be added tokens too.
        if (token->length < 0 && pieces && (!added || same)) token->length = to_piece(entry->bytes, to);
        if (token->length < 0) memcpy(to, entry->bytes, (size_t)(token->length = entry->length));
        to += token->length;
    }
    for (int32_t id = 0; id < t->size; id++)
        if (!t->tokens[id].bytes) t->tokens[id].bytes = to;  // ids may have holes
}

// Finds end of text, which decodes to no bytes.
static void read_eot(Reader* r, int32_t eot) {
    for (size_t i = 0; eot < 0 && i < sizeof(EOT_NAMES) / sizeof(EOT_NAMES[0]); i++)
        for (int32_t j = 0; eot < 0 && j < r->count; j++)
            if (strcmp(r->entries[j].bytes, EOT_NAMES[i]) == 0) eot = r->entries[j].id;
    if (eot < 0)
        die(EXIT_FAILED,
            "--tokenizer: %s: no token has a usual name of end of text (%s, %s, %s, ...); scripts/prepare_text.py "
            "--eot NAME writes a table that says which it is",
            r->path, EOT_NAMES[0], EOT_NAMES[2], EOT_NAMES[3]);
    // An id from the table of the same name may be too large for this file: open_beside then refuses the sizes.
    if (eot < r->t->size) r->t->tokens[eot].length = 0;
    r->t->eot = eot;
}

Tokenizer* tokenizer_read_json(const char* path, int32_t eot) {
    // Parse the file.
    char error[192];
    Reader r = {.path = path, .t = (Tokenizer*)host_alloc(sizeof(Tokenizer))};
    char* text = read_file(path, LIMIT, &r.file_bytes);
    if (!text) die(EXIT_FAILED, "--tokenizer: %s: cannot read: %s", path, file_error(errno));
    Json* file = json_parse(text, r.file_bytes, error, sizeof(error));
    if (!file) die(EXIT_FAILED, "--tokenizer: %s: not JSON: %s", path, error);
    free(text);

    // Tokens, then end of text.
    r.model = json_get(file, "model");
    r.added = json_get(file, "added_tokens");
    read_entries(&r);
    read_tokens(&r, file);
    read_eot(&r, eot);

    // The tokens have their own memory, so the tree can be freed.
    free(r.entries);
    free(r.names);
    json_free(file);
    return r.t;
}
