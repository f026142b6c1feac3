// Shards, the order in which training reads them, and the loader. All comparisons here are exact.
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "data/order.h"
#include "data/shards.h"
#include "tests/files.h"

// A shard of n tokens; token i has id first + i. The header's count is n + lie, and `extra` bytes follow the tokens.
static const char* write_shard(const char* name, bool wide, int n, int first, int lie, int extra) {
    size_t width = wide ? 4 : 2, total = 1024 + (size_t)n * width + (size_t)extra;
    char* file = (char*)host_alloc(total);
    int32_t header[3] = {wide ? 20240801 : 20240520, wide ? 7 : 1, n + lie};
    memcpy(file, header, sizeof(header));
    for (int i = 0; i < n; i++) {
        uint32_t id = (uint32_t)(first + i);
        memcpy(file + 1024 + (size_t)i * width, &id, width);
    }
    const char* path = write_file(name, file, total);
    free(file);
    return path;
}

enum { T = 8, BIG = 1 << 30 };

// Three shards with windows (4, 2, 3 windows; ids from 1000, 70000, 3000) and two without, in both widths.
static Shards* open_set(void) {
    remove_matching("*.bin");
    write_shard("s_train_000001.bin", false, 36, 1000, 0, 0);
    write_shard("s_train_000002.bin", false, 8, 9000, 0, 0);
    write_shard("s_train_000003.bin", true, 17, 70000, 0, 0);
    write_shard("s_train_000004.bin", true, 0, 0, 0, 0);
    write_shard("s_train_000005.bin", false, 32, 3000, 0, 0);
    return shards_open("--train", in_folder("s_train_*.bin"), T);
}

static void test_shards_windows(void) {
    Shards* s = open_set();
    const int32_t starts[] = {1000, 1008, 1016, 1024, 70000, 70008, 3000, 3008, 3016};
    CHECK(s->count == 5 && s->windows == 9 && s->tokens == 93, "%d shards, %lld windows, %lld tokens", s->count,
          (long long)s->windows, (long long)s->tokens);
    for (int64_t i = 0; i < s->windows; i++) {
        int32_t input[T], target[T];
        memset(input, -1, sizeof(input));
        memset(target, -1, sizeof(target));
        shards_read(s, i, BIG, input, target);
        for (int t = 0; t < T; t++)
            CHECK(input[t] == starts[i] + t && target[t] == starts[i] + t + 1, "window %lld, token %d: %d, %d",
                  (long long)i, t, input[t], target[t]);
    }
    shards_close(s);
    // Lengths at the edge: T tokens have no window, T + 1 and 2T have one, 2T + 1 have two.
    const int counts[] = {T, T + 1, 2 * T, 2 * T + 1}, windows[] = {0, 1, 1, 2};
    for (int i = 1; i < 4; i++) {
        s = shards_open("--val", write_shard("edge.bin", false, counts[i], 5, 0, 0), T);
        CHECK(s->windows == windows[i], "%d tokens: %lld windows", counts[i], (long long)s->windows);
        shards_close(s);
    }
    // Windows longer than the read buffer, every id of 16 bits, and T = 1.
    s = shards_open("--val", write_shard("all.bin", false, 65536, 0, 0, 0), 65535);
    int32_t *input = (int32_t*)host_alloc(65535 * 4), *target = (int32_t*)host_alloc(65535 * 4);
    shards_read(s, 0, 65536, input, target);
    for (int t = 0; t < 65535; t++)
        CHECK(input[t] == t && target[t] == t + 1, "token %d: %d, %d", t, input[t], target[t]);
    shards_close(s);
    s = shards_open("--val", in_folder("all.bin"), 1);
    CHECK(s->windows == 65535, "T = 1");
    shards_read(s, 65534, 65536, input, target);
    CHECK(input[0] == 65534 && target[0] == 65535, "the last of T = 1");
    shards_close(s);
    free(input);
    free(target);
}

