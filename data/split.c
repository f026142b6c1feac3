// A pattern becomes a tree. A group holds a list of branches (its alternatives), a branch a list of nodes that match
// one after the other:
//
//   a(b|cd?)$       SET a --next--> GROUP --next--> LINE_END
//                                   | inner
//                                   BRANCH --next--> BRANCH
//                                   | inner          | inner
//                                   SET b            SET c --next--> SET d, 0 or 1 times
//
// match() is a recursion over it that tries one way after the other. What is repeated is a single character, in a loop
// here, so its depth is bounded by the number of nodes and not by the text. How long it tries is bounded by *steps:
// with a pattern like a*a*a*b that may grow faster than the text.
#include "data/split.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/unicode.h"
#include "data/utf8.h"
#include "device/check.h"

enum { MAX_NODES = 2048, MAX_PATTERN = 1 << 16, MAX_TIMES = 100000 };
// Ranges that a byte of a pattern can add: \S has 4, an ASCII range under (?i: 1 + 2 in the other case + 2 other signs.
enum { RANGES_A_BYTE = 5 };

typedef enum { SET, GROUP, BRANCH, AHEAD, NOT_AHEAD, LINE_END } NodeType;

typedef struct Range {
    uint32_t first, last;
} Range;

typedef struct Set {
    uint64_t ascii[2];  // the answer for characters below 128, a bit each
    uint32_t kinds;     // of Unicode, a bit each
    bool negated;
    Range* ranges;
    int count;
} Set;

typedef struct Node {
    NodeType type;
    Set set;
    int64_t min, max;    // SET; GROUP: min 0 where it may be left out
    bool possessive;     // SET: gives nothing back
    struct Node* inner;  // GROUP and looks ahead: the first BRANCH; BRANCH: its first node
    struct Node* next;
} Node;

struct Split {
    Node* nodes;
    Range* ranges;
    int node_count, range_count;
    const Node* first;  // BRANCH
};

// ---- Characters

static uint32_t unicode_kind(uint32_t code) {
    size_t low = 0, high = sizeof(unicode_ranges) / sizeof(unicode_ranges[0]);
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (unicode_ranges[middle].first <= code)
            low = middle;
        else
            high = middle;
    }
    return unicode_ranges[low].kind;
}

static bool look_up(const Set* set, uint32_t code) {
    bool in = set->kinds && (set->kinds >> unicode_kind(code) & 1);
    for (int i = 0; i < set->count && !in; i++) in = set->ranges[i].first <= code && code <= set->ranges[i].last;
    return in != set->negated;
}

static bool has(const Set* set, uint32_t code) {
    return code < 128 ? set->ascii[code / 64] >> code % 64 & 1 : look_up(set, code);
}

// ---- Patterns. Each parser begins with p->at at its first byte and leaves it after its last; false (or NULL) means
// that the reason stands in p->error.

typedef struct Parser {
    Split* split;
    const char *pattern, *at;
    bool ignore_case;
    char* error;
    size_t error_size;
} Parser;

// Notes why, and at which byte. Always false.
PRINTF_LIKE(3, 4) static bool fail(Parser* p, const char* at, const char* format, ...) {
    va_list args;
    va_start(args, format);
    char reason[128];
    vsnprintf(reason, sizeof(reason), format, args);
    va_end(args);
    snprintf(p->error, p->error_size, "byte %zu: %s", (size_t)(at - p->pattern), reason);
    return false;
}

static bool take(Parser* p, const char* word) {
    bool there = strncmp(p->at, word, strlen(word)) == 0;
    if (there) p->at += strlen(word);
    return there;
}

static Node* add_node(Parser* p, NodeType type) {
    if (p->split->node_count == MAX_NODES) {
        fail(p, p->at, "a pattern has %d parts at most", MAX_NODES);
        return NULL;
    }
    Node* node = &p->split->nodes[p->split->node_count++];
    node->type = type;
    node->min = node->max = 1;
    node->set.ranges = p->split->ranges + p->split->range_count;
    return node;
}

static void put_range(Parser* p, Set* set, uint32_t first, uint32_t last) {
    Range range = {first, last};
    set->ranges[set->count++] = range;
    p->split->range_count++;
}

// A range, under (?i: with all that differs from it in case alone: of ASCII letters also the long s and the Kelvin
// sign.
static bool add_range(Parser* p, Set* set, const char* at, uint32_t first, uint32_t last) {
    if (first > last) return fail(p, at, "a range whose end is before its beginning");
    put_range(p, set, first, last);
    if (!p->ignore_case) return true;
    if (last >= 128) return fail(p, at, "(?i: with characters beyond ASCII is not supported");
    for (uint32_t lower = 0; lower <= 32; lower += 32) {
        uint32_t from = first > 'A' + lower ? first : 'A' + lower, to = last < 'Z' + lower ? last : 'Z' + lower;
        if (from <= to) put_range(p, set, from ^ 32, to ^ 32);
    }
    if ((first <= 's' && 's' <= last) || (first <= 'S' && 'S' <= last)) put_range(p, set, 0x17f, 0x17f);
    if ((first <= 'k' && 'k' <= last) || (first <= 'K' && 'K' <= last)) put_range(p, set, 0x212a, 0x212a);
    return true;
}

