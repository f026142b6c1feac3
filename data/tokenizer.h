// Tokenizer: decodes tokens to text, for samples and for bits a byte. It does not encode text.
//
//     file          layout
//     x.bin         llm.c's table: 256 little-endian uint32 {20240328, 2, number of tokens, end-of-text id, 0...}, then
//                   for each token one length byte and its bytes
//     x.json        Hugging Face's tokenizer.json. Its end of text is the token with a usual name; of a file with just
//                   this name eos_token_id of config.json beside it
//     ""            the tokens are bytes: ids 0..255, 256 = end of text
//     NULL          not known: no tokens, end of text -1
//
// If x.json exists in the folder of x.bin, it is read instead of x.bin, and must have the same tokens.
#pragma once

#include "device/types.h"

enum { TOKENIZER_MAGIC = 20240328 };  // the first number of a tokenizer file

// A token's text and id. The bytes have no NUL at their end, and are stored in Tokenizer.data.
typedef struct Token {
    const char* bytes;
    int32_t length;
    int32_t id;
} Token;

typedef struct Tokenizer {
    char* data;  // all tokens' bytes
    int32_t size;
    int32_t eot;
    Token* tokens;  // by id; end of text has no bytes
} Tokenizer;

// An invalid file ends the run: die() names the file and the reason.
Tokenizer* tokenizer_open(const char* path);
// data/tokenizer_json.c: of a tokenizer.json. eot -1: end of text is the token with one of the usual names.
Tokenizer* tokenizer_read_json(const char* path, int32_t eot);
void tokenizer_close(Tokenizer* tokenizer);
int32_t tokenizer_size(const Tokenizer* tokenizer);
int32_t tokenizer_eot(const Tokenizer* tokenizer);  // end of text
// CRC-32 (zlib) of the tokens, as scripts/prepare_eval.py puts it into its files: for each id a length byte and the
// bytes. End of text and tokens of more than 255 bytes have length 0, so x.bin and x.json have the same hash.
uint32_t tokenizer_hash(const Tokenizer* tokenizer);
// The first difference between two tokenizers, in fresh memory: size, end of text, or the bytes of a token, as the
// hash takes them. NULL: they are the same.
char* tokenizer_difference(const Tokenizer* a, const Tokenizer* b);

// The bytes of a token (not NUL-terminated), NULL for ids out of range; end of text and unknown ids have length 0.
const char* tokenizer_decode(const Tokenizer* tokenizer, int32_t id, int* length);
