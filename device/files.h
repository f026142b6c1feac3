// Folders and whole files on the host. Every call sets errno on failure; file_error returns its message.
//
// A folder may come from another user, so no call writes or removes through a symbolic link inside it: such a name
// fails with ELOOP. Only regular files are opened: a FIFO would wait for its other end, and a device might act.
#pragma once

#include "device/check.h"

// A path by value, which needs no freeing. A path that is too long for the system ends the run.
typedef struct Path {
    char text[4096];
} Path;
Path path_of(const char* format, ...) PRINTF_LIKE(1, 2);

// Creates the folder `path` and all missing parents. 0, or -1 (ENOTDIR if a file is in the way).
int make_folders(const char* path);
// Removes a file, or a folder with its contents. Links inside the folder are removed, but not their targets. A missing
// path is no error. 0, or -1: ELOOP if `path` itself is a link.
int remove_tree(const char* path);
// True if `path` itself is a symbolic link, with or without a target. False on an error, such as a missing path.
bool is_link(const char* path);
// Whether `path` still names the file or folder that fd has open. True also after an error, except for a missing name
// and a closed descriptor.
bool is_open_as(int fd, const char* path);
// Flushes an open file or folder to the disk. A file system that cannot flush (EINVAL, ENOSYS, EOPNOTSUPP) gives 0,
// with one warning a run. 0, or -1.
int sync_file(int fd, const char* path);
// Flushes a folder's entries to the disk. 0, or -1.
int sync_folder(const char* path);

// Opens a regular file for reading. Returns a descriptor, or -1: EISDIR, or ENXIO for anything else.
int open_file(const char* path);
// Makes a new file of these bytes and flushes it to the disk. A file of that name is replaced; its other hard links
// keep the old contents. Returns a descriptor that appends, or -1: ELOOP if `path` is a link.
int new_file(const char* path, const void* data, size_t bytes);
// Writes all `bytes` bytes, also where the system takes only a part at a time. 0, or -1.
int write_all(int fd, const void* data, size_t bytes);
// Reads up to `bytes` bytes from `offset` on; fewer only at the end of the file. Returns the number, or -1.
int64_t read_at(int fd, void* out, int64_t bytes, int64_t offset);
// Reads exactly `bytes` bytes. 0, or -1: EIO if the file ends earlier.
int read_all_at(int fd, void* out, int64_t bytes, int64_t offset);
// Reads the whole file of at most `limit` bytes, newly allocated, with a NUL after the last byte. NULL on error: EFBIG
// if the file is longer. `size` may be NULL.
char* read_file(const char* path, size_t limit, size_t* size);

// Takes an exclusive lock on `path`, which also excludes processes of other machines. The lock ends with this process
// or with unlock_file, which removes the file. Returns a descriptor, or -1: EAGAIN if another process has the lock,
// whose name is then in the file. A file that is there and empty is locked, and never written or removed. A file with a
// text that is no process's name is refused (EEXIST). On a file system without locks, a warning is printed and the file
// is made without a lock.
int lock_file(const char* path);
void unlock_file(const char* path, int fd);

// strerror, with messages of our own for the refusals above.
const char* file_error(int why);
