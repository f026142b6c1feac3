// data/split.h with Oniguruma.
#include "data/split.h"

#include <oniguruma.h>
#include <stdio.h>
#include <string.h>

// A Pattern is a regex_t under a name for other files. A search does not change it.

// Backtracking limit of a search: a pattern like (a*)*b takes exponential time. Patterns in use backtrack a few times
// for each byte of a run of spaces. \s+$ does so at each of its bytes. A retry may read the whole text again, so
// bpe_encode limits the time of all searches too.
static const unsigned long RETRIES = 1 << 18, RETRIES_A_BYTE = 8;

Pattern* pattern_new(const char* text, char* error, size_t error_size) {
    // The library is set up at each pattern; repeated calls do nothing.
    OnigEncoding encodings[] = {ONIG_ENCODING_UTF8};
    onig_initialize(encodings, 1);

    // Compile the pattern in Ruby's syntax, which the tokenizers library uses too.
    regex_t* regex;
    OnigErrorInfo info;
    const OnigUChar* begin = (const OnigUChar*)text;
    const int status =
        onig_new(&regex, begin, begin + strlen(text), ONIG_OPTION_NONE, ONIG_ENCODING_UTF8, ONIG_SYNTAX_DEFAULT, &info);
    if (status == ONIG_NORMAL) return (Pattern*)regex;

    // It does not compile: the library's message is the reason.
    OnigUChar why[ONIG_MAX_ERROR_MESSAGE_LEN];
    onig_error_code_to_str(why, status, &info);
    snprintf(error, error_size, "%s", (const char*)why);
    return NULL;
}

void pattern_free(Pattern* pattern) { onig_free((regex_t*)pattern); }

int pattern_find(const Pattern* pattern, const char* text, size_t length, size_t at, size_t* from, size_t* to) {
    const OnigUChar *begin = (const OnigUChar*)text, *end = begin + length;
    OnigRegion region = {0};
    // The limits are global to the process.
    const unsigned long retries = RETRIES + RETRIES_A_BYTE * (length - at);
    onig_set_retry_limit_in_match(retries);
    onig_set_retry_limit_in_search(retries);
    // The whole text is given, so that lookbehind sees the bytes before `at`.
    const int found = onig_search((regex_t*)pattern, begin, end, begin + at, end, &region, ONIG_OPTION_NONE);
    if (found >= 0) {
        *from = (size_t)region.beg[0];
        *to = (size_t)region.end[0];
    }

    // The region itself is on the stack (0); only its arrays are freed. A negative result other than a mismatch is in
    // practice the retry limit.
    onig_region_free(&region, 0);
    if (found < 0) return found == ONIG_MISMATCH ? 0 : -1;
    // With \K in a look-around a match may begin before the search, or end before it begins.
    return *from >= at && *to >= *from ? 1 : -2;
}
