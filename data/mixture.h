// A data mixture: several sets of shards, and the share of the run's windows that each has.
//
//   --train 'code_*.bin:0.7,prose_*.bin:0.3'      GLOB:WEIGHT, with commas between the sets
//   --train 'corpus_*.bin'                        one set
//
// A pattern ends at a colon with a number behind it, and then a comma or the end. So other colons and commas belong to
// the pattern; ? matches one that does not.
//
// Set k has m_k windows of each period of M = sum_k m_k: its weight in thousandths, rounded. Window j of them has a
// place from floor(j M / m_k) to ceil((j + 1) M / m_k) - 1 in the period. The earliest deadline first meets all of
// these bounds (Pfair scheduling: Baruah, Cohen, Plaxton & Varvel 1996). So of the first n windows of the run set k has
// n m_k / M, to within less than one, for every n.
//
//   weights 0.7, 0.3    place  0 1 2 3 4 5 6 7 8 9    and again
//                       set    0 0 1 0 0 1 0 0 0 1
#pragma once

#include "device/types.h"

enum { MIXTURE_SETS = 64, MIXTURE_PERIOD = 1000000 };  // at most

typedef struct MixtureSet {
    char* pattern;
    int64_t part;            // m_k: its windows of a period
    int64_t first, windows;  // all its windows, in file order over the sets (set by shards_open)
} MixtureSet;

typedef struct MixturePlace {
    int32_t set, index;  // the window is number `index` of the set's `part` windows of the period
} MixturePlace;

typedef struct Mixture {
    int count;
    MixtureSet sets[MIXTURE_SETS];
    int64_t period;        // M
    MixturePlace* places;  // (period)
} Mixture;

// The mixture of a text of `option`, which messages name. Ends the run on a set without a pattern or a weight. Also
// ends it on a weight that rounds to 0, on more sets, or on a longer period.
Mixture mixture_parse(const char* option, const char* text);
void mixture_free(Mixture* mixture);

// The window of the sets, in file order, that is window w of the run. Set k goes through its windows epoch after epoch,
// in an order by `seed` and its own epoch (shards_permute). It has no state.
int64_t mixture_window(const Mixture* mixture, uint64_t seed, int64_t w);
