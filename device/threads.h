// The limits of OpenMP's threads.
#pragma once

// Call it before the first parallel region. Ends the run if OMP_NUM_THREADS exceeds the maximum, or if threads
// cannot be created. Otherwise libgomp would end it by a signal, or without a message to the other ranks.
void threads_check(void);
