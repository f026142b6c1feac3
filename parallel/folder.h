// The folder of a run, --out: made, taken by one run at a time, and never taken from another run by mistake.
#ifndef PARALLEL_FOLDER_H
#define PARALLEL_FOLDER_H

#include "device/files.h"

BEGIN_C

typedef struct Folder {
    Path lock_path;
    int lock;  // descriptor, while this process has the folder for itself; -1 without
} Folder;

// Makes `out`, locks it, and looks what is in it: only with `resume` may a run go on in a folder that holds one. Ends
// the run, naming the folder and the reason, where that cannot be. Where locks do not work there is a warning.
Folder folder_open(const char* out, int resume);
void folder_close(const Folder* folder);

END_C

#endif
