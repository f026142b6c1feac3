// Loaded before libc (LD_PRELOAD) by tests/model/test_torture.py. It counts the program's operations on files below a
// folder. At one of them, it kills or stops the program, or fails the operation. The environment sets:
//
//   TORTURE_BELOW   the folder, as an absolute path
//   TORTURE_RANK    the only rank, of several, that is affected
//   TORTURE_LOG     a file that gets a line for each operation: number, name, path
//   TORTURE_AT      the number of the operation (1 is the first) for TORTURE_DO, or the name of operations: all of them
//   TORTURE_DO      kill, stop (a signal before the operation), half (SIGKILL after half of a write, or after another
//                   operation), fail (with the error that TORTURE_ERROR selects), slow (TORTURE_ERROR seconds more)
//
// Two kinds of operations are not counted: reads and writes of stdio without a call of fflush or fclose, and system
// calls that do not go through libc. Names that end in 64 are not needed on 64-bit Linux.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <linux/fcntl.h>  // not libc's: open is defined here with three arguments, as it is called
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdio_ext.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef enum { GO, FAIL, HALF } Turn;

static const char *below, *action, *named;
static long at, chosen;
static atomic_long count;
static FILE* report;

__attribute__((constructor)) static void begin(void) {
    const char *rank = getenv("TORTURE_RANK"), *ours = getenv("OMPI_COMM_WORLD_RANK"), *log = getenv("TORTURE_LOG");
    const char *number = getenv("TORTURE_AT"), *error = getenv("TORTURE_ERROR");
    if (rank && ours && strcmp(rank, ours) != 0) return;
    action = getenv("TORTURE_DO");
    at = number && action ? atol(number) : 0;
    named = number && action ? number : "";
    chosen = error ? atol(error) : 0;
    report = log ? fopen(log, "a") : NULL;
    below = getenv("TORTURE_BELOW");
}

static void end(void) {
    kill(getpid(), SIGKILL);
    pause();
}

// The path of the open file or folder fd, or of `name` in that folder.
static const char* path_of(int fd, const char* name, char* room) {
    if (name && (*name == '/' || fd == AT_FDCWD)) return name;
    char link[64];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, room, PATH_MAX - 1);
    if (n < 0) return NULL;
    snprintf(room + n, PATH_MAX - (size_t)n, "%s%s", name ? "/" : "", name ? name : "");
    return room;
}

// Counts an operation, and returns whether it proceeds. It can fail with one of `errors` (0 ends them).
static Turn turn(const char* name, const char* path, const int* errors) {
    char whole[2 * PATH_MAX] = "";
    if (!below || !path) return GO;
    int before = errno, known = 0;
    if (*path != '/' && getcwd(whole, PATH_MAX)) strcat(whole, "/");
    strcat(whole, path);
    size_t n = strlen(below);
    errno = before;
    if (strncmp(whole, below, n) != 0 || (whole[n] && whole[n] != '/')) return GO;
    long number = atomic_fetch_add(&count, 1) + 1;
    while (errors[known]) known++;
    int meant = number == at || strcmp(name, named) == 0;
    int error = errors[chosen % known], fails = meant && strcmp(action, "fail") == 0;
    if (report) dprintf(fileno(report), "%ld %s %s%s\n", number, name, whole + n, fails ? " FAILED" : "");
    errno = fails ? error : before;
    if (!meant) return GO;
    if (strcmp(action, "kill") == 0) end();
    if (strcmp(action, "stop") == 0) kill(getpid(), SIGSTOP);
    if (strcmp(action, "slow") == 0) sleep((unsigned)chosen);
    return fails ? FAIL : strcmp(action, "half") == 0 ? HALF : GO;
}

