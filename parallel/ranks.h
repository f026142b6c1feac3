// The ranks of a run: processes that train one model together, one a GPU (or one of several on a CPU), started by
// mpirun or srun. parallel/ranks_mpi.c speaks MPI; parallel/ranks_one.c stands in for it where there is no MPI and
// knows one rank.
//
// A call that deals with other ranks is collective: all ranks of the group make the same calls in the same order. It
// counts as a wait (parallel/watch.h). An error of MPI ends the run on every rank.
#ifndef PARALLEL_RANKS_H
#define PARALLEL_RANKS_H

#include "device/types.h"

BEGIN_C

typedef struct Ranks Ranks;  // a group of ranks

// The first call in main. From here on die() names this rank and ends the run on every rank, with its exit code. What
// ranks other than 0 print to stdout goes nowhere, and only rank 0 prints what warn() is given. A program that was not
// started through mpirun or srun is one rank.
Ranks* ranks_start(int* argc, char*** argv);
// Waits for all ranks. Ends MPI; `world` is freed.
void ranks_end(Ranks* world);

int ranks_count(const Ranks* group);
int ranks_index(const Ranks* group);  // 0 .. count - 1: this process in the group
int ranks_local(void);                // this process among those of its host
int ranks_here(void);                 // how many those are

// A group of the ranks that give the same colour, in the order of the old one. It has messages of its own: one thread
// may use one group while another thread uses another.
Ranks* ranks_split(Ranks* group, int color);
void ranks_free(Ranks* group);

// Of host memory, in any size.
void ranks_broadcast(Ranks* group, void* data, size_t bytes, int root);
// all: count * bytes, in rank order. In place where mine == all + index * bytes.
void ranks_all_gather(Ranks* group, void* all, const void* mine, size_t bytes);
// send_bytes[i] bytes at send + send_at[i] go to rank i; what it sends here arrives at recv + recv_at[i]. Own part
// included.
void ranks_exchange(Ranks* group, void* recv, const size_t* recv_at, const size_t* recv_bytes, const void* send,
                    const size_t* send_at, const size_t* send_bytes);
void ranks_barrier(Ranks* group);

// Notes to rank 0 that nobody waits for, of at most RANKS_NOTE bytes, in a group that does nothing else. Not
// collective.
enum { RANKS_NOTE = 128 };
// 0 if the note before is still on its way: then this one is not sent.
int ranks_post(Ranks* group, const void* note, size_t bytes);
// On rank 0: the rank whose note was there, -1 if there was none.
int ranks_poll(Ranks* group, void* note, size_t bytes);

END_C

#endif
