// Checkpoints: the files do not depend on the number of ranks that write them, and are read back in any layout. All
// ranks refuse bad files in the same words. Run alone and by several ranks (mpirun -np 4). All comparisons are exact.
#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "device/files.h"
#include "parallel/checkpoint.h"
#include "parallel/slices.h"
#include "tests/files.h"
#include "tests/ranks.h"

static Ctx* ctx;
static char out[128];  // the folder in which the current test saves

static void open_out(const char* name) { snprintf(out, sizeof(out), "%s/%s", folder, name); }

// The path of a file of a checkpoint in `out`, in one of a few rotating buffers.
static const char* file_of(int64_t step, const char* name) {
    static char paths[8][256];
    static int turn;
    char* path = paths[turn++ % 8];
    snprintf(path, sizeof(paths[0]), "%s/step_%08lld/%s", out, (long long)step, name);
    return path;
}

// ---- A state of a few tensors, cut in any way

enum { FILES = 3, TENSORS = 7, GUARD = 3, KINDS = 3 };

static const struct {
    int file;
    const char* name;
    int rank;
    int64_t shape[2];
} tensors[TENSORS] = {{0, "embed.weight", 2, {37, 11}},
                      {1, "a.weight", 2, {129, 64}},
                      {1, "one", 1, {1, 1}},
                      {1, "a.norm", 1, {5, 1}},
                      {2, "a.weight.exp_avg", 2, {129, 64}},
                      {2, "large.exp_avg", 2, {600, 1801}},      // more than one read
                      {2, "large.exp_avg_sq", 2, {600, 3701}}};  // the last in bf16

static const char* const file_names[FILES + 1] = {"block_000.safetensors", "block_001.safetensors",
                                                  "block_002.safetensors", "manifest.json"};

static int64_t elements(int t) { return tensors[t].shape[0] * tensors[t].shape[1]; }

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Whole numbers that are exact in float32.
static real value(int64_t step, int t, int64_t i) {
    return (real)(mix(((uint64_t)step << 48) + ((uint64_t)t << 40) + (uint64_t)i) & 0xffffff);
}

typedef struct State {
    CheckpointFile files[FILES];
    CheckpointTensor tensors[TENSORS];
    char* memory[TENSORS];  // GUARD elements, the slice, GUARD elements
} State;

static size_t memory_bytes(const CheckpointTensor* c) {
    return (size_t)(c->count + 2 * GUARD) * st_dtype_bytes(c->dtype);
}

// The expected memory of tensor t: finite values, in bf16 with arbitrary bits, and zeros around them.
static char* contents(const CheckpointTensor* c, int t, int64_t step) {
    char* host = (char*)host_alloc(memory_bytes(c));
    for (int64_t i = 0; i < c->count; i++) {
        const real x = value(step, t, c->first + i);
        if (c->dtype == ST_BF16)
            ((uint16_t*)host)[GUARD + i] = (uint16_t)((int64_t)x & 0xbfff);
        else
            ((real*)host)[GUARD + i] = x;
    }
    return host;
}

// The state of rank `index` of `parts`. Kind 0: equal parts. Kind 1: two ranks share a tensor, cut at any place, and
// the others have no part of it. Kind 2: every rank has all elements and writes an equal part.
static State* state_create(int kind, int index, int parts) {
    State* s = (State*)host_alloc(sizeof(State));
    for (int t = 0; t < TENSORS; t++) {
        CheckpointTensor* c = &s->tensors[t];
        CheckpointFile* file = &s->files[tensors[t].file];
        int64_t n = elements(t), begin = n * index / parts, end = n * (index + 1) / parts;
        if (kind == 1 && parts > 1) {
            int low = (t + 1) % parts, high = t % parts;
            int64_t place = (int64_t)(mix((uint64_t)t + 1) % (uint64_t)n);
            begin = index == low ? 0 : index == high ? place : n;
            end = index == low ? place : n;
        }
        snprintf(c->name, sizeof(c->name), "%s", tensors[t].name);
        c->dtype = t == TENSORS - 1 ? ST_BF16 : CHECKPOINT_DTYPE;
        c->rank = tensors[t].rank;
        memcpy(c->shape, tensors[t].shape, sizeof(c->shape));
        c->save_first = begin;
        c->save_count = end - begin;
        c->first = kind == 2 ? 0 : begin;
        c->count = kind == 2 ? n : end - begin;
        s->memory[t] = (char*)device_alloc(memory_bytes(c), "a slice");
        c->data = s->memory[t] + GUARD * st_dtype_bytes(c->dtype);
        snprintf(file->name, sizeof(file->name), "%s", file_names[tensors[t].file]);
        if (file->count++ == 0) file->tensors = c;
    }
    return s;
}

