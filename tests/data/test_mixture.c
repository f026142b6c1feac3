// Data mixtures: how a text is split, the share of each set after every window, the order within a set. All exact.
// Texts that are refused: tests/model/test_mixture.py.
#include "data/mixture.h"

#include "data/shards.h"
#include "tests/test.h"

static void test_texts(void) {
    // A text, and its sets as pattern|thousandths.
    const char* const cases[][2] = {
        {"code_*.bin:0.7,prose_*.bin:0.3", "code_*.bin|700 prose_*.bin|300 "},
        {"a:70,b:30", "a|70000 b|30000 "},
        {"a:1,b:1e-3,c:2.5", "a|1000 b|1 c|2500 "},
        {"a:.3333,b:0.6667", "a|333 b|667 "},
        {"a:2", "a|2000 "},
        // Without a weight the whole text is one pattern, with all its colons and commas.
        {"a_*.bin", "a_*.bin|1 "},
        {"", "|1 "},
        {"a,b", "a,b|1 "},
        {"a:b:", "a:b:|1 "},
        {"x:3_train_*.bin", "x:3_train_*.bin|1 "},
        // In a mixture they belong to the pattern too, but for a number between a colon and a comma or the end.
        {"a,b:0.5,c:d:0.5", "a,b|500 c:d|500 "},
        {"run:2_a:1,run:3_b:1", "run:2_a|1000 run:3_b|1000 "},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Mixture m = mixture_parse("--train", cases[i][0]);
        char* sets = host_strdup("");
        for (int k = 0; k < m.count; k++) host_append(&sets, "%s|%ld ", m.sets[k].pattern, m.sets[k].part);
        CHECK(strcmp(sets, cases[i][1]) == 0, "%s: %s", cases[i][0], sets);
        free(sets);
        mixture_free(&m);
    }
}

// A mixture of `count` sets with weights of 1 to `most` thousandths, and 1 to 50 windows each.
static Mixture random_mixture(int count, int most) {
    char* text = host_strdup("");
    for (int k = 0; k < count; k++) host_append(&text, "%sset%d:%g", k ? "," : "", k, 1e-3 * (1 + rand() % most));
    Mixture m = mixture_parse("--train", text);
    free(text);
    int64_t first = 0;
    for (int k = 0; k < count; k++) {
        m.sets[k].first = first;
        first += m.sets[k].windows = 1 + rand() % 50;
    }
    return m;
}

static void test_shares_and_order(void) {
    srand(1);
    for (int trial = 0; trial < 300; trial++) {
        // Large and small weights: also one set with nearly all windows, and 64 sets.
        const int count = trial == 0 ? MIXTURE_SETS : 1 + trial % 9, most = trial % 3 ? 10 : 700;
        Mixture m = random_mixture(count, most);
        int64_t taken[MIXTURE_SETS] = {0}, sum = 0;
        for (int k = 0; k < count; k++) sum += m.sets[k].part;
        const int64_t windows = m.sets[count - 1].first + m.sets[count - 1].windows;
        int wrong = 0;
        for (int64_t w = 0; w < 3 * sum && w < 20000; w++) {
            const int64_t at = mixture_window(&m, 99, w);
            CHECK(at >= 0 && at < windows, "window %ld of %ld", at, windows);
            int set = count - 1;
            while (m.sets[set].first > at) set--;

            // The set goes through its windows by its own epochs, as if it were alone.
            const int64_t n = m.sets[set].windows, i = taken[set]++;
            wrong += at != m.sets[set].first + shards_permute(99, i / n, i % n, n);
            // After w + 1 windows each set has its share of them, to within less than one.
            for (int k = 0; k < count; k++) wrong += llabs(taken[k] * sum - (w + 1) * m.sets[k].part) >= sum;
        }
        CHECK(wrong == 0, "%d sets: %d wrong", count, wrong);
        mixture_free(&m);
    }
}

static void test_without_weights(void) {
    Mixture m = mixture_parse("--train", "corpus_*.bin");
    m.sets[0].windows = 1001;
    for (int64_t w = 0; w < 5000; w++)
        CHECK(mixture_window(&m, 7, w) == shards_permute(7, w / 1001, w % 1001, 1001), "window %ld", w);
    mixture_free(&m);
}

// The largest period, far into a run: counts of windows do not overflow.
static void test_largest(void) {
    Mixture m = mixture_parse("--train", "a:999.999,b:0.001");
    CHECK(m.period == MIXTURE_PERIOD, "%ld", m.period);
    m.sets[0].windows = m.sets[1].first = (int64_t)1 << 40;
    m.sets[1].windows = 3;
    const int64_t periods = 1000000000000;
    int64_t seldom = 0;
    for (int64_t r = 0; r < m.period; r++) {
        const int64_t at = mixture_window(&m, 1, periods * m.period + r);
        if (at < m.sets[1].first) continue;
        seldom++;
        CHECK(at == m.sets[1].first + shards_permute(1, periods / 3, periods % 3, 3), "%ld", at);
    }
    CHECK(seldom == 1, "%ld", seldom);
    mixture_free(&m);
}

int main(void) {
    RUN(test_texts);
    RUN(test_shares_and_order);
    RUN(test_without_weights);
    RUN(test_largest);
    return test_summary();
}
