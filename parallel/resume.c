// Lists checkpoints, checks them and loads them. A checkpoint is checked in this order. The first error refuses the
// checkpoint, on all ranks with the same reason:
//
//   checkpoint_manifest   its CRC-32, its format, its options, the step that it names, its number of updates
//   check_files           the size and CRC-32 of every file that it lists; the ranks share the files
//   load_files            every tensor's name, type and shape; all numbers of this rank's slices are finite
#include <dirent.h>
#include <errno.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/check.h"
#include "device/files.h"
#include "device/values.h"
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

// Reads the manifest of a folder and checks it. step -1: its CRC-32 alone.
static Json* read_manifest(const char* folder, int64_t step, char** why) {
    Path path = path_of("%s/manifest.json", folder);
    char reason[128], *wrong = NULL;
    size_t size;
    Json* json = NULL;
    char* text = read_file(path.text, MANIFEST_LIMIT, &size);
    // Its last member is the CRC-32 of all bytes before.
    const char* end = text ? strstr(text, CHECKPOINT_MANIFEST_END) : NULL;
    if (!text)
        wrong = host_strdup(file_error(errno));
    else if (!end || strtoul(end + strlen(CHECKPOINT_MANIFEST_END), NULL, 10) != crc_of(text, (size_t)(end - text)))
        wrong = host_strdup("truncated or altered (its CRC-32 does not match)");
    else if (!(json = json_parse(text, size, reason, sizeof(reason))))
        wrong = host_strdup(reason);
    else if (step >= 0)
        wrong = check_values(json, step);
    free(text);

    *why = wrong ? host_format("%s: %s", path.text, wrong) : NULL;
    free(wrong);
    if (!*why) return json;
    json_free(json);
    return NULL;
}

Json* checkpoint_manifest(const char* out, int64_t step, char** why) {
    return read_manifest(step_path(out, step, "").text, step, why);
}

Json* checkpoint_manifest_in(const char* folder, Path* out, char** why) {
    Path parent = path_of("%s", folder), name = parent;  // dirname and basename change them
    *out = path_of("%s", dirname(parent.text));
    const int64_t step = step_number(basename(name.text), "");
    if (step >= 0) return checkpoint_manifest(out->text, step, why);
    *why =
        host_strdup(access(folder, F_OK) != 0 ? file_error(errno)
                                              : "its name is not step_ and 8 digits: only a step of a run has moments");
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
        // A name with a slash would lead out of the folder.
        why = !names[i] || strchr(names[i], '/')
                  ? host_format("%s/manifest.json: it lists a name that is no file of the folder", folder)
                  : check_file(path_of("%s/%s", folder, names[i]).text, file_entry(manifest, names[i]));
    return why;
}

// Elements of a file's type, as numbers. scales: of fp8.
static void convert(real* out, const void* raw, int64_t n, int64_t first, const StTensor* from, const float* scales) {
    const int64_t columns = from->shape[1];
    for (int64_t i = 0; i < n; i++) {
        switch (from->dtype) {
            case ST_F64: out[i] = (real)((const double*)raw)[i]; break;
            case ST_F32: out[i] = ((const float*)raw)[i]; break;
            case ST_F16: out[i] = half_value(((const uint16_t*)raw)[i]); break;
            case ST_BF16: out[i] = bf16_value(((const uint16_t*)raw)[i]); break;
            default: {
                // One scale for each block of the matrix, row by row of blocks.
                const int64_t row = (first + i) / columns / FP8_BLOCK, column = (first + i) % columns / FP8_BLOCK;
                out[i] = e4m3_value(((const uint8_t*)raw)[i]) * scales[row * ceil_div(columns, FP8_BLOCK) + column];
            }
        }
    }
}

