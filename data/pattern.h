// Regular expressions as trees: those by which a tokenizer cuts text into words. Of Oniguruma's syntax this is known:
//
//   abc  \n \r \t  \\ \. \- ...          characters
//   \s \S  \p{L} \P{L}  [a-z\p{N}]  [^a]  classes: white space; general categories L, Lu, Ll, Lt, Lm, Lo, M, N, P,
//                                         S, Z, C; ranges; all else
//   ab|c  (...)  (?:...)  (?i:...)        alternatives and groups; ASCII letters of either case
//   ? * + {n} {n,} {n,m}  ?+ *+ ++        of a character or class (of a group ? alone); the latter give nothing back
//   (?=...)  (?!...)  $                   what must follow or must not; the end of a line
//
// A group holds a list of branches (its alternatives), a branch a list of nodes that match one after the other:
//
//   a(b|cd?)$       SET a --next--> GROUP --next--> LINE_END
//                                   | inner
//                                   BRANCH --next--> BRANCH
//                                   | inner          | inner
//                                   SET b            SET c --next--> SET d, 0 or 1 times
#ifndef DATA_PATTERN_H
#define DATA_PATTERN_H

#include <stdbool.h>

#include "device/types.h"

BEGIN_C

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

typedef struct Pattern {
    Node* nodes;
    Range* ranges;
    int node_count, range_count;
    Node* first;  // BRANCH
} Pattern;

// NULL on error, with the reason and the byte offset in error.
Pattern* pattern_parse(const char* text, char* error, size_t error_size);
void pattern_free(Pattern* pattern);

// Whether a character is in the set.
bool set_has(const Set* set, uint32_t code);

END_C

#endif
