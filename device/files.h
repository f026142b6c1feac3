// Folders and whole files on the host, with errors that name the path.
#ifndef DEVICE_FILES_H
#define DEVICE_FILES_H

#include "device/types.h"

BEGIN_C

// Makes `path` and what is missing above it. 0, or -1 with errno set (ENOTDIR where a file is in the way).
int make_folders(const char* path);
// Removes a folder and the files in it (no folders inside), or a file. Missing is fine.
void remove_folder(const char* path);
// Flushes what was written to a folder's entries to the disk. 0, or -1 with errno set.
int sync_folder(const char* path);
// The whole file with a NUL behind it, in fresh memory; NULL with errno set. *size may be NULL.
char* read_file(const char* path, size_t* size);

END_C

#endif