// {name} of \p or \P.
static bool add_kinds(Parser* p, Set* set, const char* at, bool negated) {
    static const struct {
        const char* name;
        uint32_t kinds;
    } known[] = {{"{L}", 1u << Lu | 1u << Ll | 1u << Lt | 1u << Lm | 1u << Lo},
                 {"{Lu}", 1u << Lu},
                 {"{Ll}", 1u << Ll},
                 {"{Lt}", 1u << Lt},
                 {"{Lm}", 1u << Lm},
                 {"{Lo}", 1u << Lo},
                 {"{M}", 1u << M},
                 {"{N}", 1u << N},
                 {"{P}", 1u << P},
                 {"{S}", 1u << S},
                 {"{Z}", 1u << Z},
                 {"{C}", 1u << C | 1u << Cc}};
    if (p->ignore_case) return fail(p, at, "(?i: with \\p is not supported");
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (!take(p, known[i].name)) continue;
        set->kinds |= negated ? ~known[i].kinds : known[i].kinds;
        return true;
    }
    return fail(p, at, "%.12s is not supported", at);
}

// White space (the property White_Space), or all else.
static bool add_space(Parser* p, Set* set, bool negated) {
    static const Range space[] = {{'\t', '\r'}, {0x85, 0x85}}, other[] = {{0, 8}, {14, 31}, {127, 0x84}, {0x86, 0x9f}};
    set->kinds |= negated ? ~(1u << Z | 1u << Cc) : 1u << Z;
    for (int i = 0; i < (negated ? 4 : 2); i++) {
        const Range* range = negated ? &other[i] : &space[i];
        put_range(p, set, range->first, range->last);
    }
    return true;
}

// One character into *code, or a class of characters into the set (*code NO_CODE).
static const uint32_t NO_CODE = UINT32_MAX;
static bool parse_character(Parser* p, Set* set, uint32_t* code) {
    static const char letters[] = "nrt", controls[] = "\n\r\t";
    const char* at = p->at;
    *code = NO_CODE;
    if (!take(p, "\\")) {
        *code = utf8_read(at, &p->at);
        return true;
    }
    if (take(p, "s") || take(p, "S")) return add_space(p, set, p->at[-1] == 'S');
    if (take(p, "p") || take(p, "P")) return add_kinds(p, set, at, p->at[-1] == 'P');
    char c = *p->at, lower = (char)(c | 32);
    const char* letter = c ? strchr(letters, c) : NULL;
    if (!letter && (c <= ' ' || c > '~' || (c >= '0' && c <= '9') || (lower >= 'a' && lower <= 'z')))
        return fail(p, at, "%.2s is not supported", at);
    *code = letter ? (uint32_t)controls[letter - letters] : (uint32_t)c;
    p->at++;
    return true;
}

// What lies between [ and ]; another class inside it adds its characters.
static bool parse_class(Parser* p, Set* set, bool inside) {
    const char* start = p->at - 1;
    if (take(p, "^")) {
        if (inside || p->ignore_case) return fail(p, start, "[^ is not supported here");
        set->negated = true;
    }
    if (*p->at == ']') return fail(p, start, "an empty class is not supported");
    while (!take(p, "]")) {
        const char* at = p->at;
        uint32_t first, last;
        if (*at == 0) return fail(p, start, "[ without ]");
        if (strncmp(at, "[:", 2) == 0 || strncmp(at, "&&", 2) == 0 || (*at == '[' && inside))
            return fail(p, at, "%.2s in a class is not supported", at);
        if (take(p, "[")) {
            if (!parse_class(p, set, true)) return false;
            continue;
        }

        // A character, a class, or a range: a minus that stands last is a character.
        if (!parse_character(p, set, &first)) return false;
        last = first;
        if (*p->at == '-' && p->at[1] != ']') {
            p->at++;
            if (*p->at == '[' || *p->at == 0 || first == NO_CODE || !parse_character(p, set, &last) || last == NO_CODE)
                return fail(p, at, "a range needs two characters");
        }
        if (first != NO_CODE && !add_range(p, set, at, first, last)) return false;
    }
    return true;
}

static int64_t parse_times(Parser* p) {
    int64_t n = *p->at >= '0' && *p->at <= '9' ? 0 : -1;
    for (; *p->at >= '0' && *p->at <= '9'; p->at++) n = min_i64(n * 10 + *p->at - '0', MAX_TIMES + 1);
    return n;
}