static void state_free(State* s) {
    for (int t = 0; t < TENSORS; t++) device_free(s->memory[t]);
    free(s);
}

static void fill(const State* s, int64_t step) {
    for (int t = 0; t < TENSORS; t++) {
        const CheckpointTensor* c = &s->tensors[t];
        char* host = contents(c, t, step);
        device_upload(s->memory[t], host, memory_bytes(c), ctx);
        free(host);
    }
}

static void check_state(const State* s, int64_t step, const char* what) {
    for (int t = 0; t < TENSORS; t++) {
        const CheckpointTensor* c = &s->tensors[t];
        char *want = contents(c, t, step), *host = (char*)host_alloc(memory_bytes(c));
        device_download(host, s->memory[t], memory_bytes(c), ctx);
        int64_t wrong = 0, bytes = (int64_t)memory_bytes(c);
        for (int64_t i = 0; i < bytes; i++) wrong += host[i] != want[i];
        CHECK(wrong == 0, "%s: %lld of %lld bytes of %s", what, (long long)wrong, (long long)bytes, c->name);
        free(want);
        free(host);
    }
}

static void save(Saver* saver, int64_t step, const State* s) {
    CheckpointRecord record = {step, 2 * step, step - 1, 4000000000, 3999999999};
    checkpoint_save(saver, &record, "{\"lr\": 0.1}", s->files, FILES, ctx);
}

static void save_one(Ranks* group, int64_t step, const State* s) {
    Saver* saver = saver_create(group, out, 9);
    save(saver, step, s);
    saver_destroy(saver);
}

// Saves a state in equal parts.
static State* saved(int64_t step) {
    State* s = state_create(0, rank, ranks);
    fill(s, step);
    save_one(world, step, s);
    return s;
}

static int load(Ranks* group, int64_t step, const State* s, char* error, size_t error_size) {
    char* why;
    Json* manifest = checkpoint_manifest(out, step, &why);
    if (manifest) {
        CHECK(json_int(manifest, "step", -1) == step, "step");
        CHECK(json_int(manifest, "window", -1) == 2 * step, "window");
        CHECK(json_int(manifest, "updates", -1) == step - 1, "updates");
        CHECK(json_int(manifest, "data_hash", -1) == 4000000000, "data_hash");
    }
    why = checkpoint_load(group, out, step, manifest, s->files, FILES, ctx, why);
    json_free(manifest);
    snprintf(error, error_size, "%s", why ? why : "");
    const int result = why ? -1 : 0;
    free(why);
    return result;
}

static void check_load(Ranks* group, int kind, int64_t step, const char* what) {
    State* s = state_create(kind, ranks_index(group), ranks_count(group));
    char error[512] = "";
    CHECK(load(group, step, s, error, sizeof(error)) == 0, "%s: %s", what, error);
    check_state(s, step, what);
    state_free(s);
}

// ---- Joining the records of the ranks

