// Token shards and the loader. Shards stay open and are read with pread, not mapped. So truncation during the run gives
// a message and not a SIGBUS. While a micro-batch is in use, the operating system reads the next one from the disk.
#include "data/shards.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "data/tokenizer.h"
#include "device/check.h"

// Headers of the two formats, which data/shards.h describes.
enum { HEADER_INTS = 256, HEADER_BYTES = 1024 };
enum { MAGIC_U16 = 20240520, VERSION_U16 = 1, MAGIC_U32 = 20240801, VERSION_U32 = 7 };

// An open shard file.
typedef struct ShardFile {
    char* path;
    int fd;
    struct stat status;    // its device and inode identify the file, whatever its path
    int token_bytes;       // 2 or 4
    int64_t tokens;        // tokens in the file, not only those in windows
    int64_t first_window;  // windows of the shards before this one
} ShardFile;

// Opens a shard, checks its header against its size, and adds it to the set's windows, tokens and hash.
static void open_shard(Shards* s, ShardFile* shard, const char* path) {
    // Open the file.
    shard->path = host_strdup(path);
    shard->fd = open_file(path);
    if (shard->fd < 0 && (errno == EISDIR || errno == ENXIO))
        die(EXIT_FAILED, "%s: %s: not a file; a pattern names the shards of a folder: %s 'FOLDER/*_train_*.bin'",
            s->option, path, s->option);
    if (shard->fd < 0 || fstat(shard->fd, &shard->status) != 0)
        die(EXIT_FAILED, "%s: %s: cannot open: %s%s", s->option, path, strerror(errno),
            errno == EMFILE ? "; allow more open files (ulimit -n)" : "");
    const int64_t size = shard->status.st_size;

    // The header must be complete, with a known magic number and version.
    int32_t header[HEADER_INTS];
    int64_t got = read_at(shard->fd, header, HEADER_BYTES, 0);
    if (got < 0) die(EXIT_FAILED, "%s: %s: cannot read the header: %s", s->option, path, strerror(errno));
    if (got < HEADER_BYTES)
        die(EXIT_FAILED, "%s: %s: byte %ld: the file ends inside the header of %d bytes", s->option, path, got,
            HEADER_BYTES);
    if (header[0] != MAGIC_U16 && header[0] != MAGIC_U32)
        die(EXIT_FAILED,
            "%s: %s: byte 0: magic number %d is neither %d (uint16 tokens) nor %d (uint32 tokens): not a shard%s",
            s->option, path, header[0], MAGIC_U16, MAGIC_U32,
            header[0] == TOKENIZER_MAGIC ? " but a tokenizer: a pattern like *_train_*.bin leaves it out"
                                         : "; scripts/prepare_text.py makes shards from text");
    bool wide = header[0] == MAGIC_U32;
    int version = wide ? VERSION_U32 : VERSION_U16;
    if (header[1] != version)
        die(EXIT_FAILED, "%s: %s: byte 4: version %d, with magic number %d it must be %d; write it again", s->option,
            path, header[1], header[0], version);

    // The file's size must match the token count.
    shard->token_bytes = wide ? 4 : 2;
    shard->tokens = header[2];
    int64_t expected = HEADER_BYTES + shard->tokens * shard->token_bytes;
    if (shard->tokens < 0 || expected != size)
        die(EXIT_FAILED,
            "%s: %s: byte 8: the header counts %d tokens of %d bytes, a file of %ld bytes, but the file has %ld: "
            "it was cut off or altered; write it again",
            s->option, path, header[2], shard->token_bytes, expected, size);

    // CRC-32 over name, size and header: identifies the set.
    // The folder is not hashed, so that moved data keep their hash.
    const char* name = basename(path);
    uLong crc = crc32(s->hash, (const Bytef*)name, (uInt)strlen(name) + 1);
    crc = crc32(crc, (const Bytef*)&size, sizeof(size));
    s->hash = (uint32_t)crc32(crc, (const Bytef*)header, HEADER_BYTES);

    // Its windows in the set.
    shard->first_window = s->windows;
    s->windows += max_i64(shard->tokens - 1, 0) / s->T;
    s->tokens += shard->tokens;
}

// The path of the first shard that `others` have too; NULL: none.
static const char* shared(const ShardFile* shards, int count, const ShardFile* others, int other_count) {
    for (int i = 0; i < count; i++)
        for (int j = 0; j < other_count; j++) {
            const struct stat *a = &shards[i].status, *b = &others[j].status;
            if (a->st_dev == b->st_dev && a->st_ino == b->st_ino) return shards[i].path;
        }
    return NULL;
}

