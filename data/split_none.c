// data/split.h for a build without Oniguruma.
#include <stdio.h>

#include "data/split.h"

Pattern* pattern_new(const char* text, char* error, size_t error_size) {
    // The tokenizer can still decode: only the encoding of text is refused, for this reason.
    snprintf(error, error_size, "this build lacks Oniguruma: install libonig-dev and make again");
    return NULL;
}

void pattern_free(Pattern* pattern) {}

int pattern_find(const Pattern* pattern, const char* text, size_t length, size_t at, size_t* from, size_t* to) {
    // No pattern exists in this build, so this is never called.
    return 0;
}
