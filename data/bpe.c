// Byte-pair encoding. Each pass over a word looks up the pair with the lowest rank, and joins all of its occurrences.
// So the time grows with the length of the word times the number of different merges in it.
#include "data/bpe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/utf8.h"
#include "device/check.h"

// Text without characters from here on does not change under normalization to NFC.
static const uint32_t FIRST_COMBINING = 0x300;

// Seconds after which no new search begins. A text of a megabyte takes about one.
static const double SEARCH_SECONDS = 5;

// An entry of the hash table of merges.
struct Pair {
    int32_t left, right;   // left -1: a free entry
    int32_t rank, joined;  // rank: 0 is merged first, INT32_MAX: a free entry; joined: the id of the two together
};

// ---- Merges

Bpe* bpe_new(int64_t merges) {
    Bpe* bpe = (Bpe*)host_alloc(sizeof(Bpe));
    // The table size is a power of two, so that a mask replaces the remainder. At least half of the entries stay free,
    // so every lookup ends.
    size_t capacity = 2;
    while (capacity < 2 * (size_t)merges) capacity *= 2;
    bpe->pairs = (Pair*)host_alloc(capacity * sizeof(Pair));
    bpe->pair_mask = capacity - 1;
    const Pair unused = {.left = -1, .rank = INT32_MAX};
    for (size_t i = 0; i < capacity; i++) bpe->pairs[i] = unused;
    for (int i = 0; i < 256; i++) bpe->bytes[i] = -1;
    return bpe;
}

void bpe_free(Bpe* bpe) {
    if (!bpe) return;
    for (int i = 0; i < 2; i++) vocab_free(bpe->added[i]);
    for (int i = 0; i < bpe->cut_count; i++) pattern_free(bpe->cuts[i].pattern);
    vocab_free(bpe->whole);
    free(bpe->pairs);
    free(bpe);
}

// Hash table lookup: the entry of a pair, or a free entry if the pair has no merge. At least half of the table is free.
static Pair* find_pair(const Bpe* bpe, int32_t left, int32_t right) {
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    // Multiplicative hash: the high bits of the product depend on both ids. Collisions take the next free entry.
    size_t i = (key * 0x9e3779b97f4a7c15u >> 32) & bpe->pair_mask;
    while (bpe->pairs[i].left >= 0 && (bpe->pairs[i].left != left || bpe->pairs[i].right != right))
        i = (i + 1) & bpe->pair_mask;
    return &bpe->pairs[i];
}

void bpe_merge(Bpe* bpe, int32_t left, int32_t right, int32_t rank, int32_t joined) {
    Pair pair = {left, right, rank, joined};
    *find_pair(bpe, left, right) = pair;
}

// Applies all merges to the n tokens of a word. Returns the number of tokens that remain.
static int64_t merge_all(const Bpe* bpe, int32_t* ids, int64_t n) {
    for (;;) {
        // The pair with the lowest rank.
        Pair first = {.rank = INT32_MAX};
        for (int64_t i = 0; i + 1 < n; i++) {
            const Pair* pair = find_pair(bpe, ids[i], ids[i + 1]);
            if (pair->rank < first.rank) first = *pair;
        }
        if (first.rank == INT32_MAX) return n;

        // Join its occurrences from left to right, until a new neighbour makes a pair of lower rank.
        int64_t to = 0;
        bool goes_on = true;
        for (int64_t from = 0; from < n; to++) {
            const bool joins = goes_on && from + 1 < n && ids[from] == first.left && ids[from + 1] == first.right;
            ids[to] = joins ? first.joined : ids[from];
            from += 1 + joins;
            if (joins && to > 0 && find_pair(bpe, ids[to - 1], ids[to])->rank < first.rank) goes_on = false;
            if (joins && from < n && find_pair(bpe, ids[to], ids[from])->rank < first.rank) goes_on = false;
        }
        n = to;
    }
}

// ---- Text

// The output of one call of bpe_encode. Output stops without an error when n reaches capacity.
typedef struct Encoding {
    const Bpe* bpe;
    int32_t* ids;
    int64_t capacity, n;
    double until;  // by host_seconds: the last moment for a search
    char* why;
    size_t why_size;
} Encoding;

// The three functions below append the ids of text[0, length). On failure they return false, with the reason in e->why.

