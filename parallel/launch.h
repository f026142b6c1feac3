// The launcher (mpirun, srun) of this process, by the variables that it sets in the environment.
#pragma once

// The number of processes that it started together; 0: no launcher is known.
int launch_count(void);
// The index of this process among them, 0 without a launcher.
int launch_index(void);
