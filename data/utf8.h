// UTF-8 characters: value and length.
#pragma once

#include "device/types.h"

// Decodes the UTF-8 character at s, where at most `capacity` bytes (at least one) may be read. Returns its length in
// bytes; 0 if it is not well-formed (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF).
static inline int utf8_read(const char* s, size_t capacity, uint32_t* code) {
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};  // by length: smaller values are overlong
    const unsigned char* b = (const unsigned char*)s;
    *code = b[0];
    if (b[0] < 0x80) return 1;
    int n = b[0] >= 0xf0 ? 4 : b[0] >= 0xe0 ? 3 : 2;
    if (b[0] < 0xc0 || b[0] >= 0xf8 || capacity < (size_t)n) return 0;
    *code = b[0] & (0x7fu >> n);
    for (int i = 1; i < n; i++) {
        if ((b[i] & 0xc0) != 0x80) return 0;
        *code = *code << 6 | (b[i] & 0x3f);
    }
    return *code < least[n] || (*code >= 0xd800 && *code < 0xe000) || *code > 0x10ffff ? 0 : n;
}
