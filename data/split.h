// Finds where a pattern matches, as Oniguruma does, the engine of Hugging Face's library tokenizers.
#ifndef DATA_SPLIT_H
#define DATA_SPLIT_H

#include "data/pattern.h"

BEGIN_C

// The beginning of the first match in the well-formed UTF-8 from `at` to `end`, which may be empty; *match_end is where
// it ends. NULL if there is none, or if the search took more than *steps, which becomes less by what it took: then it
// is negative.
const char* split_find(const Pattern* pattern, const char* at, const char* end, const char** match_end, int64_t* steps);

END_C

#endif
