// The lock of a run's folder: an open file that only one process can lock. The file's text names the process with the
// lock.
#include "parallel/folder.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/check.h"
#include "device/files.h"
#include "parallel/checkpoint.h"

static Path path;      // of the lock
static int lock = -1;  // its descriptor; -1: none

// Locks the folder, or ends the run if another run has it.
static void lock_folder(const char* out) {
    path = path_of("%s/.lock", out);
    lock = lock_file(path.text);
    if (lock >= 0) return;

    // Another run has the lock: its text in the file helps to find that run.
    if (errno == EAGAIN) {
        char* holder = read_file(path.text, 256, NULL);
        die(EXIT_FAILED, "--out %s is in use by another run (%s): wait for its end, or choose another folder", out,
            holder && *holder ? holder : "unknown");
    }
    // The lock file is a link, or a file of something else: it is not touched.
    if (errno == EEXIST)
        die(EXIT_FAILED, "%s is not a lock of this program: choose another --out, or remove it", path.text);
    die(EXIT_FAILED, "--out %s: its lock %s cannot be opened: %s; remove it, or choose another folder", out, path.text,
        file_error(errno));
}

void folder_open(const char* out, int resume) {
    int count;
    if (strlen(out) + CHECKPOINT_NAMES >= sizeof(Path))
        die(EXIT_USAGE, "--out is %zu bytes long, and its files need names of %d more: at most %zu are possible",
            strlen(out), CHECKPOINT_NAMES, sizeof(Path) - CHECKPOINT_NAMES - 1);
    // The folder must exist and be writable, before the lock file is made in it.
    if (make_folders(out) != 0 || access(out, W_OK) != 0)
        die(EXIT_FAILED, "--out %s cannot be used as a folder: %s", out, strerror(errno));
    lock_folder(out);

    // A new run must not mix with an earlier one: checkpoints or a log need --resume.
    free(checkpoint_list(out, &count));
    if (!resume && (count || access(path_of("%s/log.jsonl", out).text, F_OK) == 0)) {
        folder_close();
        die(EXIT_USAGE, "--out %s holds a run already; add --resume to go on with it, or choose another folder", out);
    }
}

void folder_check(void) {
    if (lock >= 0 && !is_open_as(lock, path.text))
        die(EXIT_FAILED,
            "%s, the lock of this run, or its folder was removed, renamed or replaced: another run may be there, so "
            "nothing is written or removed; --resume goes on from the newest checkpoint of this run",
            path.text);
}

void folder_close(void) {
    if (lock >= 0) unlock_file(path.text, lock);
    lock = -1;
}
