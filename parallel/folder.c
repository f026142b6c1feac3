// The lock of a run's folder: an open file that only one process can lock. Its text names the holder.
#include "parallel/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/check.h"
#include "parallel/checkpoint.h"

// Locks the folder, or ends the run if another run has it. f->lock is -1 if locks do not work there. A POSIX record
// lock also excludes processes of other machines, if the file system supports it. It ends with its process, so a crash
// leaves none behind.
static void lock_folder(Folder* f, const char* out) {
    const char* path = f->lock_path.text;
    const struct flock whole = {.l_type = F_WRLCK};  // length 0: to the end of the file
    char holder[256] = "", host[64] = "";
    f->lock_path = path_of("%s/.lock", out);
    f->lock = -1;
    do {
        // Again: its last holder has removed the file meanwhile, so this lock is on an unlinked file.
        if (f->lock >= 0) close(f->lock);
        f->lock = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
        const int why = f->lock < 0 || fcntl(f->lock, F_SETLK, &whole) != 0 ? errno : 0;
        if (why == ELOOP) die(EXIT_FAILED, "%s: %s", path, file_error(why));

        // The text names the holder, which helps to find that run. A file with another text is not touched.
        if (f->lock >= 0) read_at(f->lock, holder, sizeof(holder) - 1, 0);
        if (*holder && strncmp(holder, "process ", 8) != 0)
            die(EXIT_FAILED, "%s is not a lock of this program: choose another --out, or remove it", path);
        if (f->lock >= 0 && (why == EAGAIN || why == EACCES))
            die(EXIT_FAILED, "--out %s is in use by another run (%s): wait for its end, or choose another folder", out,
                *holder ? holder : "unknown");
        if (why) {
            warn("--out %s cannot be locked (%s): another run in it would not be noticed", out, strerror(why));
            if (f->lock >= 0) close(f->lock);
            f->lock = -1;
            return;
        }
    } while (!is_open_as(f->lock, path));
    gethostname(host, sizeof(host) - 1);
    if (ftruncate(f->lock, 0) == 0) dprintf(f->lock, "process %d on %s", (int)getpid(), host);
}

Folder folder_open(const char* out, int resume) {
    Folder f;
    int count;
    if (strlen(out) + CHECKPOINT_NAMES >= sizeof(Path))
        die(EXIT_USAGE, "--out is %zu bytes long, and its files need names of %d more: at most %zu are possible",
            strlen(out), CHECKPOINT_NAMES, sizeof(Path) - CHECKPOINT_NAMES - 1);
    // The folder must exist and be writable, before the lock file is made in it.
    if (make_folders(out) != 0 || access(out, W_OK) != 0)
        die(EXIT_FAILED, "--out %s cannot be used as a folder: %s", out, strerror(errno));
    lock_folder(&f, out);

    // A new run must not mix with an earlier one: checkpoints or a log need --resume.
    free(checkpoint_list(out, &count));
    if (!resume && (count || access(path_of("%s/log.jsonl", out).text, F_OK) == 0)) {
        folder_close(&f);
        die(EXIT_USAGE, "--out %s holds a run already; add --resume to go on with it, or choose another folder", out);
    }
    return f;
}

void folder_check(const Folder* f) {
    if (f && f->lock >= 0 && !is_open_as(f->lock, f->lock_path.text))
        die(EXIT_FAILED,
            "%s, the lock of this run, or its folder was removed, renamed or replaced: another run may be in the "
            "folder "
            "of this name, so nothing is written or removed there; --resume goes on from its newest checkpoint",
            f->lock_path.text);
}

void folder_close(const Folder* f) {
    if (f->lock < 0) return;
    // The name is removed only while it is still that of this file. Closing ends the lock.
    if (is_open_as(f->lock, f->lock_path.text)) unlink(f->lock_path.text);
    close(f->lock);
}
