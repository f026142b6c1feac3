// How many threads OpenMP may start, and threads of our own.
#ifndef DEVICE_THREADS_H
#define DEVICE_THREADS_H

#include <pthread.h>

#include "device/types.h"

BEGIN_C

// Before the first parallel region: ends the run if OMP_NUM_THREADS asks for more threads than are allowed, or if the
// threads cannot be had; libgomp would end it by a signal, or without a word to the other ranks.
void threads_check(void);

// pthread_create, with all signals blocked in the new thread: they are the main thread's, which saves on SIGTERM.
int thread_start(pthread_t* thread, void* (*work)(void*), void* argument);

END_C

#endif