static void joining(void) {
    const int64_t TB = (int64_t)1 << 40;
    const unsigned char text[] = "0123456789";
    enum { CASES = 7 };
    const int64_t cases[CASES][4][3] = {
        // file, offset, bytes
        {{0, 0, 3}, {0, 3, 4}, {0, 7, 3}, {1, 0, 5}},   // bytes 0 .. 9 of file 0: complete
        {{0, 0, 3}, {0, 3, 4}, {0, 8, 2}, {1, 0, 5}},   // a hole
        {{0, 0, 3}, {0, 3, 4}, {0, 6, 4}, {1, 0, 5}},   // a byte twice
        {{0, 0, 3}, {0, 3, 4}, {0, 6, 3}, {1, 0, 5}},   // a byte twice, one missing
        {{0, 0, 3}, {0, 3, 7}, {0, 3, 7}, {1, 0, 5}},   // all twice
        {{0, 1, 2}, {0, 3, 4}, {0, 7, 3}, {1, 0, 5}},   // the start is missing
        {{0, 0, 3}, {0, 3, 4}, {1, 0, 5}, {1, 5, 5}}};  // the end is missing
    for (int i = 0; i < CASES; i++) {
        FileSlice slices[4] = {{.file = 0}};
        for (int k = 0; k < 4; k++) {
            slices[k].file = cases[i][k][0];
            slices[k].offset = cases[i][k][1];
            slices[k].bytes = cases[i][k][2];
            slices[k].crc = crc_of(text + slices[k].offset, (size_t)slices[k].bytes);
        }
        const FileSlice* next = slices;
        uLong crc;
        CHECK(slices_join(&next, slices + 4, 0, 10, &crc) == (i == 0), "case %d", i);
        CHECK(i || crc == crc_of(text, 10), "CRC-32");
        CHECK(next->file == 1 && slices_join(&next, slices + 4, 1, i < CASES - 1 ? 5 : 10, &crc),
              "the next file, case %d", i);
        CHECK(crc == crc_of(text, i < CASES - 1 ? 5 : 10), "its CRC-32");
    }
    const FileSlice large[2] = {{.bytes = 5 * TB}, {.offset = 5 * TB, .bytes = 7 * TB}};
    const FileSlice* next = large;
    uLong crc;
    CHECK(slices_join(&next, large + 2, 0, 12 * TB, &crc), "12 TB");
}

// ---- Saving

// The bytes of a file and of the manifest, made by independent code.
static void check_format(void) {
    const char* dtype = sizeof(real) == 8 ? "F64" : "F32";
    long long size = (long long)sizeof(real), a = elements(1) * size, b = a + size, c = b + 5 * size;
    char* header = host_format(
        "{\"__metadata__\":{\"format\":\"pt\"},"
        "\"a.weight\":{\"dtype\":\"%s\",\"shape\":[129,64],\"data_offsets\":[0,%lld]},"
        "\"one\":{\"dtype\":\"%s\",\"shape\":[1],\"data_offsets\":[%lld,%lld]},"
        "\"a.norm\":{\"dtype\":\"%s\",\"shape\":[5],\"data_offsets\":[%lld,%lld]}}",
        dtype, a, dtype, a, b, dtype, b, c);
    uint64_t length = strlen(header), padded = (length + 7) / 8 * 8, bytes = 8 + padded + (uint64_t)c;
    char* file = (char*)host_alloc(bytes);
    memcpy(file, &padded, 8);
    memset(file + 8, ' ', padded);
    memcpy(file + 8, header, length);
    real* data = (real*)(file + 8 + padded);
    for (int t = 1; t <= 3; t++)
        for (int64_t i = 0; i < elements(t); i++) *data++ = value(7, t, i);
    size_t got_bytes = 0;
    char* got = read_file(file_of(7, file_names[1]), SIZE_MAX, &got_bytes);
    CHECK(got && got_bytes == bytes && memcmp(got, file, bytes) == 0, "file");
    free(got);
    free(file);
    free(header);

    char* text = host_strdup(
        "{\"format\": \"train_moe checkpoint 2\", \"step\": 7, \"window\": 14, \"updates\": 6, "
        "\"data_hash\": 4000000000, \"tokenizer_hash\": 3999999999,\n\"options\": {\"lr\": 0.1},\n\"files\": [");
    for (int f = 0; f < FILES; f++) {
        got = read_file(file_of(7, file_names[f]), SIZE_MAX, &got_bytes);
        char* more = host_format("%s%s\n  {\"name\": \"%s\", \"bytes\": %zu, \"crc32\": %lu}", text, f ? "," : "",
                                 file_names[f], got_bytes, crc_of(got, got_bytes));
        free(got);
        free(text);
        text = more;
    }
    char* body = host_format("%s]", text);
    free(text);
    text = body;
    got = read_file(file_of(7, file_names[FILES]), SIZE_MAX, &got_bytes);
    char* sealed = host_format("%s,\n\"manifest_crc32\": %lu}\n", text, crc_of(text, strlen(text)));
    CHECK(strcmp(got, sealed) == 0, "manifest: %s instead of %s", got, sealed);
    free(sealed);
    free(text);
    free(got);
}

