// Shared by the tests of several ranks. A test runs on all ranks of mpirun, or alone without mpirun. It fails if a
// CHECK fails on any rank.
#ifndef TESTS_RANKS_H
#define TESTS_RANKS_H

#include <unistd.h>

#include "parallel/ranks.h"
#include "parallel/watch.h"
#include "tests/test.h"

static Ranks* world;
static int ranks, rank;

// Failed CHECKs are printed on every rank. All ranks but rank 0 print to stderr, because their stdout is dropped.
static inline void ranks_open(int* argc, char*** argv, double limit) {
    world = ranks_start(argc, argv);
    ranks = ranks_count(world);
    rank = ranks_index(world);
    if (rank != 0) dup2(STDERR_FILENO, STDOUT_FILENO);
    watch_start(world, limit);
}

static inline int ranks_close(void) {
    watch_stop();
    ranks_end(world);
    return rank == 0 ? test_summary() : 0;
}

#define RUN_RANKS(test)                                                                                                \
    do {                                                                                                               \
        test_failures_here = 0;                                                                                        \
        test();                                                                                                        \
        fflush(stdout);                                                                                                \
        int* failures_ = (int*)host_alloc((size_t)ranks * sizeof(int));                                                \
        ranks_all_gather(world, failures_, &test_failures_here, sizeof(int));                                          \
        for (int r_ = 0; r_ < ranks; r_++) {                                                                           \
            if (failures_[r_] && rank == 0) printf("    %d failed on rank %d\n", failures_[r_], r_);                   \
            if (r_ != rank) test_failures_here += failures_[r_];                                                       \
        }                                                                                                              \
        free(failures_);                                                                                               \
        *(test_failures_here ? &test_failed : &test_passed) += 1;                                                      \
        if (rank == 0) printf("%s %s\n", test_failures_here ? "FAIL" : "ok  ", #test);                                 \
        fflush(stdout);                                                                                                \
    } while (0)

#endif
