// A recursive descent parser: parse_value looks at one byte and calls the parser of that kind of value. Each parser
// starts with p->at at the value's first byte and ends with p->at after the last byte. On failure a parser returns
// false, with the reason in p->error. All memory is in the tree from its allocation on, so json_parse can free it after
// a failure.
#include "data/json.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"

// Nesting is limited because the parser recurses: a hostile file must not exhaust the stack.
enum { MAX_DEPTH = 128 };

// The state of one parse. The text belongs to the caller, and needs no NUL at its end.
typedef struct Parser {
    const char* text;
    size_t length;
    size_t at;  // offset of the next byte
    int depth;  // containers that are open
    char* error;
    size_t error_size;
} Parser;

// Writes the reason and its byte offset to the error. Always false.
static bool fail(Parser* p, size_t at, const char* reason) {
    if (p->error_size) snprintf(p->error, p->error_size, "byte %zu: %s", at, reason);
    return false;
}

// The next byte, or -1 at the end.
static int peek(const Parser* p) { return p->at < p->length ? (unsigned char)p->text[p->at] : -1; }

// Skips the next byte if it is c; true if it was.
static bool take(Parser* p, char c) {
    bool there = peek(p) == c;
    p->at += there;
    return there;
}

// Skips the four bytes that JSON counts as white space.
static void skip_space(Parser* p) {
    for (int c = peek(p); c == ' ' || c == '\t' || c == '\n' || c == '\r'; c = peek(p)) p->at++;
}

// The bytes of the UTF-8 character at s, where at most `capacity` bytes (at least one) may be read; 0 if it is not
// well-formed (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF).
static int utf8_length(const char* s, size_t capacity) {
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};  // by length: smaller values are overlong
    const unsigned char* b = (const unsigned char*)s;
    if (b[0] < 0x80) return 1;
    int n = b[0] >= 0xf0 ? 4 : b[0] >= 0xe0 ? 3 : 2;
    if (b[0] < 0xc0 || b[0] >= 0xf8 || capacity < (size_t)n) return 0;
    uint32_t code = b[0] & (0x7fu >> n);
    for (int i = 1; i < n; i++) {
        if ((b[i] & 0xc0) != 0x80) return 0;
        code = code << 6 | (b[i] & 0x3f);
    }
    return code < least[n] || (code >= 0xd800 && code < 0xe000) || code > 0x10ffff ? 0 : n;
}

// Writes a character as UTF-8; returns the number of bytes.
static int utf8_write(char* out, uint32_t code) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    int n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char lead[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (int i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)(lead[n] | code);
    return n;
}

// Parses four hex digits at p->at.
static bool parse_hex4(Parser* p, uint32_t* code) {
    char digits[5] = "";
    for (int i = 0; i < 4; i++) {
        if (!isxdigit(peek(p))) return fail(p, p->at, "\\u needs four hex digits");
        digits[i] = p->text[p->at++];
    }
    *code = (uint32_t)strtoul(digits, NULL, 16);
    return true;
}

// Decodes the escape at p->at (just after the backslash) into out.
static bool parse_escape(Parser* p, char* out, int* written) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    size_t start = p->at - 1;
    int c = peek(p);
    p->at++;

    // A one-letter escape.
    if (c != 'u') {
        const char* found = c > 0 ? strchr(from, c) : NULL;
        if (!found) return fail(p, start, "unknown escape in a string");
        *out = to[found - from];
        *written = 1;
        return true;
    }

    // \u and four hex digits: a character, or the first half of a surrogate pair.
    uint32_t code, low = 0;
    if (!parse_hex4(p, &code)) return false;
    if (code >= 0xdc00 && code < 0xe000) return fail(p, start, "the second half of a surrogate pair stands alone");
    if (code >= 0xd800 && code < 0xdc00) {
        bool pair = take(p, '\\') && take(p, 'u');
        if (pair && !parse_hex4(p, &low)) return false;
        if (!pair || low < 0xdc00 || low >= 0xe000)
            return fail(p, start, "the first half of a surrogate pair stands alone");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    if (code == 0) return fail(p, start, "a NUL character in a string is not supported");
    *written = utf8_write(out, code);
    return true;
}

