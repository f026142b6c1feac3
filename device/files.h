// Folders and whole files on the host. Every call sets errno where it fails; file_error says it in words.
//
// A folder may come from somebody else, so nothing is written or removed through a symbolic link that lies in it: such
// a name is refused with ELOOP. Only ordinary files are opened: a FIFO would wait for its other end, a device might
// act.
#ifndef DEVICE_FILES_H
#define DEVICE_FILES_H

#include <stdbool.h>

#include "device/check.h"

BEGIN_C

// A path in memory of its own, which needs no freeing. One that is longer than the system takes ends the run.
typedef struct Path {
    char text[4096];
} Path;
Path path_of(const char* format, ...) PRINTF_LIKE(1, 2);

// Makes `path` and what is missing above it. 0, or -1 (ENOTDIR where a file is in the way).
int make_folders(const char* path);
// Removes a file, or a folder and all that is in it; of a link below it the link goes, never what it points to. Missing
// is fine. 0, or -1: ELOOP where `path` itself is a link.
int remove_tree(const char* path);
bool is_link(const char* path);
// Flushes what was written to a folder's entries to the disk. 0, or -1.
int sync_folder(const char* path);

// Opens an ordinary file for reading. Descriptor, or -1: EISDIR, or ENXIO of anything else that is no file.
int open_file(const char* path);
// A fresh file for writing, in place of a file of that name (whose other names keep what it holds). Descriptor, or -1.
int create_file(const char* path);
// Reads up to `bytes` bytes from `offset` on; fewer only at the end of the file. How many, or -1.
int64_t read_at(int fd, void* out, int64_t bytes, int64_t offset);
// Exactly `bytes` bytes. 0, or -1: EIO where the file ends before.
int read_all_at(int fd, void* out, int64_t bytes, int64_t offset);
// The whole file, of `limit` bytes at most, with a NUL after it, in fresh memory; NULL: EFBIG where it is longer. *size
// may be NULL.
char* read_file(const char* path, size_t limit, size_t* size);

// Takes a lock that no other process has, of any machine where the file system knows locks; it ends with this process
// or with unlock_file, which removes the file. Descriptor, or -1: EAGAIN where another has it, whose name the file
// holds.
int lock_file(const char* path);
void unlock_file(const char* path, int fd);

// strerror, with words for what the calls above refuse.
const char* file_error(int why);

END_C

#endif
