// UTF-8 characters: length and value.
#ifndef DATA_UTF8_H
#define DATA_UTF8_H

#include "device/types.h"

// Length in bytes of the UTF-8 character at s, where at most `capacity` bytes may be read. 0 if it is not well-formed
// (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF).
static inline int utf8_length(const char* s, size_t capacity) {
    const unsigned char* b = (const unsigned char*)s;
    if (b[0] < 0x80) return 1;
    int n = b[0] >= 0xf0 ? 4 : b[0] >= 0xe0 ? 3 : 2;
    if (b[0] < 0xc2 || b[0] > 0xf4 || capacity < (size_t)n) return 0;
    for (int i = 1; i < n; i++)
        if ((b[i] & 0xc0) != 0x80) return 0;
    if ((b[0] == 0xe0 && b[1] < 0xa0) || (b[0] == 0xed && b[1] > 0x9f)) return 0;
    if ((b[0] == 0xf0 && b[1] < 0x90) || (b[0] == 0xf4 && b[1] > 0x8f)) return 0;
    return n;
}

// Decodes the well-formed character at s; *next is its end.
static inline uint32_t utf8_read(const char* s, const char** next) {
    const unsigned char* b = (const unsigned char*)s;
    int n = b[0] < 0x80 ? 1 : b[0] < 0xe0 ? 2 : b[0] < 0xf0 ? 3 : 4;
    uint32_t code = n == 1 ? b[0] : b[0] & (0x7fu >> n);
    for (int i = 1; i < n; i++) code = code << 6 | (b[i] & 0x3f);
    *next = s + n;
    return code;
}

#endif
