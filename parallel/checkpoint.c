// Saving. The saver threads of all ranks write a checkpoint together:
//
//   1. rank 0      makes the temporary folder
//   2. every rank  writes its slices of each file in place and flushes them, file by file, and sends their CRC-32s to
//                  rank 0, whose slices are also the headers and the text files
//   3. rank 0      joins the CRC-32s, writes the manifest, renames the folder, removes old ones
#include "parallel/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/check.h"
#include "device/files.h"
#include "parallel/folder.h"
#include "parallel/slices.h"
#include "parallel/watch.h"

// A file of the checkpoint.
typedef struct SavedFile {
    char name[sizeof(((CheckpointFile*)0)->name)];
    char* text;     // the header; the whole file if it has no tensors
    int64_t bytes;  // of the whole file
} SavedFile;

// The saver of one rank. The thread and the caller never change it at once: checkpoint_wait comes between.
struct Saver {
    Ranks* group;  // the world, with messages of its own
    char* out;
    int keep;
    SavedFile others[8];  // of saver_add_file
    int other_count;
    pthread_t thread;
    bool running;
    // Used by the thread while it runs. `buffer` has the tensors of this rank's slices, one after another.
    char* buffer;
    size_t capacity;
    FileSlice* slices;
    int64_t slice_count;
    SavedFile* files;
    int tensor_files, count;  // files of tensors, then others
    int64_t step;
    Path folder;   // the temporary one
    char* record;  // the manifest up to its list of files
};

// Removes a file or folder, and returns whether it is gone. If it cannot be removed (a link, say), it does no harm.
static bool clear_away(const char* path) {
    if (remove_tree(path) == 0) return true;
    warn("cannot remove %s: %s", path, file_error(errno));
    return false;
}

// Removes the files and folders that an interrupted run left, in a save or at its start.
static void sweep(const char* out) {
    DIR* folder = opendir(out);
    for (struct dirent* entry; folder && (entry = readdir(folder)) != NULL;) {
        if (step_number(entry->d_name, ".tmp") < 0 && step_number(entry->d_name, ".replaced") < 0) continue;
        Path path = path_of("%s/%s", out, entry->d_name);
        if (clear_away(path.text)) warn("%s was left by a save that did not finish; it is removed", path.text);
    }
    if (folder) closedir(folder);
}

Saver* saver_create(Ranks* world, const char* out, int keep) {
    Saver* s = (Saver*)host_alloc(sizeof(Saver));
    s->group = ranks_split(world, 0);
    s->out = host_strdup(out);
    s->keep = keep;

    // A folder that the hosts do not share is detected now, not at the first save: rank 0 makes a folder that the
    // others must see. Its name is new each time, because file systems may cache that an old name did not exist. It has
    // the form of an unfinished save: if this run is killed here, the next one removes it.
    int64_t id = getpid();
    ranks_broadcast(world, &id, sizeof(id), 0);
    Path probe = step_path(out, id, ".tmp");
    const bool leads = ranks_index(world) == 0;
    if (leads) sweep(out);
    if (leads && make_folders(probe.text) != 0) die(EXIT_FAILED, "cannot create %s: %s", probe.text, file_error(errno));
    // The folder exists before any rank looks, and stays until all have looked.
    ranks_barrier(world);
    bool there = access(probe.text, F_OK) == 0;
    ranks_barrier(world);
    if (leads) rmdir(probe.text);
    ranks_must_share(world, out, there);
    return s;
}

void saver_add_file(Saver* s, const char* name, const char* data, size_t bytes) {
    ASSERT(s->other_count < (int)(sizeof(s->others) / sizeof(s->others[0])));
    SavedFile* file = &s->others[s->other_count++];
    snprintf(file->name, sizeof(file->name), "%s", name);
    file->text = (char*)memcpy(host_alloc(bytes), data, bytes);
    file->bytes = (int64_t)bytes;
}

void checkpoint_wait(Saver* s) {
    if (s->running) watch_join(s->thread, "save");
    s->running = false;
}

void saver_destroy(Saver* s) {
    checkpoint_wait(s);
    ranks_free(s->group);
    for (int i = 0; i < s->other_count; i++) free(s->others[i].text);
    free(s->buffer);
    free(s->out);
    free(s);
}

