// JSON, safetensors and tokenizer files. All comparisons here are exact.
#include <stdbool.h>

#include "data/json.h"
#include "data/safetensors.h"
#include "data/tokenizer.h"
#include "tests/files.h"

// ---- JSON

static Json* parse(const char* text) {
    char error[128] = "";
    return json_parse(text, strlen(text), error, sizeof(error));
}

static void test_json_values(void) {
    Json* j = parse(" {\"a\": [1, -2.5e2, true, false, null, \"x\", [], {}], \"b\" : {\"c\":0}, \"t\":\"text\"}\n");
    CHECK(j && j->type == JSON_OBJECT && json_count(j) == 3, "object");
    if (!j) return;
    const Json* a = json_get(j, "a");
    CHECK(a && a->type == JSON_ARRAY && json_count(a) == 8, "array");
    const Json* e = a->child;
    CHECK(e->type == JSON_NUMBER && e->integer == 1 && e->number == 1, "1");
    e = e->next;
    CHECK(e->type == JSON_NUMBER && e->integer == -250 && e->number == -250, "-2.5e2 is %g", e->number);
    e = e->next;
    CHECK(e->type == JSON_BOOL && e->number == 1, "true");
    e = e->next;
    CHECK(e->type == JSON_BOOL && e->number == 0, "false");
    e = e->next;
    CHECK(e->type == JSON_NULL, "null");
    e = e->next;
    CHECK(e->type == JSON_STRING && strcmp(e->text, "x") == 0, "string");
    e = e->next;
    CHECK(e->type == JSON_ARRAY && json_count(e) == 0, "empty array");
    e = e->next;
    CHECK(e->type == JSON_OBJECT && json_count(e) == 0 && !e->next, "empty object");
    CHECK(json_int(json_get(j, "b"), "c", 7) == 0, "nested");
    CHECK(json_int(j, "none", 7) == 7 && json_int(j, "t", 7) == 7, "absent, or not a number");
    CHECK(strcmp(json_text(j, "t"), "text") == 0 && !json_text(j, "a") && !json_text(j, "none"), "text");
    CHECK(!json_get(a, "a") && !json_get(NULL, "a"), "members of what is not an object");
    json_free(j);
}

static void test_json_integers(void) {
    const struct {
        const char* text;
        int64_t value;
    } cases[] = {{"9223372036854775807", INT64_MAX},
                 {"-9223372036854775808", INT64_MIN},
                 {"9007199254740993", 9007199254740993},
                 {"-9007199254740993", -9007199254740993},
                 {"9223372036854775808", INT64_MAX},
                 {"-9223372036854775809", INT64_MIN},
                 {"123456789012345678901234", INT64_MAX},
                 {"0", 0},
                 {"-0", 0},
                 {"1.9", 1},
                 {"1e300", INT64_MAX - 1023},
                 {"-1e300", INT64_MIN}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Json* j = parse(cases[i].text);
        CHECK(j && j->integer == cases[i].value, "%s gives %lld", cases[i].text, j ? (long long)j->integer : 0);
        CHECK(j && j->number == strtod(cases[i].text, NULL), "%s", cases[i].text);
        json_free(j);
    }
}

static void test_json_strings(void) {
    Json* j = parse("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00e9\\u20AC\\ud83d\\ude00 \xe2\x82\xac\"");
    CHECK(j && strcmp(j->text, "\"\\/\b\f\n\r\tA\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80 \xe2\x82\xac") == 0, "%s",
          j ? j->text : "");
    json_free(j);
    // The output of json_quote is read back. Bytes that are not UTF-8 become the replacement character.
    const char* texts[] = {"", "plain", "q\"b\\n\nt\tr\rc\x01\x1f\x7f", "\xf0\x9f\x98\x80\xc3\xa9"};
    for (int i = 0; i < 4; i++) {
        char* quoted = json_quote(texts[i]);
        j = parse(quoted);
        CHECK(j && strcmp(j->text, texts[i]) == 0, "%s", quoted);
        json_free(j);
        free(quoted);
    }
    char* quoted = json_quote(
        "a\xff"
        "b\xe2\x82");
    CHECK(strcmp(quoted, "\"a\\ufffdb\\ufffd\\ufffd\"") == 0, "%s", quoted);
    free(quoted);
}