static void files_do_not_depend_on_ranks(void) {
    Ranks* apart = ranks_split(world, rank == 0);
    char* alone[FILES + 1];
    size_t sizes[FILES + 1], size = 0;
    if (rank == 0) {
        open_out("alone");
        State* s = state_create(0, 0, 1);
        fill(s, 7);
        save_one(apart, 7, s);
        check_format();
        for (int f = 0; f <= FILES; f++) alone[f] = read_file(file_of(7, file_names[f]), SIZE_MAX, &sizes[f]);
        state_free(s);
    }
    for (int kind = 0; kind < KINDS; kind++) {
        const char* const folders[KINDS] = {"kind/0", "kind/1", "kind/2"};  // the parent folder is missing too
        open_out(folders[kind]);
        State* s = state_create(kind, rank, ranks);
        fill(s, 7);
        save_one(world, 7, s);
        for (int f = 0; f <= FILES && rank == 0; f++) {
            char* file = read_file(file_of(7, file_names[f]), SIZE_MAX, &size);
            CHECK(file && size == sizes[f] && memcmp(file, alone[f], size) == 0, "kind %d: %s", kind, file_names[f]);
            free(file);
        }
        state_free(s);
    }
    for (int f = 0; f <= FILES && rank == 0; f++) free(alone[f]);
    ranks_free(apart);
}

static void any_layout_loads(void) {
    open_out("layouts");
    State* s = state_create(1, rank, ranks);
    fill(s, 1);
    save_one(world, 1, s);
    state_free(s);
    const int colors[] = {0, rank / 2, rank};  // all, pairs, each alone
    for (int i = 0; i < 3; i++) {
        Ranks* group = ranks_split(world, colors[i]);
        for (int kind = 0; kind < KINDS; kind++) {
            char* what = host_format("%d ranks, kind %d", ranks_count(group), kind);
            check_load(group, kind, 1, what);
            free(what);
        }
        ranks_free(group);
    }
}

// Rank 0's save returns before it can complete, because the others have not begun theirs. Its tensors may change at
// once.
static void a_save_returns_at_once(void) {
    open_out("async");
    State* s = state_create(1, rank, ranks);
    Saver* saver = saver_create(world, out, 9);
    fill(s, 1);
    if (rank != 0) ranks_barrier(world);
    save(saver, 1, s);
    fill(s, 2);
    if (rank == 0) {
        CHECK(ranks == 1 || access(file_of(1, ""), F_OK) != 0, "saved by one rank alone");
        ranks_barrier(world);
    }
    checkpoint_wait(saver);
    CHECK(access(file_of(1, ""), F_OK) == 0, "not saved when the wait ends");
    check_load(world, 0, 1, "changed after the save");
    // The second save waits for the first.
    fill(s, 3);
    save(saver, 3, s);
    fill(s, 4);
    save(saver, 4, s);
    fill(s, 5);
    checkpoint_wait(saver);
    checkpoint_wait(saver);
    check_load(world, 0, 3, "first of two");
    check_load(world, 0, 4, "second of two");
    saver_destroy(saver);
    state_free(s);
}

static void check_list(int expected, const int64_t* steps) {
    int count;
    int64_t* found = checkpoint_list(out, &count);
    CHECK(count == expected, "%d checkpoints, not %d", count, expected);
    for (int i = 0; i < count && i < expected; i++) CHECK(found[i] == steps[i], "step %lld", (long long)found[i]);
    free(found);
}

