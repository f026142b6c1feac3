// A data mixture: several sets of shards, and the share of the run's windows that each has.
//
//   --train 'code_*.bin:0.7,prose_*.bin:0.3'      GLOB:WEIGHT, with commas between the sets
//   --train 'corpus_*.bin'                        one set
//
// A pattern ends at a colon with a number behind it, and then a comma or the end. So other colons and commas belong to
// the pattern; ? matches one that does not.
//
// A weight is a positive number below 10^19 with at most 18 decimals, a share or a count of tokens: 0.7, 7e9. The part
// m_k of set k is its weight in the smallest whole numbers with these ratios, and M is their sum. So equal ratios are
// one mixture. Set k has n m_k / M of the first n windows of the run, rounded down or up: for every n and every set,
// less than one window from its share.
//
//   weights 0.7, 0.3    window  0 1 2 3 4 5 6 7 8 9
//                       set     0 0 1 0 0 1 0 0 0 1
//
// Window j of set k has a place from floor(j M / m_k) to ceil((j + 1) M / m_k) - 1 in the run. The earliest deadline
// first meets all of these bounds (Pfair scheduling: Baruah, Cohen, Plaxton & Varvel 1996). A walk from window to
// window finds the set of each. It may begin at any multiple of M, where every share is whole.
#pragma once

#include "device/types.h"

enum {
    MIXTURE_SETS = 64,  // at most
    MIXTURE_ORDER = 2   // revision of the order of several sets; checkpoints record it
};

typedef struct MixtureSet {
    char* pattern;
    int64_t part;            // m_k
    int64_t first, windows;  // all its windows, in file order over the sets (set by shards_open)
} MixtureSet;

typedef struct Mixture {
    int count;
    MixtureSet sets[MIXTURE_SETS];
    int64_t parts;  // M
} Mixture;

// The mixture of a text of `option`, which messages name. Ends the run on a set without a pattern or a weight, on other
// weights, on more sets, and where M is above 2^62.
Mixture mixture_parse(const char* option, const char* text);
void mixture_free(Mixture* mixture);

// A walk through the windows of a run. {mixture} is a new one.
typedef struct MixtureWalk {
    const Mixture* mixture;
    int64_t at, taken[MIXTURE_SETS];  // the next window, and the windows of each set before it
} MixtureWalk;

// The window of the sets, in file order, that is window w of the run. Set k goes through its windows epoch after epoch,
// in an order by `seed` (below 2^56), k and its own epoch (order_permute). Earlier calls do not change the result.
//
// They save time: a call takes some 5 ns a set for each window since the call before, or since the multiple of M below
// w. A resume at window 10^8 with three sets and a larger M takes two seconds.
int64_t mixture_window(MixtureWalk* walk, uint64_t seed, int64_t w);
