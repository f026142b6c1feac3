// tokenizer.json: its tokens, what is refused, and the table beside it. All comparisons here are exact.
#include <stdbool.h>

#include "data/tokenizer.h"
#include "tests/files.h"

// The bytes a b c d, space and e with acute, and tokens of several bytes.
#define VOCAB                                                                                                          \
    "\"a\":0,\"b\":1,\"c\":2,\"d\":3,\"\\u0120\":4,\"\\u00c3\":5,\"\\u00a9\":6,\"bc\":7,\"ab\":8,\"cd\":9,\"bcd\":10," \
    "\"\\u00c3\\u00a9\":11,\"\\u0120a\":12,\"abc\":13"
#define ADDED                                                                                                          \
    "{\"id\":14,\"content\":\"<|endoftext|>\",\"special\":true,\"normalized\":false},"                                 \
    "{\"id\":15,\"content\":\"<a\",\"special\":false,\"normalized\":false},"                                           \
    "{\"id\":16,\"content\":\"<ab>\",\"special\":false,\"normalized\":false}"
#define BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"

static const char* json(const char* name, const char* before, const char* added, const char* model, const char* vocab) {
    char* text =
        host_format("{%s,\"added_tokens\":[%s],\"model\":{\"type\":%s,\"vocab\":%s}}", before, added, model, vocab);
    const char* path = write_file(name, text, strlen(text));
    free(text);
    return path;
}

static bool decodes(const Tokenizer* t, int32_t id, const char* bytes) {
    int length = -1;
    const char* got = tokenizer_decode(t, id, &length);
    return got && length == (int)strlen(bytes) && memcmp(got, bytes, strlen(bytes)) == 0;
}

#define HEAD "\"normalizer\":null,\"pre_tokenizer\":" BYTE_LEVEL
static void test_tokenizer_json(void) {
    Tokenizer* t = tokenizer_open(json("t.json", HEAD, ADDED, "\"BPE\"", "{" VOCAB "}"));
    CHECK(tokenizer_size(t) == 17 && tokenizer_eot(t) == 14, "size and end of text");
    CHECK(decodes(t, 10, "bcd") && decodes(t, 4, " ") && decodes(t, 12, " a") && decodes(t, 11, "\xc3\xa9") &&
              decodes(t, 5, "\xc3") && decodes(t, 16, "<ab>") && decodes(t, 14, ""),
          "decode");
    tokenizer_close(t);

    // A token whose name has other characters than the alphabet is its name. Ids may have holes.
    t = tokenizer_open(json("t.json", HEAD, "", "\"BPE\"",
                            "{\"a\":0,\"</s>\":1,\"\\u0142\\u0143\\u0120\\u0121\":2,\"\\u0144\":3,\"b\":5}"));
    CHECK(tokenizer_size(t) == 6 && tokenizer_eot(t) == 1, "size and end of text");
    CHECK(decodes(t, 2, "\xa0\xad \x7f") && decodes(t, 3, "\xc5\x84") && decodes(t, 4, "") && decodes(t, 5, "b"),
          "the alphabet's ends");
    tokenizer_close(t);
}

// Tokens of SentencePiece: a mark is a space, and <0xFF> is a byte.
static void test_pieces(void) {
    Tokenizer* t = tokenizer_open(json("t.json", "\"decoder\":{\"type\":\"Metaspace\"}", "", "\"Unigram\"",
                                       "[[\"\xe2\x96\x81"
                                       "a\",0],[\"<0xFF>\",0],[\"</s>\",0]]"));
    CHECK(decodes(t, 0, " a") && decodes(t, 1, "\xff") && decodes(t, 2, ""), "pieces");
    tokenizer_close(t);

    // Byte tokens and spaces may be added tokens too; the last of the three is no token of the model.
    t = tokenizer_open(json("t.json", "\"normalizer\":null",
                            ADDED
                            ",{\"id\":17,\"content\":\"<0x0A>\",\"special\":true},{\"id\":18,\"content\":\"\\u2581\"},"
                            "{\"id\":19,\"content\":\"<0x20>\"}",
                            "\"BPE\",\"byte_fallback\":true", "{" VOCAB ",\"<0x0A>\":17,\"\\u2581\":18}"));
    CHECK(decodes(t, 17, "\n") && decodes(t, 18, " ") && decodes(t, 19, "<0x20>"), "byte_fallback");
    tokenizer_close(t);
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
    json("bad.json", HEAD, "", bpe, "{" VOCAB "}");
    DIES(open_it, "bad.json", "no token has a usual name of end of text (<|endoftext|>");
    json("bad.json", HEAD, ADDED, bpe, "{\"a\":0,\"b\":16777216}");
    DIES(open_it, "bad.json: token 'b': the id 1.67772e+07");
    json("bad.json", HEAD, ADDED, bpe, "{\"a\":0,\"b\":-1}");
    DIES(open_it, "bad.json: token 'b': the id -1");
    json("bad.json", HEAD, ADDED, bpe, "{\"a\":0,\"b\":0.5}");
    DIES(open_it, "bad.json: token 'b': the id 0.5");
    json("bad.json", HEAD, ADDED, bpe, "{\"a\":0,\"b\":0}");
    DIES(open_it, "bad.json: token 'b', id 0: the id is another token's");
    json("bad.json", HEAD, "{\"id\":1,\"content\":\"a\"}", bpe, "{\"a\":0}");
    DIES(open_it, "bad.json: token 'a', id 1: ", "has another id");
    json("bad.json", HEAD, "{\"id\":2,\"content\":\"c\"}", bpe, "{\"b\":2,\"a\":0}");
    DIES(open_it, "bad.json: token 'c', id 2: the id is another token's");
    // Of a text that is there twice, the lowest id counts.
    json("bad.json", HEAD, "{\"id\":2,\"content\":\"a\"}", "\"Unigram\"", "[[\"b\",0],[\"a\",0],[\"a\",0]]");
    DIES(open_it, "bad.json: token 'a', id 2: ", "has another id");
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
    CHECK(tokenizer_eot(t) == 15 && decodes(t, 15, "") && decodes(t, 13, "abc"), "a table alone");
    tokenizer_close(t);

    // End of text comes from the table.
    json("x.json", HEAD, ADDED, "\"BPE\"", "{" VOCAB "}");
    t = tokenizer_open(path);
    CHECK(tokenizer_eot(t) == 15 && decodes(t, 15, "") && decodes(t, 14, tokens[14]), "eot");
    tokenizer_close(t);

    opened = "x.bin";
    json("x.json", HEAD, ADDED ",{\"id\":17,\"content\":\"x\"}", "\"BPE\"", "{" VOCAB "}");
    DIES(open_it, "x.bin and ", "x.json beside it must be of one tokenizer: 17 tokens, not 18");
    json("x.json", HEAD, ADDED, "\"BPE\"", "{" VOCAB "}");
    file[1025] = 'e';
    write_file("x.bin", file, n);
    DIES(open_it, "x.bin and ", "x.json beside it must be of one tokenizer: the bytes of token 0 differ");
    write_file("x.json", "[", 1);
    DIES(open_it, "x.json: not JSON");
}

int main(void) {
    make_folder("test_tokenizer");
    RUN(test_tokenizer_json);
    RUN(test_pieces);
    RUN(test_json_refused);
    RUN(test_beside);
    remove_matching("");
    return test_summary();
}