static void the_newest_stay(void) {
    open_out("keep");
    const char* unfinished = in_folder("keep/step_00000009.tmp");
    if (rank == 0 && make_folders(unfinished) != 0) die(EXIT_FAILED, "cannot make %s", unfinished);
    ranks_barrier(world);
    State* s = state_create(0, rank, ranks);
    const int64_t steps[][2] = {{1, 0}, {2, 1}, {3, 2}, {4, 3}};
    for (int keep = 2; keep >= 1; keep--) {  // two checkpoints stay while a run goes on, even with --keep 1
        Saver* saver = saver_create(world, out, keep);
        CHECK(access(unfinished, F_OK) != 0, "what an unfinished save left is still there");
        for (int64_t step = 1; step <= 4; step++) {
            fill(s, step);
            save(saver, step, s);
            checkpoint_wait(saver);
            if (keep == 2) check_list(step == 1 ? 1 : 2, steps[step - 1]);
            ranks_barrier(world);
        }
        check_list(2, steps[3]);
        ranks_barrier(world);
        checkpoint_finish(saver);
        ranks_barrier(world);
        check_list(keep, steps[3]);
        saver_destroy(saver);
    }
    // A run that went back to before step 4 saves step 3 again; it does not count the checkpoint ahead for --keep.
    Saver* saver = saver_create(world, out, 1);
    fill(s, 3);
    save(saver, 3, s);
    checkpoint_finish(saver);
    ranks_barrier(world);
    check_list(2, steps[3]);
    check_load(world, 0, 3, "saved anew");
    // A checkpoint after which no step was good is set aside, but never the oldest one.
    bool aside = checkpoint_set_aside(saver, 4), oldest = checkpoint_set_aside(saver, 3);
    ranks_barrier(world);
    CHECK(aside == (rank == 0) && !oldest && access(in_folder("keep/step_00000004.diverged"), F_OK) == 0, "set aside");
    check_list(1, steps[2]);
    saver_destroy(saver);
    state_free(s);
}

// ---- Loading bad checkpoints

static void check_refused(const State* s, const char* file, const char* reason) {
    char error[512] = "", first[512], *words = host_format("%s: ", file);
    ranks_barrier(world);
    CHECK(load(world, 1, s, error, sizeof(error)) == -1, "%s is loaded (%s)", file, reason);
    memcpy(first, error, sizeof(error));
    ranks_broadcast(world, first, sizeof(first), 0);
    CHECK(strcmp(error, first) == 0, "'%s' is not '%s'", error, first);
    CHECK(strstr(error, words) && strstr(error, reason), "'%s' and '%s' are not in '%s'", words, reason, error);
    ranks_barrier(world);
    free(words);
}

typedef enum Damage { TRUNCATED, LONGER, EMPTY, FIRST, MIDDLE, LAST, MISSING, DAMAGES } Damage;

// Damages a file on rank 0. Returns the good contents.
static char* damage(int file, Damage how, size_t* size) {
    if (rank != 0) return NULL;
    const char* path = file_of(1, file_names[file]);
    char *good = read_file(path, SIZE_MAX, size), *bad = (char*)host_alloc(*size + 1);
    size_t n = *size, bytes = how == TRUNCATED ? n - 3 : how == LONGER ? n + 1 : how == EMPTY ? 0 : n;
    memcpy(bad, good, n);
    bad[how == MIDDLE ? n / 2 : how == LAST ? n - 1 : 0] ^= how == FIRST || how == MIDDLE || how == LAST;
    unlink(path);
    if (how != MISSING) write_file(path + strlen(folder) + 1, bad, bytes);
    free(bad);
    return good;
}

static void mend(int file, char* good, size_t size) {
    if (rank == 0) write_file(file_of(1, file_names[file]) + strlen(folder) + 1, good, size);
    free(good);
}

static void bad_files_are_refused(void) {
    open_out("refused");
    State* s = saved(1);
    size_t size, size_2;
    for (int f = 0; f <= FILES; f++) {
        for (int how = 0; how < DAMAGES; how++) {
            const char* reason = how == MISSING                                 ? "No such file"
                                 : f == FILES                                   ? "truncated or altered"
                                 : how == FIRST || how == MIDDLE || how == LAST ? "altered (its CRC-32 is"
                                                                                : "bytes long, the manifest says";
            if (f == FILES && (how == LAST || how == LONGER)) continue;  // only the newline, or a NUL after it
            char* good = damage(f, (Damage)how, &size);
            check_refused(s, file_names[f], reason);
            mend(f, good, size);
        }
    }
    // The first of two bad files is named, on whichever rank it is read.
    for (int a = 0; a < FILES; a++) {
        for (int b = a + 1; b < FILES; b++) {
            for (int swap = 0; swap < 2; swap++) {
                char *good = damage(a, swap ? MISSING : LAST, &size),
                     *good_2 = damage(b, swap ? LAST : MISSING, &size_2);
                check_refused(s, file_names[a], "");
                mend(a, good, size);
                mend(b, good_2, size_2);
            }
        }
    }
    ranks_barrier(world);
    check_load(world, 0, 1, "mended");
    state_free(s);
}

