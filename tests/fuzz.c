// Fuzz tests of the readers of outside data. No input may crash a reader, lead it out of bounds, make it hang or make
// it allocate much memory.
// `make fuzz`: libFuzzer looks for inputs, with address and undefined-behaviour checks (fuzz [options] FOLDER, named
// after a target below). `make test`: mutated seeds, the same number each time (fuzz [SEED]).
//
// A reader that ends the run comes back here by longjmp: the linker gives it the functions __wrap_*. Its allocations
// are freed here.
#include <assert.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "data/safetensors.h"
#include "data/tokenizer.h"
#include "device/check.h"
#include "model/memory.h"
#include "model/record.h"

static jmp_buf reader;
static volatile bool reading;
static void* allocated[1 << 14];
static size_t count;

void* __real_calloc(size_t n, size_t size);
void __real_free(void* p);

void* __wrap_calloc(size_t n, size_t size) {
    void* p = __real_calloc(n, size);
    assert(p && n * size < 1 << 24 && count < sizeof(allocated) / sizeof(allocated[0]));
    if (reading) allocated[count++] = p;
    return p;
}
void __wrap_free(void* p) {
    size_t i = count;
    while (i > 0 && allocated[i - 1] != p) i--;
    if (i > 0) allocated[i - 1] = allocated[--count];
    __real_free(p);
}

void __wrap_warn(const char* format, ...) { (void)format; }
NORETURN void __wrap_die(int code, const char* format, ...) {
    va_list args;
    va_start(args, format);
    assert(vsnprintf(NULL, 0, format, args) > 0);
    va_end(args);
    assert(reading && (code == EXIT_FAILED || code == EXIT_USAGE) && !strstr(format, "internal"));
    reading = false;
    while (count > 0) __real_free(allocated[--count]);
    longjmp(reader, 1);
}
// True before the reader runs, false after the reader has ended the run.
#define BEGINS_TO_READ (reading = true, setjmp(reader) == 0)
static void has_read(void) { reading = false, count = 0; }

// ---- Targets. Mutations do not produce matching lengths and paddings. A target adds these to inputs that begin with
// an odd byte.

static char file[64];  // the input in memory, for readers that take a path

static void write_file(const void* head, size_t head_bytes, const void* body, size_t body_bytes, size_t body_at) {
    static int file_fd = -1;
    if (file_fd < 0) file_fd = memfd_create("input", 0);
    snprintf(file, sizeof(file), "/proc/self/fd/%d", file_fd);
    assert(ftruncate(file_fd, 0) == 0 && ftruncate(file_fd, (off_t)(body_at + body_bytes)) == 0);
    assert(pwrite(file_fd, head, head_bytes, 0) == (ssize_t)head_bytes);
    assert(pwrite(file_fd, body, body_bytes, (off_t)body_at) == (ssize_t)body_bytes);
}

static void read_json(const uint8_t* data, size_t size) {
    char error[64] = "";
    Json* j = json_parse((const char*)data, size, error, sizeof(error));
    assert((j != NULL) == (error[0] == 0));
    json_free(j);
}

// An input with an odd first byte: a header, NUL, and the data.
static void read_safetensors(const uint8_t* data, size_t size) {
    char error[256] = "";
    const uint8_t* end = size && data[0] % 2 ? (const uint8_t*)memchr(data, 0, size) : NULL;
    uint64_t length = end ? (uint64_t)(end - data) - 1 : 0;
    if (end) {
        char* head = host_format("8 bytes.%s", (const char*)data + 1);
        memcpy(head, &length, 8);
        write_file(head, 8 + (size_t)length, end + 1, size - (size_t)length - 2, 8 + (size_t)length);
        free(head);
    } else {
        write_file(NULL, 0, data, size, 0);
    }
    SafeTensors* st = st_open(file, error, sizeof(error));
    assert((st != NULL) == (error[0] == 0));
    for (int i = 0; st && i < st->count; i++) {
        const StTensor* t = &st->tensors[i];
        int64_t elements = t->bytes / (int64_t)st_dtype_bytes(t->dtype);
        char* to = (char*)malloc((size_t)t->bytes + 1);
        assert(st_read(st, t, 0, elements, to) == 0 && st_read(st, t, 1, elements, to) != 0);
        assert(!end || memcmp(to, end + 1 + t->offset - 8 - (int64_t)length, (size_t)t->bytes) == 0);
        assert(st_find(st, t->name) == t);
        free(to);
    }
    st_close(st);
}

// An input with an odd first byte: the four numbers of the header, then the tokens.
static void read_tokenizer(const uint8_t* data, size_t size) {
    size_t head = size > 16 && data[0] % 2 ? 17 : 0;
    write_file(data + (head > 0), head ? 16 : 0, data + head, size - head, head ? 1024 : 0);
    if (!BEGINS_TO_READ) return;
    Tokenizer* t = tokenizer_open(file);
    has_read();
    int length;
    for (int32_t id = -1; id <= t->size; id++) {
        const char* bytes = tokenizer_decode(t, id, &length);
        assert((bytes != NULL) == (length > 0 || id == t->eot) && length >= 0 && length <= (int)size);
        assert(length == 0 || memchr(bytes, bytes[length - 1], (size_t)length));
    }
    tokenizer_close(t);
}

