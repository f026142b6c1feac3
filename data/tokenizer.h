// Tokenizer: decodes tokens to text, for samples and for bits a byte, and does not encode text.
//
//     file          layout
//     x.bin         256 little-endian uint32 {20240328, version, number of tokens, end-of-text id, 0...}, then for each
//                   token its length and its bytes. A length is one byte in version 2, which is llm.c's, and a
//                   uint32 in version 3, for tokens of more than 255 bytes
//     ""            the tokens are bytes: ids 0..255, 256 = end of text
//     NULL          not known: no tokens, end of text -1
//
// scripts/prepare_text.py writes x.bin next to its shards. scripts/tokenizer_json.py makes x.bin from a tokenizer.json
// of Hugging Face. A token without bytes is an id that no text has, or in version 2 a token of more than 255 bytes.
#pragma once

#include "device/files.h"

enum {
    TOKENIZER_MAGIC = 20240328,   // the first number of a tokenizer file
    TOKENIZER_LIMIT = 256 << 20,  // bytes of a file; usual ones have 1 to 40 MiB
};

// A token's text. The bytes have no NUL at their end, and are stored in Tokenizer.data.
typedef struct Token {
    const char* bytes;
    int32_t length;
} Token;

typedef struct Tokenizer {
    char* data;     // all tokens' bytes
    int32_t size;   // number of tokens
    int32_t eot;    // end of text
    Token* tokens;  // by id; end of text has no bytes
} Tokenizer;

// Opens the tokenizer of `path`, one of the three rows above; tokenizer_close frees it. An invalid file ends the run:
// die() names the file and the reason.
Tokenizer* tokenizer_open(const char* path);
// The path of tokenizer.bin in `folder`, a model's folder and the value of --`option`. Empty: the folder has no
// tokenizer. Ends the run if the folder has a tokenizer.json alone.
Path tokenizer_of_folder(const char* option, const char* folder);
void tokenizer_close(Tokenizer* tokenizer);
// CRC-32 (zlib) of the tokens, as scripts/prepare_eval.py writes it: for each id a length byte and the bytes. End of
// text and tokens of more than 255 bytes have length 0, so a tokenizer has the same hash in both versions.
uint32_t tokenizer_hash(const Tokenizer* tokenizer);
// The first difference between two tokenizers, in fresh memory: size, end of text, or the bytes of a token, as
// tokenizer_hash takes them. NULL: both are the same.
char* tokenizer_difference(const Tokenizer* a, const Tokenizer* b);

// The bytes of a token (not NUL-terminated). NULL: the token's text is not known, because the id is out of range or has
// no bytes. End of text has length 0.
const char* tokenizer_decode(const Tokenizer* tokenizer, int32_t id, int* length);