static void test_shards_hash(void) {
    Shards* s = open_set();
    uint32_t hash = s->hash;
    shards_close(s);
    s = shards_open("--val", in_folder("s_train_*.bin"), T - 1);
    CHECK(s->hash == hash, "the hash tells files, not how they are read");
    shards_close(s);
    // A name that does not change the order.
    CHECK(rename(in_folder("s_train_000002.bin"), in_folder("s_train_000002b.bin")) == 0, "rename");
    s = shards_open("--train", in_folder("s_train_*.bin"), T);
    CHECK(s->hash != hash, "another name");
    shards_close(s);
    remove_matching("s_train_000002b.bin");
    write_shard("s_train_000002.bin", false, 9, 9000, 0, 0);
    s = shards_open("--train", in_folder("s_train_*.bin"), T);
    CHECK(s->hash != hash, "another length");
    shards_close(s);
}

// Sets of a mixture: a_0 and a_1 with 4 and 2 windows, b_0 with 3; ids from 1000, 2000, 3000.
static Shards* open_mixture(const char* weight_a, const char* weight_b) {
    remove_matching("*.bin");
    write_shard("a_0.bin", false, 4 * T + 1, 1000, 0, 0);
    write_shard("a_1.bin", true, 2 * T + 1, 2000, 0, 0);
    write_shard("b_0.bin", false, 3 * T + 1, 3000, 0, 0);
    char* text = host_format("%s/a_*.bin:%s,%s/b_*.bin:%s", folder, weight_a, folder, weight_b);
    Shards* s = shards_open("--train", text, T);
    free(text);
    return s;
}

// Equal ratios are the same data.
static void test_shards_hash_of_mixtures(void) {
    const char* const weights[][2] = {
        {"0.7", "0.3"}, {"70", "30"}, {"1400000000", "6e8"}, {"0.3", "0.7"}, {"0.7", "0.2999"}};
    uint32_t hash[5];
    for (int i = 0; i < 5; i++) {
        Shards* s = open_mixture(weights[i][0], weights[i][1]);
        hash[i] = s->hash;
        shards_close(s);
    }
    CHECK(hash[0] == hash[1] && hash[0] == hash[2], "%08x %08x %08x", hash[0], hash[1], hash[2]);
    CHECK(hash[0] != hash[3] && hash[0] != hash[4], "%08x %08x %08x", hash[0], hash[3], hash[4]);
}

static const char* sets;  // of the text that open_sets opens
static void open_sets(void) {
    if (chdir(folder) == 0) shards_open("--train", sets, T);
}

