// Patterns that cut text into words, merges, and tokenizer.json. All comparisons here are exact.
// tests/data/test_tokenizer.py compares with the library tokenizers on real text.
#include <stdbool.h>

#include "data/split.h"
#include "data/tokenizer.h"
#include "tests/files.h"

// ---- Patterns

// The text with each match of the pattern in <>, or the reason why there are no matches.
static const char* pieces(const char* text_of_pattern, const char* text) {
    static char out[1024], error[256];
    Pattern* pattern = pattern_new(text_of_pattern, error, sizeof(error));
    if (!pattern) return error;
    const size_t length = strlen(text);
    size_t at = 0, done = 0, from, to;
    int n = 0, found = 0;
    out[0] = 0;
    while (at < length && (found = pattern_find(pattern, text, length, at, &from, &to)) > 0) {
        n += snprintf(out + n, sizeof(out) - (size_t)n, "%.*s<%.*s>", (int)(from - done), text + done, (int)(to - from),
                      text + from);
        done = to;
        at = to > from ? to : to + 1;
    }
    snprintf(out + n, sizeof(out) - (size_t)n, "%s%s", text + done,
             found == -1 ? " takes too long"
             : found < 0 ? " begins before its search"
                         : "");
    pattern_free(pattern);
    return out;
}

static int has_oniguruma(void) { return !strstr(pieces("a", ""), "Oniguruma"); }

