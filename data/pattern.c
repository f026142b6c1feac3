// A recursive descent. Each parser begins with p->at at its first byte and leaves it after its last; false (or NULL)
// means that the reason stands in p->error.
#include "data/pattern.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/unicode.h"
#include "data/utf8.h"
#include "device/check.h"

enum { MAX_NODES = 2048, MAX_BYTES = 1 << 16, MAX_TIMES = 100000 };
// Ranges that a byte of a pattern can add: \S has 4, an ASCII range under (?i: 1 + 2 in the other case + 2 other signs.
enum { RANGES_A_BYTE = 5 };

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

bool set_has(const Set* set, uint32_t code) {
    bool in = set->kinds && (set->kinds >> unicode_kind(code) & 1);
    for (int i = 0; i < set->count && !in; i++) in = set->ranges[i].first <= code && code <= set->ranges[i].last;
    return in != set->negated;
}

typedef struct Parser {
    Pattern* pattern;
    const char *text, *at;
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
    snprintf(p->error, p->error_size, "byte %zu: %s", (size_t)(at - p->text), reason);
    return false;
}

static bool take(Parser* p, const char* word) {
    bool there = strncmp(p->at, word, strlen(word)) == 0;
    if (there) p->at += strlen(word);
    return there;
}

static Node* add_node(Parser* p, NodeType type) {
    if (p->pattern->node_count == MAX_NODES) {
        fail(p, p->at, "a pattern has %d parts at most", MAX_NODES);
        return NULL;
    }
    Node* node = &p->pattern->nodes[p->pattern->node_count++];
    node->type = type;
    node->min = node->max = 1;
    node->set.ranges = p->pattern->ranges + p->pattern->range_count;
    return node;
}

static void put_range(Parser* p, Set* set, uint32_t first, uint32_t last) {
    Range range = {first, last};
    set->ranges[set->count++] = range;
    p->pattern->range_count++;
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
    if (take(p, "s") || (!p->ignore_case && take(p, "S"))) return add_space(p, set, p->at[-1] == 'S');
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

static bool parse_branches(Parser* p, Node** tail);

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

// A character or a class, into a set.
static bool parse_set(Parser* p, Set* set) {
    const char* at = p->at;
    uint32_t code;
    if (take(p, "[")) {
        if (!parse_class(p, set, false)) return false;
    } else {
        if (!parse_character(p, set, &code)) return false;
        if (code != NO_CODE && !add_range(p, set, at, code, code)) return false;
        if (p->ignore_case && strchr("fFsS", *at) && *p->at && strchr("fFiIlLsStT", *p->at))
            return fail(p, at, "%.2s under (?i:, which are also one character, is not supported", at);
    }
    for (uint32_t c = 0; c < 128; c++) set->ascii[c / 64] |= (uint64_t)set_has(set, c) << c % 64;
    return true;
}

// A character, a class, a group or a mark, and how often it may stand.
static Node* parse_item(Parser* p) {
    Node* node = NULL;
    if (strchr("^.?*+{", *p->at)) {
        fail(p, p->at, "%.1s is not supported here", p->at);
        return NULL;
    }
    bool group = *p->at == '(', there = group ? parse_group(p, &node) : true;
    if (!group) {
        node = add_node(p, take(p, "$") ? LINE_END : SET);
        there = node && (node->type == LINE_END || parse_set(p, &node->set));
    }
    return there && parse_quantifier(p, node) ? node : NULL;
}

// Alternatives up to a closing bracket or the end: a list of branches.
static bool parse_branches(Parser* p, Node** tail) {
    do {
        Node* branch = *tail = add_node(p, BRANCH);
        if (!branch) return false;
        tail = &branch->next;
        for (Node** item = &branch->inner; *p->at && *p->at != '|' && *p->at != ')'; item = &(*item)->next)
            if (!(*item = parse_item(p))) return false;
    } while (take(p, "|"));
    return true;
}

Pattern* pattern_parse(const char* text, char* error, size_t error_size) {
    size_t length = strlen(text);
    Pattern* pattern = (Pattern*)host_alloc(sizeof(Pattern));
    Parser p = {.pattern = pattern, .text = text, .at = text, .error = error, .error_size = error_size};
    if (length > MAX_BYTES) fail(&p, p.at, "a pattern has %d bytes at most", MAX_BYTES);

    // A byte makes two nodes at most (a group and its first branch), and the whole a branch more.
    if (length <= MAX_BYTES) {
        pattern->nodes = (Node*)host_alloc((size_t)min_i64(2 * (int64_t)length + 1, MAX_NODES) * sizeof(Node));
        pattern->ranges = (Range*)host_alloc(RANGES_A_BYTE * length * sizeof(Range));
        bool parsed = parse_branches(&p, &pattern->first);
        if (parsed && *p.at == 0) return pattern;
        if (parsed) fail(&p, p.at, ") without (");
    }
    pattern_free(pattern);
    return NULL;
}

void pattern_free(Pattern* pattern) {
    if (!pattern) return;
    free(pattern->nodes);
    free(pattern->ranges);
    free(pattern);
}
