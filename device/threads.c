#include "device/threads.h"

#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "device/check.h"

enum {
    MOST = 512,       // OpenBLAS has buffers for 640 concurrent GEMMs
    STACK_KIB = 512,  // this program's frames take 100, those of libraries vary
};

void threads_check_stacks(void) {
    struct rlimit stack;
    if (getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur < STACK_KIB << 10)
        die(EXIT_FAILED, "a stack is limited to %ld KiB, and %d are needed: raise the limit (ulimit -s 8192)",
            (long)stack.rlim_cur >> 10, STACK_KIB);

    // In KiB, unless another unit follows: 1, 2^10, 2^20 or 2^30 bytes.
    static const char units[] = "bkmgBKMG";
    const char *own = getenv("OMP_STACKSIZE"), *at;
    if (!own) own = getenv("GOMP_STACKSIZE");
    long size;
    char unit = 'k';
    if (!own || sscanf(own, "%ld %c", &size, &unit) < 1 || !(at = strchr(units, unit))) return;
    if (size << 10 * ((at - units) % 4) < STACK_KIB << 10)
        die(EXIT_USAGE, "OMP_STACKSIZE or GOMP_STACKSIZE is %s; at least %dk are needed", own, STACK_KIB);
}

// A thread of the trial: waits until all have been started.
static void* wait_at(void* gate) {
    pthread_mutex_lock((pthread_mutex_t*)gate);
    pthread_mutex_unlock((pthread_mutex_t*)gate);
    return NULL;
}

void threads_check(void) {
    int threads = omp_get_max_threads(), started = 1, error = 0;  // started includes the main thread
    if (threads > MOST || threads < 1) {                          // below 1: the variable exceeds an int
        if (getenv("OMP_NUM_THREADS"))
            die(EXIT_USAGE, "OMP_NUM_THREADS asks for %s threads; it can be 1 to %d", getenv("OMP_NUM_THREADS"), MOST);
        omp_set_num_threads(threads = MOST);
    }

    // A trial: start the maximum number of OpenMP threads at once.
    pthread_t all[MOST];
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&gate);
    while (started < threads && (error = pthread_create(&all[started], NULL, wait_at, &gate)) == 0) started++;
    pthread_mutex_unlock(&gate);
    for (int i = 1; i < started; i++) pthread_join(all[i], NULL);
    if (error)
        die(EXIT_FAILED,
            "out of memory, or of threads: %d of %d could be started (%s); set OMP_NUM_THREADS to fewer, or raise the "
            "limits (ulimit -v, ulimit -u)",
            started, threads, strerror(error));
}