static void test_json_malformed(void) {
    // clang-format off
    const char* cases[] = {
        "", " ", "{", "[", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "{\"a\"}", "{\"a\":}", "{\"a\":1,}", "{a:1}",
        "{1:2}", "{\"a\":1 \"b\":2}", "]", "}", "1 2", "{} x", "tru", "truee", "nul", "True", "NaN", "Infinity", "-",
        "+1", "01", "-01", "1.", ".5", "1e", "1e+", "0x10", "1e999", "\"", "\"abc", "\"\\\"", "\"\\", "\"\\x\"",
        "\"\\u12\"", "\"\\u12g4\"", "\"\\ud800\"", "\"\\ud800x\"", "\"\\ud800\\u0041\"", "\"\\udc00\"", "\"\\u0000\"",
        "\"a\nb\"", "\"\xff\"", "\"\xc0\x80\"", "\"\xe0\x80\x80\"", "\"\xf0\x80\x80\x80\"", "\"\xed\xa0\x80\"", "\"\xf4\x90\x80\x80\"", "\"\xe2\x82\"", "[1}",
        "{\"a\":1]", "'a'", "\xef\xbb\xbf{}"};
    // clang-format on
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char error[128] = "";
        Json* j = json_parse(cases[i], strlen(cases[i]), error, sizeof(error));
        CHECK(!j, "'%s' was taken", cases[i]);
        CHECK(strncmp(error, "byte ", 5) == 0, "'%s' says '%s'", cases[i], error);
        json_free(j);
    }
    char error[128];
    CHECK(!json_parse("[1, 2, x]", 9, error, sizeof(error)) && strncmp(error, "byte 7:", 7) == 0, "%s", error);
    CHECK(!json_parse("[1]\0", 4, error, sizeof(error)), "a NUL behind the value");
    CHECK(!json_parse("[12]", 3, error, sizeof(error)), "the length ends the text");
    CHECK(!json_parse("x", 1, NULL, 0), "no room for a message");
}

static void test_json_depth(void) {
    enum { N = 1000000 };
    char* text = (char*)host_alloc(2 * N);
    memset(text, '[', N);
    char error[128];
    CHECK(!json_parse(text, N, error, sizeof(error)) && strstr(error, "deep"), "%s", error);
    memset(text + 100, ']', 100);
    Json* j = json_parse(text, 200, error, sizeof(error));
    CHECK(j, "100 levels: %s", error);
    json_free(j);
    // Siblings do not add depth.
    for (int i = 0; i < N; i++) memcpy(text + 2 * i, "1,", 2);
    text[0] = '[';
    text[2 * N - 1] = ']';
    memcpy(text + 2, "1,", 2);
    text[1] = ' ';
    j = json_parse(text, 2 * N, error, sizeof(error));
    CHECK(j && json_count(j) == N - 1, "many siblings");
    json_free(j);
    for (int i = 0; i < 1000; i++) memcpy(text + 3 * i, "[],", 3);
    memcpy(text, "[ 1", 3);
    text[3 * 1000 - 1] = ']';
    j = json_parse(text, 3 * 1000, error, sizeof(error));
    CHECK(!j, "two values without a comma");
    memcpy(text, "[1,", 3);
    j = json_parse(text, 3 * 1000, error, sizeof(error));
    CHECK(j && json_count(j) == 1000, "siblings that nest: %s", error);
    json_free(j);
    free(text);
}

// ---- safetensors

static StTensor tensor(const char* name, StDtype dtype, int rank, int64_t a, int64_t b) {
    StTensor t;
    memset(&t, 0, sizeof(t));
    t.name = (char*)name;
    t.dtype = dtype;
    t.rank = rank;
    t.shape[0] = a;
    t.shape[1] = b;
    return t;
}

