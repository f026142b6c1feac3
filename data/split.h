// Regular expressions by which tokenizers cut text into words, with the meaning that Oniguruma gives them (the library
// tokenizers uses it). Text is UTF-8.
//
//   abc  \n \r \t  \\ and other escaped signs     characters
//   \s \S  \p{L} \P{L}  [a-z\p{N}]  [^...]        classes: white space, general categories (L, Lu, Ll, Lt, Lm, Lo, M,
//   N,
//                                                 P, S, Z, C), ranges, and all else
//   ab|c  (...)  (?:...)  (?i:...)                alternatives, groups, ASCII letters of either case
//   ? * + {n} {n,} {n,m}  ?+ *+ ++                of a character or class; of a group ? alone. + behind: keeps what it
//   took
//   (?=...)  (?!...)  $                           what must or must not follow; the end of a line
//
// Everything else is refused.
#ifndef DATA_SPLIT_H
#define DATA_SPLIT_H

#include <stdbool.h>

#include "device/types.h"

BEGIN_C

typedef struct Split Split;

// NULL on error, with the reason and the byte offset in error.
Split* split_compile(const char* pattern, char* error, size_t error_size);
void split_free(Split* split);

// The first match in the well-formed text from `at` to `end`, which may be empty: *end of it, and where it begins; NULL
// if there is none, or if the search took more than *steps. *steps becomes less by what it took: negative if too
// little.
const char* split_find(const Split* split, const char* at, const char* end, const char** match_end, int64_t* steps);

END_C

#endif