// Ends the run for the reason in errno. The temporary folder is removed first: it may have filled the disk.
static NORETURN void give_up(const Saver* s, const char* what, const char* path) {
    int why = errno;
    remove_tree(s->folder.text);
    die(EXIT_FAILED, "cannot %s %s: %s; this checkpoint was not saved, earlier ones are as they were", what, path,
        file_error(why));
}

// Rank 0: makes the empty folder.
static void make_folder(const Saver* s) {
    const char* folder = s->folder.text;
    folder_check();
    if (remove_tree(folder) != 0 || mkdir(folder, 0777) != 0) give_up(s, "create", folder);
}

// Ends the run if a rank's weights or moments are not finite, before anything is written.
static void check_finite(const Saver* s) {
    bool finite = true;
    for (const FileSlice* slice = s->slices; slice < s->slices + s->slice_count; slice++) {
        const int64_t n = slice->bytes / (int64_t)st_dtype_bytes((StDtype)slice->dtype);
        finite = finite && first_not_finite(slice->data, n, (StDtype)slice->dtype) == n;
    }
    if (ranks_well(s->group, finite)) return;
    die(EXIT_FAILED,
        "step %ld is not saved: weights or moments of this rank are not finite; earlier checkpoints are as they were",
        s->step);
}

// Writes this rank's slices of a file, from *next on, and moves it past them. Every rank that wrote flushes. False on
// errors, with errno set.
static bool write_slices(const char* path, int64_t file, FileSlice** next, const FileSlice* end) {
    if (*next == end || (*next)->file != file) return true;
    int fd = open(path, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) return false;
    for (; *next < end && (*next)->file == file; ++*next) {
        const size_t bytes = (size_t)(*next)->bytes;
        (*next)->crc = crc_of((*next)->data, bytes);
        if (lseek(fd, (*next)->offset, SEEK_SET) < 0 || write_all(fd, (*next)->data, bytes) != 0) return false;
    }
    return sync_file(fd, path) == 0 && close(fd) == 0;
}

// Writes the files one by one, all ranks together: the watchdog's limit applies to one file, as a slow disk may take
// longer for all. Text files come after the tensors: a folder of zeros never has them and cannot pass for a model.
static void write_files(Saver* s) {
    FileSlice* next = s->slices;
    for (int i = 0; i < s->count; i++) {
        Path path = path_of("%s/%s", s->folder.text, s->files[i].name);
        // ranks_well may change errno, so the reason is kept.
        bool written = write_slices(path.text, i, &next, s->slices + s->slice_count);
        int why = errno;
        if (ranks_well(s->group, written)) continue;
        errno = why;
        give_up(s, "write", path.text);
    }
}

// Rank 0: writes the manifest: the record, each file's size and joined CRC-32, and the CRC-32 of all that.
static void write_manifest(const Saver* s, const FileSlice* slices, int64_t slice_count) {
    const FileSlice *next = slices, *end = slices + slice_count;
    char* body = host_strdup(s->record);
    for (int i = 0; i < s->count; i++) {
        const SavedFile* f = &s->files[i];
        uLong crc;
        if (!slices_join(&next, end, i, f->bytes, &crc))
            die(EXIT_FAILED, "internal error: the ranks did not write every byte of %s/%s once", s->folder.text,
                f->name);
        host_append(&body, "%s\n  {\"name\": \"%s\", \"bytes\": %ld, \"crc32\": %lu}", i ? "," : "", f->name, f->bytes,
                    crc);
    }
    host_append(&body, "]");
    host_append(&body, "%s%lu}\n", CHECKPOINT_MANIFEST_END, crc_of(body, strlen(body)));
    Path path = path_of("%s/manifest.json", s->folder.text);
    const int fd = new_file(path.text, body, strlen(body));
    if (fd < 0 || close(fd) != 0) give_up(s, "write", path.text);
    free(body);
}

// Whether a folder with a checkpoint's name is one: others are never removed.
static bool is_checkpoint(const char* out, int64_t step) {
    char* why;
    json_free(checkpoint_manifest(out, step, &why));
    const bool good = !why;
    free(why);
    return good;
}

// Removes a checkpoint. It is renamed first, so that a folder with a checkpoint's name is always complete.
static void remove_step(const char* out, int64_t step) {
    Path path = step_path(out, step, ""), old = step_path(out, step, ".replaced");
    bool renamed = !is_link(path.text) && clear_away(old.text) && rename(path.text, old.text) == 0;
    clear_away(renamed ? old.text : path.text);  // a link stays; a folder that cannot be renamed is removed in place
}

