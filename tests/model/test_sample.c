// Samples and answers of a model: draws, the context of a sample, and the measures of multiple choice.
#include "pretrained/evaluate.h"
#include "pretrained/sample.h"
#include "tests/model.h"

// Logits are the logarithms of 1 3 2 4 2. These are the weights at temperature 1, and their squares are the weights at
// 1/2. No u of the thousand is at a boundary between two tokens.
static void draws(void) {
    static const struct {
        int64_t top_k;
        double temperature;
        int weight[5];
    } cases[] = {{50, 1, {1, 3, 2, 4, 2}},   {3, 1, {0, 3, 2, 4, 0}},   {1, 1, {0, 0, 0, 1, 0}},
                 {5, 1, {1, 3, 2, 4, 2}},    {4, 1, {0, 3, 2, 4, 2}},   {50, 0.5, {1, 9, 4, 16, 4}},
                 {3, 0.5, {0, 9, 4, 16, 0}}, {1, 0.5, {0, 0, 0, 1, 0}}, {5, 0, {0, 0, 0, 1, 0}},
                 {3, 0, {0, 0, 0, 1, 0}}};
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        const int* weight = cases[c].weight;
        const int sum = weight[0] + weight[1] + weight[2] + weight[3] + weight[4];
        int wrong = 0;
        for (int i = 0; i < 1000; i++) {
            real logits[5] = {0, (real)log(3), (real)log(2), (real)log(4), (real)log(2)};
            const double u = (i + 0.5) / 1000;
            int expected = 0;
            for (int below = weight[0]; below < u * sum; below += weight[++expected]) continue;
            wrong += sample_draw(logits, 5, cases[c].temperature, cases[c].top_k, u) != expected;
        }
        CHECK(wrong == 0, "top_k %lld, temperature %g: %d of 1000 draws", (long long)cases[c].top_k,
              cases[c].temperature, wrong);
    }
}

// The first of equal logits are among the top_k, and temperature 0 takes the first one.
static void draws_of_equals(void) {
    for (int64_t top_k = 0; top_k <= 4; top_k++)
        for (int i = 0; i < 100; i++) {
            real logits[6] = {-1, 2, 2, -1, 2, 2};
            static const int32_t equals[4] = {1, 2, 4, 5};
            const double u = (i + 0.5) / 100;
            const int32_t expected = top_k ? equals[(int)(u * (double)top_k)] : 1;
            const int32_t id = sample_draw(logits, 6, top_k ? 1 : 0, top_k, u);
            CHECK(id == expected, "top_k %lld, u %g: %d, expected %d", (long long)top_k, u, id, expected);
        }
}

// In a model of zeros all tokens are equally likely, and a sample takes the first 50. Bytes below 32 are written as
// \\xNN.
static void among_the_likeliest(void) {
    Settings s = small_settings("--vocab 257 --sample-tokens 500 --temperature 1");
    Model* m = model_create(&s.model, &s.run, NULL);
    Tokenizer* bytes = tokenizer_open("");
    char *text = model_sample(m, &s, NULL, bytes, 0), last = 0;
    for (const char* c = text; *c; c += *c == '\\' ? 4 : 1)
        if (*c != '\\' && *c > last) last = *c;
    CHECK(last == 49, "the last byte is %d", last);
    free(text);
    tokenizer_close(bytes);
    model_destroy(m);
    settings_free(&s);
}

// A sample's context is the last seq_len tokens. A longer prompt continues like its last seq_len tokens.
static void text_beyond_the_context(void) {
    Settings s = small_settings("--vocab 257 --sample-tokens 12 --temperature 0 --prompt abcdefghijklmnopqrstuvwxyz");
    Model* m = model_create(&s.model, &s.run, NULL);
    Tokenizer* bytes = tokenizer_open("");
    model_init(m, 3);
    char *prompt = s.prompt, *whole = model_sample(m, &s, NULL, bytes, 0);
    s.prompt += 26 - 20;
    char* last = model_sample(m, &s, NULL, bytes, 0);
    CHECK(strlen(whole) > 26 && strcmp(whole + 6, last) == 0, "'%s' does not end as '%s'", whole, last);
    s.prompt = prompt;
    free(whole), free(last);
    tokenizer_close(bytes);
    model_destroy(m);
    settings_free(&s);
}

// A blank before an ending counts no byte. In a model of zeros all tokens are equally likely. The endings " a" and
// "bb", of two tokens each, then have equal likelihoods, and the first counts as best. Per byte, "bb" is best: it has
// two bytes, and " a" without its blank has one.
static void a_blank_counts_no_byte(void) {
    Model* m = small_model("--vocab 257");
    Tokenizer* bytes = tokenizer_open("");
    int32_t ids[] = {'x', ' ', 'a', 'b', 'b'}, label[1];
    Choice list[2] = {{0, 0, 0, 1, 1, 2}, {0, 1, 0, 1, 3, 2}};
    const Choices question = {(char*)"blank", 0, 0, 1, 0, label, 2, list, ids};
    for (label[0] = 0; label[0] < 2; label[0]++) {
        const ScoreRecord score = evaluate_choices(m, &question, bytes);
        CHECK(score.accuracy == 1 - label[0] && score.normalised == label[0], "ending %d: accuracy %g, normalised %g",
              label[0], score.accuracy, score.normalised);
    }
    tokenizer_close(bytes);
    model_destroy(m);
}

int main(void) {
    RUN(draws);
    RUN(draws_of_equals);
    RUN(among_the_likeliest);
    RUN(text_beyond_the_context);
    RUN(a_blank_counts_no_byte);
    return test_summary();
}
