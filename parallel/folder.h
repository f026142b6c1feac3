// The folder of a run, --out: created if needed, and locked, so that two runs cannot use it at once by mistake. A
// process has one such folder. In a process without one, as on all ranks but rank 0, folder_check and folder_close do
// nothing.
#pragma once

// Makes `out`, locks it, and checks its contents: a folder that has a run is accepted only with `resume`. On errors
// ends the run with a message that names the folder and the reason. If locks do not work there is only a warning.
void folder_open(const char* out, int resume);
// Ends the run if the lock, or its folder, was removed, renamed or replaced since folder_open: another run may use the
// folder. Called before anything in the folder is written, replaced or removed.
void folder_check(void);
void folder_close(void);  // removes the lock