// Opens the shards of a set, behind those of the sets before it.
static void open_set(Shards* s, MixtureSet* set) {
    // All files that match, in the order of their names.
    const int before = s->count;
    glob_t found;
    int rc = glob(set->pattern, GLOB_ERR, NULL, &found);
    if (rc == GLOB_NOMATCH)
        die(EXIT_FAILED, "%s: no file matches '%s'; %s", s->option, set->pattern,
            strchr(set->pattern, ',') ? "it is one pattern, since sets are GLOB:WEIGHT,GLOB:WEIGHT, in --train alone"
                                      : "scripts/prepare_text.py makes shards from text");
    if (rc != 0) die(EXIT_FAILED, "%s: cannot list '%s': %s", s->option, set->pattern, strerror(errno));
    s->count += (int)found.gl_pathc;
    s->files = (ShardFile*)realloc(s->files, (size_t)s->count * sizeof(ShardFile));
    if (!s->files) die(EXIT_FAILED, "out of host memory for the list of shards");
    set->first = s->windows;
    for (int i = before; i < s->count; i++) open_shard(s, &s->files[i], found.gl_pathv[i - before]);
    globfree(&found);
    set->windows = s->windows - set->first;
    const char* both = shared(&s->files[before], s->count - before, s->files, before);
    if (both)
        die(EXIT_FAILED,
            "%s: '%s' has %s, and so has an earlier set, by this or another name: give each file to one set", s->option,
            set->pattern, both);
    // A run keeps its shares, so they count for the hash.
    if (s->mixture.count > 1) s->hash = (uint32_t)crc32(s->hash, (const Bytef*)&set->part, (uInt)sizeof(set->part));

    // At least one shard must contain a whole window.
    if (set->windows == 0) {
        int64_t longest = 0;
        for (int i = before; i < s->count; i++) longest = max_i64(longest, s->files[i].tokens);
        die(EXIT_FAILED,
            "%s: no shard of '%s' holds a window of %ld tokens (--seq-len %ld and one more): the longest of %d has "
            "%ld; lower --seq-len or prepare more text",
            s->option, set->pattern, s->T + 1, s->T, s->count - before, longest);
    }
}

Shards* shards_open(const char* option, const char* text, int64_t T) {
    ASSERT(T > 0);
    Shards* s = (Shards*)host_alloc(sizeof(Shards));
    s->option = option;
    s->T = T;
    s->mixture = mixture_parse(option, text);
    for (int k = 0; k < s->mixture.count; k++) open_set(s, &s->mixture.sets[k]);
    return s;
}

void shards_close(Shards* shards) {
    if (!shards) return;
    for (int i = 0; i < shards->count; i++) {
        close(shards->files[i].fd);
        free(shards->files[i].path);
    }
    mixture_free(&shards->mixture);
    free(shards->files);
    free(shards);
}

Path shards_first(const char* option, const char* text) {
    glob_t found;
    Mixture mixture = mixture_parse(option, text);
    const int rc = glob(mixture.sets[0].pattern, 0, NULL, &found);
    Path path = path_of("%s", rc == 0 ? found.gl_pathv[0] : "");
    if (rc == 0) globfree(&found);
    mixture_free(&mixture);
    return path;
}

Path shards_tokenizer(const char* path, const char* mark, const char* of_run) {
    // The shard's name up to its last `mark` is the name of the data set.
    const Path none = {""};
    const char* end = NULL;
    for (const char* at = basename(path); (at = strstr(at, mark)) != NULL; at++) end = at;
    Path tokenizer = end ? path_of("%.*s_tokenizer.bin", (int)(end - path), path) : none;
    if (!*tokenizer.text || access(tokenizer.text, F_OK) == 0) return tokenizer;

    // scripts/prepare_text.py puts the table in place last, so other files of the tokenizer show that the set is not
    // whole. Shards that other programs made come without these files.
    static const char* const traces[] = {"json", "bin.tmp"};
    for (int i = 0; i < 2; i++) {
        Path trace = path_of("%.*s%s", (int)(strlen(tokenizer.text) - strlen("bin")), tokenizer.text, traces[i]);
        if (strcmp(trace.text, of_run) != 0 && access(trace.text, F_OK) == 0)
            die(EXIT_FAILED,
                "%s is there, but not %s, which scripts/prepare_text.py writes last: the shards may be incomplete. "
                "Copy or prepare them again",
                trace.text, tokenizer.text);
    }
    return none;
}

const char* shards_path(const Shards* shards, int index) { return shards->files[index].path; }

const char* shards_shared(const Shards* shards, const Shards* others) {
    return shared(shards->files, shards->count, others->files, others->count);
}

// The shard of a window; *start gets the byte where the window begins.
static const ShardFile* shard_of(const Shards* s, int64_t index, int64_t* start) {
    ASSERT(index >= 0 && index < s->windows);
    // The last shard that starts at the window or before: one without windows starts with the next.
    const ShardFile* shard = &s->files[s->count - 1];
    while (shard->first_window > index) shard--;
    *start = HEADER_BYTES + (index - shard->first_window) * s->T * shard->token_bytes;
    return shard;
}