static void test_shards_shared(void) {
    shards_close(open_mixture("1", "1"));
    CHECK(symlink("a_1.bin", in_folder("link_0.bin")) == 0 && link(in_folder("b_0.bin"), in_folder("other_0.bin")) == 0,
          "links");
    const char* const cases[][3] = {
        {"a_*.bin:1,a_*.bin:1", "'a_*.bin'", "has a_0.bin"},
        {"b_*.bin:1,a_*.bin:2,?_0.bin:3", "'?_0.bin'", "has a_0.bin"},
        {"a_*.bin:1,./a_1.bin:1", "'./a_1.bin'", "has ./a_1.bin"},
        {"a_*.bin:1,link_*.bin:1", "'link_*.bin'", "has link_0.bin"},
        {"b_*.bin:1,other_*.bin:1", "'other_*.bin'", "has other_0.bin"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        sets = cases[i][0];
        DIES(open_sets, "--train", cases[i][1], cases[i][2], "give each file to one set");
    }
    sets = "a_*.bin,b_*.bin";
    DIES(open_sets, "--train: no file matches 'a_*.bin,b_*.bin'",
         "it is one pattern, since sets are GLOB:WEIGHT,GLOB:WEIGHT");
    remove_matching("*.bin");
}

static void test_shards_many(void) {
    for (int i = 0; i < 40; i++) {
        char name[32];
        snprintf(name, sizeof(name), "m_%03d.bin", i);
        write_shard(name, false, T + 1, 10 * i, 0, 0);
    }
    Shards* s = shards_open("--train", in_folder("m_*.bin"), T);
    CHECK(s->windows == 40, "%lld windows", (long long)s->windows);
    int32_t input[T], target[T];
    shards_read(s, 33, BIG, input, target);
    CHECK(input[0] == 330, "sorted by name");
    shards_close(s);
    remove_matching("m_*.bin");
}

static void open_none(void) { shards_open("--train", in_folder("nothing_*.bin"), T); }
static void open_no_folder(void) { shards_open("--train", in_folder("none/x_*.bin"), T); }
static void open_bad(void) { shards_open("--train", in_folder("bad*.bin"), T); }
static void open_short_set(void) { shards_open("--val", in_folder("short_*.bin"), T); }
static void open_folder(void) { shards_open("--train", folder, T); }

static void test_shards_refused(void) {
    DIES(open_none, "train_moe: error: ", "--train", "nothing_*.bin", "no file matches", "prepare_text.py");
    DIES(open_no_folder, "--train", "none/x_*.bin");
    DIES(open_folder, "--train", folder, "not a file");
    ASSERT(mkfifo(in_folder("bad.bin"), 0600) == 0);  // without a writer an open would wait
    DIES(open_bad, "--train", "bad.bin", "not a file");
    remove_matching("bad.bin");

    int32_t header[256] = {20240520, 1, 0};
    for (int n = 0; n < 1024; n += 341) {
        char says[64];
        snprintf(says, sizeof(says), "byte %d: the file ends inside the header", n);
        write_file("bad.bin", header, (size_t)n);
        DIES(open_bad, "--train", "bad.bin", says);
    }
    header[0] = 20240521;
    write_file("bad.bin", header, 1024);
    DIES(open_bad, "bad.bin", "byte 0: magic number 20240521", "20240520", "20240801");
    header[0] = 20240520, header[1] = 7;
    write_file("bad.bin", header, 1024);
    DIES(open_bad, "bad.bin", "byte 4: version 7", "must be 1");
    header[0] = 20240801, header[1] = 1;
    write_file("bad.bin", header, 1024);
    DIES(open_bad, "bad.bin", "byte 4: version 1", "must be 7");
    header[1] = 7, header[2] = -1;
    write_file("bad.bin", header, 1024 - 4 + 4);
    DIES(open_bad, "bad.bin", "byte 8: the header counts -1 tokens");
    header[2] = -1;
    write_file("bad.bin", header, 1020);
    DIES(open_bad, "bad.bin", "byte 1020");
    write_shard("bad.bin", false, 100, 0, 1, 0);
    DIES(open_bad, "bad.bin", "byte 8: the header counts 101 tokens of 2 bytes", "1226 bytes", "has 1224");
    write_shard("bad.bin", true, 100, 0, -1, 0);
    DIES(open_bad, "bad.bin", "byte 8: the header counts 99 tokens of 4 bytes", "1420 bytes", "has 1424");
    write_shard("bad.bin", false, 100, 0, 0, 1);
    DIES(open_bad, "bad.bin", "1224 bytes", "has 1225");
    // One bad shard among good ones is found at once.
    write_shard("bad_0.bin", false, 100, 0, 0, 0);
    write_shard("bad_2.bin", false, 100, 0, 0, 0);
    remove_matching("bad.bin");
    write_shard("bad_1.bin", false, 100, 0, -5, 0);
    DIES(open_bad, "bad_1.bin", "95 tokens");
    remove_matching("bad*.bin");

    write_shard("short_0.bin", false, T, 0, 0, 0);
    write_shard("short_1.bin", true, T - 1, 0, 0, 0);
    DIES(open_short_set, "--val", "short_*.bin", "no shard", "window of 9 tokens", "--seq-len 8", "longest of 2 has 8");
}

static void read_bad_u16(void) {
    int32_t input[T], target[T];
    Shards* s = shards_open("--train", in_folder("ids.bin"), T);
    shards_read(s, 0, 1010, input, target);
    shards_read(s, 1, 1010, input, target);
}
static void read_bad_u32(void) {
    int32_t input[T], target[T];
    Shards* s = shards_open("--val", in_folder("wide.bin"), T);
    shards_read(s, 0, BIG, input, target);
}
static void read_cut(void) {
    int32_t input[T], target[T];
    Shards* s = shards_open("--val", in_folder("wide.bin"), T);
    if (truncate(in_folder("wide.bin"), 1024 + 10) == 0) shards_read(s, 0, BIG, input, target);
}

static void test_shards_bad_ids(void) {
    write_shard("ids.bin", false, 33, 1000, 0, 0);
    DIES(read_bad_u16, "--train", "ids.bin", "byte 1044: token 1010",
         "--vocab 1010");                        // window 1, token 10 of the file
    write_shard("wide.bin", true, 9, -8, 0, 0);  // as uint32: 4294967288 ...
    DIES(read_bad_u32, "--val", "wide.bin", "byte 1024: token 4294967288", "vocabulary");
    write_shard("wide.bin", true, 9, 0, 0, 0);
    DIES(read_cut, "--val", "wide.bin", "byte 1034: the file ends here");
    // The last target counts too, V - 1 is allowed.
    int32_t input[T], target[T];
    write_shard("wide.bin", true, 9, 0, 0, 0);
    Shards* s = shards_open("--val", in_folder("wide.bin"), T);
    shards_read(s, 0, 9, input, target);
    CHECK(target[T - 1] == 8, "V - 1");
    shards_close(s);
}

static void read_last_target(void) {
    int32_t input[T], target[T];
    shards_read(shards_open("--val", in_folder("wide.bin"), T), 0, 8, input, target);
}
static void test_shards_bad_last_target(void) {
    write_shard("wide.bin", true, 9, 0, 0, 0);
    DIES(read_last_target, "byte 1056: token 8");
}

// ---- Order

static void test_permute_bijection(void) {
    const int64_t sizes[] = {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 65, 1000, 1023, 1024, 1025, 4096, 4097, 100003};
    for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
        int64_t n = sizes[k];
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            char* seen = (char*)host_alloc((size_t)n);
            int64_t bad = 0;
            for (int64_t i = 0; i < n; i++) {
                int64_t x = order_permute(42, epoch, i, n);
                if (x < 0 || x >= n || seen[x])
                    bad++;
                else
                    seen[x] = 1;
            }
            CHECK(bad == 0, "n %lld, epoch %lld: %lld wrong", (long long)n, (long long)epoch, (long long)bad);
            free(seen);
        }
    }
    int64_t huge = (int64_t)3 << 58;  // 64-bit sizes
    for (int64_t i = 0; i < 100; i++) {
        int64_t x = order_permute(1, 0, huge - 1 - i, huge);
        CHECK(x >= 0 && x < huge, "%lld", (long long)x);
    }
    CHECK(order_permute(1, 0, 0, huge) != order_permute(1, 0, 1, huge), "huge");
}