static void other_tensors_are_refused(void) {
    open_out("others");
    State* s = saved(1);
    CheckpointTensor *t = &s->tensors[3], *matrix = &s->tensors[1];
    for (int all = 0; all < 2; all++) {  // 0: read by the last rank alone, 1: by all
        bool other = all || rank == ranks - 1;
        if (other) t->name[0] = 'b';
        check_refused(s, file_names[1], "tensor b.norm is missing");
        t->name[0] = 'a';
        if (other) t->shape[0]++;
        check_refused(s, file_names[1], "tensor a.norm is of another shape");
        t->shape[0] = 5;
        if (other) matrix->shape[1]++;
        check_refused(s, file_names[1], "tensor a.weight is of another shape");
        matrix->shape[1] = 64;
        if (other) matrix->dtype = ST_BF16;
        check_refused(s, file_names[1], "tensor a.weight is of another type");
        matrix->dtype = CHECKPOINT_DTYPE;
        if (other) matrix->rank = 1;
        check_refused(s, file_names[1], "tensor a.weight is of another shape");
        matrix->rank = 2;
    }
    // A file that the manifest does not list is reported after one that is bad.
    s->files[2].name[0] = 'B';
    check_refused(s, "Block_002.safetensors", "the manifest does not list it");
    size_t size;
    char* good = damage(1, MIDDLE, &size);
    check_refused(s, file_names[1], "altered");
    mend(1, good, size);
    state_free(s);
}

// ---- Faults that end the run

static void limit_files(void) {
    struct rlimit limit = {20000, 20000};  // less than the second file
    setrlimit(RLIMIT_FSIZE, &limit);
}

// Step 1 is unchanged, and no files of step 2 are left.
static void check_not_saved(const char* name) {
    const int64_t steps[] = {1};
    open_out(name);
    check_list(1, steps);
    check_load(world, 0, 1, "the one before");
    char* unfinished = host_format("%s/step_00000002.tmp", out);
    CHECK(access(unfinished, F_OK) != 0, "the unfinished folder is still there");
    free(unfinished);
}

static void fill_the_disk(void) {
    limit_files();
    saved(2);
}

static void leave_a_hole(void) {
    State* s = state_create(0, 0, 1);
    s->tensors[1].save_count--;
    save_one(world, 2, s);
}

// Step 2 of this rank. Its last written element of tensor t is not finite.
static State* spoiled(int t) {
    const real infinite = INFINITY;
    const uint16_t nan = 0x7fc0;
    State* s = state_create(0, rank, ranks);
    fill(s, 2);
    const CheckpointTensor* c = &s->tensors[t];
    const size_t size = st_dtype_bytes(c->dtype);
    ASSERT(c->save_count > 0);
    device_upload((char*)c->data + (size_t)(c->save_first - c->first + c->save_count - 1) * size,
                  c->dtype == ST_BF16 ? (const void*)&nan : (const void*)&infinite, size, ctx);
    return s;
}
static void save_infinite(void) { save_one(world, 2, spoiled(0)); }
static void save_bf16_nan(void) { save_one(world, 2, spoiled(TENSORS - 1)); }

static void save_below_a_file(void) { saver_create(world, in_folder("file/run"), 9); }

static void a_fault_ends_the_run(void) {
    open_out("disk");
    state_free(saved(1));
    DIES(fill_the_disk, "cannot write", "disk/step_00000002.tmp/block_001.safetensors: File too large",
         "this checkpoint was not saved, earlier ones are as they were");
    check_not_saved("disk");
    DIES(save_infinite, "step 2 is not saved: weights or moments of this rank are not finite; earlier checkpoints are");
    check_not_saved("disk");
    DIES(save_bf16_nan, "step 2 is not saved: weights or moments of this rank are not finite");
    check_not_saved("disk");
    DIES(leave_a_hole, "internal error", "disk/step_00000002.tmp/block_001.safetensors");
    write_file("file", "", 0);
    DIES(save_below_a_file, "cannot create", "file/run", "Not a directory");
}

