// What tests of several ranks share. Each runs on all ranks of mpirun, and alone where there is none; it fails if a
// CHECK fails on any rank.
#ifndef TESTS_RANKS_H
#define TESTS_RANKS_H

#include <unistd.h>

#include "parallel/ranks.h"
#include "parallel/watch.h"
#include "tests/test.h"

static Ranks* world;
static int ranks, rank;

// The lines of failed CHECKs show on every rank: on stderr where stdout goes nowhere.
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