static void test_safetensors_round_trip(void) {
    StTensor plan[] = {tensor("model.w", ST_F32, 2, 3, 5), tensor("empty", ST_F32, 1, 0, 0),
                       tensor("step \"x\"", ST_I64, 0, 0, 0), tensor("half", ST_BF16, 1, 7, 0)};
    int64_t size;
    char* header = st_plan_header(plan, 4, &size);
    CHECK(size % 8 == 0 && plan[0].offset == size && plan[1].bytes == 0, "plan");
    CHECK(plan[2].bytes == 8 && plan[2].offset == size + 60 && plan[3].offset == size + 68 && plan[3].bytes == 14,
          "plan");
    size_t total = (size_t)size + 82;
    char* file = (char*)host_alloc(total);
    memcpy(file, header, (size_t)size);
    float w[15];
    for (int i = 0; i < 15; i++) w[i] = (float)i * 0.5f;
    int64_t step = INT64_MIN + 5;
    memcpy(file + plan[0].offset, w, sizeof(w));
    memcpy(file + plan[2].offset, &step, 8);
    const char* path = write_file("a.safetensors", file, total);
    char error[512] = "";
    SafeTensors* st = st_open(path, error, sizeof(error));
    CHECK(st && st->count == 4, "%s", error);
    if (st) {
        const StTensor* t = st_find(st, "model.w");
        float out[15] = {0};
        CHECK(t && t->dtype == ST_F32 && t->rank == 2 && t->shape[0] == 3 && t->shape[1] == 5 && t->offset == size,
              "w");
        CHECK(st_read(st, t, 0, 15, out) == 0 && memcmp(out, w, sizeof(w)) == 0, "values");
        CHECK(st_read(st, t, 4, 3, out) == 0 && out[0] == 2.0f && out[2] == 3.0f, "part");
        CHECK(st_read(st, t, 4, 12, out) == -1 && st_read(st, t, -1, 2, out) == -1, "reads past the end");
        int64_t read_step = 0;
        t = st_find(st, "step \"x\"");
        CHECK(t && t->rank == 0 && st_read(st, t, 0, 1, &read_step) == 0 && read_step == step, "scalar");
        t = st_find(st, "empty");
        CHECK(t && t->bytes == 0 && st_read(st, t, 0, 0, NULL) == 0, "empty");
        CHECK(!st_find(st, "__metadata__") && !st_find(st, "model"), "absent");
        CHECK(strcmp(json_text(json_get(st->header, "__metadata__"), "format"), "pt") == 0, "metadata");
        // A file that is truncated while it is open gives an error, not zeros.
        float last[5];
        CHECK(truncate(path, (off_t)size + 50) == 0 && st_read(st, st_find(st, "model.w"), 10, 5, last) == -1,
              "cut while open");
    }
    st_close(st);
    free(header);
    // Every shorter or longer file is refused.
    for (size_t n = 0; n < total; n++) {
        path = write_file("cut.safetensors", file, n);
        st = st_open(path, error, sizeof(error));
        CHECK(!st && strstr(error, path), "%zu of %zu bytes: %s", n, total, error);
        st_close(st);
    }
    file = (char*)realloc(file, total + 1);
    path = write_file("long.safetensors", file, total + 1);
    st = st_open(path, error, sizeof(error));
    CHECK(!st && strstr(error, "1 bytes after"), "%s", error);
    st_close(st);
    free(file);
    header = st_plan_header(NULL, 0, &size);
    st = st_open(write_file("none.safetensors", header, (size_t)size), error, sizeof(error));
    CHECK(st && st->count == 0, "no tensors: %s", error);
    st_close(st);
    free(header);
}

// Data begin at a multiple of 8, for any length of the names.
static void test_safetensors_aligned(void) {
    for (int n = 1; n < 17; n++) {
        char name[20] = "", error[512];
        memset(name, 'n', (size_t)n);
        StTensor plan = tensor(name, ST_U8, 1, 0, 0);
        int64_t size;
        char* header = st_plan_header(&plan, 1, &size);
        SafeTensors* st = st_open(write_file("aligned.safetensors", header, (size_t)size), error, sizeof(error));
        CHECK(st && size % 8 == 0, "a name of %d: %lld bytes", n, (long long)size);
        st_close(st);
        free(header);
    }
}