char* checkpoint_read(const CheckpointTensor* t, const SafeTensors* st, const StTensor* found, const float* scales,
                      Ctx* ctx) {
    // The tensor must be as this run plans it. Ranks without elements check it too.
    if (found->rank != t->rank || found->shape[0] != t->shape[0] || (t->rank == 2 && found->shape[1] != t->shape[1]))
        return host_format("%s: tensor %s is of another shape than %ld%s", st->path, t->name, t->shape[0],
                           t->rank == 2 ? host_format(" x %ld", t->shape[1]) : "");

    const StDtype d = found->dtype;
    if (d != t->dtype && d != ST_F32 && d != ST_F16 && d != ST_BF16 && d != ST_F64 && !(d == ST_F8_E4M3 && scales))
        return host_format("%s: tensor %s must have type F32, F16, BF16 or F8_E4M3", st->path, t->name);

    // In chunks through host memory. A number that is not finite would spoil the run, and is refused.
    const int64_t size = (int64_t)st_dtype_bytes(t->dtype);
    void* raw = host_alloc((size_t)CHUNK_BYTES);
    real* numbers = (real*)host_alloc((size_t)CHUNK_BYTES);
    char* why = NULL;
    for (int64_t at = 0, n; at < t->count && !why; at += n) {
        n = min_i64(t->count - at, CHUNK_BYTES / (int64_t)sizeof(double));
        const int64_t first = t->first + at;
        const void* values = t->dtype == found->dtype ? raw : numbers;
        if (st_read(st, found, first, n, raw) != 0) {
            why = host_format("%s: cannot read %s: %s", st->path, t->name, strerror(errno));
            break;
        }
        if (values == numbers) convert(numbers, raw, n, first, found, scales);
        if (first_not_finite(values, n, t->dtype) < n) {
            why = host_format("%s: element %ld of %s is not finite", st->path,
                              first + first_not_finite(values, n, t->dtype), t->name);
        } else if (t->weight) {
            masters_upload((Master*)t->data + at, t->weight + at, (const real*)values, n, ctx);
        } else {
            device_upload((char*)t->data + at * size, values, (size_t)(n * size), ctx);
        }
    }
    free(raw);
    free(numbers);
    return why;
}

// Every rank looks up every tensor, even without a slice of it, so that all ranks refuse a missing one.
static char* load_files(const Json* manifest, const char* folder, const CheckpointFile* files, int count, Ctx* ctx) {
    char error[512], *why = NULL;
    for (int i = 0; i < count && !why; i++) {
        Path path = path_of("%s/%s", folder, files[i].name);
        if (!file_entry(manifest, files[i].name)) return host_format("%s: the manifest does not list it", path.text);
        SafeTensors* st = st_open(path.text, error, sizeof(error));
        if (!st) return host_strdup(error);
        for (int k = 0; k < files[i].count && !why; k++) {
            const CheckpointTensor* t = &files[i].tensors[k];
            const StTensor* found = st_find(st, t->name);
            if (!found)
                why = host_format("%s: tensor %s is missing", path.text, t->name);
            else if (found->dtype != t->dtype)
                why = host_format("%s: tensor %s is of another type", path.text, t->name);
            else
                why = checkpoint_read(t, st, found, NULL, ctx);
        }
        st_close(st);
    }
    return why;
}

char* checkpoint_load(Ranks* world, const char* out, int64_t step, const Json* manifest, const CheckpointFile* files,
                      int count, Ctx* ctx, char* why) {
    // All ranks must have the same step and manifest.
    const int64_t mine[2] = {step, json_int(manifest, "manifest_crc32", -1)};
    int64_t theirs[2] = {mine[0], mine[1]};
    ranks_broadcast(world, theirs, sizeof(theirs), 0);
    ranks_must_share(world, out, mine[0] == theirs[0] && mine[1] == theirs[1]);

    // All files that the manifest lists.
    Path folder = step_path(out, step, "");
    const Json* list = json_get(manifest, "files");
    const char** names = (const char**)host_alloc((size_t)json_count(list) * sizeof(char*));
    int listed = 0;
    for (const Json* e = list ? list->child : NULL; e; e = e->next) names[listed++] = json_text(e, "name");

    // From here each check runs only if the one before it found all good. All ranks get the same result.
    why = ranks_reason(world, why);
    if (!why) why = ranks_reason(world, check_files(world, folder.text, manifest, names, listed));
    if (!why) why = ranks_reason(world, load_files(manifest, folder.text, files, count, ctx));
    free((void*)names);
    return why;
}

char* checkpoint_check(Ranks* world, const char* folder, const char** names, int count) {
    // Folders without a manifest are accepted: rank 0 decides, so that all ranks do the same.
    bool there = access(path_of("%s/manifest.json", folder).text, F_OK) == 0;
    ranks_broadcast(world, &there, sizeof(there), 0);
    if (!there) return NULL;

    // Its manifest, then the files.
    char* why;
    Json* manifest = read_manifest(folder, -1, &why);
    why = ranks_reason(world, why);
    if (!why) why = ranks_reason(world, check_files(world, folder, manifest, names, count));
    json_free(manifest);
    return why;
}