// The number of positions, of n, at which two orders agree; about 1 for unrelated orders.
static int in_common(uint64_t seed_a, int64_t epoch_a, uint64_t seed_b, int64_t epoch_b, int64_t n) {
    int same = 0;
    for (int64_t i = 0; i < n; i++)
        same += order_permute(seed_a, epoch_a, i, n) == order_permute(seed_b, epoch_b, i, n);
    return same;
}

static void test_permute_differs(void) {
    const int64_t n = 1000;
    CHECK(in_common(7, 3, 7, 3, n) == n, "stateless");
    CHECK(in_common(7, 0, 7, 1, n) < 12 && in_common(7, 1, 7, 2, n) < 12, "epochs");
    CHECK(in_common(7, 0, 8, 0, n) < 12 && in_common(0, 0, 1, 0, n) < 12, "seeds");
    CHECK(in_common(0, 1, 1, 0, n) < 12 && in_common(1, 0, 2, -1, n) < 12,
          "seed and epoch do not stand in for each other");
    // Neighbours are separated, each position is equally likely: chi-square over 10 x 10 cells of (position, value).
    int adjacent = 0, cells[10][10] = {{0}};
    for (int64_t i = 0; i < n; i++) {
        int64_t x = order_permute(7, 0, i, n);
        if (i > 0 && llabs(x - order_permute(7, 0, i - 1, n)) == 1) adjacent++;
        cells[i / 100][x / 100]++;
    }
    double chi = 0;
    for (int i = 0; i < 100; i++) chi += (cells[i / 10][i % 10] - 10) * (cells[i / 10][i % 10] - 10) / 10.0;
    CHECK(adjacent < 12, "%d neighbours", adjacent);
    CHECK(chi > 40 && chi < 140, "chi-square %g, 81 expected, deviation 13", chi);
    // All orders of three windows occur, none much more often than another.
    int orders[27] = {0};
    for (int epoch = 0; epoch < 6000; epoch++)
        orders[9 * order_permute(5, epoch, 0, 3) + 3 * order_permute(5, epoch, 1, 3) + order_permute(5, epoch, 2, 3)]++;
    int lowest = 6000;
    for (int i = 0; i < 27; i++)
        if (orders[i] && orders[i] < lowest) lowest = orders[i];
    int found = 0;
    for (int i = 0; i < 27; i++) found += orders[i] > 0;
    CHECK(found == 6 && lowest > 850, "%d orders of 3, the rarest %d of 6000 times", found, lowest);
}