// A word: its own token, else its bytes with all merges applied.
static bool encode_word(Encoding* e, const char* text, size_t length) {
    // A word that is a token as a whole needs no merges.
    const Bpe* bpe = e->bpe;
    const Token* whole = bpe->whole ? vocab_find(bpe->whole, text, length) : NULL;
    if (whole && e->n < e->capacity) e->ids[e->n++] = whole->id;
    if (whole || e->n == e->capacity) return true;

    // Its bytes as tokens, then all merges.
    int32_t* ids = (int32_t*)host_alloc(length * sizeof(int32_t));
    for (size_t i = 0; i < length; i++) {
        ids[i] = bpe->bytes[(unsigned char)text[i]];
        if (ids[i] >= 0) continue;
        snprintf(e->why, e->why_size, "the tokenizer has no token for the byte 0x%02x", (unsigned char)text[i]);
        free(ids);
        return false;
    }
    const int64_t n = min_i64(merge_all(bpe, ids, (int64_t)length), e->capacity - e->n);
    memcpy(e->ids + e->n, ids, (size_t)n * sizeof(int32_t));
    e->n += n;
    free(ids);
    return true;
}

// Cuts the text by the patterns from `cut` on, then encodes the words.
static bool encode_piece(Encoding* e, int cut, const char* text, size_t length) {
    if (length == 0) return true;
    if (cut == e->bpe->cut_count) return encode_word(e, text, length);
    const Cut* by = &e->bpe->cuts[cut];

    // Each match also ends a part of the rest. The parts that are kept go to the next pattern.
    size_t at = 0, done = 0, from, to;  // text before `done` is encoded
    int found;
    while (at < length && (found = pattern_find(by->pattern, text, length, at, &from, &to)) != 0) {
        if (found == -1 || host_seconds() > e->until) {
            snprintf(e->why, e->why_size, "a pattern of the tokenizer takes too long for this text");
            return false;
        }
        if (found == -2) {
            snprintf(e->why, e->why_size, "a pattern of the tokenizer matches text before the place of its search");
            return false;
        }
        if (by->keeps_rest && !encode_piece(e, cut + 1, text + done, from - done)) return false;
        if (by->keeps_matches && !encode_piece(e, cut + 1, text + from, to - from)) return false;
        done = at = to;
        // An empty match would be found again at the same place: the search moves on by one character.
        uint32_t code;
        if (to == from && to < length) at += (size_t)utf8_read(text + to, length - to, &code);
    }
    return !by->keeps_rest || encode_piece(e, cut + 1, text + done, length - done);
}

// Splits the text at the added tokens of this round and the next, then encodes the text between them. Names of special
// tokens are encoded as text.
static bool encode_around(Encoding* e, int round, const char* text, size_t length) {
    if (round == 2) return encode_piece(e, 0, text, length);
    const Vocab* added = e->bpe->added[round];
    const char *end = text + length, *done = text;

    // At each place the longest name wins. A special name is skipped as a whole, and no other name can begin inside it.
    for (const char* at = text; added && at < end;) {
        const Token* found = vocab_longest(added, at, (size_t)(end - at));
        if (found && found->id != SPECIAL) {
            if (!encode_around(e, round + 1, done, (size_t)(at - done))) return false;
            if (e->n < e->capacity) e->ids[e->n++] = found->id;
            done = at + found->length;
        }
        at += found ? found->length : 1;
    }
    return encode_around(e, round + 1, done, (size_t)(end - done));
}

int64_t bpe_encode(const Bpe* bpe, const char* text, int32_t* ids, int64_t capacity, char* why, size_t why_size) {
    // Check the text: UTF-8, and no character that NFC might change.
    size_t length = strlen(text);
    uint32_t code;
    for (size_t at = 0; at < length;) {
        const int bytes = utf8_read(text + at, length - at, &code);
        if (bytes == 0) {
            snprintf(why, why_size, "byte %zu of the text is not UTF-8", at);
            return -1;
        }
        if (bpe->nfc && code >= FIRST_COMBINING) {
            snprintf(why, why_size,
                     "byte %zu of the text: the tokenizer normalizes to NFC, which is not supported there", at);
            return -1;
        }
        at += (size_t)bytes;
    }

    // Encode, with the added tokens of the first round at the top.
    Encoding e = {bpe, ids, capacity, 0, host_seconds() + SEARCH_SECONDS, why, why_size};
    return encode_around(&e, 0, text, length) ? e.n : -1;
}
