// JSON (RFC 8259) parser for headers, manifests and logs. The result is a tree; {"step": 7, "files": [1, 2]} becomes
//
//   object
//   | child
//   "step": 7 --next--> "files": array
//                                | child
//                                1 --next--> 2
#pragma once

#include "device/types.h"

typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonType;

typedef struct Json {
    JsonType type;
    double number;       // NUMBER; BOOL: 0 or 1
    int64_t integer;     // NUMBER: exact if written without fraction and exponent and in range; else (int64_t)number
    char* text;          // STRING, UTF-8
    char* key;           // set on members of an object
    struct Json* child;  // first element or member
    struct Json* next;   // next sibling
} Json;

// Parses `length` bytes, which must be one value; json_free frees the tree. NULL on error, with the reason and byte
// offset in `error` (error_size may be 0).
Json* json_parse(const char* text, size_t length, char* error, size_t error_size);
void json_free(Json* json);

const Json* json_get(const Json* object, const char* key);   // NULL if absent or not an object
const char* json_text(const Json* object, const char* key);  // NULL if absent or not a string
// The member as an integer; if_absent if the member is absent or no number.
int64_t json_int(const Json* object, const char* key, int64_t if_absent);
// The number of elements or members; 0 for NULL and for values of other types.
int64_t json_count(const Json* container);

// `text` as a JSON string with its quotes, in fresh memory that the caller frees.
char* json_quote(const char* text);
