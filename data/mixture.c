#include "data/mixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/shards.h"
#include "device/check.h"

// The colon that ends the pattern at `text`, with its weight and the end of that; NULL: there is none.
static const char* find_weight(const char* text, double* weight, char** end) {
    for (const char* colon = strchr(text, ':'); colon; colon = strchr(colon + 1, ':')) {
        *weight = strtod(colon + 1, end);
        if (*end > colon + 1 && (**end == ',' || !**end)) return colon;
    }
    return NULL;
}

// Which set has each place of a period: of those whose next window may be there, the one with the earliest deadline.
static void fill_places(Mixture* m) {
    int64_t taken[MIXTURE_SETS] = {0};
    m->places = (MixturePlace*)host_alloc((size_t)m->period * sizeof(MixturePlace));
    for (int64_t n = 0; n < m->period; n++) {
        int64_t earliest = INT64_MAX;
        int next = 0;
        for (int k = 0; k < m->count; k++) {
            const int64_t part = m->sets[k].part, deadline = ceil_div((taken[k] + 1) * m->period, part);
            if (taken[k] * m->period / part <= n && deadline < earliest) earliest = deadline, next = k;
        }
        const MixturePlace place = {next, (int32_t)taken[next]++};
        m->places[n] = place;
    }
}

Mixture mixture_parse(const char* option, const char* text) {
    Mixture m = {.count = 0};
    double weight;
    char* end;
    const bool weighted = find_weight(text, &weight, &end) != NULL;
    for (const char* at = text; at; at = *end ? end + 1 : NULL) {
        // A pattern and its weight. A text without weights is one pattern.
        const char* colon = weighted ? find_weight(at, &weight, &end) : (end = (char*)strchr(text, 0));
        if (weighted && (!colon || colon == at))
            die(EXIT_USAGE, "%s: '%s' has no %s: each set is GLOB:WEIGHT, with commas between them", option, at,
                colon ? "pattern" : "weight");
        MixtureSet set = {.pattern = host_format("%.*s", (int)(colon - at), at), .part = 1};
        if (weighted) set.part = (int64_t)fmin(fmax(round(1000 * weight), 0), MIXTURE_PERIOD + 1);
        m.period += set.part;
        if (set.part < 1 || m.period > MIXTURE_PERIOD || m.count == MIXTURE_SETS)
            die(EXIT_USAGE, "%s: '%s': weights are at least 0.001, and together at most %d, of at most %d sets", option,
                at, MIXTURE_PERIOD / 1000, MIXTURE_SETS);
        m.sets[m.count++] = set;
    }
    fill_places(&m);
    return m;
}

void mixture_free(Mixture* m) {
    for (int k = 0; k < m->count; k++) free(m->sets[k].pattern);
    free(m->places);
}

int64_t mixture_window(const Mixture* m, uint64_t seed, int64_t w) {
    const MixturePlace* place = &m->places[w % m->period];
    const MixtureSet* set = &m->sets[place->set];
    // Windows of the set that come before, over all its epochs.
    const int64_t i = w / m->period * set->part + place->index;
    return set->first + shards_permute(seed, i / set->windows, i % set->windows, set->windows);
}