// Removes the oldest checkpoints, so that `keep` remain.
static void prune(const Saver* s, int keep) {
    // The new checkpoint is complete, so a folder that cannot be listed is no reason to end the run.
    int count, seen = 0;
    int64_t* steps = checkpoint_try_list(s->out, &count);
    if (count < 0) warn("cannot list %s: %s; old checkpoints stay", s->out, strerror(errno));

    // The list begins with the newest, so its first `keep` entries stay.
    for (int i = 0; i < count; i++) {
        if (steps[i] > s->step || !is_checkpoint(s->out, steps[i])) continue;  // newer ones were refused at resume
        if (++seen > keep) remove_step(s->out, steps[i]);
    }
    free(steps);
}

void checkpoint_finish(Saver* s) {
    checkpoint_wait(s);
    if (ranks_index(s->group) != 0) return;
    folder_check();
    prune(s, s->keep);
}

bool checkpoint_set_aside(Saver* s, int64_t step) {
    if (ranks_index(s->group) != 0) return false;
    folder_check();
    int count;
    int64_t* steps = checkpoint_try_list(s->out, &count);
    Path path = step_path(s->out, step, ""), aside = step_path(s->out, step, ".diverged");
    // The oldest checkpoint stays, because there would be none to go back to.
    bool oldest = count < 1 || steps[count - 1] >= step;
    free(steps);
    return !oldest && remove_tree(aside.text) == 0 && !is_link(path.text) && rename(path.text, aside.text) == 0;
}

// Commit, when all files are on disk: renames the folder.
static void publish(const Saver* s) {
    const bool replaces = is_checkpoint(s->out, s->step);
    Path final = step_path(s->out, s->step, ""), old = step_path(s->out, s->step, replaces ? ".replaced" : ".aside");
    const char *path = final.text, *folder = s->folder.text;
    folder_check();
    if (sync_folder(folder) != 0) give_up(s, "flush", path);

    // A checkpoint of this name can only be one that was refused at resume. It is renamed, and removed after the new
    // one has its name. Anything else of this name is kept under another one.
    if (is_link(path)) errno = ELOOP, give_up(s, "replace", path);
    for (int n = 2; !replaces && (access(old.text, F_OK) == 0 || is_link(old.text)); n++)
        old = path_of("%s.aside%d", path, n);
    const bool found = rename(path, old.text) == 0;
    if (!found && errno != ENOENT) give_up(s, "replace", path);
    if (found && !replaces) warn("%s is no checkpoint that can be read, so it is kept as %s", path, old.text);
    if (rename(folder, path) != 0 || sync_folder(s->out) != 0) give_up(s, "create", path);
    if (replaces) clear_away(old.text);
}

// Removes the oldest checkpoints, then prints the new one. At least two remain: only the next step shows
// whether the newest one's model has diverged.
static void finish(const Saver* s) {
    Path path = step_path(s->out, s->step, "");
    prune(s, s->keep > 2 ? s->keep : 2);
    char* shown = host_printable(path.text, strlen(path.text), "");
    printf("saved %s\n", shown);
    fflush(stdout);
    free(shown);
}

// The thread of a save, on every rank.
static void* saver_thread(void* saver) {
    Saver* s = (Saver*)saver;
    bool leads = ranks_index(s->group) == 0;
    int64_t total;
    watch_helper();
    check_finite(s);
    if (leads) make_folder(s);
    ranks_barrier(s->group);
    write_files(s);

    // The manifest is last. Rank 0 needs the CRC-32s only after every rank has flushed its slices.
    FileSlice* all = slices_gather(s->group, s->slices, s->slice_count, &total);
    if (leads) write_manifest(s, all, total);
    if (leads) publish(s);
    ranks_barrier(s->group);
    if (leads) finish(s);
    ranks_barrier(s->group);  // no rank's wait ends before the checkpoint is complete

    // The buffer stays for the next save; the rest belonged to this one.
    free(all);
    for (int i = 0; i < s->tensor_files; i++) free(s->files[i].text);
    free(s->files);
    free(s->slices);
    free(s->record);
    return NULL;
}

// Adds bytes that this rank writes into file i.
static void add_slice(Saver* s, int i, int64_t offset, const char* data, int64_t bytes, StDtype dtype) {
    FileSlice slice = {.file = i, .offset = offset, .bytes = bytes, .dtype = dtype, .data = data};
    s->slices[s->slice_count++] = slice;
}