// clang-format off
#define ERRORS(...) ((const int[]){__VA_ARGS__, 0})
#define READING ERRORS(EIO, ESTALE)
#define OPENING ERRORS(EIO, ESTALE, EMFILE, EINTR, EACCES)
#define WRITING ERRORS(ENOSPC, EIO, EDQUOT, EINTR)
#define FLUSHING ERRORS(EIO, ENOSPC, EDQUOT)
#define NAMING ERRORS(EIO, ESTALE, EDQUOT, ENOSPC)

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
// A close that fails has still closed the file.
#define WRAP(type, name, parameters, arguments, path, errors, bad)                              \
    type name parameters {                                                                      \
        char room[PATH_MAX];                                                                    \
        (void)room;                                                                             \
        Turn t = turn(#name, path, errors);                                                     \
        int why = errno;                                                                        \
        type result = t != FAIL || strstr(#name, "close") ? REAL(name) arguments : bad;         \
        if (t == HALF) end();                                                                   \
        if (t == FAIL) errno = why;                                                             \
        return t == FAIL ? bad : result;                                                        \
    }
#define FD path_of(fd, NULL, room)
#define AT path_of(fd, path, room)
#define OF(file) path_of(fileno(file), NULL, room)
#define SOME (t == GO ? n : (n + 1) / 2)
#define MAKING flags & O_CREAT ? ERRORS(ENOSPC, EDQUOT, EIO, EMFILE, EINTR) : OPENING

WRAP(int, open, (const char* path, int flags, mode_t mode), (path, flags, mode), path, MAKING, -1)
WRAP(int, openat, (int fd, const char* path, int flags, mode_t mode), (fd, path, flags, mode), AT, MAKING, -1)
WRAP(DIR*, opendir, (const char* path), (path), path, OPENING, NULL)
WRAP(DIR*, fdopendir, (int fd), (fd), FD, OPENING, NULL)
WRAP(struct dirent*, readdir, (DIR* folder), (folder), path_of(dirfd(folder), NULL, room), READING, NULL)
WRAP(ssize_t, read, (int fd, void* to, size_t n), (fd, to, n), FD, ERRORS(EIO, ESTALE, EINTR), -1)
WRAP(ssize_t, pread, (int fd, void* to, size_t n, off_t from), (fd, to, n, from), FD, READING, -1)
WRAP(ssize_t, write, (int fd, const void* from, size_t n), (fd, from, SOME), FD, WRITING, -1)
WRAP(ssize_t, pwrite, (int fd, const void* from, size_t n, off_t to), (fd, from, SOME, to), FD, WRITING, -1)
WRAP(int, access, (const char* path, int mode), (path, mode), path, READING, -1)
WRAP(int, stat, (const char* restrict path, struct stat* restrict to), (path, to), path, READING, -1)
WRAP(int, lstat, (const char* restrict path, struct stat* restrict to), (path, to), path, READING, -1)
WRAP(int, fstat, (int fd, struct stat* to), (fd, to), FD, ERRORS(EIO), -1)  // ESTALE: the file is gone, not this call
WRAP(int, fcntl, (int fd, int how, void* lock), (fd, how, lock), FD, ERRORS(ENOLCK), -1)
WRAP(int, fallocate, (int fd, int how, off_t from, off_t n), (fd, how, from, n), FD, ERRORS(ENOSPC, EDQUOT, EOPNOTSUPP), -1)
WRAP(int, fsync, (int fd), (fd), FD, ERRORS(EIO, ENOSPC, EDQUOT, EINVAL, ENOSYS, EOPNOTSUPP), -1)
WRAP(int, close, (int fd), (fd), FD, FLUSHING, -1)
WRAP(int, fclose, (FILE* file), (file), OF(file), WRITING, EOF)
WRAP(int, rename, (const char* from, const char* path), (from, path), path, NAMING, -1)
WRAP(int, unlink, (const char* path), (path), path, NAMING, -1)
WRAP(int, unlinkat, (int fd, const char* path, int flags), (fd, path, flags), AT, NAMING, -1)
WRAP(int, mkdir, (const char* path, mode_t mode), (path, mode), path, NAMING, -1)
WRAP(int, rmdir, (const char* path), (path), path, NAMING, -1)
// clang-format on

int fflush(FILE* file) {
    char room[PATH_MAX];
    size_t n = file ? __fpending(file) : 0;
    Turn t = n ? turn("fflush", OF(file), WRITING) : GO;
    if (t == HALF) {
        syscall(SYS_write, fileno(file), file->_IO_write_base, n / 2);
        end();
    }
    return t == FAIL ? EOF : REAL(fflush)(file);
}
