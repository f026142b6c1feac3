// Files by POSIX calls that never follow a symbolic link by mistake: a name is checked with lstat and opened with
// O_NOFOLLOW. Every loop over pread and write continues after a signal.
#include "device/files.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// The return value of a call that fails with errno `why`.
static int fails(int why) {
    errno = why;
    return -1;
}

Path path_of(const char* format, ...) {
    Path path;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(path.text, sizeof(path.text), format, args);
    va_end(args);
    if (n < 0 || (size_t)n >= sizeof(path.text)) die(EXIT_FAILED, "%.64s...: %s", path.text, strerror(ENAMETOOLONG));
    return path;
}

// Creates the first folder of the path, then the first two, and so on.
int make_folders(const char* path) {
    for (int n = 1, end = (int)strlen(path); n <= end; n++) {
        if (path[n] != '/' && path[n] != 0) continue;
        Path part = path_of("%.*s", n, path);
        struct stat info;
        if (mkdir(part.text, 0777) == 0) continue;
        if (errno != EEXIST) return -1;
        if (stat(part.text, &info) == 0 && !S_ISDIR(info.st_mode)) return fails(ENOTDIR);
    }
    return 0;
}

bool is_link(const char* path) {
    struct stat info;
    return lstat(path, &info) == 0 && S_ISLNK(info.st_mode);
}

// nftw calls this for everything in a folder and then for the folder.
static int remove_one(const char* path, const struct stat* info, int type, struct FTW* place) { return remove(path); }

int remove_tree(const char* path) {
    if (is_link(path)) return fails(ELOOP);
    // FTW_PHYS: a link is removed itself.
    return nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS) == 0 || errno == ENOENT ? 0 : -1;
}

// ESTALE of an open file: on NFS, another machine removed it.
bool is_open_as(int fd, const char* path) {
    struct stat held, named;
    if (fstat(fd, &held) != 0) return errno != ESTALE && errno != EBADF;
    if (stat(path, &named) != 0) return errno != ENOENT && errno != ENOTDIR;
    return held.st_dev == named.st_dev && held.st_ino == named.st_ino;
}

int sync_file(int fd, const char* path) {
    static bool warned;
    if (fsync(fd) == 0) return 0;
    if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) return -1;
    if (!warned)
        warn(
            "%s cannot be flushed to the disk (%s): its file system does not offer that, and a power failure may "
            "lose the newest files",
            path, strerror(errno));
    warned = true;
    return 0;
}

// After a rename: the new name survives a power failure only if its folder is synced.
int sync_folder(const char* path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return -1;
    int result = sync_file(fd, path), why = errno;
    close(fd);
    return result == 0 ? 0 : fails(why);
}

// O_NONBLOCK: if a FIFO takes the name between the two calls, the open does not wait.
int open_file(const char* path) {
    struct stat info;
    if (stat(path, &info) != 0) return -1;
    if (S_ISREG(info.st_mode)) return open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    return fails(S_ISDIR(info.st_mode) ? EISDIR : ENXIO);
}

// An existing file is unlinked first, so a process that reads it keeps the old contents.
int new_file(const char* path, const void* data, size_t bytes) {
    if (is_link(path)) return fails(ELOOP);
    if (unlink(path) != 0 && errno != ENOENT) return -1;
    const int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 || (write_all(fd, data, bytes) == 0 && sync_file(fd, path) == 0)) return fd;
    const int why = errno;
    close(fd);
    return fails(why);
}

int write_all(int fd, const void* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = write(fd, (const char*)data + done, bytes - done);
        if (n < 0 && errno != EINTR) return -1;
        done += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

// Fewer than `bytes` only at the end of the file.
int64_t read_at(int fd, void* out, int64_t bytes, int64_t offset) {
    int64_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(fd, (char*)out + done, (size_t)(bytes - done), (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -1;
        if (n == 0) break;
        done += n;
    }
    return done;
}

int read_all_at(int fd, void* out, int64_t bytes, int64_t offset) {
    int64_t got = read_at(fd, out, bytes, offset);
    return got == bytes ? 0 : got < 0 ? -1 : fails(EIO);
}

// The size is checked first: a file that grows meanwhile gives the bytes that it had.
char* read_file(const char* path, size_t limit, size_t* size) {
    int fd = open_file(path);
    if (fd < 0) return NULL;
    const int64_t bytes = lseek(fd, 0, SEEK_END);
    const bool fits = (uint64_t)bytes <= limit;
    char* text = fits ? (char*)host_alloc((size_t)bytes + 1) : NULL;
    const int64_t got = fits ? read_at(fd, text, bytes, 0) : -1;
    int why = fits ? errno : EFBIG;
    close(fd);
    if (got < 0) {
        free(text);
        fails(why);
        return NULL;
    }
    if (size) *size = (size_t)got;
    return text;
}

// Reads the text of a lock. Whether it is lock_file's: "process 17 on host", and no more.
static bool is_holder(int fd, char text[256]) {
    int64_t n = read_at(fd, text, 255, 0);
    int host = 0;
    text[n > 0 ? n : 0] = 0;
    return sscanf(text, "process %*d on %n", &host) == 0 && host > 0 && strcspn(text, "\n") == (size_t)n && n < 255;
}

// A POSIX record lock: it ends with its process, so a crash leaves no lock behind.
int lock_file(const char* path) {
    struct flock whole = {.l_type = F_WRLCK};  // length 0: to the end of the file
    for (;;) {
        // A new file, or the one that is there.
        int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        const bool made = fd >= 0;
        if (!made && errno == EEXIST) {
            fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
            if (fd < 0 && errno == ENOENT) continue;  // its holder has just removed it
        }
        if (fd < 0) return -1;

        // The lock: the system gives it to one process at a time.
        if (fcntl(fd, F_SETLK, &whole) != 0) {
            if (errno == EACCES || errno == EAGAIN) {
                close(fd);
                return fails(EAGAIN);
            }
            warn("%s cannot be locked (%s): a second run that uses it would not be noticed", path, strerror(errno));
        }

        // Its last holder may have removed the file meanwhile. Then this lock is on an unlinked file: retry.
        if (!is_open_as(fd, path)) {
            close(fd);
            continue;
        }

        // A file of another program is left unchanged.
        char text[256], host[64] = "";
        const bool left = is_holder(fd, text);  // by a run that was killed
        if (!left && *text) {
            close(fd);
            return fails(EEXIST);
        }

        // The name of the holder, for the error message of the next process.
        gethostname(host, sizeof(host) - 1);
        if ((made || left) && ftruncate(fd, 0) == 0) dprintf(fd, "process %d on %s", (int)getpid(), host);
        return fd;
    }
}

void unlock_file(const char* path, int fd) {
    char text[256];
    // The name is removed only while it is still that of this file, and the file this program's. Closing ends the lock.
    if (is_holder(fd, text) && is_open_as(fd, path)) unlink(path);
    close(fd);
}

const char* file_error(int why) {
    if (why == ELOOP) return "it is a symbolic link, and train_moe follows none: remove it";
    if (why == ENXIO) return "it is not a file";
    return strerror(why);
}
