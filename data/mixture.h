// A data mixture: several sets of shards, and the share of the run's windows that each has.
//
//   --train 'code_*.bin:0.7,prose_*.bin:0.3'      GLOB:WEIGHT, with commas between the sets
//   --train 'corpus_*.bin'                        one set
//
// A pattern ends at a colon that is followed by a number, and then by a comma or the end of the text. Other colons and
// commas belong to the pattern. Where a colon of a file name would end the pattern, write ? instead.
//
// A weight is a positive number below 10^19 with at most 18 decimals, a share or a count of tokens: 0.7, 7e9. The parts
// m_k of the sets k are the smallest whole numbers that have the ratios of the weights; M is the sum of the parts. So
// weights of equal ratios give the same mixture. Set k has n m_k / M of the first n windows of the run, rounded down or
// up: for every n and every set, less than one window from its share.
//
//   weights 0.7, 0.3    window  0 1 2 3 4 5 6 7 8 9
//                       set     0 0 1 0 0 1 0 0 0 1
//
// Window j of set k has a place from floor(j M / m_k) to ceil((j + 1) M / m_k) - 1 in the run. Each window of the run
// goes to the set with the earliest deadline, among the sets whose next window may already be there. Earliest deadline
// first meets the bounds of all windows (Pfair scheduling: Baruah, Cohen, Plaxton & Varvel 1996). A walk from window to
// window finds the set of each window. A walk may begin at any multiple of M, where n m_k / M is a whole number for
// every set.
#pragma once

#include "device/types.h"

enum {
    MIXTURE_SETS = 64,  // at most
    MIXTURE_ORDER = 2   // revision of the order of several sets; checkpoints record it
};

typedef struct MixtureSet {
    char* pattern;
    int64_t part;            // m_k
    int64_t first, windows;  // the set's first window in the file order of all sets, and its windows (by shards_open)
} MixtureSet;

typedef struct Mixture {
    int count;
    MixtureSet sets[MIXTURE_SETS];
    int64_t parts;  // M
} Mixture;

// The mixture that `text`, the value of `option`, describes. Ends the run if a set has no pattern or no weight, or if a
// weight is out of range. More than MIXTURE_SETS sets, or M above 2^62, end the run too. Patterns are freed by
// mixture_free.
Mixture mixture_parse(const char* option, const char* text);
void mixture_free(Mixture* mixture);

// A walk through the windows of a run; a new walk is {mixture}.
typedef struct MixtureWalk {
    const Mixture* mixture;
    int64_t at, taken[MIXTURE_SETS];  // the next window, and the windows of each set before it
} MixtureWalk;

// Returns the index, in the file order of all sets, of window w of the run. Set k goes through its windows epoch after
// epoch, in an order by `seed` (below 2^56), k and the set's own epoch (order_permute).
//
// Earlier calls save time, and do not change the result. A call takes some 5 ns a set for each window since the call
// before, or since the multiple of M below w. A resume at window 10^8 with three sets and a larger M takes two seconds.
int64_t mixture_window(MixtureWalk* walk, uint64_t seed, int64_t w);
