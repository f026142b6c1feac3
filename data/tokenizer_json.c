// Reader of Hugging Face's tokenizer.json.
//
//   model          vocab (tokens and their ids), merges (by rank), ignore_merges (a word that is a token stays whole)
//   added_tokens   more tokens, or names for some of them
//   pre_tokenizer  the patterns that cut text into words
//
// Decoding works with the tokens of any tokenizer. Encoding needs byte-level BPE; for any other file `refused` is the
// reason. The post_processor is ignored: it frames whole texts with special tokens, and a prompt is not a whole text.
//
// The file is parsed into a JSON tree, which is freed when all is read. Entries are the tokens with their texts in the
// file: first the vocabulary, which the merges refer to, then the added tokens. Byte-level BPE writes each byte as a
// printable character; the tokens get the bytes back.
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

// GPT-2's pre-tokenizer pattern, the default of ByteLevel.
static const char GPT2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

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
    Token* byte_level;           // the decoded bytes of a byte-level model's entries; empty for others
    int32_t model_count, count;  // entries of the model; all entries, with the added tokens
    Vocab* names;                // the model's entries, by text
    Tokenizer* t;
} Reader;

// The type of a part, "none" if it has no type.
static const char* type_of(const Json* json) {
    const char* type = json_text(json, "type");
    return type ? type : "none";
}

// A Boolean option of a part. A value that is no Boolean counts as absent.
static bool flag(const Json* json, const char* key, bool if_absent) {
    const Json* member = json_get(json, key);
    return member && member->type == JSON_BOOL ? member->number != 0 : if_absent;
}

// True if the tree has a part of this type, at any depth.
static bool has_type(const Json* json, const char* type) {
    if (!json) return false;
    if (strcmp(type_of(json), type) == 0) return true;
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
    r->names = vocab_new(r->entries, r->model_count);
    r->byte_level = (Token*)host_alloc((size_t)r->model_count * sizeof(Token));
}

