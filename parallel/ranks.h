// The ranks of a run are processes that train one model together, one per GPU (or several on a CPU). mpirun or srun
// starts the ranks. MPI is used in parallel/ranks_mpi.c alone; parallel/ranks_one.c replaces it in a build without MPI,
// for one rank.
//
// Communication calls are collective: all ranks of the group make the same calls in the same order. Each call counts as
// a wait for the watchdog (parallel/watch.h). An error of MPI ends the run on every rank.
#pragma once

#include "device/types.h"

typedef struct Ranks Ranks;  // a group of ranks

// Starts MPI. Then die() names this rank, and ends the run on every rank, with die's exit code. Only rank 0 prints
// warnings; the other ranks' stdout is discarded. A program that was not started by mpirun or srun is one rank.
Ranks* ranks_start(int* argc, char*** argv);
// Waits for all ranks. Ends MPI; `world` is freed.
void ranks_end(Ranks* world);

int ranks_count(const Ranks* group);
int ranks_index(const Ranks* group);  // 0 .. count - 1: the index of this process in the group
int ranks_local(void);                // the index of this process on its host
int ranks_here(void);                 // the number of ranks on this host

// A group of the ranks that pass the same color, in the order of the old group. Messages of different groups are
// separate, so two threads may use two groups at the same time. ranks_free frees the group.
Ranks* ranks_split(Ranks* group, int color);
void ranks_free(Ranks* group);

// Collectives on host memory, of any size.
void ranks_broadcast(Ranks* group, void* data, size_t bytes, int root);
// All-gather. all: count * bytes, in rank order. In place if mine == all + index * bytes.
void ranks_all_gather(Ranks* group, void* all, const void* mine, size_t bytes);
// A step of an all-to-all: sends to rank `to` while it receives recv_bytes from rank `from`. `to` and `from` may be
// this rank.
void ranks_send_receive(Ranks* group, int to, const void* send, size_t send_bytes, int from, void* recv,
                        size_t recv_bytes);
void ranks_barrier(Ranks* group);  // waits for all ranks of the group

// Asynchronous notes to rank 0, of at most RANKS_NOTE bytes. The group must be used for nothing else. Not collective.
enum { RANKS_NOTE = 192 };
// Sends a note. Returns 0 if the previous note is still in flight: the new note is then not sent.
int ranks_post(Ranks* group, const void* note, size_t bytes);
// On rank 0: receives a note and returns its rank, or -1 if there is none.
int ranks_poll(Ranks* group, void* note, size_t bytes);
