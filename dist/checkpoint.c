#include "dist/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "data/safetensors.h"
#include "device/check.h"
#include "device/files.h"

static const size_t PIECE = (size_t)16 << 20;  // bytes copied, written and summed at a time

static char* step_path(const char* out, int64_t step, const char* suffix) {
    return host_format("%s/step_%08lld%s", out, (long long)step, suffix);
}

// A file being written: its size and CRC-32 so far. Errors end the run, after the unfinished folder is removed: what it
// took may be just the room that is missing.
typedef struct Writer {
    char *folder, *path;
    int fd;
    int64_t bytes;
    uLong crc;
} Writer;

static NORETURN void give_up(const Writer* w, const char* what) {
    int why = errno;
    remove_folder(w->folder);
    die(EXIT_FAILED, "cannot %s %s: %s; this checkpoint was not saved, earlier ones are as they were", what, w->path,
        strerror(why));
}

static void writer_open(Writer* w, const char* name) {
    w->path = host_format("%s/%s", w->folder, name);
    w->bytes = 0;
    w->crc = crc32(0, NULL, 0);
    w->fd = open(w->path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (w->fd < 0) give_up(w, "create");
}

static void writer_put(Writer* w, const void* data, size_t bytes) {
    w->crc = crc32_z(w->crc, (const Bytef*)data, bytes);
    w->bytes += (int64_t)bytes;
    const char* p = (const char*)data;
    while (bytes) {
        ssize_t n = write(w->fd, p, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) give_up(w, "write");
        p += n;
        bytes -= (size_t)n;
    }
}

static void writer_close(Writer* w) {
    if (fsync(w->fd) != 0 || close(w->fd) != 0) give_up(w, "write");
    free(w->path);
}

static int64_t tensor_count(const CheckpointTensor* t) {
    return t->rank == 2 ? t->shape[0] * t->shape[1] : t->shape[0];
}

static void write_tensors(Writer* w, const CheckpointFile* file, void* piece, Ctx* ctx) {
    StTensor* planned = (StTensor*)host_alloc((size_t)file->count * sizeof(StTensor));
    for (int i = 0; i < file->count; i++) {
        const CheckpointTensor* t = &file->tensors[i];
        planned[i].name = (char*)t->name;
        planned[i].dtype = sizeof(real) == 8 ? ST_F64 : ST_F32;
        planned[i].rank = t->rank;
        planned[i].shape[0] = t->shape[0];
        planned[i].shape[1] = t->shape[1];
    }
    const char* const metadata[] = {"format", "pt", NULL};
    int64_t header_bytes;
    char* header = st_plan_header(planned, file->count, metadata, &header_bytes);
    writer_put(w, header, (size_t)header_bytes);
    free(header);
    free(planned);
    for (int i = 0; i < file->count; i++) {
        const char* data = (const char*)file->tensors[i].data;
        size_t left = (size_t)tensor_count(&file->tensors[i]) * sizeof(real);
        while (left) {
            size_t n = left < PIECE ? left : PIECE;
            device_download(piece, data, n, ctx);
            writer_put(w, piece, n);
            data += n;
            left -= n;
        }
    }
}

static uint32_t text_crc(const char* text, size_t length) {
    return (uint32_t)crc32_z(crc32(0, NULL, 0), (const Bytef*)text, length);
}

static const char format[] = "train_moe checkpoint 1";
static const char manifest_end[] = ",\n\"manifest_crc32\": ";

// Removes what a save that was cut short left behind.
static void sweep(const char* out) {
    DIR* folder = opendir(out);
    for (struct dirent* entry; folder && (entry = readdir(folder));) {
        char *name = entry->d_name, *end;
        if (strncmp(name, "step_", 5) != 0) continue;
        strtoll(name + 5, &end, 10);
        if (end == name + 5 || (strcmp(end, ".tmp") != 0 && strcmp(end, ".replaced") != 0)) continue;
        char* path = host_format("%s/%s", out, name);
        warn("%s was left by a save that did not finish; it is removed", path);
        remove_folder(path);
        free(path);
    }
    if (folder) closedir(folder);
}

static void prune(const char* out, int64_t newest, int keep) {
    int count, seen = 0;
    int64_t* steps = checkpoint_list(out, &count);
    for (int i = 0; i < count; i++) {
        if (steps[i] > newest) continue;  // refused ones that a resumed run went back behind: not ours to count
        char* path = step_path(out, steps[i], "");
        if (++seen > keep) remove_folder(path);
        free(path);
    }
    free(steps);
}

void checkpoint_save(const char* out, const CheckpointRecord* r, const char* options_json, const CheckpointFile* files,
                     int count, int keep, Ctx* ctx) {
    Writer w;
    char *path = step_path(out, r->step, ""), *list = host_strdup(""), *old = step_path(out, r->step, ".replaced");
    void* piece = host_alloc(PIECE);
    w.folder = step_path(out, r->step, ".tmp");
    w.path = w.folder;
    remove_folder(w.folder);
    if (make_folders(w.folder) != 0) give_up(&w, "create");
    for (int i = 0; i < count; i++) {
        writer_open(&w, files[i].name);
        write_tensors(&w, &files[i], piece, ctx);
        writer_close(&w);
        char* longer = host_format("%s%s\n  {\"name\": \"%s\", \"bytes\": %lld, \"crc32\": %lu}", list, i ? "," : "",
                                   files[i].name, (long long)w.bytes, w.crc);
        free(list);
        list = longer;
    }
    char* body = host_format(
        "{\"format\": \"%s\", \"step\": %lld, \"window\": %lld, \"updates\": %lld, "
        "\"bad_in_a_row\": %lld, "
        "\"data_hash\": %lld,\n\"options\": %s,\n\"files\": [%s]",
        format, (long long)r->step, (long long)r->window, (long long)r->updates, (long long)r->bad_in_a_row,
        (long long)r->data_hash, options_json, list);
    char* manifest = host_format("%s%s%lu}\n", body, manifest_end, (unsigned long)text_crc(body, strlen(body)));
    writer_open(&w, "manifest.json");
    writer_put(&w, manifest, strlen(manifest));
    writer_close(&w);
    w.path = path;
    if (sync_folder(w.folder) != 0) give_up(&w, "flush");
    // A folder of this name can only be one that was refused at resume: out of the way, and gone once the new one
    // stands.
    remove_folder(old);
    if (rename(path, old) != 0 && errno != ENOENT) give_up(&w, "replace");
    if (rename(w.folder, path) != 0 || sync_folder(out) != 0) give_up(&w, "create");
    remove_folder(old);
    prune(out, r->step, keep);
    sweep(out);
    free(manifest);
    free(body);
    free(list);
    free(piece);
    free(path);
    free(old);
    free(w.folder);
}

static int newest_first(const void* a, const void* b) {
    int64_t x = *(const int64_t*)a, y = *(const int64_t*)b;
    return (x < y) - (x > y);
}

int64_t* checkpoint_list(const char* out, int* count) {
    int64_t* steps = NULL;
    int room = 0;
    *count = 0;
    DIR* folder = opendir(out);
    for (struct dirent* entry; folder && (entry = readdir(folder));) {
        char* end;
        if (strncmp(entry->d_name, "step_", 5) != 0 || strlen(entry->d_name) < 13) continue;
        long long step = strtoll(entry->d_name + 5, &end, 10);
        if (*end) continue;
        if (*count == room) {
            room = room ? 2 * room : 16;
            steps = (int64_t*)realloc(steps, (size_t)room * sizeof(int64_t));
            if (!steps) die(EXIT_FAILED, "out of host memory for the list of checkpoints");
        }
        steps[(*count)++] = step;
    }
    if (folder) closedir(folder);
    if (*count) qsort(steps, (size_t)*count, sizeof(int64_t), newest_first);
    return steps;
}

Json* checkpoint_manifest(const char* out, int64_t step, CheckpointRecord* r, char* error, size_t error_size) {
    char *folder = step_path(out, step, ""), *path = host_format("%s/manifest.json", folder), reason[128] = "";
    size_t size = 0;
    char* text = read_file(path, &size);
    Json* json = NULL;
    char* end = text ? strstr(text, manifest_end) : NULL;
    if (!text)
        snprintf(error, error_size, "%s: %s", path, strerror(errno));
    else if (!end || strtoul(end + strlen(manifest_end), NULL, 10) != text_crc(text, (size_t)(end - text)))
        snprintf(error, error_size, "%s: truncated or altered (its CRC-32 does not match)", path);
    else if (!(json = json_parse(text, size, reason, sizeof(reason))))
        snprintf(error, error_size, "%s: %s", path, reason);
    if (json) {
        r->step = json_int(json, "step", -1);
        r->window = json_int(json, "window", -1);
        r->updates = json_int(json, "updates", -1);
        r->bad_in_a_row = json_int(json, "bad_in_a_row", -1);
        r->data_hash = json_int(json, "data_hash", -1);
    }
    if (json && (!json_text(json, "format") || strcmp(json_text(json, "format"), format) != 0)) {
        snprintf(error, error_size, "%s: not of the format '%s'", path, format);
        json_free(json);
        json = NULL;
    }
    if (json && r->step != step) {
        snprintf(error, error_size, "%s: it is of step %lld; the folder was renamed", path, (long long)r->step);
        json_free(json);
        json = NULL;
    }
    free(text);
    free(path);
    free(folder);
    return json;
}

// Compares size and CRC-32 of a file with what the manifest says.
static int check_file(const char* path, const Json* entry, void* piece, char* error, size_t error_size) {
    int64_t want = json_int(entry, "bytes", -1), got = 0;
    int fd = open(path, O_RDONLY);
    if (fd < 0) {
        snprintf(error, error_size, "%s: %s", path, strerror(errno));
        return -1;
    }
    uLong crc = crc32(0, NULL, 0);
    for (ssize_t n; (n = read(fd, piece, PIECE)) > 0; got += n) crc = crc32_z(crc, (const Bytef*)piece, (size_t)n);
    close(fd);
    if (got != want)
        snprintf(error, error_size, "%s: %lld bytes long, the manifest says %lld", path, (long long)got,
                 (long long)want);
    else if ((int64_t)crc != json_int(entry, "crc32", -1))
        snprintf(error, error_size, "%s: altered (its CRC-32 is %lu, the manifest says %lld)", path, crc,
                 (long long)json_int(entry, "crc32", -1));
    else
        return 0;
    return -1;
}

static int load_tensor(const SafeTensors* st, const CheckpointTensor* t, void* piece, Ctx* ctx, char* error,
                       size_t error_size) {
    const StTensor* found = st_find(st, t->name);
    StDtype dtype = sizeof(real) == 8 ? ST_F64 : ST_F32;
    if (!found || found->dtype != dtype || found->rank != t->rank || found->shape[0] != t->shape[0] ||
        (t->rank == 2 && found->shape[1] != t->shape[1])) {
        snprintf(error, error_size, "%s: tensor %s is %s", st->path, t->name,
                 found ? "of another shape or type" : "missing");
        return -1;
    }
    int64_t count = tensor_count(t), most = (int64_t)(PIECE / sizeof(real));
    for (int64_t first = 0; first < count; first += most) {
        int64_t n = count - first < most ? count - first : most;
        if (st_read(st, found, first, n, piece) != 0) {
            snprintf(error, error_size, "%s: cannot read %s: %s", st->path, t->name, strerror(errno));
            return -1;
        }
        device_upload(t->data + first, piece, (size_t)n * sizeof(real), ctx);
    }
    return 0;
}

static const Json* file_entry(const Json* manifest, const char* name) {
    const Json* list = json_get(manifest, "files");
    for (const Json* e = list ? list->child : NULL; e; e = e->next) {
        const char* text = json_text(e, "name");
        if (text && strcmp(text, name) == 0) return e;
    }
    return NULL;
}

int checkpoint_load(const char* out, int64_t step, const Json* manifest, const CheckpointFile* files, int count,
                    Ctx* ctx, char* error, size_t error_size) {
    void* piece = host_alloc(PIECE);
    char* folder = step_path(out, step, "");
    int result = 0;
    for (int i = 0; i < count && result == 0; i++) {
        char* path = host_format("%s/%s", folder, files[i].name);
        const Json* entry = file_entry(manifest, files[i].name);
        SafeTensors* st = NULL;
        if (!entry) {
            snprintf(error, error_size, "%s: the manifest does not list it", path);
            result = -1;
        } else if (check_file(path, entry, piece, error, error_size) != 0 || !(st = st_open(path, error, error_size))) {
            result = -1;
        }
        for (int t = 0; t < files[i].count && result == 0; t++)
            result = load_tensor(st, &files[i].tensors[t], piece, ctx, error, error_size);
        if (st) st_close(st);
        free(path);
    }
    free(folder);
    free(piece);
    return result;
}