static void test_safetensors_malformed(void) {
    const struct {
        const char* header;
        int data;
        const char* says;
    } cases[] = {
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}", 8, "header: byte"},
        {"[]", 0, "not a JSON object"},
        {"{\"a\":1}", 0, "needs dtype, shape and data_offsets"},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "needs dtype"},
        {"{\"a\":{\"dtype\":\"F99\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "dtype F99"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8,
         "has 8 bytes of data, its shape and dtype need 12"},
        {"{\"a\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "need 16"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8, "not made of sizes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,6]}}", 6, "not made of sizes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[\"2\"],\"data_offsets\":[0,8]}}", 8, "not made of sizes"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,8],\"data_offsets\":[0,8]}}", 8, "more than 4 dimensions"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, "too large"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8, "not [begin, end]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]}}", 8, "not [begin, end]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 8, "not [begin, end]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 8, "ends at byte 12"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[9223372036854775792,9223372036854775800]}}", 8,
         "ends at byte"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12, "4 bytes before tensor 'a'"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[2],"
         "\"data_offsets\":[4,12]}}",
         12, "'a' and 'b' overlap"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_"
         "offsets\":[8,16]}}",
         16, "two tensors are named 'a'"},
    };
    char error[512];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint64_t length = strlen(cases[i].header);
        size_t total = 8 + length + (size_t)cases[i].data;
        char* file = (char*)host_alloc(total);
        memcpy(file, &length, 8);
        memcpy(file + 8, cases[i].header, length);
        const char* path = write_file("bad.safetensors", file, total);
        error[0] = 0;
        SafeTensors* st = st_open(path, error, sizeof(error));
        CHECK(!st && strstr(error, path) == error && strstr(error, cases[i].says), "%s: '%s'", cases[i].header, error);
        st_close(st);
        free(file);
    }
    uint64_t huge[2] = {(uint64_t)-1, 0};
    CHECK(!st_open(write_file("bad.safetensors", huge, 16), error, sizeof(error)) && strstr(error, "not a safetensors"),
          "%s", error);
    huge[0] = 9;
    CHECK(!st_open(write_file("bad.safetensors", huge, 16), error, sizeof(error)) && strstr(error, "cut off"), "%s",
          error);
    CHECK(!st_open(in_folder("absent"), error, sizeof(error)) && strstr(error, "No such file"), "%s", error);
    CHECK(!st_open(folder, error, sizeof(error)) && strstr(error, "Is a directory"), "%s", error);
}

// ---- Tokenizer

// Header and tokens "a", "b", "ab", "" , "abc", "<eot>", "a" (again), "\xff"; returns the size.
static size_t make_tokenizer(unsigned char* file) {
    const char* tokens[] = {"a", "b", "ab", "", "abc", "<eot>", "a", "\xff"};
    uint32_t header[256] = {20240328, 2, 8, 5};
    memcpy(file, header, 1024);
    size_t n = 1024;
    for (int i = 0; i < 8; i++) {
        size_t length = strlen(tokens[i]);
        file[n++] = (unsigned char)length;
        memcpy(file + n, tokens[i], length);
        n += length;
    }
    return n;
}

static bool decodes(const Tokenizer* t, int32_t id, const char* bytes, int expected) {
    int length = -1;
    const char* got = tokenizer_decode(t, id, &length);
    return got && length == expected && memcmp(got, bytes, (size_t)expected) == 0;
}

static void open_bad_tokenizer(void) { tokenizer_open(in_folder("bad.tok")); }

static void test_tokenizer_file(void) {
    unsigned char file[2048];
    size_t n = make_tokenizer(file);
    Tokenizer* t = tokenizer_open(write_file("t.tok", file, n));
    CHECK(t->size == 8 && t->eot == 5, "size and end of text");
    CHECK(decodes(t, 0, "a", 1) && decodes(t, 4, "abc", 3) && decodes(t, 5, "", 0) && decodes(t, 7, "\xff", 1),
          "decode");
    int length = -1;
    CHECK(!tokenizer_decode(t, 8, &length) && length == 0 && !tokenizer_decode(t, -1, &length), "ids out of range");
    length = -1;
    CHECK(!tokenizer_decode(t, 3, &length) && length == 0, "a token without bytes");
    tokenizer_close(t);
}