// Parses a string into fresh memory at *text; p->at is at its opening quote.
static bool parse_string(Parser* p, char** text) {
    // Find its end: a quote without a backslash before it.
    size_t start = p->at++, end = p->at;
    while (end < p->length && p->text[end] != '"') end += p->text[end] == '\\' ? 2 : 1;
    if (end >= p->length) return fail(p, start, "a string does not end");

    // Decode character by character, escaped or plain. An escape is never shorter than its character, so `out`
    // suffices.
    char* out = *text = (char*)host_alloc(end - p->at + 1);
    while (p->at < end) {
        int bytes = 0;
        if (take(p, '\\')) {
            if (!parse_escape(p, out, &bytes)) return false;
        } else if (peek(p) < 0x20) {
            return fail(p, p->at, "a control character in a string must be escaped");
        } else {
            bytes = utf8_length(p->text + p->at, end - p->at);
            if (bytes == 0) return fail(p, p->at, "a string is not UTF-8");
            memcpy(out, p->text + p->at, (size_t)bytes);
            p->at += (size_t)bytes;
        }
        out += bytes;
    }
    p->at = end + 1;
    return true;
}

// Skips decimal digits, and returns their number.
static size_t skip_digits(Parser* p) {
    size_t start = p->at;
    while (peek(p) >= '0' && peek(p) <= '9') p->at++;
    return p->at - start;
}

// RFC 8259's grammar, which is narrower than strtod's.
static bool parse_number(Parser* p, Json* json) {
    // Scan the number: sign, digits, fraction, exponent.
    size_t start = p->at;
    take(p, '-');
    const bool zero = peek(p) == '0';
    const size_t digits = skip_digits(p), integer_end = p->at;
    bool good = digits > 0 && !(zero && digits > 1);
    if (take(p, '.')) good &= skip_digits(p) > 0;
    if (take(p, 'e') || take(p, 'E')) {
        if (!take(p, '+')) take(p, '-');
        good &= skip_digits(p) > 0;
    }
    if (!good) return fail(p, start, "not a number");

    // Its value as a double, and as a 64-bit integer: exact if it is written as an integer, else truncated. The limit
    // is the largest double below 2^63.
    char* copy = host_format("%.*s", (int)(p->at - start), p->text + start);  // NUL-terminated for strtod
    json->type = JSON_NUMBER;
    json->number = strtod(copy, NULL);
    const double truncated = fmax(-0x1p63, fmin(json->number, 0x1.fffffffffffffp62));
    json->integer = p->at == integer_end ? strtol(copy, NULL, 10) : (int64_t)truncated;
    free(copy);
    return isfinite(json->number) ? true : fail(p, start, "a number is too large");
}

// true, false or null.
static bool parse_word(Parser* p, Json* json, const char* word, JsonType type, double number) {
    size_t n = strlen(word);
    if (p->length - p->at < n || memcmp(p->text + p->at, word, n) != 0) return fail(p, p->at, "expected a value");
    p->at += n;
    json->type = type;
    json->number = number;
    return true;
}

// Containers have values, so the two functions call each other.
static bool parse_value(Parser* p, Json* json);

// An array or object; p->at is at its opening bracket.
static bool parse_container(Parser* p, Json* json) {
    bool object = peek(p) == '{';
    int close = object ? '}' : ']';
    json->type = object ? JSON_OBJECT : JSON_ARRAY;
    if (++p->depth > MAX_DEPTH) return fail(p, p->at, "nested too deeply");
    p->at++;
    Json** tail = &json->child;

    // An empty container has no child at its closing bracket; others end after a value.
    skip_space(p);
    while (json->child || peek(p) != close) {
        Json* child = *tail = (Json*)host_alloc(sizeof(Json));
        tail = &child->next;

        // The name of a member, and the value.
        skip_space(p);
        if (object) {
            if (peek(p) != '"') return fail(p, p->at, "expected a member's name in quotes");
            if (!parse_string(p, &child->key)) return false;
            skip_space(p);
            if (!take(p, ':')) return fail(p, p->at, "expected ':' after a member's name");
        }
        if (!parse_value(p, child)) return false;

        // A comma, or the end.
        skip_space(p);
        if (peek(p) == close) break;
        if (!take(p, ',')) return fail(p, p->at, object ? "expected ',' or '}'" : "expected ',' or ']'");
    }
    p->at++;
    p->depth--;
    return true;
}

