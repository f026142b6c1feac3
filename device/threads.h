// How many threads OpenMP may start.
#ifndef DEVICE_THREADS_H
#define DEVICE_THREADS_H

#include "device/types.h"

BEGIN_C

// Before the first parallel region: ends the run if OMP_NUM_THREADS asks for more threads than are allowed, or if the
// threads cannot be had; libgomp would end it by a signal, or without a word to the other ranks.
void threads_check(void);

END_C

#endif
