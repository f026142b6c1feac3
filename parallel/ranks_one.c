// Ranks in a build without MPI: a run is one rank. The functions do the same as ranks_mpi.c in a group of one.
#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "parallel/launch.h"
#include "parallel/ranks.h"

// A program that was started as one of several ranks is refused: it would be several runs that overwrite each other.
Ranks* ranks_start(int* argc, char*** argv) {
    if (launch_count() > 1)
        die(EXIT_USAGE, "started as one of %d ranks, but built without MPI: install Open MPI and run make again",
            launch_count());
    return (Ranks*)host_alloc(1);  // there is nothing to store
}

void ranks_end(Ranks* world) { free(world); }

// A group of one never waits, and sends only to itself.
int ranks_count(const Ranks* group) { return 1; }
int ranks_index(const Ranks* group) { return 0; }
int ranks_local(void) { return 0; }
int ranks_here(void) { return 1; }

Ranks* ranks_split(Ranks* group, int color) { return group; }
void ranks_free(Ranks* group) {}

void ranks_broadcast(Ranks* group, void* data, size_t bytes, int root) {}

void ranks_all_gather(Ranks* group, void* all, const void* mine, size_t bytes) {
    if (bytes && all != mine) memcpy(all, mine, bytes);
}

void ranks_send_receive(Ranks* group, int to, const void* send, size_t send_bytes, int from, void* recv,
                        size_t recv_bytes) {
    if (recv_bytes) memmove(recv, send, recv_bytes);
}

void ranks_barrier(Ranks* group) {}

int ranks_post(Ranks* group, const void* note, size_t bytes) { return 0; }
int ranks_poll(Ranks* group, void* note, size_t bytes) { return -1; }
