// A vocabulary: tokens with lookup by bytes and by longest match.
#pragma once

#include "device/types.h"

// A token's text and id. The bytes have no NUL at their end, and belong to another structure.
typedef struct Token {
    const char* bytes;
    int32_t length;
    int32_t id;
} Token;

typedef struct Vocab {
    Token* sorted;  // by length, then bytes; no empty tokens; the lowest id among tokens with the same bytes
    int32_t count;
    int32_t longest;
    bool repeats;  // true if two tokens had the same bytes
} Vocab;

// The vocabulary of n tokens. It points to their bytes and does not copy them.
Vocab* vocab_new(const Token* tokens, int32_t n);
void vocab_free(Vocab* vocab);

// The token with exactly these bytes; NULL if none.
const Token* vocab_find(const Vocab* vocab, const char* bytes, size_t length);
// The longest token that is a prefix of the text; NULL if none.
const Token* vocab_longest(const Vocab* vocab, const char* text, size_t length);