// Version 3 has tokens of more than 255 bytes; for hash and comparison they have none, as in version 2.
static void test_tokenizer_words(void) {
    unsigned char file[4096], words[4096];
    char text[301] = "";
    const size_t n = make_tokenizer(file);
    memset(text, ' ', 300);
    memcpy(words, file, 1024);
    words[4] = 3;
    size_t to = 1024;
    for (size_t at = 1024; at < n; at += 1 + file[at]) {
        const uint32_t length = file[at] ? file[at] : 300;
        memcpy(words + to, &length, 4);
        memcpy(words + to + 4, file[at] ? (const char*)file + at + 1 : text, length);
        to += 4 + length;
    }
    Tokenizer *a = tokenizer_open(write_file("a.tok", file, n)), *b = tokenizer_open(write_file("b.tok", words, to));
    CHECK(b->size == 8 && b->eot == 5, "size and end of text");
    CHECK(decodes(b, 0, "a", 1) && decodes(b, 3, text, 300) && decodes(b, 5, "", 0) && decodes(b, 7, "\xff", 1),
          "decode");
    CHECK(tokenizer_hash(a) == tokenizer_hash(b) && !tokenizer_difference(a, b), "hash and comparison");
    tokenizer_close(a);
    tokenizer_close(b);
    for (size_t cut = 1; cut < 6; cut++) {
        write_file("bad.tok", words, to - cut);
        DIES(open_bad_tokenizer, "bad.tok", "the file ends inside token 7 of 8");
    }
    write_file("bad.tok", words, to + 1);
    DIES(open_bad_tokenizer, "bad.tok", "1 bytes after the last of 8 tokens");
}

static void test_tokenizer_bytes(void) {
    Tokenizer* t = tokenizer_open("");
    CHECK(t->size == 257 && t->eot == 256, "size");
    for (int i = 1; i < 256; i++) {
        const char byte[] = {(char)i, 0};
        CHECK(decodes(t, i, byte, 1), "byte %d", i);
    }
    CHECK(decodes(t, 0, "\0", 1) && decodes(t, 256, "", 0), "zero and end of text");
    int length;
    CHECK(!tokenizer_decode(t, 257, &length), "out of range");
    tokenizer_close(t);
}

static void test_tokenizer_refused(void) {
    unsigned char file[2048];
    size_t n = make_tokenizer(file);
    remove_matching("bad.tok");
    DIES(open_bad_tokenizer, "--tokenizer", "bad.tok", "No such file");
    write_file("bad.tok", file, 1000);
    DIES(open_bad_tokenizer, "--tokenizer", "bad.tok", "byte 1000: the file ends inside the header");
    write_file("bad.tok", file, n - 1);
    DIES(open_bad_tokenizer, "bad.tok", "the file ends inside token 7 of 8");
    write_file("bad.tok", file, n - 2);
    DIES(open_bad_tokenizer, "bad.tok", "the file ends inside token 7 of 8");
    write_file("bad.tok", file, n + 1);
    DIES(open_bad_tokenizer, "bad.tok", "1 bytes after the last of 8 tokens");
    const struct {
        int field;
        uint32_t value;
        const char* says;
    } cases[] = {{0, 20240327, "byte 0: magic number 20240327"},
                 {1, 1, "byte 4: version 1"},
                 {2, 0, "byte 8: 0 tokens"},
                 {2, 0x80000000u, "byte 8: 2147483648 tokens"},
                 {2, 9, "the file ends inside token 8 of 9"},
                 {3, 8, "byte 12: end of text has id 8"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        make_tokenizer(file);
        memcpy(file + 4 * cases[i].field, &cases[i].value, 4);
        write_file("bad.tok", file, n);
        DIES(open_bad_tokenizer, "bad.tok", cases[i].says);
    }
}

int main(void) {
    make_folder("test_data");
    RUN(test_json_values);
    RUN(test_json_integers);
    RUN(test_json_strings);
    RUN(test_json_malformed);
    RUN(test_json_depth);
    RUN(test_safetensors_round_trip);
    RUN(test_safetensors_aligned);
    RUN(test_safetensors_malformed);
    RUN(test_tokenizer_file);
    RUN(test_tokenizer_words);
    RUN(test_tokenizer_bytes);
    RUN(test_tokenizer_refused);
    remove_matching("");
    return test_summary();
}
