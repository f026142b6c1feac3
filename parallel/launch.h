// The launcher (mpirun, srun) of this process, known by its environment variables.
#pragma once

// The number of processes that the launcher started together; 0: no launcher is known.
int launch_count(void);
// The index of this process among the launcher's processes; 0 without a launcher.
int launch_index(void);
