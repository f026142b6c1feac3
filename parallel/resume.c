// Lists checkpoints, checks them and loads them. A checkpoint is checked in this order. The first error refuses it, on
// all ranks with the same reason:
//
//   checkpoint_manifest   its CRC-32, its format, its options, the step that it names, its number of updates
//   check_files           the size and CRC-32 of every file; the ranks share the files
//   load_files            every tensor's name, type and shape; all numbers of this rank's slices are finite
#include <dirent.h>
#include <errno.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/check.h"
#include "device/files.h"
#include "parallel/checkpoint.h"
#include "parallel/slices.h"

static const int64_t CHUNK_BYTES = (int64_t)4 << 20;  // bytes read at a time
// A limit far above any manifest, so that a damaged one cannot exhaust memory.
static const size_t MANIFEST_LIMIT = (size_t)64 << 20;

// qsort order of steps: descending.
static int newest_first(const void* a, const void* b) {
    int64_t x = *(const int64_t*)a, y = *(const int64_t*)b;
    return (x < y) - (x > y);
}

int64_t* checkpoint_try_list(const char* out, int* count) {
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
    const int why = errno;
    if (folder) closedir(folder);
    if (why) *count = -1;
    errno = why;
    if (*count > 0) qsort(steps, (size_t)*count, sizeof(int64_t), newest_first);
    return steps;
}

int64_t* checkpoint_list(const char* out, int* count) {
    int64_t* steps = checkpoint_try_list(out, count);
    if (*count < 0) die(EXIT_FAILED, "cannot list %s: %s; nothing was changed", out, strerror(errno));
    return steps;
}

// The checks below return NULL, or the reason in fresh memory.

// Checks the values of a manifest whose CRC-32 matches.
static char* check_values(const Json* json, int64_t step) {
    const Json* options = json_get(json, "options");
    const char* format = json_text(json, "format");
    if (!format || strcmp(format, CHECKPOINT_FORMAT) != 0)
        return host_format("its format is '%s', not '" CHECKPOINT_FORMAT
                           "': another version made it; --init can read its weights",
                           format ? format : "");
    if (!options || options->type != JSON_OBJECT || !options->child) return host_strdup("it has no options");
    const int64_t recorded = json_int(json, "step", -1), updates = json_int(json, "updates", -1),
                  before = json_int(options, "updates-before", 0);
    if (recorded != step) return host_format("it is of step %ld; the folder was renamed", recorded);
    // At least one of three consecutive steps is an update. A stage counts on from those before it.
    if (before < 0 || updates < before || updates - before < step / 3 || updates - before > step)
        return host_strdup("its number of updates is out of range");
    return NULL;
}

// Reads a manifest into *json and checks its CRC-32.
static char* read_manifest(const char* path, Json** json) {
    char reason[128];
    size_t size;
    *json = NULL;
    char* text = read_file(path, MANIFEST_LIMIT, &size);
    if (!text) return host_strdup(file_error(errno));

    // Its last member is the CRC-32 of all bytes before.
    const char* end = strstr(text, CHECKPOINT_MANIFEST_END);
    bool good = end && strtoul(end + strlen(CHECKPOINT_MANIFEST_END), NULL, 10) == crc_of(text, (size_t)(end - text));
    if (good) *json = json_parse(text, size, reason, sizeof(reason));
    free(text);
    if (!good) return host_strdup("truncated or altered (its CRC-32 does not match)");
    return *json ? NULL : host_strdup(reason);
}

Json* checkpoint_manifest(const char* out, int64_t step, char* error, size_t error_size) {
    Path path = path_of("%s/manifest.json", step_path(out, step, "").text);
    Json* json;
    char* why = read_manifest(path.text, &json);
    if (!why) why = check_values(json, step);
    if (!why) return json;
    snprintf(error, error_size, "%s: %s", path.text, why);
    free(why);
    json_free(json);
    return NULL;
}

