// Lists checkpoints, checks them and loads them. A checkpoint is checked in this order. The first error refuses it, on
// all ranks with the same reason:
//
//   checkpoint_manifest   its CRC-32, its format, the step that it names
//   check_files           the size and CRC-32 of every file; the ranks share the reading
//   load_files            every tensor's name, type and shape; all numbers of this rank's slices are finite
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/check.h"
#include "device/files.h"
#include "parallel/checkpoint.h"
#include "parallel/slices.h"

static const size_t CHUNK_BYTES = (size_t)4 << 20;  // bytes read at a time
// Limits far above any checkpoint, so that a damaged manifest cannot exhaust memory or overflow 64 bits.
static const size_t MANIFEST_LIMIT = (size_t)64 << 20;
static const int64_t FILE_LIMIT = (int64_t)1 << 50;

// qsort order of steps: descending.
static int newest_first(const void* a, const void* b) {
    int64_t x = *(const int64_t*)a, y = *(const int64_t*)b;
    return (x < y) - (x > y);
}

int64_t* checkpoint_list(const char* out, int* count) {
    // readdir returns NULL at the end and on errors. Only errno differs, so it is 0 before each entry is read.
    int64_t* steps = NULL;
    *count = 0;
    DIR* folder = opendir(out);
    errno = folder ? 0 : errno;
    for (struct dirent* entry; folder && (entry = readdir(folder)) != NULL; errno = 0) {
        int64_t step = step_number(entry->d_name, "");
        if (step < 0) continue;
        steps = (int64_t*)realloc(steps, (size_t)(*count + 1) * sizeof(int64_t));
        if (!steps) die(EXIT_FAILED, "out of host memory for the list of checkpoints");
        steps[(*count)++] = step;
    }
    // A folder that cannot be read is an error, not an empty folder.
    if (errno) die(EXIT_FAILED, "cannot list %s: %s; nothing was changed", out, strerror(errno));
    closedir(folder);
    if (*count) qsort(steps, (size_t)*count, sizeof(int64_t), newest_first);
    return steps;
}

// Reads the record of a manifest whose CRC-32 matches. Returns whether it is valid; if not, the reason is in `reason`.
static bool read_record(const Json* json, int64_t step, CheckpointRecord* r, char reason[128]) {
    const Json* options = json_get(json, "options");
    const char* format = json_text(json, "format");
    r->step = json_int(json, "step", -1);
    r->window = json_int(json, "window", -1);
    r->updates = json_int(json, "updates", -1);
    r->data_hash = json_int(json, "data_hash", -1);

    // At least one of three consecutive steps is an update.
    const char* odd = NULL;
    if (!format || strcmp(format, CHECKPOINT_FORMAT) != 0)
        odd = "not of the format '" CHECKPOINT_FORMAT "'";
    else if (!options || options->type != JSON_OBJECT || json_count(options) == 0)
        odd = "it has no options";
    else if (r->window < 0)
        odd = "its window is out of range";
    else if (r->updates < r->step / 3 || r->updates > r->step)
        odd = "its number of updates is out of range";
    if (odd) snprintf(reason, 128, "%s", odd);
    if (!odd && r->step != step) snprintf(reason, 128, "it is of step %ld; the folder was renamed", r->step);
    return !odd && r->step == step;
}

// Reads a manifest and checks its CRC-32; NULL with the reason.
static Json* read_manifest(const char* path, char reason[128]) {
    size_t size = 0;
    char* text = read_file(path, MANIFEST_LIMIT, &size);
    char* end = text ? strstr(text, CHECKPOINT_MANIFEST_END) : NULL;
    Json* json = NULL;
    if (!text)
        snprintf(reason, 128, "%s", file_error(errno));
    else if (!end || strtoul(end + strlen(CHECKPOINT_MANIFEST_END), NULL, 10) != crc_of(text, (size_t)(end - text)))
        snprintf(reason, 128, "truncated or altered (its CRC-32 does not match)");
    else
        json = json_parse(text, size, reason, 128);
    free(text);
    return json;
}

Json* checkpoint_manifest(const char* out, int64_t step, CheckpointRecord* r, char* error, size_t error_size) {
    Path path = path_of("%s/manifest.json", step_path(out, step, "").text);
    char reason[128] = "";
    Json* json = read_manifest(path.text, reason);
    if (json && !read_record(json, step, r, reason)) {
        json_free(json);
        json = NULL;
    }
    if (!json) snprintf(error, error_size, "%s: %s", path.text, reason);
    return json;
}

// The manifest's entry of a file; NULL: it is not listed.
static const Json* file_entry(const Json* manifest, const char* name) {
    const Json* list = json_get(manifest, "files");
    for (const Json* e = list ? list->child : NULL; e; e = e->next) {
        const char* text = json_text(e, "name");
        if (text && strcmp(text, name) == 0) return e;
    }
    return NULL;
}

