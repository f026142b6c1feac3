#include "data/mixture.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "data/order.h"
#include "device/check.h"

typedef __int128 Wide;  // products of two int64_t

static const int64_t MOST_PARTS = (int64_t)1 << 62;

// ---- Text

// The colon that ends the pattern at `text`, with the end of its weight; NULL: there is none.
static const char* find_weight(const char* text, char** end) {
    for (const char* colon = strchr(text, ':'); colon; colon = strchr(colon + 1, ':')) {
        strtod(colon + 1, end);
        if (*end > colon + 1 && (**end == ',' || !**end)) return colon;
    }
    return NULL;
}

// A weight in units of 10^-18. 0: it is not a positive number below 10^19, of digits down to this unit.
static Wide read_weight(const char* at, char* end) {
    const double value = strtod(at, NULL);
    const char* point = NULL;
    Wide number = 0;
    if (!(value > 0 && value < 1e19)) return 0;
    for (; isdigit((unsigned char)*at) || (*at == '.' && !point); at++) {
        if (*at == '.') point = at;
        if (*at != '.') number = 10 * number + (*at - '0');
        if (number >> 120) return 0;  // one digit more, and it would not fit
    }
    int64_t power = point ? point + 19 - at : 18;
    if (*at == 'e' || *at == 'E') power += strtol(at + 1, (char**)&at, 10);
    for (; power > 0; power--) number *= 10;
    for (; power < 0 && number % 10 == 0; power++) number /= 10;
    return power == 0 && at == end ? number : 0;
}

static Wide gcd(Wide a, Wide b) { return b ? gcd(b, a % b) : a; }

Mixture mixture_parse(const char* option, const char* text) {
    Mixture m = {.count = 0};
    Wide weights[MIXTURE_SETS] = {1}, sum = 0, factor = 0;
    char* end;
    const bool weighted = find_weight(text, &end) != NULL;
    for (const char* at = text; at; at = *end ? end + 1 : NULL) {
        // A pattern and its weight. A text without weights is one pattern.
        const int k = m.count++;
        const char* colon = weighted ? find_weight(at, &end) : (end = (char*)strchr(text, 0));
        const int length = colon ? (int)(end - at) : (int)strlen(at);
        if (weighted && (!colon || colon == at))
            die(EXIT_USAGE, "%s: '%.*s' has no %s: each set is GLOB:WEIGHT, with commas between them", option, length,
                at, colon ? "pattern" : "weight");
        if (k == MIXTURE_SETS) die(EXIT_USAGE, "%s: at most %d sets are possible", option, MIXTURE_SETS);
        if (weighted) weights[k] = read_weight(colon + 1, end);
        if (weights[k] == 0)
            die(EXIT_USAGE, "%s: '%.*s': a weight is a positive number below 1e19, with at most 18 decimals", option,
                length, at);
        m.sets[k].pattern = host_format("%.*s", (int)(colon - at), at);
        factor = gcd(weights[k], factor);
    }
    // Whole numbers without a common factor. The sum stops before it could overflow.
    for (int k = 0; k < m.count && sum <= MOST_PARTS; k++) sum += weights[k] / factor;
    if (sum > MOST_PARTS)
        die(EXIT_USAGE,
            "%s: the weights have too many digits: as whole numbers they add up to more than %ld; round them", option,
            MOST_PARTS);
    m.parts = (int64_t)sum;
    for (int k = 0; k < m.count; k++) m.sets[k].part = (int64_t)(weights[k] / factor);
    return m;
}

void mixture_free(Mixture* m) {
    for (int k = 0; k < m->count; k++) free(m->sets[k].pattern);
}

// ---- Order

// The set of window `at`: of those whose next window may be there, the one with the earliest deadline.
static int next_set(MixtureWalk* walk) {
    const Mixture* m = walk->mixture;
    int due = -1;
    walk->at++;
    for (int k = 0; k < m->count; k++) {
        const Wide part = m->sets[k].part, taken = walk->taken[k];
        if (taken * m->parts >= walk->at * part) continue;
        if (due < 0 || (taken + 1) * m->sets[due].part < (Wide)(walk->taken[due] + 1) * part) due = k;
    }
    walk->taken[due]++;
    return due;
}

int64_t mixture_window(MixtureWalk* walk, uint64_t seed, int64_t w) {
    const Mixture* m = walk->mixture;
    if (w < walk->at || w - walk->at >= m->parts) {
        walk->at = w - w % m->parts;
        for (int k = 0; k < m->count; k++) walk->taken[k] = w / m->parts * m->sets[k].part;
    }
    while (walk->at < w) next_set(walk);
    const int k = next_set(walk);
    const MixtureSet* set = &m->sets[k];
    const int64_t i = walk->taken[k] - 1, windows = set->windows;  // number i of the set, over all its epochs
    // The number of the set is in the bits above all seeds: sets of one size have other orders.
    return set->first + order_permute(seed ^ (uint64_t)k << 56, i / windows, i % windows, windows);
}