// Decodes all entries to the tokens' bytes.
static void read_tokens(Reader* r, const Json* file) {
    // The encoding of the texts: byte-level, SentencePiece, or plain.
    Tokenizer* t = r->t;
    bool byte_level = false, pieces = flag(r->model, "byte_fallback", false);
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
        const Token* same = added ? vocab_find(r->names, entry->bytes, (size_t)entry->length) : NULL;
        // An id has one token, and a token has one id. Only an added token may repeat one of the vocabulary.
        if ((token->bytes && !same) || (same && same->id != entry->id))
            die(EXIT_FAILED,
                "--tokenizer: %s: token '%s', id %d: the id is another token's, or the token has another id", r->path,
                entry->bytes, entry->id);
        token->id = entry->id;
        token->bytes = to;
        // A byte-level entry with other characters falls through to plain text.
        token->length = byte_level && !added ? to_bytes(entry->bytes, to) : -1;
        if (token->length >= 0) r->byte_level[i] = *token;
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

// ---- Tables for encoding. Each function returns NULL, or the unsupported feature in fresh memory.

// A Split: one pattern and its behavior.
static char* read_cut(Bpe* bpe, const char* pattern, const char* behavior, bool inverted) {
    char error[192];
    // Isolated keeps matches and the rest as words. Removed drops the matches, or with `inverted` the rest.
    bool isolated = strcmp(behavior, "Isolated") == 0;
    if (!isolated && strcmp(behavior, "Removed") != 0)
        return host_format("pre_tokenizer with the behavior %.40s", behavior);
    if (bpe->cut_count == MOST_CUTS) return host_format("pre_tokenizer with more than %d patterns", MOST_CUTS);
    Pattern* parsed = pattern_new(pattern, error, sizeof(error));
    if (!parsed) return host_format("the pattern '%.200s' in pre_tokenizer: %s", pattern, error);
    Cut cut = {parsed, isolated || inverted, isolated || !inverted};
    bpe->cuts[bpe->cut_count++] = cut;
    return NULL;
}

// A pre-tokenizer, or a sequence of them that ends with ByteLevel. *bytes is set once ByteLevel was read.
static char* read_cuts(Bpe* bpe, const Json* json, bool* bytes) {
    const char *type = type_of(json), *pattern = json_text(json_get(json, "pattern"), "Regex");
    if (strcmp(type, "Sequence") == 0) {
        const Json* list = json_get(json, "pretokenizers");
        char* refused = NULL;
        for (const Json* j = list ? list->child : NULL; j && !refused; j = j->next) refused = read_cuts(bpe, j, bytes);
        return refused;
    }

    // A single part. ByteLevel must be the last: after it, the text would be in its own alphabet.
    if (*bytes) return host_format("pre_tokenizer %.40s behind ByteLevel", type);
    if (strcmp(type, "Split") == 0) {
        const char* behavior = json_text(json, "behavior");
        if (!pattern || !behavior) return host_strdup("a Split in pre_tokenizer without a Regex and a behavior");
        return read_cut(bpe, pattern, behavior, flag(json, "invert", false));
    }
    if (strcmp(type, "Digits") == 0)
        return read_cut(bpe, flag(json, "individual_digits", false) ? "\\p{N}" : "\\p{N}+", "Isolated", false);
    if (strcmp(type, "ByteLevel") != 0) return host_format("pre_tokenizer %.40s", type);
    if (flag(json, "add_prefix_space", true)) return host_strdup("pre_tokenizer ByteLevel with add_prefix_space");
    *bytes = true;
    return flag(json, "use_regex", true) ? read_cut(bpe, GPT2, "Isolated", false) : NULL;
}

// The normalizer: none, or NFC.
static char* read_normalizer(Bpe* bpe, const Json* json) {
    if (!json || json->type == JSON_NULL) return NULL;
    const char* type = type_of(json);
    if (strcmp(type, "Sequence") == 0) {
        const Json* list = json_get(json, "normalizers");
        char* refused = NULL;
        for (const Json* j = list ? list->child : NULL; j && !refused; j = j->next) refused = read_normalizer(bpe, j);
        return refused;
    }
    if (strcmp(type, "NFC") != 0) return host_format("normalizer %.40s", type);
    bpe->nfc = true;
    return NULL;
}

// The merges, by rank. A merge is one string with a space between its two tokens, or a list of two strings.
static char* read_merges(Reader* r, const Json* merges) {
    int32_t rank = 0;
    for (const Json* j = merges ? merges->child : NULL; j; j = j->next, rank++) {
        // The two texts.
        const char *left = j->text, *right = j->text ? strchr(j->text, ' ') : NULL;
        size_t left_length = right ? (size_t)(right - left) : 0;
        if (right) right++;
        if (j->type == JSON_ARRAY && json_count(j) == 2 && j->child->text && j->child->next->text) {
            left = j->child->text;
            left_length = strlen(left);
            right = j->child->next->text;
        }
        if (!right) return host_format("merge %d, which does not name two tokens", rank);

        // Their tokens, and the token of both together.
        char* both = host_format("%.*s%s", (int)left_length, left, right);
        const Token *a = vocab_find(r->names, left, left_length), *b = vocab_find(r->names, right, strlen(right)),
                    *joined = vocab_find(r->names, both, strlen(both));
        free(both);
        if (!a || !b || !joined)
            return host_format("merge %d, '%.*s' and '%.40s', with a token that is not in the vocabulary", rank,
                               (int)min_i64((int64_t)left_length, 40), left, right);
        bpe_merge(r->t->bpe, a->id, b->id, rank, joined->id);
    }
    return NULL;
}

// Added tokens in two rounds: first those that are matched in raw text, then those in normalized text.
static char* read_added(Reader* r) {
    Token* list = (Token*)host_alloc((size_t)(r->count - r->model_count) * sizeof(Token));
    char* refused = NULL;
    for (int round = 0; round < 2; round++) {
        // The list of this round: `normalized` selects the round, and its default is the opposite of `special`.
        int32_t n = 0, i = r->model_count;
        for (const Json* j = r->added ? r->added->child : NULL; j && !refused; j = j->next, i++) {
            bool special = flag(j, "special", false);
            if (flag(j, "normalized", !special) != (round == 1)) continue;
            // The token's own bytes, which outlive the JSON tree.
            list[n] = r->t->tokens[r->entries[i].id];
            if (special) list[n].id = SPECIAL;
            n++;
            if (!special && (flag(j, "lstrip", false) || flag(j, "rstrip", false) || flag(j, "single_word", false)))
                refused =
                    host_format("the added token '%.40s' with lstrip, rstrip or single_word", r->entries[i].bytes);
        }
        r->t->bpe->added[round] = vocab_new(list, n);
    }
    free(list);
    return refused;
}

// The model: checks that its type and options are supported, then sets the byte tokens and whole words.
static char* read_model(Reader* r) {
    // Type and options.
    const Json* model = r->model;
    Bpe* bpe = r->t->bpe;
    const char *prefix = json_text(model, "continuing_subword_prefix"),
               *suffix = json_text(model, "end_of_word_suffix");
    const Json* dropout = json_get(model, "dropout");
    bool untyped = !json_get(model, "type") && json_get(model, "merges");  // as early files are
    if (strcmp(type_of(model), "BPE") != 0 && !untyped)
        return host_format("model %.40s: it must be BPE", type_of(model));
    if (flag(model, "byte_fallback", false)) return host_strdup("model.byte_fallback");
    if (dropout && dropout->number != 0) return host_strdup("model.dropout");
    if (prefix && *prefix) return host_strdup("model.continuing_subword_prefix");
    if (suffix && *suffix) return host_strdup("model.end_of_word_suffix");
    if (r->names->repeats) return host_strdup("model.vocab with a token that is there twice");

    // The token of each byte, and the words that ignore the merges.
    for (int32_t i = 0; i < r->model_count; i++)
        if (r->byte_level[i].length == 1) bpe->bytes[(unsigned char)*r->byte_level[i].bytes] = r->byte_level[i].id;
    if (flag(model, "ignore_merges", false)) bpe->whole = vocab_new(r->byte_level, r->model_count);
    return NULL;
}

// All tables of byte-level BPE.
static char* read_bpe(Reader* r, const Json* file) {
    const Json* merges = json_get(r->model, "merges");
    bool bytes = false;
    // The first unsupported feature is the reason. The tables may then be incomplete, and the encoder is not used.
    r->t->bpe = bpe_new(json_count(merges));
    char* refused = read_model(r);
    if (!refused) refused = read_normalizer(r->t->bpe, json_get(file, "normalizer"));
    if (!refused) refused = read_cuts(r->t->bpe, json_get(file, "pre_tokenizer"), &bytes);
    if (!refused && !bytes) refused = host_strdup("pre_tokenizer without ByteLevel");
    if (!refused) refused = read_added(r);
    if (!refused) refused = read_merges(r, merges);
    return refused;
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

    // Tokens for decoding, then BPE for encoding, then end of text.
    r.model = json_get(file, "model");
    r.added = json_get(file, "added_tokens");
    read_entries(&r);
    read_tokens(&r, file);
    char* refused = read_bpe(&r, file);
    if (refused) r.t->refused = host_format("%s: encoding of text does not support %s", path, refused);
    read_eot(&r, eot);

    // The tokens have their own memory, so the tree can be freed.
    free(refused);
    free(r.entries);
    free(r.byte_level);
    vocab_free(r.names);
    json_free(file);
    return r.t;
}