uint32_t shards_sample(const Shards* s) {
    enum { SAMPLES = 64 };  // a few reads, whatever the size of the set; the first and the last window are among them
    uLong crc = s->hash;
    for (int64_t i = 0; i < SAMPLES; i++) {
        int64_t start;
        const ShardFile* shard = shard_of(s, (int64_t)((double)(s->windows - 1) * (double)i / (SAMPLES - 1)), &start);
        const int64_t bytes = s->T * shard->token_bytes;
        void* raw = host_alloc((size_t)bytes);
        // A file that cannot be read gives another CRC-32 here, and a message when its windows are read.
        crc = crc32_z(crc, (const Bytef*)raw, (size_t)max_i64(read_at(shard->fd, raw, bytes, start), 0));
        free(raw);
    }
    return (uint32_t)crc;
}

void shards_read(const Shards* s, int64_t index, int32_t V, int32_t* input, int32_t* target) {
    // Read the window.
    int64_t T = s->T, start;
    const ShardFile* shard = shard_of(s, index, &start);
    const int64_t width = shard->token_bytes, bytes = (T + 1) * width;
    char* raw = (char*)host_alloc((size_t)bytes);
    const int64_t got = read_at(shard->fd, raw, bytes, start);
    if (got < 0) die(EXIT_FAILED, "%s: %s: byte %ld: cannot read: %s", s->option, shard->path, start, strerror(errno));
    if (got < bytes)
        die(EXIT_FAILED, "%s: %s: byte %ld: the file ends here; it was longer when the run began", s->option,
            shard->path, start + got);

    // Check each id. A token is an input, and the target of the token before it.
    for (int64_t t = 0; t <= T; t++) {
        // The file is little-endian, so the low bytes of id get the token.
        uint32_t id = 0;
        memcpy(&id, raw + t * width, (size_t)width);
        if ((int64_t)id >= V)
            die(EXIT_FAILED,
                "%s: %s: byte %ld: token %u is outside the vocabulary (--vocab %d): these shards were made with "
                "another tokenizer",
                s->option, shard->path, start + t * width, id, V);
        if (t < T) input[t] = (int32_t)id;
        if (t > 0) target[t - 1] = (int32_t)id;
    }
    free(raw);
}

// ---- Loader

// The Shards must outlive a loader.
struct Loader {
    const Shards* shards;
    int64_t batch;
    int32_t V;
    LoaderOrder order;
    MixtureWalk walk, ahead;  // to the windows that are read, and to those that are prefetched
    int32_t *input, *target;  // (batch, T) each, in one allocation
};

Loader* loader_start(const Shards* shards, int64_t batch, int32_t V, LoaderOrder order) {
    ASSERT(batch > 0 && order.first >= 0 && order.stride >= 0 && order.wrap >= 0);
    Loader* loader = (Loader*)host_alloc(sizeof(Loader));
    const MixtureWalk walk = {.mixture = &shards->mixture};
    int32_t* tokens = (int32_t*)host_alloc((size_t)(2 * batch * shards->T) * sizeof(int32_t));
    const Loader start = {shards, batch, V, order, walk, walk, tokens, tokens + batch * shards->T};
    *loader = start;
    return loader;
}

void loader_stop(Loader* loader) {
    free(loader->input);
    free(loader);
}

// The window of the shards that is row b of micro-batch n.
static int64_t window_of(const Loader* loader, MixtureWalk* walk, int64_t n, int64_t b) {
    // w counts windows of the run over all epochs. A wrap makes the run repeat its first windows.
    int64_t w = loader->order.first + n * loader->order.stride + b;
    if (loader->order.wrap > 0) w %= loader->order.wrap;
    return mixture_window(walk, loader->order.seed, w);
}

void loader_read(Loader* loader, int64_t n, const int32_t** input, const int32_t** target) {
    const Shards* s = loader->shards;
    for (int64_t b = 0; b < loader->batch; b++) {
        const int64_t window = window_of(loader, &loader->walk, n, b);
        shards_read(s, window, loader->V, loader->input + b * s->T, loader->target + b * s->T);
    }
    *input = loader->input;
    *target = loader->target;

    // Prefetch: the kernel reads the next micro-batch while this one is used.
    for (int64_t b = 0; b < loader->batch; b++) {
        int64_t start;
        const ShardFile* shard = shard_of(s, window_of(loader, &loader->ahead, n + 1, b), &start);
        posix_fadvise(shard->fd, start, (s->T + 1) * shard->token_bytes, POSIX_FADV_WILLNEED);
    }
}