Json* checkpoint_manifest_in(const char* folder, Path* out, char* error, size_t error_size) {
    Path parent = path_of("%s", folder), name = parent;  // dirname and basename change them
    *out = path_of("%s", dirname(parent.text));
    const int64_t step = step_number(basename(name.text), "");
    if (step >= 0) return checkpoint_manifest(out->text, step, error, error_size);
    const char* other = "its name is not step_ and 8 digits, that of a step of a run, which has moments";
    snprintf(error, error_size, "%s", access(folder, F_OK) == 0 ? other : file_error(errno));
    return NULL;
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

// Cross-rank agreement. Returns 0 if no rank has a reason. Else it returns -1 on all ranks, and `error` gets the reason
// of the first rank that has one. Frees `why`.
static int agree(Ranks* world, char* why, char* error, size_t error_size) {
    char* reason = ranks_reason(world, why);
    if (!reason) return 0;
    snprintf(error, error_size, "%s", reason);
    free(reason);
    return -1;
}

// Compares size and CRC-32 of a file with its entry in the manifest.
static char* check_file(const char* path, const Json* entry) {
    if (!entry) return host_format("%s: the manifest does not list it", path);
    const int fd = open_file(path);
    if (fd < 0) return host_format("%s: %s", path, file_error(errno));

    // Read to the end.
    void* chunk = host_alloc((size_t)CHUNK_BYTES);
    uLong crc = crc32(0, NULL, 0);
    int64_t bytes = 0, n;
    for (; (n = read_at(fd, chunk, CHUNK_BYTES, bytes)) > 0; bytes += n)
        crc = crc32_z(crc, (const Bytef*)chunk, (size_t)n);
    char* why = n < 0 ? host_format("%s: %s", path, strerror(errno)) : NULL;
    free(chunk);
    close(fd);
    if (why) return why;

    // Compare.
    const int64_t size = json_int(entry, "bytes", -1), want = json_int(entry, "crc32", -1);
    if (bytes != size) return host_format("%s: %ld bytes long, the manifest says %ld", path, bytes, size);
    if ((int64_t)crc == want) return NULL;
    return host_format("%s: altered (its CRC-32 is %lu, the manifest says %ld)", path, crc, want);
}

// Checks files of a folder. Each rank reads a contiguous part of the list, so the first rank with a reason has the
// first bad file.
static char* check_files(Ranks* world, const char* folder, const Json* manifest, const char** names, int count) {
    const int ranks = ranks_count(world), rank = ranks_index(world);
    char* why = NULL;
    for (int i = count * rank / ranks; i < count * (rank + 1) / ranks && !why; i++)
        why = check_file(path_of("%s/%s", folder, names[i]).text, file_entry(manifest, names[i]));
    return why;
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

// Loads this rank's slice of a tensor.
static char* load_slice(const SafeTensors* st, const CheckpointTensor* t, void* chunk, Ctx* ctx) {
    // The tensor must be as this run plans it. Ranks without elements check it too.
    const StTensor* found = st_find(st, t->name);
    if (!found) return host_format("%s: tensor %s is missing", st->path, t->name);
    if (found->dtype != t->dtype || found->rank != t->rank || found->shape[0] != t->shape[0] ||
        (t->rank == 2 && found->shape[1] != t->shape[1]))
        return host_format("%s: tensor %s is of another shape or type", st->path, t->name);

    // In chunks through host memory. A number that is not finite would spoil the run, and is refused.
    int64_t size = (int64_t)st_dtype_bytes(t->dtype), most = CHUNK_BYTES / size;
    for (int64_t at = 0; at < t->count; at += most) {
        int64_t n = min_i64(t->count - at, most);
        if (st_read(st, found, t->first + at, n, chunk) != 0)
            return host_format("%s: cannot read %s: %s", st->path, t->name, strerror(errno));
        const int64_t bad = first_not_finite(chunk, n, t->dtype);
        if (bad < n) return host_format("%s: element %ld of %s is not finite", st->path, t->first + at + bad, t->name);
        if (t->weight)
            masters_upload((Master*)t->data + at, t->weight + at, (const real*)chunk, n, ctx);
        else
            device_upload((char*)t->data + at * size, chunk, (size_t)(n * size), ctx);
    }
    return NULL;
}

// Every rank looks up every tensor, even without a slice of it, so that all ranks refuse a missing one.
static char* load_files(const char* folder, const CheckpointFile* files, int count, Ctx* ctx) {
    void* chunk = host_alloc((size_t)CHUNK_BYTES);
    char error[512], *why = NULL;
    for (int i = 0; i < count && !why; i++) {
        SafeTensors* st = st_open(path_of("%s/%s", folder, files[i].name).text, error, sizeof(error));
        if (!st) why = host_strdup(error);
        for (int t = 0; t < files[i].count && !why; t++) why = load_slice(st, &files[i].tensors[t], chunk, ctx);
        st_close(st);
    }
    free(chunk);
    return why;
}

int checkpoint_load(Ranks* world, const char* out, int64_t step, const Json* manifest, const CheckpointFile* files,
                    int count, Ctx* ctx, char* error, size_t error_size) {
    // All ranks must have the same step and manifest.
    const int64_t mine[2] = {step, json_int(manifest, "manifest_crc32", -1)};
    int64_t theirs[2] = {mine[0], mine[1]};
    ranks_broadcast(world, theirs, sizeof(theirs), 0);
    ranks_must_share(world, out, mine[0] == theirs[0] && mine[1] == theirs[1]);

    // From here each check runs only if the one before it found all good. All ranks get the same result.
    Path path = step_path(out, step, "");
    const char* folder = path.text;
    int all_files;
    const char** names = list_files(manifest, files, count, &all_files);
    int result = agree(world, manifest ? NULL : host_strdup(error), error, error_size);
    if (result == 0) result = agree(world, check_files(world, folder, manifest, names, all_files), error, error_size);
    if (result == 0) result = agree(world, load_files(folder, files, count, ctx), error, error_size);
    free((void*)names);
    return result;
}

int checkpoint_check(Ranks* world, const char* folder, const char** names, int count, char* error, size_t error_size) {
    Path path = path_of("%s/manifest.json", folder);
    // Folders without a manifest are accepted: rank 0 decides, so that all ranks do the same.
    bool there = access(path.text, F_OK) == 0;
    ranks_broadcast(world, &there, sizeof(there), 0);
    if (!there) return 0;

    // Its manifest, then the files.
    Json* manifest;
    char *why = read_manifest(path.text, &manifest), *named = why ? host_format("%s: %s", path.text, why) : NULL;
    free(why);
    int result = agree(world, named, error, error_size);
    if (result == 0) result = agree(world, check_files(world, folder, manifest, names, count), error, error_size);
    json_free(manifest);
    return result;
}
