// Byte-level byte-pair encoding (BPE): text to token ids, in three steps.
//
//     1. Added tokens are found in the text and become their own ids.
//     2. The text between them is cut into words by patterns, one pattern after the other.
//     3. A word begins as the tokens of its bytes. While two neighbours have a merge, the pair whose merge has the
//        lowest rank becomes one token.
//
// The tables are read from tokenizer.json (data/tokenizer_json.c).
#pragma once

#include "data/split.h"
#include "data/vocab.h"

// A pre-tokenizer: a pattern cuts text into matches and the rest between them. The flags select the parts that are
// kept.
typedef struct Cut {
    Pattern* pattern;
    bool keeps_matches, keeps_rest;
} Cut;

typedef struct Pair Pair;

// The id of special added tokens in Bpe.added: their names in a text are encoded as text.
enum { SPECIAL = -1 };
enum { MOST_CUTS = 32 };  // tokenizers in use have at most 7

// The tables of a tokenizer. It owns its patterns and vocabularies.
typedef struct Bpe {
    Vocab* added[2];      // searched in the text, then in the text that the first leaves; or NULL
    Cut cuts[MOST_CUTS];  // applied one after the other
    int cut_count;
    Vocab* whole;        // words that become one token without merges (ignore_merges); or NULL
    int32_t bytes[256];  // token of each byte, -1: none
    bool nfc;            // the tokenizer normalizes to NFC: only text that NFC does not change is encoded

    // merges, a hash table
    Pair* pairs;
    size_t pair_mask;
} Bpe;

// A new Bpe without cuts and merges; `merges` is the capacity of the merge table.
Bpe* bpe_new(int64_t merges);
void bpe_free(Bpe* bpe);

// Adds a merge. A second merge of the same pair replaces the first.
void bpe_merge(Bpe* bpe, int32_t left, int32_t right, int32_t rank, int32_t joined);

// Returns the number of ids written, at most `capacity`; -1 with the reason in why (at most why_size bytes).
int64_t bpe_encode(const Bpe* bpe, const char* text, int32_t* ids, int64_t capacity, char* why, size_t why_size);