bool checkpoint_lists(const Json* manifest, const char* name) { return file_entry(manifest, name) != NULL; }

// GOOD is above every file number, so the lowest number of all ranks is the first bad file.
static const int64_t GOOD = INT64_MAX;

// Cross-rank agreement. `bad` is the number of the first file that this rank found bad, for the reason in `error`, or
// GOOD. Returns 0 if no rank found one. Else it returns -1 on all ranks, and all get the reason for the first such
// file.
static int agree(Ranks* world, int64_t bad, char* error, size_t error_size) {
    int who;
    if (ranks_lowest(world, bad, &who) == GOOD) return 0;
    ranks_broadcast(world, error, error_size, who);
    return -1;
}

// Computes the CRC-32 of a slice of a file that must be `size` bytes long.
static int sum_slice(const char* path, int64_t size, FileSlice* slice, void* chunk, char* error, size_t error_size) {
    struct stat info;
    int fd = open_file(path);
    bool ok = fd >= 0 && fstat(fd, &info) == 0, fits = ok && info.st_size == size;
    uLong crc = crc32(0, NULL, 0);
    for (int64_t at = 0, n; ok && fits && at < slice->bytes; at += n) {
        n = min_i64(slice->bytes - at, (int64_t)CHUNK_BYTES);
        ok = read_all_at(fd, chunk, n, slice->offset + at) == 0;
        if (ok) crc = crc32_z(crc, (const Bytef*)chunk, (size_t)n);
    }
    slice->crc = crc;
    if (!ok)
        snprintf(error, error_size, "%s: %s", path, file_error(errno));
    else if (!fits)
        snprintf(error, error_size, "%s: %ld bytes long, the manifest says %ld", path, info.st_size, size);
    if (fd >= 0) close(fd);
    return ok && fits ? 0 : -1;
}

// The files of the checkpoint, in fresh memory: the tensor files, then the others that the manifest lists.
static const char** list_files(const Json* manifest, const CheckpointFile* files, int count, int* all) {
    const Json* list = json_get(manifest, "files");
    const char** names = (const char**)host_alloc((size_t)(count + json_count(list)) * sizeof(char*));
    *all = 0;
    for (int i = 0; i < count; i++) names[(*all)++] = files[i].name;
    for (const Json* e = list ? list->child : NULL; e; e = e->next) {
        const char* name = json_text(e, "name");
        // A name with a slash would lead out of the folder: a damaged manifest may have one.
        int i = 0;
        while (i < count && name && strcmp(name, files[i].name) != 0) i++;
        if (i == count && name && !strchr(name, '/')) names[(*all)++] = name;
    }
    return names;
}

// Compares size and CRC-32 of files with the manifest. Each rank reads an equal share of all bytes.
static int check_files(Ranks* world, const char* folder, const Json* manifest, const char** names, int count,
                       char* error, size_t error_size) {
    // The sizes in the manifest. `listed`: files before the first one that it does not list.
    int listed = 0;
    int64_t *sizes = (int64_t*)host_alloc((size_t)count * sizeof(int64_t)), all_bytes = 0, bad = GOOD;
    for (; listed < count; all_bytes += sizes[listed++]) {
        sizes[listed] = json_int(file_entry(manifest, names[listed]), "bytes", 0);
        if (sizes[listed] <= 0 || sizes[listed] > FILE_LIMIT) break;
    }
    if (listed < count) {
        snprintf(error, error_size, "%s/%s: the manifest %s", folder, names[listed],
                 sizes[listed] ? "gives it a size that is out of range" : "does not list it");
        bad = listed;
    }

    // This rank's share of the bytes, as slices of the files that it touches.
    int64_t ranks = ranks_count(world), rank = ranks_index(world), slices = 0, total, at = 0;
    int64_t begin = all_bytes * rank / ranks, end = all_bytes * (rank + 1) / ranks;
    // A rank has at most one slice of a file, because its share is contiguous.
    FileSlice* mine = (FileSlice*)host_alloc((size_t)listed * sizeof(FileSlice));
    void* chunk = host_alloc(CHUNK_BYTES);
    for (int i = 0; i < listed && i < bad; at += sizes[i++]) {
        int64_t from = max_i64(begin - at, 0), to = min_i64(end - at, sizes[i]);
        if (from >= to) continue;
        Path path = path_of("%s/%s", folder, names[i]);
        FileSlice slice = {.file = i, .offset = from, .bytes = to - from};
        if (sum_slice(path.text, sizes[i], &slice, chunk, error, error_size) == 0)
            mine[slices++] = slice;
        else
            bad = i;
    }

    // Rank 0 joins the slices' CRC-32s, and compares them with the manifest.
    FileSlice* all = slices_gather(world, mine, slices, &total);
    const FileSlice* next = all;
    for (int i = 0; i < listed && i < bad && ranks_index(world) == 0; i++) {
        uLong crc = crc32(0, NULL, 0);
        int64_t want = json_int(file_entry(manifest, names[i]), "crc32", -1);
        // A missing slice could not be read: its rank reports the reason.
        if (!slices_join(&next, all + total, i, 0, sizes[i], &crc) || (int64_t)crc == want) continue;
        snprintf(error, error_size, "%s/%s: altered (its CRC-32 is %lu, the manifest says %ld)", folder, names[i], crc,
                 want);
        bad = i;
    }

    free(all);
    free(chunk);
    free(mine);
    free(sizes);
    return agree(world, bad, error, error_size);
}

