// What reads bytes from outside, fed with inputs that nobody would write. No input may crash a reader, lead it out of
// bounds or make it hang, and what it accepts must survive being written and read again.
//
//   make fuzz    libFuzzer with address and undefined-behaviour checks: fuzz [options] FOLDER, the folder named after a
//                target below; it holds the inputs, and gets the seeds
//   make test    the same targets and seeds, with a fixed number of inputs mutated blindly: fuzz [SEED]
//
// A reader that die()s comes back here by longjmp (the linker gives it the __wrap_ functions) and leaves memory behind:
// it is freed where a sanitizer can list it, else the inputs go to children in portions.
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/safetensors.h"
#include "data/tokenizer.h"
#include "dist/checkpoint.h"
#include "dist/slices.h"
#include "model/report.h"
#include "tests/test.h"

#define HOLDS(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);                             \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

// ---- die() comes back

static jmp_buf reader;
static const volatile void* left[1 << 16];  // what the reader has allocated
static size_t left_count;
static bool reading;

__attribute__((weak)) int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void*, size_t),
                                                                    void (*)(const volatile void*));

static void allocated(const volatile void* p, size_t size) {
    (void)size;
    if (reading && p && left_count < sizeof(left) / sizeof(left[0])) left[left_count++] = p;
}

static void freed(const volatile void* p) {
    for (size_t i = left_count; reading && i-- > 0;)
        if (left[i] == p) {
            left[i] = left[--left_count];
            return;
        }
}

NORETURN void __wrap_die(int code, const char* format, ...) {
    char message[8192];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    HOLDS(code == EXIT_FAILED || code == EXIT_USAGE);
    HOLDS(!strstr(format, "internal"));
    longjmp(reader, 1);
}
void __wrap_warn(const char* format, ...) { (void)format; }
void __wrap_options_help(const Option* table, int count, const char* program) {
    (void)table, (void)count, (void)program;
}

// True the first time, false where die() comes back.
#define READS (left_count = 0, reading = true, setjmp(reader) == 0)
static void read_on(void) { reading = false; }
static void read_no_more(void) {
    reading = false;
    while (left_count > 0) free((void*)left[--left_count]);
}

// ---- Files

static char out[64], file[128];  // a folder that holds step_00000001/manifest.json, which readers get as their file

static void remove_file(void) {
    remove(file);
    *strrchr(file, '/') = 0;
    remove(file);
    remove(out);
}

