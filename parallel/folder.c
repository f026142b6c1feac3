// The lock of a run's folder: an open file that only one process can lock. Its text names the holder.
#include "parallel/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/check.h"
#include "parallel/checkpoint.h"

// Locks the folder, or ends the run if another run has it. f->lock is -1 if locks do not work there.
static void lock_folder(Folder* f, const char* out) {
    const char* path = f->lock_path.text;
    f->lock_path = path_of("%s/.lock", out);
    f->lock = lock_file(path);
    if (f->lock >= 0) return;

    // Another run has the lock: its text in the file helps to find that run.
    if (errno == EAGAIN) {
        char* holder = read_file(path, 256, NULL);
        die(EXIT_FAILED, "--out %s is in use by another run (%s): wait for its end, or choose another folder", out,
            holder && *holder ? holder : "unknown");
    }
    // The lock file is a link, or a file of something else: it is not touched.
    if (errno == ELOOP) die(EXIT_FAILED, "%s: %s", path, file_error(errno));
    if (errno == EEXIST) die(EXIT_FAILED, "%s is not a lock of this program: choose another --out, or remove it", path);
    warn("--out %s cannot be locked (%s): another run in it would not be noticed", out, strerror(errno));
}

Folder folder_open(const char* out, int resume) {
    Folder f = {.path = path_of("%s", out)};
    int count;
    if (strlen(out) + CHECKPOINT_NAMES >= sizeof(Path))
        die(EXIT_USAGE, "--out is %zu bytes long, and its files need names of %d more: at most %zu are possible",
            strlen(out), CHECKPOINT_NAMES, sizeof(Path) - CHECKPOINT_NAMES - 1);
    // The folder must exist and be writable, before the lock file is made in it.
    if (make_folders(out) != 0 || access(out, W_OK) != 0)
        die(EXIT_FAILED, "--out %s cannot be used as a folder: %s", out, strerror(errno));
    lock_folder(&f, out);
    f.fd = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    // A new run must not mix with an earlier one: checkpoints or a log need --resume.
    free(checkpoint_list(out, &count));
    if (!resume && (count || access(path_of("%s/log.jsonl", out).text, F_OK) == 0)) {
        folder_close(&f);
        die(EXIT_USAGE, "--out %s holds a run already; add --resume to go on with it, or choose another folder", out);
    }
    return f;
}

void folder_check(const Folder* f) {
    if (f->fd >= 0 && !is_open_as(f->fd, f->path.text))
        die(EXIT_FAILED,
            "--out %s is another folder than at the start of this run, which was removed or renamed: nothing is "
            "written or removed there",
            f->path.text);
    if (f->lock >= 0 && !is_open_as(f->lock, f->lock_path.text))
        die(EXIT_FAILED,
            "%s, the lock of this run, was removed or replaced: another run may be in this folder, so nothing is "
            "written or removed there; --resume goes on from its newest checkpoint",
            f->lock_path.text);
}

void folder_close(const Folder* f) {
    if (f->lock >= 0) unlock_file(f->lock_path.text, f->lock);
    if (f->fd >= 0) close(f->fd);
}