// How often the node may stand.
static bool parse_quantifier(Parser* p, Node* node) {
    const char* at = p->at;
    if (take(p, "?") || take(p, "*") || take(p, "+")) {
        node->min = *at == '+';
        node->max = *at == '?' ? 1 : INT64_MAX;
        node->possessive = take(p, "+");
    } else if (take(p, "{")) {
        node->min = node->max = parse_times(p);
        if (take(p, ",")) node->max = *p->at == '}' ? INT64_MAX : parse_times(p);
        if (node->min < 0 || node->min > MAX_TIMES || node->max < node->min || !take(p, "}"))
            return fail(p, at, "{ needs numbers up to %d: {n}, {n,} or {n,m}", MAX_TIMES);
    } else {
        return true;
    }
    if (*p->at && strchr("?*+{", *p->at))
        return fail(p, at, "%.8s: a lazy or repeated quantifier is not supported", at);
    bool optional = node->type == GROUP && *at == '?' && !node->possessive;
    return node->type == SET || optional ? true : fail(p, at, "after a group, ? alone is supported");
}

static const Node* parse_branches(Parser* p, Node** first);

// A group or a look ahead, if one begins here: what follows its opening bracket is parsed.
static bool parse_group(Parser* p, Node** node) {
    static const struct {
        const char* opens;
        NodeType type;
    } kinds[] = {{"(?:", GROUP}, {"(?i:", GROUP}, {"(?=", AHEAD}, {"(?!", NOT_AHEAD}, {"(?", BRANCH}, {"(", GROUP}};
    const char* at = p->at;
    bool ignored = p->ignore_case;
    int k = 0;
    while (!take(p, kinds[k].opens)) k++;
    if (kinds[k].type == BRANCH) return fail(p, at, "%.4s is not supported", at);
    *node = add_node(p, kinds[k].type);
    if (!*node) return false;
    p->ignore_case = ignored || k == 1;
    if (!parse_branches(p, &(*node)->inner)) return false;
    p->ignore_case = ignored;
    return take(p, ")") ? true : fail(p, at, "( without )");
}

// A character, a class, a group or a mark, and how often it may stand.
static Node* parse_item(Parser* p) {
    const char* at = p->at;
    Node* node = NULL;
    uint32_t code;
    if (strchr("^.?*+{", *at)) {
        fail(p, at, "%.1s is not supported here", at);
        return NULL;
    }
    if (*at == '(') {
        if (!parse_group(p, &node)) return NULL;
    } else {
        node = add_node(p, take(p, "$") ? LINE_END : SET);
        if (!node) return NULL;
        if (node->type == SET) {
            if (take(p, "[")) {
                if (!parse_class(p, &node->set, false)) return NULL;
            } else if (!parse_character(p, &node->set, &code) ||
                       (code != NO_CODE && !add_range(p, &node->set, at, code, code))) {
                return NULL;
            }
            for (uint32_t c = 0; c < 128; c++) node->set.ascii[c / 64] |= (uint64_t)look_up(&node->set, c) << c % 64;
        }
    }

    return parse_quantifier(p, node) ? node : NULL;
}

// Alternatives up to a closing bracket or the end: a list of branches.
static const Node* parse_branches(Parser* p, Node** first) {
    Node** tail = first;
    do {
        Node* branch = add_node(p, BRANCH);
        if (!branch) return NULL;
        Node** item = &branch->inner;
        for (; *p->at && *p->at != '|' && *p->at != ')'; item = &(*item)->next)
            if (!(*item = parse_item(p))) return NULL;
        *tail = branch;
        tail = &branch->next;
    } while (take(p, "|"));
    return *first;
}

Split* split_compile(const char* pattern, char* error, size_t error_size) {
    Split* split = (Split*)host_alloc(sizeof(Split));
    Parser p = {.split = split, .pattern = pattern, .at = pattern, .error = error, .error_size = error_size};
    size_t length = strlen(pattern);
    Node* first = NULL;
    bool fits = length <= MAX_PATTERN;
    if (!fits) fail(&p, p.at, "a pattern has %d bytes at most", MAX_PATTERN);
    if (fits) {
        // A byte makes one node at most, and each group and the whole a branch more.
        split->nodes = (Node*)host_alloc((size_t)min_i64(2 * (int64_t)length + 2, MAX_NODES) * sizeof(Node));
        split->ranges = (Range*)host_alloc(RANGES_A_BYTE * length * sizeof(Range));
        split->first = parse_branches(&p, &first);
        if (split->first && *p.at == 0) return split;
        if (split->first) fail(&p, p.at, ") without (");
    }
    split_free(split);
    return NULL;
}

void split_free(Split* split) {
    if (!split) return;
    free(split->nodes);
    free(split->ranges);
    free(split);
}

// ---- Matching

typedef struct Search {
    const char* end;
    int64_t steps;
} Search;

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

const char* split_find(const Split* split, const char* at, const char* end, const char** match_end, int64_t* steps) {
    Search s = {.end = end, .steps = *steps};
    const char* found = NULL;
    for (const char* next; at < end && !found && s.steps >= 0; at = next) {
        *match_end = match_branches(&s, split->first, at, NULL);
        if (*match_end) found = at;
        utf8_read(at, &next);
    }
    *steps = s.steps;
    return s.steps < 0 ? NULL : found;
}
