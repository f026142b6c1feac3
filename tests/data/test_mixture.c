// Data mixtures: how a text is split, the share of each set after every window, the order within a set. All exact.
// Texts that are refused: tests/model/test_mixture.py.
#include "data/mixture.h"

#include "data/order.h"
#include "data/shards.h"
#include "tests/test.h"

typedef __int128 Wide;

static void test_texts(void) {
    // A text, and its sets as pattern|part.
    const char* const cases[][2] = {
        {"code_*.bin:0.7,prose_*.bin:0.3", "code_*.bin|7 prose_*.bin|3 "},
        {"a:70,b:30", "a|7 b|3 "},
        {"a:1,b:1e-3,c:2.5", "a|1000 b|1 c|2500 "},
        {"a:.3333,b:0.6667", "a|3333 b|6667 "},
        {"a:0.0014,b:1.", "a|7 b|5000 "},
        {"a:2", "a|1 "},
        // Counts of tokens, and weights that another program has divided.
        {"a:120000000000,b:35999999999", "a|120000000000 b|35999999999 "},
        {"a:0.30000000000000004,b:0.70", "a|7500000000000001 b|17500000000000000 "},
        {"a:1e18,b:2E+18,c:30.0e17", "a|1 b|2 c|3 "},
        {"a:3e-18,b:2e-18,c:0.000000000000000004000", "a|3 b|2 c|4 "},
        {"a:5000000000000000000,b:2500000000000000000", "a|2 b|1 "},
        {"a:4611686018427387903,b:1", "a|4611686018427387903 b|1 "},
        // Without a weight the whole text is one pattern, with all its colons and commas.
        {"a_*.bin", "a_*.bin|1 "},
        {"", "|1 "},
        {"a,b", "a,b|1 "},
        {"a:b:", "a:b:|1 "},
        {"x:3_train_*.bin", "x:3_train_*.bin|1 "},
        // In a mixture they belong to the pattern too, but for a number between a colon and a comma or the end.
        {"a,b:0.5,c:d:0.5", "a,b|1 c:d|1 "},
        {"run:2_a:1,run:3_b:1", "run:2_a|1 run:3_b|1 "},
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

// The weights of many sets add up to more than 128 bits hold in units of 10^-18; their parts do not.
static void test_large_weights(void) {
    char* text = host_strdup("");
    for (int k = 0; k < MIXTURE_SETS; k++) host_append(&text, "%sset%d:9e18", k ? "," : "", k);
    Mixture m = mixture_parse("--train", text);
    CHECK(m.count == MIXTURE_SETS && m.parts == MIXTURE_SETS, "%d sets, %ld parts", m.count, m.parts);
    mixture_free(&m);
    free(text);
}

// ---- Shares and order

// A mixture with these weights, in units of 10^-digits, and `least` windows or up to 50 more a set.
static Mixture mixture_of(int count, const int64_t* weights, int digits, int least) {
    char* text = host_strdup("");
    for (int k = 0; k < count; k++) host_append(&text, "%sset%d:%lde-%d", k ? "," : "", k, weights[k], digits);
    Mixture m = mixture_parse("--train", text);
    free(text);
    for (int k = 0; k < count; k++) {
        m.sets[k].windows = least + rand() % 51;
        m.sets[k].first = k ? m.sets[k - 1].first + m.sets[k - 1].windows : 0;
    }
    return m;
}

// Follows `steps` windows from w on. Each is the next one of a set, in the order of that set's epochs. After each
// window every set has its share of the weights, to within less than one window.
static void follow(const Mixture* m, const int64_t* weights, int64_t w, int64_t steps) {
    const uint64_t seed = 99;
    const int count = m->count;
    const int64_t windows = m->sets[count - 1].first + m->sets[count - 1].windows;
    Wide sum = 0;
    int64_t taken[MIXTURE_SETS], wrong = 0;
    bool sure[MIXTURE_SETS];  // whether taken[k] is known; before, it is that or one more
    for (int k = 0; k < count; k++) sum += weights[k];
    for (int k = 0; k < count; k++) {
        taken[k] = (int64_t)((Wide)w * weights[k] / sum);
        sure[k] = (Wide)w * weights[k] % sum == 0;
    }
    MixtureWalk walk = {.mixture = m};
    for (int64_t end = w + steps; w < end && !wrong; w++) {
        const int64_t at = mixture_window(&walk, seed, w);
        CHECK(at >= 0 && at < windows, "window %ld of %ld", at, windows);
        // A run that begins here finds the same.
        MixtureWalk fresh = {.mixture = m};
        if (w % 97 == 0) wrong += mixture_window(&fresh, seed, w) != at;
        int k = count - 1;
        while (m->sets[k].first > at) k--;
        const int64_t n = m->sets[k].windows, place = at - m->sets[k].first;
        const uint64_t own = seed ^ (uint64_t)k << 56;
        const bool first = place == order_permute(own, taken[k] / n, taken[k] % n, n);
        if (!first && !sure[k]) taken[k]++;
        wrong += place != order_permute(own, taken[k] / n, taken[k] % n, n);
        sure[k] = true;
        taken[k]++;
        for (int j = 0; j < count; j++) {
            const Wide error = taken[j] * sum - (Wide)(w + 1) * weights[j];
            if (sure[j]) wrong += error >= sum || error <= -sum;
            // A set that is not sure may have one more, so it must come in time.
            if (!sure[j]) wrong += (Wide)(w + 1) * weights[j] / sum > taken[j] + 1;
        }
        CHECK(wrong == 0, "%d sets, M %ld: wrong at window %ld", count, m->parts, w);
    }
}

static void test_shares_and_order(void) {
    srand(1);
    for (int trial = 0; trial < 400; trial++) {
        // Small weights, large and small ones, counts of tokens; 64 sets; far into a run.
        const int count = trial % 50 == 0 ? MIXTURE_SETS : 1 + trial % 9, digits = trial % 7;
        int64_t weights[MIXTURE_SETS];
        for (int k = 0; k < count; k++) {
            const int64_t large = (int64_t)rand() << 10 | rand() % 1024;
            weights[k] = 1 + (trial % 3 == 0 ? rand() % 10 : trial % 3 == 1 ? rand() % 700 : large * (1 + rand() % 50));
        }
        Mixture m = mixture_of(count, weights, digits, 1);
        follow(&m, weights, 0, 3000);
        mixture_free(&m);
        // With so many windows the next one and the one after it differ.
        m = mixture_of(count, weights, digits, 1000000);
        const int64_t far = m.parts * (rand() % (((int64_t)1 << 62) / m.parts));
        follow(&m, weights, far + rand() % 10000, 1000);
        mixture_free(&m);
    }
    // A set with few windows of very many.
    const int64_t rare[] = {14, 10000, 3}, tokens[] = {900000000000, 1, 99999999};
    Mixture m = mixture_of(3, rare, 4, 1);
    follow(&m, rare, 0, 50000);
    mixture_free(&m);
    m = mixture_of(3, tokens, 0, 1);
    follow(&m, tokens, 0, 50000);
    mixture_free(&m);
}

// All windows of a set have one place in each of its epochs, and sets with as many windows have other orders.
static void test_epochs(void) {
    enum { WINDOWS = 100, SETS = 3, EPOCHS = 4 };
    Mixture m = mixture_parse("--train", "a:1,b:1,c:2");
    for (int k = 0; k < SETS; k++) m.sets[k].first = WINDOWS * k, m.sets[k].windows = WINDOWS;
    int seen[SETS][EPOCHS][WINDOWS] = {{{0}}}, order[SETS][WINDOWS], taken[SETS] = {0}, wrong = 0, same = 0;
    MixtureWalk walk = {.mixture = &m};
    for (int64_t w = 0; w < EPOCHS * WINDOWS * 2; w++) {
        const int64_t at = mixture_window(&walk, 5, w);
        const int k = (int)(at / WINDOWS), i = taken[k]++;
        if (i < WINDOWS) order[k][i] = (int)(at % WINDOWS);
        if (i < EPOCHS * WINDOWS) seen[k][i / WINDOWS][at % WINDOWS]++;
    }
    for (int k = 0; k < SETS; k++)
        for (int i = 0; i < (k < 2 ? EPOCHS / 2 : EPOCHS) * WINDOWS; i++)
            wrong += seen[k][i / WINDOWS][i % WINDOWS] != 1;
    CHECK(wrong == 0, "%d windows have not one place in each epoch", wrong);
    for (int k = 0; k < SETS; k++)
        for (int j = 0; j < k; j++)
            for (int i = 0; i < WINDOWS; i++) same += order[k][i] == order[j][i];
    CHECK(same < 20, "%d places of three pairs are the same; 3 are likely", same);
    mixture_free(&m);
}

// A window does not depend on the ones asked for before, nor on the scale of the weights.
static void test_no_state(void) {
    srand(2);
    const char* const texts[] = {"a:0.7,b:0.3", "a:70,b:30", "a:7e8,b:3e8", "a:2.1,b:0.9"};
    Mixture mixtures[4];
    MixtureWalk walks[4];
    for (int i = 0; i < 4; i++) {
        mixtures[i] = mixture_parse("--train", texts[i]);
        mixtures[i].sets[0].windows = mixtures[i].sets[1].first = 37;
        mixtures[i].sets[1].windows = 11;
        walks[i] = (MixtureWalk){.mixture = &mixtures[i]};
    }
    int64_t inorder[2000];
    for (int w = 0; w < 2000; w++) inorder[w] = mixture_window(&walks[0], 3, w);
    for (int n = 0; n < 20000; n++) {
        const int w = rand() % 2000;
        CHECK(mixture_window(&walks[n % 4], 3, w) == inorder[w], "%s: window %d", texts[n % 4], w);
    }
    for (int i = 0; i < 4; i++) mixture_free(&mixtures[i]);
}

static void test_without_weights(void) {
    Mixture m = mixture_parse("--train", "corpus_*.bin");
    m.sets[0].windows = 1001;
    MixtureWalk walk = {.mixture = &m};
    for (int64_t w = 0; w < 5000; w++)
        CHECK(mixture_window(&walk, 7, w) == order_permute(7, w / 1001, w % 1001, 1001), "window %ld", w);
    mixture_free(&m);
}

// The largest weights, at the start and far into a run: products do not overflow.
static void test_largest(void) {
    const int64_t two[] = {((int64_t)1 << 62) - 1, 1}, three[] = {(int64_t)1 << 60, ((int64_t)1 << 60) - 1, 1};
    Mixture m = mixture_of(2, two, 0, 1000000);
    CHECK(m.parts == (int64_t)1 << 62, "%ld", m.parts);
    follow(&m, two, 0, 1000);
    mixture_free(&m);
    m = mixture_of(3, three, 0, 1000000);
    follow(&m, three, 0, 1000);
    follow(&m, three, m.parts, 1000);
    mixture_free(&m);
}

int main(void) {
    RUN(test_texts);
    RUN(test_large_weights);
    RUN(test_shares_and_order);
    RUN(test_epochs);
    RUN(test_no_state);
    RUN(test_without_weights);
    RUN(test_largest);
    return test_summary();
}