static void test_patterns(void) {
    static const struct {
        const char *pattern, *text, *pieces;
    } cases[] = {{"ab|a", "abaxb", "<ab><a>xb"},
                 {"\\s+(?!\\S)|\\s+", "a   b ", "a<  >< >b< >"},
                 {"(?i:'s|'Ll)", "'S'll's", "<'S><'ll><'s>"},
                 {"\\p{L}+",
                  "a\xc3\xa9\xe4\xb8\xad\xf0\x9d\x94\xb8"
                  "1",
                  "<a\xc3\xa9\xe4\xb8\xad\xf0\x9d\x94\xb8>1"},
                 {"x*", "axb", "<>a<x><>b"},
                 {"(a|aa)+[^a]", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
                  "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa takes too long"},
                 {"(?<=\\Ka)b|a", "abab", "<a>bab begins before its search"},
                 {"(a", "", "end pattern with unmatched parenthesis"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        CHECK(strcmp(pieces(cases[i].pattern, cases[i].text), cases[i].pieces) == 0, "%s in '%s': %s", cases[i].pattern,
              cases[i].text, pieces(cases[i].pattern, cases[i].text));
}

// ---- tokenizer.json

// The bytes a b c d, space and e with acute, and the tokens merged from them. The merge c d is later than b c, and bc d
// is later than a b.
#define VOCAB                                                                                                          \
    "\"a\":0,\"b\":1,\"c\":2,\"d\":3,\"\\u0120\":4,\"\\u00c3\":5,\"\\u00a9\":6,\"bc\":7,\"ab\":8,\"cd\":9,\"bcd\":10," \
    "\"\\u00c3\\u00a9\":11,\"\\u0120a\":12,\"abc\":13"
#define MERGES "\"b c\",\"a b\",[\"c\",\"d\"],[\"bc\",\"d\"],\"\\u00c3 \\u00a9\",\"\\u0120 a\""
#define ADDED                                                                                                          \
    "{\"id\":14,\"content\":\"<|endoftext|>\",\"special\":true,\"normalized\":false},"                                 \
    "{\"id\":15,\"content\":\"<a\",\"special\":false,\"normalized\":false},"                                           \
    "{\"id\":16,\"content\":\"<ab>\",\"special\":false,\"normalized\":false}"
#define BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"

static const char* json(const char* name, const char* before, const char* added, const char* model, const char* vocab,
                        const char* merges) {
    char* text = host_format("{%s,\"added_tokens\":[%s],\"model\":{\"type\":%s,\"vocab\":%s,\"merges\":[%s]}}", before,
                             added, model, vocab, merges);
    const char* path = write_file(name, text, strlen(text));
    free(text);
    return path;
}

static bool encodes(const Tokenizer* t, const char* text, int n, const int32_t* expected) {
    int32_t ids[32];
    int64_t got = tokenizer_encode(t, text, ids, 32);
    return got == n && memcmp(ids, expected, (size_t)n * sizeof(int32_t)) == 0;
}
#define ENCODES(t, text, ...)                                                                                          \
    do {                                                                                                               \
        const int32_t expected[] = {__VA_ARGS__};                                                                      \
        CHECK(encodes(t, text, sizeof(expected) / sizeof(expected[0]), expected), "'%s'", text);                       \
    } while (0)

static bool decodes(const Tokenizer* t, int32_t id, const char* bytes) {
    int length = -1;
    const char* got = tokenizer_decode(t, id, &length);
    return got && length == (int)strlen(bytes) && memcmp(got, bytes, strlen(bytes)) == 0;
}

#define HEAD "\"normalizer\":null,\"pre_tokenizer\":" BYTE_LEVEL
static void test_tokenizer_json(void) {
    Tokenizer* t = tokenizer_open(json("t.json", HEAD, ADDED, "\"BPE\"", "{" VOCAB "}", MERGES));
    CHECK(tokenizer_size(t) == 17 && tokenizer_eot(t) == 14 && tokenizer_exact(t), "size and end of text");
    CHECK(decodes(t, 10, "bcd") && decodes(t, 4, " ") && decodes(t, 12, " a") && decodes(t, 11, "\xc3\xa9") &&
              decodes(t, 5, "\xc3") && decodes(t, 16, "<ab>") && decodes(t, 14, ""),
          "decode");
    // A longest match would begin with ab or abc.
    ENCODES(t, "abcd", 0, 10);
    ENCODES(t, "abab", 8, 8);
    ENCODES(t, "acd", 0, 9);
    ENCODES(t, "a a  a\xc3\xa9", 0, 12, 4, 12, 11);
    // Added tokens match first, the longest before others. A special token in a text is read as text, and its bytes
    // without a token are refused.
    ENCODES(t, "ab<ab><ac", 8, 16, 15, 2);
    int32_t ids[4] = {77, 77, 77, 77};
    CHECK(tokenizer_encode(t, "a<|endoftext|>", ids, 4) == -1 && strstr(tokenizer_why(t), "byte 0x3c"), "%s",
          tokenizer_why(t));
    CHECK(tokenizer_encode(t, "a\xc3", ids, 4) == -1 && strstr(tokenizer_why(t), "byte 1 of the text is not UTF-8"),
          "%s", tokenizer_why(t));
    CHECK(tokenizer_encode(t, "", ids, 4) == 0 && tokenizer_encode(t, "abab<ab>a", ids, 3) == 3 && ids[2] == 16 &&
              ids[3] == 77,
          "room");
    tokenizer_close(t);

    // The leftmost of equal merges comes first. If an earlier merge changes the right token of a pair, the old pair's
    // merge is dropped, and the new pair's merge counts. Two neighbouring results of merges are a pair too.
    t = tokenizer_open(
        json("t.json", HEAD, "", "\"BPE\"",
             "{\"a\":0,\"b\":1,\"aa\":2,\"ba\":3,\"baa\":4,\"</s>\":5,\"\\u0142\\u0143\\u0120\\u0121\":6,"
             "\"bb\":7,\"aabb\":8}",
             "\"a a\",\"b a\",\"b aa\",\"b b\",\"aa bb\""));
    ENCODES(t, "aaa", 2, 0);
    ENCODES(t, "ba", 3);
    ENCODES(t, "baa", 4);
    ENCODES(t, "aabaaa", 2, 4, 0);
    ENCODES(t, "aabb", 8);
    CHECK(decodes(t, 6, "\xa0\xad \x7f"), "the alphabet's ends");
    tokenizer_close(t);

    // A merge makes a new pair of lower rank, on its right or on its left. That pair is merged before the same merge
    // further right.
    t = tokenizer_open(
        json("t.json", HEAD, "", "\"BPE\"", "{\"a\":0,\"b\":1,\"ab\":2,\"aba\":3,\"</s>\":4}", "\"ab a\",\"a b\""));
    ENCODES(t, "abab", 3, 1);
    tokenizer_close(t);
    t = tokenizer_open(json("t.json", HEAD, "", "\"BPE\"", "{\"a\":0,\"b\":1,\"ab\":2,\"bab\":3,\"baba\":4,\"</s>\":5}",
                            "\"bab a\",\"b ab\",\"a b\""));
    ENCODES(t, "babab", 4, 1);
    tokenizer_close(t);

    // With ignore_merges, words that are tokens need no merges. Two patterns cut the text in order.
    t = tokenizer_open(json("t.json",
                            "\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":\"Sequence\","
                            "\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"c|d+\"},\"behavior\":"
                            "\"Removed\",\"invert\":false},{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                            "\"use_regex\":false}]}",
                            ADDED, "\"BPE\",\"ignore_merges\":true", "{" VOCAB "}", MERGES));
    ENCODES(t, "abcabdd\xc3\xa9", 8, 8, 11);
    CHECK(tokenizer_encode(t, "e\xcc\x81", ids, 4) == -1 && strstr(tokenizer_why(t), "byte 1 of the text: "), "%s",
          tokenizer_why(t));
    tokenizer_close(t);
    t = tokenizer_open(json("t.json", HEAD, ADDED, "\"BPE\",\"ignore_merges\":true", "{" VOCAB "}", MERGES));
    ENCODES(t, "abc abcd", 13, 12, 7 + 3);
    tokenizer_close(t);
}

// Patterns of a hostile file. With \K a match begins before its search: one pattern alone, and two in a row, which made
// more tokens than the text has bytes. Searches that each take long end together, and one alone ends too.
static void test_hostile_patterns(void) {
#define SPLIT(regex, behavior, invert)                                                                                 \
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" regex "\"},\"behavior\":\"" behavior "\",\"invert\":" invert "}"
    static char many[1001], blocks[50001];
    memset(many, 'a', 1000);
    for (int i = 0; i < 50000; i++) blocks[i] = i % 700 ? 'a' : 'd';
    static const struct {
        const char *splits, *text, *says;
    } cases[] = {
        {SPLIT("(?<=\\\\Ka)b|a", "Isolated", "false"), "abab", "matches text before"},
        {SPLIT("(?<=\\\\Ka)b|a", "Removed", "true") "," SPLIT("[^x]+", "Isolated", "false"), "abab",
         "matches text before"},
        {SPLIT("a*a*a*[bc]|.", "Isolated", "false"), many, "takes too long"},
        {SPLIT("a*a*[bc]|.", "Isolated", "false"), blocks, "takes too long"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char* head = host_format(
            "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[%s,{\"type\":\"ByteLevel\","
            "\"add_prefix_space\":false,\"use_regex\":false}]}",
            cases[i].splits);
        Tokenizer* t = tokenizer_open(json("k.json", head, ADDED, "\"BPE\"", "{" VOCAB "}", MERGES));
        static int32_t ids[50000];
        const double began = host_seconds();
        CHECK(tokenizer_encode(t, cases[i].text, ids, (int64_t)strlen(cases[i].text)) == -1 &&
                  strstr(tokenizer_why(t), cases[i].says),
              "case %zu: %s", i, tokenizer_why(t));
        // The limit is 5 s, and one search more.
        CHECK(host_seconds() - began < 20, "case %zu: %.1f s", i, host_seconds() - began);
        tokenizer_close(t);
        free(head);
    }
}

// These tokenizers open and decode, but refuse text and name the unsupported feature.
static void test_not_encoded(void) {
    const char* bpe = "\"BPE\"";
    const char *vocab = "{" VOCAB "}", *pieces_vocab =
                                           "[[\"\xe2\x96\x81"
                                           "a\",0],[\"<0xFF>\",0],[\"</s>\",0]]";
    const struct {
        const char *head, *added, *model, *vocab, *merges, *says;
    } cases[] = {
        {"\"decoder\":{\"type\":\"Metaspace\"}", "", "\"Unigram\"", pieces_vocab, "", "model Unigram"},
        // Byte tokens and spaces may be added tokens too; the last of the three is no token of the model.
        {"\"normalizer\":null",
         ADDED ",{\"id\":17,\"content\":\"<0x0A>\",\"special\":true},{\"id\":18,\"content\":\"\\u2581\"},"
               "{\"id\":19,\"content\":\"<0x20>\"}",
         "\"BPE\",\"byte_fallback\":true", "{" VOCAB ",\"<0x0A>\":17,\"\\u2581\":18}", MERGES, "byte_fallback"},
        {HEAD, ADDED, "\"BPE\",\"dropout\":0.1", vocab, MERGES, "dropout"},
        {HEAD, ADDED, "\"BPE\",\"end_of_word_suffix\":\"</w>\"", vocab, MERGES, "end_of_word_suffix"},
        {"\"normalizer\":{\"type\":\"Lowercase\"}", ADDED, bpe, vocab, MERGES, "normalizer Lowercase"},
        {"\"pre_tokenizer\":null", ADDED, bpe, vocab, MERGES, "pre_tokenizer none"},
        {"\"pre_tokenizer\":{\"type\":\"Whitespace\"}", ADDED, bpe, vocab, MERGES, "pre_tokenizer Whitespace"},
        {"\"pre_tokenizer\":{\"type\":\"ByteLevel\"}", ADDED, bpe, vocab, MERGES, "add_prefix_space"},
        {"\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(a\"},\"behavior\":\"Isolated\"}", ADDED, bpe,
         vocab, MERGES, "the pattern '(a'"},
        {HEAD, "{\"id\":14,\"content\":\"</s>\",\"lstrip\":true}", bpe, vocab, MERGES, "'</s>' with lstrip"},
        {HEAD, ADDED, bpe, vocab, "\"b c\",\"a x\"", "merge 1, 'a' and 'x'"},
        {HEAD, ADDED, bpe, vocab, "\"bc\"", "merge 0,"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Tokenizer* t = tokenizer_open(
            json("no.json", cases[i].head, cases[i].added, cases[i].model, cases[i].vocab, cases[i].merges));
        int32_t ids[4];
        CHECK(tokenizer_encode(t, "a", ids, 4) == -1 && strstr(tokenizer_why(t), cases[i].says) &&
                  strstr(tokenizer_why(t), "no.json"),
              "%s: %s", cases[i].says, tokenizer_why(t));
        CHECK(tokenizer_encode(t, "", ids, 4) == 0, "nothing is encoded with any tokenizer");
        if (i == 1) CHECK(decodes(t, 17, "\n") && decodes(t, 18, " ") && decodes(t, 19, "<0x20>"), "byte_fallback");
        if (i == 0) CHECK(decodes(t, 0, " a") && decodes(t, 1, "\xff") && decodes(t, 2, ""), "pieces");
        tokenizer_close(t);
    }
}

static const char* opened;
static void open_it(void) { tokenizer_open(in_folder(opened)); }

static void test_json_refused(void) {
    const char* bpe = "\"BPE\"";
    opened = "bad.json";
    remove_matching("bad.json");
    DIES(open_it, "bad.json", "No such file");
    write_file("bad.json", "{", 1);
    DIES(open_it, "bad.json: not JSON: byte 1");
    write_file("bad.json", "{}", 2);
    DIES(open_it, "bad.json: not a tokenizer.json: no model.vocab");
    json("bad.json", HEAD, "", bpe, "{" VOCAB "}", MERGES);
    DIES(open_it, "bad.json", "no token has a usual name of end of text (<|endoftext|>");
    json("bad.json", HEAD, ADDED, bpe, "{\"a\":0,\"b\":16777216}", "");
    DIES(open_it, "bad.json: token 'b': the id 1.67772e+07");
    json("bad.json", HEAD, ADDED, bpe, "{\"a\":0,\"b\":-1}", "");
    DIES(open_it, "bad.json: token 'b': the id -1");
    json("bad.json", HEAD, ADDED, bpe, "{\"a\":0,\"b\":0.5}", "");
    DIES(open_it, "bad.json: token 'b': the id 0.5");
    json("bad.json", HEAD, ADDED, bpe, "{\"a\":0,\"b\":0}", "");
    DIES(open_it, "bad.json: token 'b', id 0: the id is another token's");
    json("bad.json", HEAD, "{\"id\":1,\"content\":\"a\"}", bpe, "{\"a\":0}", "");
    DIES(open_it, "bad.json: token 'a', id 1: ", "has another id");
}

// A table with a tokenizer.json next to it.
static void test_beside(void) {
    unsigned char file[2048];
    const char* tokens[] = {"a",  "b",   "c",        "d",  " ",   "\xc3",          "\xa9", "bc",  "ab",
                            "cd", "bcd", "\xc3\xa9", " a", "abc", "<|endoftext|>", "<a",   "<ab>"};
    uint32_t header[256] = {20240328, 2, 17, 15};
    memcpy(file, header, 1024);
    size_t n = 1024;
    for (int i = 0; i < 17; i++) {
        file[n++] = (unsigned char)strlen(tokens[i]);
        memcpy(file + n, tokens[i], strlen(tokens[i]));
        n += strlen(tokens[i]);
    }
    const char* path = write_file("x.bin", file, n);
    Tokenizer* t = tokenizer_open(path);
    CHECK(!tokenizer_exact(t), "a table alone");
    ENCODES(t, "abcd", 13, 3);
    tokenizer_close(t);

    // End of text comes from the table.
    json("x.json", HEAD, ADDED, "\"BPE\"", "{" VOCAB "}", MERGES);
    t = tokenizer_open(path);
    CHECK(tokenizer_exact(t) && tokenizer_eot(t) == 15 && decodes(t, 15, "") && decodes(t, 14, tokens[14]), "eot");
    ENCODES(t, "abcd", 0, 10);
    tokenizer_close(t);

    opened = "x.bin";
    json("x.json", HEAD, ADDED ",{\"id\":17,\"content\":\"x\"}", "\"BPE\"", "{" VOCAB "}", MERGES);
    DIES(open_it, "x.bin and ", "x.json beside it must be of one tokenizer: 17 tokens, not 18");
    json("x.json", HEAD, ADDED, "\"BPE\"", "{" VOCAB "}", MERGES);
    file[1025] = 'e';
    write_file("x.bin", file, n);
    DIES(open_it, "x.bin and ", "x.json beside it must be of one tokenizer: the bytes of token 0 differ");
    write_file("x.json", "[", 1);
    DIES(open_it, "x.json: not JSON");
}

// Without Oniguruma a tokenizer decodes; encoding fails and names the missing package.
static void test_without_oniguruma(void) {
    Tokenizer* t = tokenizer_open(json("t.json", HEAD, ADDED, "\"BPE\"", "{" VOCAB "}", MERGES));
    int32_t ids[4];
    CHECK(decodes(t, 10, "bcd"), "decode");
    CHECK(tokenizer_encode(t, "a", ids, 4) == -1 && strstr(tokenizer_why(t), "lacks Oniguruma: install libonig-dev"),
          "%s", tokenizer_why(t));
    tokenizer_close(t);
}

int main(void) {
    make_folder("test_bpe");
    RUN(test_json_refused);
    if (has_oniguruma()) {
        RUN(test_patterns);
        RUN(test_tokenizer_json);
        RUN(test_hostile_patterns);
        RUN(test_not_encoded);
        RUN(test_beside);
    } else {
        RUN(test_without_oniguruma);
        SKIP(test_tokenizer_json, "no Oniguruma");
    }
    remove_matching("");
    return test_summary();
}
