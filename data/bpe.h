// Byte-level BPE: text to tokens. Text is cut into words, first at added tokens, which stand for themselves, then by
// patterns, each of which cuts the pieces that the one before left. A word begins as the tokens of its bytes. As long
// as two neighbours have a merge, those with the earliest merge become one token.
//
// tokenizer.json fills this in (data/tokenizer_json.c).
#ifndef DATA_BPE_H
#define DATA_BPE_H

#include "data/split.h"
#include "data/vocab.h"

BEGIN_C

// A pattern cuts a piece into matches and the rest between them.
typedef struct Cut {
    Pattern* pattern;
    bool keeps_matches, keeps_rest;
} Cut;

typedef struct Pair Pair;
typedef struct Scratch Scratch;

// Ids of added tokens that are special (their names in a text are text) are SPECIAL.
enum { SPECIAL = -1 };

typedef struct Bpe {
    Vocab* added[2];  // looked for first, and in what these leave; or NULL
    Cut* cuts;
    int cut_count;
    Vocab* whole;        // words that are tokens as they are, whatever the merges; or NULL
    int32_t bytes[256];  // token of each byte, -1: none
    bool nfc;            // text is normalized to NFC: taken where that changes nothing

    // merges, a hash table
    Pair* pairs;
    size_t pair_mask;

    Scratch* scratch;
} Bpe;

// Without cuts and without merges, with room for so many.
Bpe* bpe_new(int64_t merges);
void bpe_free(Bpe* bpe);

// Of two merges of a pair, the later counts.
void bpe_merge(Bpe* bpe, int32_t left, int32_t right, int32_t rank, int32_t joined);
void bpe_cut(Bpe* bpe, Pattern* pattern, bool keeps_matches, bool keeps_rest);

// How many ids were written, at most `room`; -1 with the reason in why (at most why_size bytes).
int64_t bpe_encode(const Bpe* bpe, const char* text, int32_t* ids, int64_t room, char* why, size_t why_size);

END_C

#endif
