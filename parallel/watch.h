// The time limit of collectives. A rank that waits for others says so; a thread of every rank looks on. Ranks tell rank
// 0 once a second how far they are, so that when one stands still longer than the limit, the message can name the rank
// that the others wait for and what they wait in. Rank 0 itself is watched by the others. The run then ends on every
// rank, within some seconds of the limit.
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

// Around everything that waits for other ranks on the host. Waits within a wait count as the outer one, which gives the
// name ("dispatch", "all-gather"). Without watch_start they do nothing. Only what the thread that called watch_start
// waits for counts as the rank's progress: other threads (a save) may wait as well, but are not watched.
void watch_begin(const char* what);
void watch_end(void);
// Another thread, which the watched one may come to wait for, has got on: a wait longer than the limit for all of its
// work is no fault. Called as often on every rank.
void watch_progress(void);

// For waits that the host does not stand in (work queued on a device): called by the thread a few times a second, from
// watch_probe until the next watch_probe, or watch_probe(NULL, NULL), returns. Returns how many collectives are done so
// far, and in *pending the name of the oldest that is queued and not done, NULL if there is none; the name must live as
// long. It may die() on errors it finds.
typedef int64_t (*WatchProbe)(void* context, const char** pending);
void watch_probe(WatchProbe probe, void* context);

END_C

#endif