// Parses a value; its first byte decides the kind.
static bool parse_value(Parser* p, Json* json) {
    skip_space(p);
    int c = peek(p);
    switch (c) {
        case '{':
        case '[': return parse_container(p, json);
        case '"': json->type = JSON_STRING; return parse_string(p, &json->text);
        case 't': return parse_word(p, json, "true", JSON_BOOL, 1);
        case 'f': return parse_word(p, json, "false", JSON_BOOL, 0);
        case 'n': return parse_word(p, json, "null", JSON_NULL, 0);
        case -1: return fail(p, p->at, "the text ends where a value is expected");
        default: return c == '-' || isdigit(c) ? parse_number(p, json) : fail(p, p->at, "expected a value");
    }
}

Json* json_parse(const char* text, size_t length, char* error, size_t error_size) {
    Parser p = {.text = text, .length = length, .error = error, .error_size = error_size};
    Json* json = (Json*)host_alloc(sizeof(Json));
    bool ok = parse_value(&p, json);

    // Only white space may follow the value.
    skip_space(&p);
    if (ok && p.at < length) ok = fail(&p, p.at, "more text after the value");
    if (ok) return json;
    json_free(json);
    return NULL;
}

void json_free(Json* json) {
    while (json) {
        // Siblings are freed in a loop and children by recursion, so MAX_DEPTH also limits the stack here.
        Json* next = json->next;
        json_free(json->child);
        free(json->text);
        free(json->key);
        free(json);
        json = next;
    }
}

const Json* json_get(const Json* object, const char* key) {
    if (!object || object->type != JSON_OBJECT) return NULL;
    for (const Json* member = object->child; member; member = member->next)
        if (strcmp(member->key, key) == 0) return member;
    return NULL;
}

const char* json_text(const Json* object, const char* key) {
    const Json* member = json_get(object, key);
    return member && member->type == JSON_STRING ? member->text : NULL;
}

int64_t json_int(const Json* object, const char* key, int64_t if_absent) {
    const Json* member = json_get(object, key);
    return member && member->type == JSON_NUMBER ? member->integer : if_absent;
}

int64_t json_count(const Json* container) {
    int64_t n = 0;
    for (const Json* child = container ? container->child : NULL; child; child = child->next) n++;
    return n;
}

char* json_quote(const char* text) {
    static const char from[] = "\"\\\n\t\r", to[] = "\"\\ntr";
    size_t length = strlen(text);
    char* out = (char*)host_alloc(6 * length + 3);  // \u00xx is the longest that a byte becomes
    char* o = out;

    // Copy the characters; escape those that JSON requires to be escaped.
    *o++ = '"';
    for (size_t i = 0; i < length;) {
        int c = (unsigned char)text[i], bytes = utf8_length(text + i, length - i);
        const char* short_form = c ? strchr(from, c) : NULL;
        if (short_form) {
            *o++ = '\\';
            *o++ = to[short_form - from];
        } else if (c < 0x20 || bytes == 0) {
            // A sample may cut a character in two: invalid UTF-8 becomes the replacement character.
            o += snprintf(o, 7, "\\u%04x", bytes ? (unsigned)c : 0xfffdu);
            bytes = 1;
        } else {
            memcpy(o, text + i, (size_t)bytes);
            o += bytes;
        }
        i += (size_t)bytes;
    }
    *o++ = '"';
    *o = 0;
    return out;
}
