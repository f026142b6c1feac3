// The limits of threads and of their stacks.
#pragma once

// The first call in main. Ends the run if stacks are too small (ulimit -s, OMP_STACKSIZE, GOMP_STACKSIZE): the run
// would end in a segmentation fault or in a message of libgomp.
void threads_check_stacks(void);

// Call threads_check before the first parallel region. Ends the run if OMP_NUM_THREADS exceeds the maximum, or if
// threads cannot be created. Without this check libgomp would end the run by a signal, or without a message to the
// other ranks.
void threads_check(void);
