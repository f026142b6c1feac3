// Each launcher has its own variables. mpirun's variables are read first: within a Slurm job srun may start mpirun.
#include "parallel/launch.h"

#include <stddef.h>
#include <stdlib.h>

// The first of the variables that is set; 0: none is.
static int first_set(const char* const* names, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (getenv(names[i])) return atoi(getenv(names[i]));
    return 0;
}

int launch_count(void) {
    static const char* const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    return first_set(names, sizeof(names) / sizeof(names[0]));
}

int launch_index(void) {
    static const char* const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"};
    return first_set(names, sizeof(names) / sizeof(names[0]));
}
