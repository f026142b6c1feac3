// The time limit of collectives. A rank notes when it begins to wait for others and when it ends. A thread on every
// rank reads these notes and sends them to rank 0 once a second. When a rank has waited longer than the limit, rank 0's
// thread ends the run: its message names the rank that the others wait for, and what they wait in. The other ranks'
// threads watch rank 0. So the run ends on every rank, within some seconds of the limit.
//
//   rank 1   main thread   compute | wait in "all-gather" ............................
//            its thread    note to rank 0 . note to rank 0 . note to rank 0 . note ...
//   rank 0   its thread    compares the notes: who waits, who does not, who was not heard of
#ifndef PARALLEL_WATCH_H
#define PARALLEL_WATCH_H

#include "parallel/ranks.h"

BEGIN_C

// Collective over the world. `seconds` is the limit for one wait.
void watch_start(Ranks* world, double seconds);
// Ends this rank's part. Rank 0 waits here for the others to get as far, within the limit as in any wait.
void watch_stop(void);

// The first step is done. Messages before it say that the start may need a longer limit.
void watch_settled(void);

// Around everything that waits for other ranks on the host. `what` names the wait ("dispatch", "all-gather"). A wait
// inside another counts as the outer one. Without watch_start they do nothing. Only the thread that called watch_start
// is watched: other threads (a save) may wait as well, but their waits do not count.
void watch_begin(const char* what);
void watch_end(void);
// Another thread, which the watched one may come to wait for, has done a piece of its work. All of that work together
// may take longer than the limit. Called as often on every rank.
void watch_progress(void);

// For waits of the device, which the host does not see: the thread calls the probe a few times a second, until another
// watch_probe returns (with NULL, NULL: from then on there is none). A probe returns how many collectives are done so
// far. *pending gets the name of the oldest that is queued and not done, NULL if there is none; the name must stay
// valid as long as the probe. It may die() on errors that it finds.
typedef int64_t (*WatchProbe)(void* context, const char** pending);
void watch_probe(WatchProbe probe, void* context);

END_C

#endif
