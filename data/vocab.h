// Tokens that can be searched by their bytes.
#ifndef DATA_VOCAB_H
#define DATA_VOCAB_H

#include <stdbool.h>

#include "device/types.h"

BEGIN_C

typedef struct Token {
    const char* bytes;
    int32_t length;
    int32_t id;
} Token;

typedef struct Vocab {
    Token* sorted;  // by length, then bytes. Without empty tokens; of those with the same bytes the lowest id.
    int32_t count;
    int32_t longest;
    bool begins[256];  // whether a token begins with this byte
    bool repeats;      // whether some had the same bytes
} Vocab;

// The bytes stay where the n tokens have them.
Vocab* vocab_new(const Token* tokens, int32_t n);
void vocab_free(Vocab* vocab);

// NULL where there is none.
const Token* vocab_find(const Vocab* vocab, const char* bytes, size_t length);
// The longest token that the text begins with.
const Token* vocab_longest(const Vocab* vocab, const char* text, size_t length);

END_C

#endif