// ---- Loader

// The first tokens of the `calls` * batch windows that a loader gives; they identify the windows. Checks the targets.
static void collect(const Shards* s, int64_t batch, LoaderOrder order, int calls, int32_t* first_tokens) {
    Loader* loader = loader_start(s, batch, BIG, order);
    for (int c = 0; c < calls; c++) {
        const int32_t *input, *target;
        loader_read(loader, c, &input, &target);
        for (int64_t b = 0; b < batch; b++) {
            first_tokens[c * batch + b] = input[b * T];
            for (int t = 0; t < T; t++)
                CHECK(input[b * T + t] == input[b * T] + t && target[b * T + t] == input[b * T] + t + 1,
                      "call %d, row %d, token %d", c, (int)b, t);
        }
    }
    loader_stop(loader);
}

static LoaderOrder order_of(int64_t first, int64_t stride, int64_t wrap) {
    LoaderOrder order = {99, first, stride, wrap};
    return order;
}

static void test_loader_epochs(void) {
    Shards* s = open_set();  // 9 windows
    enum { BATCH = 4, CALLS = 18 };
    int32_t got[CALLS * BATCH];
    collect(s, BATCH, order_of(0, BATCH, 0), CALLS, got);
    for (int w = 0; w < CALLS * BATCH; w++) {
        int32_t input[T], target[T];
        shards_read(s, order_permute(99, w / 9, w % 9, 9), BIG, input, target);
        CHECK(got[w] == input[0], "window %d: %d, not %d", w, got[w], input[0]);
    }
    // 9 windows, 4 per batch: epochs end inside a batch, and each has every window once.
    for (int epoch = 0; epoch < 8; epoch++)
        for (int i = 0; i < 9; i++)
            for (int j = 0; j < i; j++)
                CHECK(got[9 * epoch + i] != got[9 * epoch + j], "epoch %d has %d twice", epoch, got[9 * epoch + i]);
    CHECK(memcmp(got, got + 9, 9 * sizeof(int32_t)) != 0, "epochs have the same order");
    shards_close(s);
}

static void test_loader_ranks(void) {
    Shards* s = open_set();
    enum { TOTAL = 48 };
    int32_t whole[TOTAL], part[TOTAL];
    collect(s, 1, order_of(0, 1, 0), TOTAL, whole);
    // Every distribution of a step's windows over ranks gives the step the same windows.
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int batch = 1; batch <= 12 / ranks; batch++) {
            if (TOTAL % (ranks * batch)) continue;
            int calls = TOTAL / (ranks * batch), differ = 0;
            for (int r = 0; r < ranks; r++) {
                collect(s, batch, order_of(r * batch, ranks * batch, 0), calls, part);
                for (int c = 0; c < calls; c++)
                    for (int b = 0; b < batch; b++) differ += part[c * batch + b] != whole[(c * ranks + r) * batch + b];
            }
            CHECK(differ == 0, "%d ranks, batch %d: %d differ", ranks, batch, differ);
        }
    // A run that resumes at window w reads the same windows as an uninterrupted run.
    for (int w = 0; w < 30; w++) {
        collect(s, 3, order_of(w, 3, 0), (TOTAL - w) / 3, part);
        CHECK(memcmp(part, whole + w, (size_t)((TOTAL - w) / 3) * 3 * sizeof(int32_t)) == 0, "going on at %d", w);
    }
    shards_close(s);
}

