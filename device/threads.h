// The thread limit of OpenMP, and threads of the program's own.
#pragma once

#include <pthread.h>

#include "device/types.h"

// Call it before the first parallel region. Ends the run if OMP_NUM_THREADS exceeds the maximum, or if threads
// cannot be created. Otherwise libgomp would end it by a signal, or without a message to the other ranks.
void threads_check(void);

// pthread_create, with all signals blocked in the new thread. The main thread handles signals: it saves on SIGTERM.
int thread_start(pthread_t* thread, void* (*work)(void*), void* argument);
