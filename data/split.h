// Regular expressions that cut text into words, by Oniguruma, which Hugging Face's library tokenizers uses too. A build
// without Oniguruma refuses every pattern.
#ifndef DATA_SPLIT_H
#define DATA_SPLIT_H

#include "device/types.h"

BEGIN_C

typedef struct Pattern Pattern;

// NULL with the reason in error.
Pattern* pattern_new(const char* text, char* error, size_t error_size);
void pattern_free(Pattern* pattern);

// Finds the first match in text[at, length), which is UTF-8: its bytes are *from .. *to - 1, and there may be none. 1 if
// there is a match, 0 if not, -1 if the search took too long.
int pattern_find(const Pattern* pattern, const char* text, size_t length, size_t at, size_t* from, size_t* to);

END_C

#endif
