// Reader of Hugging Face's tokenizer.json, and the struct Tokenizer that data/tokenizer.c shares.
//
//   model          vocab (tokens and their ids), merges (by rank), ignore_merges (a word that is a token stays whole)
//   added_tokens   more tokens, or names for some of them
//   pre_tokenizer  the patterns that cut text into words
//
// Decoding works with the tokens of any tokenizer. Encoding needs byte-level BPE; for any other file `refused` is the
// reason. The post_processor is ignored: it frames whole texts with special tokens, and a prompt is not a whole text.
#pragma once

#include "data/bpe.h"
#include "data/tokenizer.h"
#include "data/vocab.h"

struct Tokenizer {
    char* data;  // all tokens' bytes
    int32_t size;
    int32_t eot;
    Token* tokens;  // by id; end of text has no bytes
    Vocab* vocab;   // for the longest match, or NULL
    Bpe* bpe;       // from tokenizer.json, or NULL
    char* refused;  // the reason if text cannot be encoded, or NULL
    char* why;      // the reason of the last failed encoding
};

// eot -1: end of text is the token with one of the usual names. die()s on an invalid file.
Tokenizer* tokenizer_read_json(const char* path, int32_t eot);
