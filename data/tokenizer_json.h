// Reading a Hugging Face tokenizer.json, and what data/tokenizer.c makes of it.
//
//   model          vocab (the tokens and their ids), merges (by rank), whether a word that is a token is taken whole
//   added_tokens   more tokens, or names for some of them
//   pre_tokenizer  how text is cut into words
//
// The tokens of any tokenizer can be read, for decoding. Encoding needs byte-level BPE; where a file asks for something
// else, `refused` says what. Its post_processor is left out: it frames whole texts with marks, and a prompt is no whole
// text.
#ifndef DATA_TOKENIZER_JSON_H
#define DATA_TOKENIZER_JSON_H

#include "data/bpe.h"
#include "data/tokenizer.h"
#include "data/vocab.h"

BEGIN_C

struct Tokenizer {
    char* data;  // all tokens' bytes
    int32_t size;
    int32_t eot;
    Token* tokens;  // by id; end of text without bytes
    Vocab* vocab;   // what the longest match searches, or NULL
    Bpe* bpe;       // of tokenizer.json, or NULL
    char* refused;  // why text cannot be encoded, or NULL
    char* why;      // why it was not encoded last
};

// end of text -1: the token with one of the usual names. die()s on a file that is not one.
Tokenizer* tokenizer_read_json(const char* path, int32_t eot);

END_C

#endif