// Loads this rank's slice of a tensor.
static int load_slice(const SafeTensors* st, const CheckpointTensor* t, void* chunk, Ctx* ctx, char* error,
                      size_t error_size) {
    // The tensor must be as this run plans it. Ranks without elements check it too.
    const StTensor* found = st_find(st, t->name);
    if (!found || found->dtype != t->dtype || found->rank != t->rank || found->shape[0] != t->shape[0] ||
        (t->rank == 2 && found->shape[1] != t->shape[1])) {
        snprintf(error, error_size, "%s: tensor %s is %s", st->path, t->name,
                 found ? "of another shape or type" : "missing");
        return -1;
    }

    // In chunks through host memory. A number that is not finite would spoil the run, and is refused.
    int64_t size = (int64_t)st_dtype_bytes(t->dtype), most = (int64_t)CHUNK_BYTES / size;
    for (int64_t at = 0; at < t->count; at += most) {
        int64_t n = min_i64(t->count - at, most);
        if (st_read(st, found, t->first + at, n, chunk) != 0) {
            snprintf(error, error_size, "%s: cannot read %s: %s", st->path, t->name, strerror(errno));
            return -1;
        }
        const int64_t bad = first_not_finite(chunk, n, t->dtype);
        if (bad < n) {
            snprintf(error, error_size, "%s: element %ld of %s is not finite", st->path, t->first + at + bad, t->name);
            return -1;
        }
        device_upload((char*)t->data + at * size, chunk, (size_t)(n * size), ctx);
    }
    return 0;
}

// Every rank looks up every tensor, even without a slice of it, so that all ranks refuse a missing one.
static int load_files(Ranks* world, const char* folder, const CheckpointFile* files, int count, Ctx* ctx, char* error,
                      size_t error_size) {
    void* chunk = host_alloc(CHUNK_BYTES);
    int64_t bad = GOOD;
    for (int i = 0; i < count && bad == GOOD; i++) {
        SafeTensors* st = st_open(path_of("%s/%s", folder, files[i].name).text, error, error_size);
        if (!st) bad = i;
        for (int t = 0; t < files[i].count && bad == GOOD; t++)
            if (load_slice(st, &files[i].tensors[t], chunk, ctx, error, error_size) != 0) bad = i;
        st_close(st);
    }
    free(chunk);
    return agree(world, bad, error, error_size);
}

int checkpoint_load(Ranks* world, const char* out, int64_t step, const Json* manifest, const CheckpointFile* files,
                    int count, Ctx* ctx, char* error, size_t error_size) {
    // All ranks must have the same step and manifest.
    int64_t mine[2] = {step, manifest ? json_int(manifest, "manifest_crc32", -1) : -1}, theirs[2];
    memcpy(theirs, mine, sizeof(mine));
    ranks_broadcast(world, theirs, sizeof(theirs), 0);
    ranks_must_share(world, out, mine[0] == theirs[0] && mine[1] == theirs[1]);

    // From here each check runs only if the one before it found all good. All ranks get the same result.
    Path path = step_path(out, step, "");
    const char* folder = path.text;
    int result = agree(world, manifest ? GOOD : 0, error, error_size);
    int all_files;
    const char** names = list_files(manifest, files, count, &all_files);
    if (result == 0) result = check_files(world, folder, manifest, names, all_files, error, error_size);
    if (result == 0) result = load_files(world, folder, files, count, ctx, error, error_size);
    free((void*)names);
    return result;
}

int checkpoint_check(Ranks* world, const char* folder, const char** names, int count, char* error, size_t error_size) {
    Path path = path_of("%s/manifest.json", folder);
    char reason[128] = "";
    // Folders without a manifest are accepted: rank 0 decides, so that all ranks do the same.
    bool there = access(path.text, F_OK) == 0;
    ranks_broadcast(world, &there, sizeof(there), 0);
    if (!there) return 0;
    Json* manifest = read_manifest(path.text, reason);
    snprintf(error, error_size, "%s: %s", path.text, reason);
    int result = agree(world, manifest ? GOOD : 0, error, error_size);
    if (result == 0) result = check_files(world, folder, manifest, names, count, error, error_size);
    json_free(manifest);
    return result;
}