static void make_file(void) {
    snprintf(out, sizeof(out), "%s/train_moe_fuzz_XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    HOLDS(mkdtemp(out));
    snprintf(file, sizeof(file), "%s/step_00000001", out);
    HOLDS(mkdir(file, 0777) == 0);
    strcat(file, "/manifest.json");
    atexit(remove_file);
    if (__sanitizer_install_malloc_and_free_hooks) __sanitizer_install_malloc_and_free_hooks(allocated, freed);
}

typedef struct Piece {
    const void* bytes;
    size_t size;
} Piece;

static void write_pieces(const Piece* pieces, int count) {
    FILE* f = fopen(file, "wb");
    HOLDS(f);
    for (int i = 0; i < count; i++)
        HOLDS(pieces[i].size == 0 || fwrite(pieces[i].bytes, 1, pieces[i].size, f) == pieces[i].size);
    HOLDS(fclose(f) == 0);
}

// ---- Targets. Where a format has parts that mutations hardly ever get right, an input whose first byte is odd goes
// without them, and they are added here.

static void print_json(FILE* f, const Json* j) {
    char *key = j->key ? json_quote(j->key) : NULL, *text = j->text ? json_quote(j->text) : NULL;
    if (key) fprintf(f, "%s:", key);
    switch (j->type) {
        case JSON_NULL: fprintf(f, "null"); break;
        case JSON_BOOL: fprintf(f, j->number ? "true" : "false"); break;
        case JSON_STRING: fprintf(f, "%s", text); break;
        case JSON_NUMBER:
            if ((double)j->integer == j->number)
                fprintf(f, "%lld", (long long)j->integer);
            else
                fprintf(f, "%.17g", j->number);
            break;
        default:
            fputc(j->type == JSON_ARRAY ? '[' : '{', f);
            for (const Json* child = j->child; child; child = child->next) {
                print_json(f, child);
                if (child->next) fputc(',', f);
            }
            fputc(j->type == JSON_ARRAY ? ']' : '}', f);
    }
    free(key);
    free(text);
}

static Json* parse_again(char* text) {
    char error[64];
    Json* j = json_parse(text, strlen(text), error, sizeof(error));
    HOLDS(j);
    free(text);
    return j;
}

static char* printed(const Json* j) {
    char* text;
    size_t size;
    FILE* f = open_memstream(&text, &size);
    print_json(f, j);
    fclose(f);
    return text;
}

static void read_json(const uint8_t* data, size_t size) {
    char error[64] = "";
    Json* j = json_parse((const char*)data, size, error, sizeof(error));
    HOLDS((j != NULL) == (error[0] == 0));
    if (j) {
        char* once = printed(j);
        Json* again = parse_again(host_strdup(once));
        char* twice = printed(again);
        HOLDS(strcmp(once, twice) == 0);
        free(once);
        free(twice);
        json_free(again);
    }
    json_free(j);
    // Any bytes can be quoted, and what is UTF-8 stays what it is.
    char *text = host_format("%.*s", (int)size, (const char*)data), *quoted = json_quote(text);
    bool whole = !strstr(quoted, "\\ufffd");
    Json* said = parse_again(quoted);
    HOLDS(said->type == JSON_STRING && (!whole || strcmp(said->text, text) == 0));
    json_free(said);
    free(text);
}

static void same_when_rewritten(const SafeTensors* st, const char* data) {
    char error[256];
    StTensor* copy = (StTensor*)host_alloc((size_t)st->count * sizeof(StTensor));
    memcpy(copy, st->tensors, (size_t)st->count * sizeof(StTensor));
    for (int i = 0; i < st->count; i++)
        for (int d = 0; d < copy[i].rank && copy[i].bytes == 0; d++) copy[i].shape[d] = 0;  // whose product overflows
    Piece pieces[2] = {{NULL, 0}, {data, 0}};
    int64_t header;
    pieces[0].bytes = st_plan_header(copy, st->count, NULL, &header);
    pieces[0].size = (size_t)header;
    for (int i = 0; i < st->count; i++) pieces[1].size += (size_t)copy[i].bytes;
    write_pieces(pieces, 2);
    SafeTensors* again = st_open(file, error, sizeof(error));
    HOLDS(again && again->count == st->count);
    for (int i = 0; i < st->count; i++) {
        const StTensor *a = &copy[i], *b = st_find(again, a->name);
        HOLDS(b && a->dtype == b->dtype && a->rank == b->rank && a->offset == b->offset && a->bytes == b->bytes);
        HOLDS(memcmp(a->shape, b->shape, (size_t)a->rank * sizeof(a->shape[0])) == 0);
    }
    st_close(again);
    free((void*)pieces[0].bytes);
    free(copy);
}

// Odd: a header, NUL, and the data; its length is added.
static void read_safetensors(const uint8_t* data, size_t size) {
    char error[256] = "";
    bool dressed = size && data[0] % 2;
    const uint8_t* end = dressed ? (const uint8_t*)memchr(data, 0, size) : NULL;
    uint64_t length = dressed ? (uint64_t)((end ? end : data + size) - data) - 1 : 0;
    const char* body = (const char*)data + (dressed ? 1 + length + (end != NULL) : 0);
    size_t body_bytes = size - (size_t)(body - (const char*)data);
    Piece pieces[3] = {{&length, dressed ? 8 : 0}, {data + 1, (size_t)length}, {body, body_bytes}};
    write_pieces(pieces, 3);
    SafeTensors* st = st_open(file, error, sizeof(error));
    HOLDS((st != NULL) == (error[0] == 0));
    if (!st) return;
    for (int i = 0; i < st->count; i++) {
        const StTensor* t = &st->tensors[i];
        int64_t elements = t->bytes / (int64_t)st_dtype_bytes(t->dtype);
        char* to = (char*)malloc((size_t)t->bytes + 1);
        HOLDS(st_read(st, t, 0, elements, to) == 0 && st_read(st, t, 1, elements, to) != 0);
        if (dressed) HOLDS(memcmp(to, body + (t->offset - 8 - (int64_t)length), (size_t)t->bytes) == 0);
        HOLDS(st_find(st, t->name) == t);
        free(to);
    }
    same_when_rewritten(st, body);
    st_close(st);
}

// Odd: the four numbers of the header, then the tokens; the header's other bytes are added.
static void read_tokenizer(const uint8_t* data, size_t size) {
    static const char zeros[1024 - 16];
    bool dressed = size > 16 && data[0] % 2;
    Piece pieces[3] = {{data + dressed, dressed ? 16 : size}, {zeros, dressed ? sizeof(zeros) : 0}, {NULL, 0}};
    if (dressed) pieces[2].bytes = data + 17, pieces[2].size = size - 17;
    write_pieces(pieces, 3);
    if (READS) {
        Tokenizer* t = tokenizer_open(file);
        read_on();
        int32_t ids[64];
        int length;
        for (int32_t id = -1; id <= tokenizer_size(t); id++) {
            const char* bytes = tokenizer_decode(t, id, &length);
            HOLDS((bytes != NULL) == (id >= 0 && id < tokenizer_size(t)) && length >= 0 && length < 256);
            HOLDS(length == 0 || memchr(bytes, bytes[length - 1], (size_t)length));
        }
        char *text = host_format("%.*s", (int)size, (const char*)data), *at = text;
        int64_t n = tokenizer_encode(t, text, ids, 64);
        for (int64_t i = 0; i < n; i++, at += length) {
            const char* bytes = tokenizer_decode(t, ids[i], &length);
            HOLDS(length > 0 && strncmp(at, bytes, (size_t)length) == 0);
        }
        HOLDS(n < 0 || n == 64 || *at == 0);
        free(text);
        tokenizer_close(t);
    } else {
        read_no_more();
    }
}

// Words are lines.
static void read_options(const uint8_t* data, size_t size) {
    char *text = host_format("train_moe\n%.*s", (int)size, (const char*)data), *argv[256], *was, *is, error[64];
    int argc = 0;
    for (char* line = strtok(text, "\n"); line && argc < 256; line = strtok(NULL, "\n")) argv[argc++] = line;
    if (READS) {
        Settings s = settings_read(argc, argv, 1);
        read_on();
        if (!s.help) {
            char* json = settings_json(&s);
            Json* record = json_parse(json, strlen(json), error, sizeof(error));
            HOLDS(record && json_count(record) == settings_count && !settings_differ(&s, record, &was, &is));
            HOLDS(isfinite(settings_lr(&s, 1)) && isfinite(settings_lr(&s, s.steps)));
            json_free(record);
            free(json);
            if (s.model.L <= 4 && s.ranks <= 64) report_dry_run(&s);
        }
        settings_free(&s);
    } else {
        read_no_more();
    }
    free(text);
}

// Odd: what is ahead of the CRC-32; the seal is added.
static void read_manifest(const uint8_t* data, size_t size) {
    char seal[64] = "", error[512] = "", *was, *is;
    bool dressed = size && data[0] % 2;
    if (dressed) snprintf(seal, sizeof(seal), "%s%lu}\n", CHECKPOINT_MANIFEST_END, crc_of(data + 1, size - 1));
    Piece pieces[2] = {{data + dressed, size - dressed}, {seal, strlen(seal)}};
    write_pieces(pieces, 2);
    CheckpointRecord record;
    Json* manifest = checkpoint_manifest(out, 1, &record, error, sizeof(error));
    HOLDS((manifest != NULL) == (error[0] == 0));
    if (!manifest) return;
    HOLDS(record.step == 1);
    Settings s;
    memset(&s, 0, sizeof(s));
    options_defaults(settings_table, settings_count, &s);
    if (settings_differ(&s, json_get(manifest, "options"), &was, &is)) {
        free(was);
        free(is);
    }
    settings_free(&s);
    json_free(manifest);
}

typedef struct Target {
    const char* name;
    void (*read)(const uint8_t* data, size_t size);
    int inputs;  // in make test
    Piece seeds[4];
} Target;
#define SEED(text)                                                                                                     \
    { text, sizeof(text) - 1 }
#define OPTIONS_SEED 2  // of the target options: made of the table

static Target targets[] = {
    {"json",
     read_json,
     50000,
     {SEED("{\"a\": [1, -2.5e-3, true, false, null, {}], \"b\\u00e9\\ud83d\\ude00\\n\": \"\xc3\xa9\xf0\x9f\x98\x80\"}"),
      SEED("[9223372036854775807, -9223372036854775808, 1e308, 0.1, \"\\\"\\\\\\/\\b\\f\\n\\r\\t\"]"),
      SEED("{\"step\": 3, \"loss\": 5.44823647, \"mfu\": null, \"mx_stats\": [{\"layer\": 1}]}\n")}},
    {"safetensors",
     read_safetensors,
     20000,
     {SEED("1{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
           "\"b\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[8,9]}}  \0ABCDEFGHI"),
      SEED("1{\"e\":{\"dtype\":\"I64\",\"shape\":[0,3],\"data_offsets\":[0,0]},\"x\":{\"dtype\":\"BF16\",\"shape\":"
           "[1,1,2,1],\"data_offsets\":[0,4]}}\0abcd"),
      SEED("\x2a\0\0\0\0\0\0\0{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}z")}},
    {"tokenizer",
     read_tokenizer,
     20000,
     {SEED("1\xc8\xda\x34\x01\2\0\0\0\4\0\0\0\3\0\0\0\1a\2ab\1b\5<eot>"),
      SEED("1\xc8\xda\x34\x01\2\0\0\0\6\0\0\0\0\0\0\0\0\1x\1\xc8\1x\2\xda\x34\0\1\x01")}},
    {"options",
     read_options,
     20000,
     {SEED("--train\nx*.bin\n--steps\n10\n--lr\n1e-3\n--schedule\nwsd\n--out\nrun\n--resume\n--seed\n7"),
      SEED(
          "--dry-run\n--model\n671b\n--ranks\n64\n--ep\n8\n--shard\nweights\n--linear-precision\nmxfp8\n--layers\n4")}},
    {"manifest",
     read_manifest,
     20000,
     {SEED("1{\"format\": \"train_moe checkpoint 1\", \"step\": 1, \"window\": 2, \"updates\": 1, \"bad_in_a_row\": 0, "
           "\"data_hash\": 7,\n\"options\": {\"model\": \"tiny\", \"dim\": 32, \"lr\": 0.003},\n\"files\": [\n  "
           "{\"name\": \"block_000.safetensors\", \"bytes\": 1, \"crc32\": 5}]"),
      SEED("{\"format\": \"train_moe checkpoint 1\", \"step\": 1,\n\"files\": [],\n\"manifest_crc32\": 1}\n")}},
};
enum { TARGETS = sizeof(targets) / sizeof(targets[0]) };

// Every option with its default.
static void make_seeds(void) {
    char* text = host_strdup("--train\nx");
    for (int i = 0; i < settings_count; i++) {
        const Option* o = &settings_table[i];
        if (!o->initial || o->type == OPTION_TEXT || strcmp(o->name, "help") == 0) continue;
        char* longer = host_format("%s\n--%s%s%s", text, o->name, o->type == OPTION_FLAG ? "" : "\n",
                                   o->type == OPTION_FLAG ? "" : o->initial);
        free(text);
        text = longer;
    }
    for (int t = 0; t < TARGETS; t++)
        if (targets[t].read == read_options)
            targets[t].seeds[OPTIONS_SEED].bytes = text, targets[t].seeds[OPTIONS_SEED].size = strlen(text);
}

#ifdef LIBFUZZER

static const Target* target;

// The last argument is the folder of inputs.
int LLVMFuzzerInitialize(int* argc, char*** argv) {
    const char *folder = (*argv)[*argc - 1], *slash = strrchr(folder, '/');
    for (int t = 0; t < TARGETS; t++)
        if (strcmp(targets[t].name, slash ? slash + 1 : folder) == 0) target = &targets[t];
    HOLDS(target);
    make_file();
    make_seeds();
    for (int i = 0; i < 4 && target->seeds[i].size; i++) {
        char* path = host_format("%s/seed_%d", folder, i);
        FILE* f = fopen(path, "wb");
        HOLDS(f && fwrite(target->seeds[i].bytes, 1, target->seeds[i].size, f) > 0 && fclose(f) == 0);
        free(path);
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    target->read(data, size);
    return 0;
}

#else

enum { ROOM = 4096, PORTION = 1000 };
static uint64_t seed = 1;

static uint64_t dice(uint64_t* state, uint64_t sides) {  // xorshift64*
    *state ^= *state >> 12, *state ^= *state << 25, *state ^= *state >> 27;
    return (*state * 0x2545f4914f6cdd1du >> 16) % sides;
}

static const char* word(uint64_t* state) {
    static const char* const words[] = {"\"",
                                        "\\",
                                        "{",
                                        "}",
                                        "[",
                                        "]",
                                        ",",
                                        ":",
                                        "-",
                                        "0",
                                        "\n",
                                        "--",
                                        "e999",
                                        ".",
                                        "\\u",
                                        "\\ud800",
                                        "null",
                                        "\xff",
                                        "\xed\xa0\x80",
                                        "9223372036854775808",
                                        "4294967296",
                                        "\"shape\":[0],",
                                        "\"x\":{}",
                                        "__metadata__",
                                        "nan",
                                        "0x1p9",
                                        "-1",
                                        " "};
    uint64_t i = dice(state, 2 * sizeof(words) / sizeof(words[0]));
    return i < sizeof(words) / sizeof(words[0]) ? words[i] : settings_table[dice(state, (uint64_t)settings_count)].name;
}

// One to eight changes of a seed: a bit, a byte, a piece left out, moved or doubled, a word put in or over.
static size_t mutate(const Target* t, uint64_t* state, uint8_t* data) {
    uint64_t seeds = 0;
    while (seeds < 4 && t->seeds[seeds].size) seeds++;
    const Piece* from = &t->seeds[dice(state, seeds)];
    size_t size = from->size;
    memcpy(data, from->bytes, size);
    for (uint64_t n = 1 + dice(state, 8); n > 0; n--) {
        size_t at = dice(state, size + 1), some = dice(state, size - at + 1), kind = dice(state, 6);
        if (some > 64) some %= 64;
        const char* put = word(state);
        size_t length = strlen(put), room = ROOM - size;
        if (kind == 0 && at < size) data[at] ^= (uint8_t)(1 << dice(state, 8));
        if (kind == 1 && at < size) data[at] = (uint8_t)dice(state, 256);
        if (kind == 2) {
            memmove(data + at, data + at + some, size - at - some);
            size -= some;
        }
        if (kind == 3 && some <= room) {
            memmove(data + at + some, data + at, size - at);
            size += some;
        }
        if (kind == 4 && length <= room) {
            memmove(data + at + length, data + at, size - at);
            memcpy(data + at, put, length);
            size += length;
        }
        if (kind == 5 && at + length <= size) memcpy(data + at, put, length);
    }
    return size;
}

// In a child: inputs `first` and on.
static void portion(const Target* t, uint64_t first) {
    static uint8_t data[ROOM];
    if (!freopen("/dev/null", "w", stdout)) abort();  // the report of a dry run
    for (uint64_t i = first; i < first + PORTION; i++) {
        uint64_t state = (seed * 1000003 + i) * 0x9e3779b97f4a7c15u + 1;
        size_t size = mutate(t, &state, data);
        uint8_t* exact = (uint8_t*)malloc(size ? size : 1);
        memcpy(exact, data, size);
        alarm(20);  // a hang ends the child
        t->read(exact, size);
        free(exact);
    }
    _exit(0);
}

static const Target* target;
static void inputs(void) {
    for (uint64_t first = 0; first < (uint64_t)target->inputs; first += PORTION) {
        fflush(stdout);
        int status = -1;
        pid_t child = fork();
        if (child == 0) portion(target, first);
        waitpid(child, &status, 0);
        CHECK(status == 0, "%s: seed %llu, inputs from %llu on: status %x", target->name, (unsigned long long)seed,
              (unsigned long long)first, status);
    }
    printf("%d inputs of %s, seed %llu\n", target->inputs, target->name, (unsigned long long)seed);
}

int main(int argc, char** argv) {
    if (argc > 1) seed = strtoull(argv[1], NULL, 10);
    make_file();
    make_seeds();
    for (target = targets; target < targets + TARGETS; target++) RUN(inputs);
    return test_summary();
}
#endif