// Each line of the input is a word of the command line.
static void read_options(const uint8_t* data, size_t size) {
    static char text[4200], *words[256];
    int n = 0;
    snprintf(text, sizeof(text), "train_moe\n%.*s", (int)size, (const char*)data);
    for (char* line = strtok(text, "\n"); line && n < 256; line = strtok(NULL, "\n")) words[n++] = line;
    if (!BEGINS_TO_READ) return;
    Settings s = settings_read(settings_parse(n, words), 1, NULL);
    has_read();
    if (!s.help && !s.version) {
        // A resumed run without options takes all settings from the record. Its own record must be the same.
        char *json = record_json(&s), error[64], *nothing[] = {words[0], (char*)"--dry-run"};
        Json* record = json_parse(json, strlen(json), error, sizeof(error));
        Settings resumed = settings_read(settings_parse(2, nothing), (int)s.run.ranks, record);
        resumed.dry_run = s.dry_run;
        resumed.resume = s.resume;
        char* again = record_json(&resumed);
        // All options, and the five numbers that are none (model/record.c).
        assert(json_count(record) == settings_count + 5 && strcmp(json, again) == 0);
        assert(isfinite(run_lr(&s.run, 1)) && isfinite(run_lr(&s.run, s.run.steps)));
        settings_free(&resumed);
        free(again);
        json_free(record);
        free(json);
        if (s.model.L <= 4 && s.run.ranks <= 64 && BEGINS_TO_READ)
            memory_report(&s, 1);  // ends the run if it does not fit
        has_read();
    }
    settings_free(&s);
}

typedef struct Target {
    const char* name;
    void (*read)(const uint8_t* data, size_t size);
    const char* seed;
    size_t size;
} Target;

// clang-format off
#define SEED(text) text, sizeof(text) - 1
static const Target targets[] = {
    {"json", read_json, SEED(
        "{\"a\": [1, -2.5e-3, true, false, null, {}], \"b\\u00e9\\ud83d\\ude00\\n\": \"\xc3\xa9\xf0\x9f\x98\x80\", \"\": -9223372036854775808}")},
    {"safetensors", read_safetensors, SEED(
        "1{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},\"e\":"
        "{\"dtype\":\"I64\",\"shape\":[0,3],\"data_offsets\":[8,8]}}\0ABCDEFGH")},
    {"tokenizer", read_tokenizer, SEED("1\xc8\xd7\x34\x01\2\0\0\0\4\0\0\0\3\0\0\0\1a\2ab\1b\5<eot>")},
    {"tokenizer-words", read_tokenizer, SEED("1\xc8\xd7\x34\x01\3\0\0\0\3\0\0\0\2\0\0\0\1\0\0\0a\2\0\0\0ab\3\0\0\0eot")},
    {"options", read_options, SEED(
        "--dry-run\n--model\n671b\n--ranks\n64\n--ep=8\n--shard\nweights\n--lr\n1e-3\n--schedule\nwsd\n--layers\n4\n--overfit")},
};
// clang-format on
enum { TARGETS = sizeof(targets) / sizeof(targets[0]), ROOM = 4096 };

#ifdef LIBFUZZER
static const Target* target;

// Writes the seed into the folder.
int LLVMFuzzerInitialize(int* argc, char*** argv) {
    const char *folder = (*argv)[*argc - 1], *slash = strrchr(folder, '/');
    for (int t = 0; t < TARGETS; t++)
        if (strcmp(targets[t].name, slash ? slash + 1 : folder) == 0) target = &targets[t];
    char* path = host_format("%s/seed", folder);
    FILE* f = fopen(path, "wb");
    assert(target && f && fwrite(target->seed, 1, target->size, f) == target->size && fclose(f) == 0);
    free(path);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    target->read(data, size);
    return 0;
}
#else
static uint64_t state;

static size_t dice(size_t sides) {  // xorshift64*
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (size_t)(state * 0x2545f4914f6cdd1du >> 16) % sides;
}

// Makes one to eight changes to a seed: flips a bit, sets a byte, removes bytes, or inserts the name of an option.
static size_t mutate(const Target* t, char* data) {
    size_t size = t->size;
    memcpy(data, t->seed, size);
    for (size_t n = 1 + dice(8); n > 0 && size > 0; n--) {
        size_t at = dice(size), kind = dice(4), cut = kind == 2 ? dice(size - at) : 0;
        const char* word = kind == 3 ? settings_table[dice((size_t)settings_count)].name : "";
        if (kind == 0) data[at] ^= (char)(1 << dice(8));
        if (kind == 1) data[at] = (char)dice(256);
        memmove(data + at + strlen(word), data + at + cut, size - at - cut);
        memcpy(data + at, word, strlen(word));
        size += strlen(word) - cut;
    }
    return size;
}

int main(int argc, char** argv) {
    unsigned long long seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    if (!freopen("/dev/null", "w", stdout)) return 1;  // drops the output of --dry-run
    for (int t = 0; t < TARGETS; t++) {
        fprintf(stderr, "25000 inputs of %s, seed %llu\n", targets[t].name, seed);
        for (uint64_t input = 0; input < 25000; input++) {
            char data[ROOM];
            state = (seed * 1000003 + input) * 0x9e3779b97f4a7c15u + 1;
            size_t size = mutate(&targets[t], data);
            uint8_t* exact = (uint8_t*)memcpy(malloc(size + 1), data, size);
            alarm(20);
            targets[t].read(exact, size);
            free(exact);
        }
    }
    fprintf(stderr, "%d passed, 0 failed, 0 skipped\n", TARGETS);
    return 0;
}
#endif
