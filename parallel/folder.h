// The folder of a run, --out: created if needed, and locked, so that two runs cannot use it at once by mistake.
#pragma once

#include "device/files.h"

// The folder and its lock, from folder_open to folder_close.
typedef struct Folder {
    Path path, lock_path;
    int fd;    // descriptor of the folder; -1: it cannot be read
    int lock;  // descriptor of the lock file while it is locked; -1: no lock
} Folder;

// Makes `out`, locks it, and checks its contents: a folder that has a run is accepted only with `resume`. On errors
// ends the run with a message that names the folder and the reason. If locks do not work there is only a warning.
Folder folder_open(const char* out, int resume);
// Ends the run if the folder is not the one that folder_open locked: it, or its lock, was removed, renamed or replaced.
// Another run may be in it then. Called before anything in it is written, replaced or removed.
void folder_check(const Folder* folder);
void folder_close(const Folder* folder);