// Adds this rank's part of a tensor, which it copies to `to`, the end of the buffer.
static char* copy_slice(Saver* s, int i, const CheckpointTensor* t, int64_t tensor_offset, char* to, Ctx* ctx) {
    int64_t size = (int64_t)st_dtype_bytes(t->dtype), bytes = t->save_count * size;
    ASSERT(t->save_first >= t->first && t->save_first + t->save_count <= t->first + t->count);
    const int64_t at = t->save_first - t->first;
    if (t->weight)
        masters_download((real*)to, (Master*)t->data + at, t->weight + at, t->save_count, ctx);
    else
        device_download(to, (char*)t->data + at * size, (size_t)bytes, ctx);
    add_slice(s, i, tensor_offset + t->save_first * size, to, bytes, t->dtype);
    return to + bytes;
}

// Plans the layout of file i. Its slices here: on rank 0 the header, then this rank's parts of tensors.
static char* copy_file(Saver* s, int i, const CheckpointFile* file, char* to, Ctx* ctx) {
    // The header: the tensors by name, with their offsets in the file.
    StTensor* planned = (StTensor*)host_alloc((size_t)file->count * sizeof(StTensor));
    for (int k = 0; k < file->count; k++) {
        CheckpointTensor* t = &file->tensors[k];
        StTensor plan = {.name = t->name, .dtype = t->dtype, .rank = t->rank, .shape = {t->shape[0], t->shape[1]}};
        planned[k] = plan;
    }
    SavedFile* saved = &s->files[i];
    memcpy(saved->name, file->name, sizeof(saved->name));
    saved->text = st_plan_header(planned, file->count, &saved->bytes);
    if (ranks_index(s->group) == 0) add_slice(s, i, 0, saved->text, saved->bytes, ST_U8);

    // This rank's part of each tensor.
    for (int k = 0; k < file->count; k++) {
        saved->bytes += planned[k].bytes;
        if (file->tensors[k].save_count) to = copy_slice(s, i, &file->tensors[k], planned[k].offset, to, ctx);
    }
    free(planned);
    return to;
}

void checkpoint_save(Saver* s, const CheckpointRecord* r, const char* options_json, const CheckpointFile* files,
                     int count, Ctx* ctx) {
    // The last save must end first: its thread reads the buffer.
    checkpoint_wait(s);

    // The bytes of tensors that this rank writes, and the most slices.
    s->count = count + s->other_count;
    size_t bytes = 0, slices = (size_t)s->count;
    for (int i = 0; i < count; i++)
        for (int t = 0; t < files[i].count; t++) {
            const CheckpointTensor* tensor = &files[i].tensors[t];
            bytes += (size_t)tensor->save_count * st_dtype_bytes(tensor->dtype);
            slices += tensor->save_count > 0;
        }

    // The buffer, and the thread's inputs.
    s->buffer = (char*)host_at_least(s->buffer, &s->capacity, bytes);
    s->slices = (FileSlice*)host_alloc(slices * sizeof(FileSlice));
    s->slice_count = 0;
    s->files = (SavedFile*)host_alloc((size_t)s->count * sizeof(SavedFile));
    s->tensor_files = count;
    s->step = r->step;
    s->folder = step_path(s->out, r->step, ".tmp");
    s->record = host_format(
        "{\"format\": \"%s\", \"step\": %ld, \"window\": %ld, \"updates\": %ld, \"data_hash\": %ld, "
        "\"tokenizer_hash\": %ld,\n\"options\": %s,\n\"files\": [",
        CHECKPOINT_FORMAT, r->step, r->window, r->updates, r->data_hash, r->tokenizer_hash, options_json);

    // The copy to host memory. Training continues after it.
    char* to = s->buffer;
    for (int i = 0; i < count; i++) to = copy_file(s, i, &files[i], to, ctx);
    for (int i = 0; i < s->other_count; i++) {
        s->files[count + i] = s->others[i];
        if (ranks_index(s->group) == 0) add_slice(s, count + i, 0, s->others[i].text, s->others[i].bytes, ST_U8);
    }

    // The thread writes the files.
    int rc = pthread_create(&s->thread, NULL, saver_thread, s);
    if (rc != 0)
        die(EXIT_FAILED, "cannot start the thread that writes %s: %s (too little memory, or too many threads)",
            s->folder.text, strerror(rc));
    s->running = true;
}