// One of four ranks has a fault. This program, run alone, starts itself in this way.
enum { ODD = 2, FAULTS = 4 };
static const char* const faults[FAULTS] = {"full", "unlike", "apart", "spoiled"};

static void fault(const char* name, const char* path) {
    char error[512];
    bool odd = rank == ODD, full = strcmp(name, "full") == 0, apart = strcmp(name, "apart") == 0;
    if (strcmp(name, "none") == 0) return;
    snprintf(out, sizeof(out), "%s", path);
    State* s = state_create(0, rank, ranks);
    Saver* saver = saver_create(world, apart && odd ? "/tmp/a/folder/of/its/own" : out, 9);
    fill(s, 1);
    save(saver, 1, s);
    checkpoint_wait(saver);
    if (full && odd) limit_files();
    save(saver, 2, strcmp(name, "spoiled") == 0 && odd ? spoiled(TENSORS - 1) : s);
    checkpoint_wait(saver);
    load(world, odd ? 1 : 2, s, error, sizeof(error));
}

// Open MPI leaks memory at its end, which must not count in a build with the address sanitizer. Each run has a session
// directory of its own: an mpirun that ends removes the common one, while another may be starting in it.
static FILE* start_ranks(const char* name) {
    char* command = host_format(
        "TMPDIR=`mktemp -d %s/XXXXXX` ASAN_OPTIONS=detect_leaks=0 OMPI_ALLOW_RUN_AS_ROOT=1 "
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 60 mpirun "
        "--oversubscribe -np 4 --mca mpi_yield_when_idle 1 /proc/%d/exe %s %s/%s 2>&1 >/dev/null",
        folder, (int)getpid(), name, folder, name);
    FILE* run = popen(command, "r");
    if (!run) die(EXIT_FAILED, "cannot run %s", command);
    free(command);
    return run;
}

static void one_of_several_ranks_ends_all(void) {
    FILE* runs[FAULTS];
    for (int i = 0; i < FAULTS; i++) runs[i] = start_ranks(faults[i]);
    const char* const words[FAULTS][3] = {{"cannot write", "/full/step_00000002.tmp/block_", ": File too large"},
                                          {"/unlike", "all ranks share", ""},
                                          {"/tmp/a/folder/of/its/own", "all ranks share", ""},
                                          {"step 2 is not saved", "of this rank are not finite", ""}};
    for (int i = 0; i < FAULTS; i++) {
        char said[8192];
        size_t n = fread(said, 1, sizeof(said) - 1, runs[i]);
        int status = pclose(runs[i]);
        said[n] = 0;
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILED, "%s: status %x: %s", faults[i], status, said);
        CHECK(strstr(said, "error: rank 2 of 4"), "%s: said %s", faults[i], said);
        for (int w = 0; w < 3; w++)
            CHECK(strstr(said, words[i][w]), "%s: '%s' is missing from %s", faults[i], words[i][w], said);
    }
    check_not_saved("full");
    check_not_saved("spoiled");
}

int main(int argc, char** argv) {
    ranks_open(&argc, &argv, 60);
    ctx = ctx_create(0);
    signal(SIGXFSZ, SIG_IGN);  // like the program
    if (argc == 3) {
        fault(argv[1], argv[2]);
        return ranks_close();
    }
    if (rank == 0) make_folder("test_checkpoint");
    ranks_broadcast(world, folder, sizeof(folder), 0);
    RUN_RANKS(joining);
    RUN_RANKS(files_do_not_depend_on_ranks);
    RUN_RANKS(any_layout_loads);
    RUN_RANKS(a_save_returns_at_once);
    RUN_RANKS(the_newest_stay);
    RUN_RANKS(bad_files_are_refused);
    RUN_RANKS(other_tensors_are_refused);
    if (ranks == 1 && BACKEND == BACKEND_CPU) {  // a forked child cannot use the GPU
        RUN_RANKS(a_fault_ends_the_run);
        if (pclose(start_ranks("none")) == 0)
            RUN_RANKS(one_of_several_ranks_ends_all);
        else
            SKIP(one_of_several_ranks_ends_all, "no mpirun, or built without MPI");
    }
    if (rank == 0) remove_matching("");
    ctx_destroy(ctx);
    return ranks_close();
}
