// A recursion over the pattern's tree that tries one way after the other. What is repeated is a single character, in a
// loop here, so its depth is bounded by the number of nodes and not by the text. How long it tries is bounded by
// *steps: with a pattern like a*a*a*b that may grow faster than the text.
#include "data/split.h"

#include "data/utf8.h"

typedef struct Search {
    const char* end;
    int64_t steps;
} Search;

static bool has(const Set* set, uint32_t code) {
    return code < 128 ? set->ascii[code / 64] >> code % 64 & 1 : set_has(set, code);
}

// What follows the group that is being matched, and what follows the groups around it.
typedef struct Then {
    const Node* node;
    const struct Then* then;
} Then;

static const char* match(Search* s, const Node* node, const char* at, const Then* then);

static const char* match_branches(Search* s, const Node* branch, const char* at, const Then* then) {
    const char* end = NULL;
    for (; branch && !end; branch = branch->next) end = match(s, branch->inner, at, then);
    return end;
}

// As many characters as the set takes, and fewer until what follows matches.
static const char* match_set(Search* s, const Node* node, const char* at, const Then* then) {
    const char *least = at, *next;
    int64_t n = 0;
    for (; n < node->max && at < s->end && has(&node->set, utf8_read(at, &next)); n++) {
        at = next;
        if (n < node->min) least = at;
    }
    s->steps -= n;
    if (n < node->min) return NULL;
    if (node->possessive) least = at;
    while (s->steps >= 0) {
        const char* end = match(s, node->next, at, then);
        if (end || at == least) return end;
        do at--;
        while ((*at & 0xc0) == 0x80);
    }
    return NULL;
}

// Where the match of `node` and all that follows ends; NULL if it does not match at `at`.
static const char* match(Search* s, const Node* node, const char* at, const Then* then) {
    for (; !node && then; then = then->then) node = then->node;
    if (!node) return at;
    if (--s->steps < 0) return NULL;
    if (node->type == SET) return match_set(s, node, at, then);

    bool goes_on;
    if (node->type == GROUP) {
        Then after = {node->next, then};
        const char* end = match_branches(s, node->inner, at, &after);
        if (end) return end;
        goes_on = node->min == 0;
    } else if (node->type == LINE_END) {
        goes_on = at == s->end || *at == '\n';
    } else {
        goes_on = (match_branches(s, node->inner, at, NULL) != NULL) == (node->type == AHEAD);
    }
    return goes_on ? match(s, node->next, at, then) : NULL;
}

const char* split_find(const Pattern* pattern, const char* at, const char* end, const char** match_end,
                       int64_t* steps) {
    Search s = {.end = end, .steps = *steps};
    const char* found = NULL;
    for (const char* next; at < end && !found && s.steps >= 0; at = next) {
        *match_end = match_branches(&s, pattern->first, at, NULL);
        if (*match_end) found = at;
        utf8_read(at, &next);
    }
    *steps = s.steps;
    return s.steps < 0 ? NULL : found;
}
