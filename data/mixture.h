// A data mixture: several sets of shards, and the share of the run's windows that each has.
//
//   --train 'code_*.bin:0.7,prose_*.bin:0.3'      GLOB:WEIGHT, with commas between the sets
//   --train 'corpus_*.bin'                        one set
//
// A pattern ends at a colon with a number behind it, and then a comma or the end. So other colons and commas belong to
// the pattern; ? matches one that does not.
//
// A weight is a positive number below 10^19 with at most 18 decimals, a share or a count of tokens. The part m_k of set
// k is its weight in the smallest whole numbers with these ratios, and M is their sum. So equal ratios are one mixture.
// Set k has n m_k / M of the first n windows of the run, rounded down or up: for every n and every set, less than one
// window from its share.
//
//   weights 0.7, 0.3    window  0 1 2 3 4 5 6 7 8 9
//                       set     0 0 1 0 0 1 0 0 0 1
//
// Window j of set k has a place from its release floor(j M / m_k) to its deadline ceil((j + 1) M / m_k), exclusive. The
// earliest deadline first meets all of these (Pfair scheduling: Baruah, Cohen, Plaxton & Varvel 1996), in a walk from
// the run's first window. To begin a walk anywhere, the counts are fixed at each multiple of a span of windows, M over
// the least m_k, rounded up. A walk begins at the multiple before its window, and reaches the counts of the next one.
//
// At a multiple n the share n m_k / M of set k has a fraction f_k. The set has x_k, 0 or 1, windows above the share
// rounded down: sum x = sum f. The open window of a set is the next one after the rounded share. Two-way rounding
// (Knuth 1995) finds x with sum x > sum f - 1 over the first sets in two orders, whatever their number: by release of
// the open window, and by its deadline.
//
// Proof. The earliest deadline first fails only if more than t - s windows have all their places in s .. t - 1 (Hall's
// theorem). Between two multiples there are at most (t - s) m_k / M of set k. With s at a multiple only sets with a
// deadline up to t count: at most t - s + sum f - sum x windows, less than t - s + 1. With t at a multiple the same
// holds for releases. From one multiple to the next there are t - s: the count of no set is lower at the next one,
// since its share grows by one or more in a span.
#pragma once

#include "device/types.h"

enum {
    MIXTURE_SETS = 64,  // at most
    MIXTURE_ORDER = 2   // version of the order of several sets; checkpoints record it
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

// A walk through the windows of a run. It saves time: results do not depend on it.
typedef struct MixtureWalk {
    const Mixture* mixture;
    int64_t span, at;
    int64_t taken[MIXTURE_SETS], goal[MIXTURE_SETS];  // windows of each set before `at`, and before the next multiple
} MixtureWalk;
MixtureWalk mixture_walk(const Mixture* mixture);

// The window of the sets, in file order, that is window w of the run. Set k goes through its windows epoch after epoch,
// in an order by `seed` (below 2^56), k and its own epoch (shards_permute). The time is that of the windows between the
// call before and this one. It is at most that of a span, also for an earlier window.
int64_t mixture_window(MixtureWalk* walk, uint64_t seed, int64_t w);