static void test_loader_wrap(void) {
    Shards* s = open_set();
    int32_t whole[40], got[40], again[40];
    collect(s, 1, order_of(0, 1, 0), 40, whole);
    collect(s, 4, order_of(0, 4, 8), 10, got);
    for (int i = 0; i < 40; i++) CHECK(got[i] == whole[i % 8], "window %d", i);
    collect(s, 4, order_of(4, 8, 24), 10, got);  // rank 1 of 2; a step of 24 windows, longer than an epoch
    for (int i = 0; i < 40; i++) CHECK(got[i] == whole[(4 + i / 4 * 8 + i % 4) % 24], "window %d", i);
    collect(s, 4, order_of(5 * 24 + 4, 8, 24), 10, again);  // resumed
    CHECK(memcmp(got, again, sizeof(got)) == 0, "a later step of the same batch");
    shards_close(s);
}

// The loader of a mixture reads the windows that a walk finds, wherever it begins and with repeated ones.
static void test_loader_mixture(void) {
    Shards* s = open_mixture("0.9995", "0.0005");
    enum { BATCH = 4, CALLS = 30 };
    const LoaderOrder orders[] = {order_of(0, BATCH, 0), order_of(1990, 3 * BATCH, 0), order_of(4, 2 * BATCH, 24)};
    for (int i = 0; i < 3; i++) {
        int32_t got[CALLS * BATCH];
        int differ = 0;
        collect(s, BATCH, orders[i], CALLS, got);
        for (int n = 0; n < CALLS * BATCH; n++) {
            int64_t w = orders[i].first + n / BATCH * orders[i].stride + n % BATCH;
            if (orders[i].wrap) w %= orders[i].wrap;
            MixtureWalk walk = {.mixture = &s->mixture};
            int32_t input[T], target[T];
            shards_read(s, mixture_window(&walk, 99, w), BIG, input, target);
            differ += got[n] != input[0];
        }
        CHECK(differ == 0, "order %d: %d differ", i, differ);
    }
    shards_close(s);
}

// With V 70000 the windows 4 and 5 of the set are bad. How many windows of the run come before the first of them:
static int windows_before_bad(void) {
    int w = 0;
    for (; w < 9; w++) {
        int64_t index = order_permute(99, 0, w, 9);
        if (index == 4 || index == 5) break;
    }
    return w;
}
static void load_bad(void) {
    Shards* s = open_set();
    Loader* loader = loader_start(s, 1, 70000, order_of(0, 1, 0));
    const int32_t *input, *target;
    for (int c = 0; c < 9; c++) loader_read(loader, c, &input, &target);
}
// A bad window is no error if the run does not use it.
static void load_up_to_bad(void) {
    int good = windows_before_bad();
    Shards* s = open_set();
    Loader* loader = loader_start(s, 1, 70000, order_of(0, 1, 0));
    const int32_t *input, *target;
    for (int c = 0; c < good; c++) loader_read(loader, c, &input, &target);
    loader_stop(loader);
    die(EXIT_FAILED, "all %d good ones", good);
}

static void test_loader_bad_ids(void) {
    CHECK(windows_before_bad() > 0, "another seed is needed");
    DIES(load_bad, "--train", "s_train_000003.bin", "byte ", "token 700", "--vocab 70000");
    DIES(load_up_to_bad, "good ones");
}

int main(void) {
    make_folder("test_shards");
    RUN(test_shards_windows);
    RUN(test_shards_hash);
    RUN(test_shards_hash_of_mixtures);
    RUN(test_shards_shared);
    RUN(test_shards_many);
    RUN(test_shards_refused);
    RUN(test_shards_bad_ids);
    RUN(test_shards_bad_last_target);
    RUN(test_permute_bijection);
    RUN(test_permute_differs);
    RUN(test_loader_epochs);
    RUN(test_loader_ranks);
    RUN(test_loader_wrap);
    RUN(test_loader_mixture);
    RUN(test_loader_bad_ids);
    remove_matching("");
    return test_summary();
}
