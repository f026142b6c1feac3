// Regular expressions of the pre-tokenizer, which cuts text into words. The library is Oniguruma, as in Hugging Face's
// `tokenizers`. A build without Oniguruma refuses every pattern.
#pragma once

#include "device/types.h"

typedef struct Pattern Pattern;

// Compiles a pattern. NULL on failure, with the reason in error.
Pattern* pattern_new(const char* text, char* error, size_t error_size);
void pattern_free(Pattern* pattern);

// Finds the first match in text[at, length), which is UTF-8: bytes *from .. *to - 1, possibly empty. Returns 1 for a
// match and 0 for none. Errors: -1, the search took too long; -2, the match begins before `at` or ends before its begin.
int pattern_find(const Pattern* pattern, const char* text, size_t length, size_t at, size_t* from, size_t* to);
