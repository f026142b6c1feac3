// The watchdog: a time limit for collectives. A rank notes when it begins to wait for others and when the wait ends. A
// thread on every rank reads these notes and sends them to rank 0 once a second. When a rank has waited longer than the
// limit, rank 0's thread ends the run. Its message names the rank that the others wait for, and their wait. The other
// ranks' threads watch rank 0. So the run ends on every rank, within some seconds of the limit.
//
//   rank 1   main thread   compute | wait in "all-gather" ............................
//            its thread    note to rank 0 . note to rank 0 . note to rank 0 . note ...
//   rank 0   its thread    compares the notes: ranks that wait, ranks that do not, ranks that sent no note
#pragma once

#include <pthread.h>

#include "parallel/ranks.h"

// Collective over the world. `seconds` is the limit for one wait.
void watch_start(Ranks* world, double seconds);
// An alarm for the start, before watch_start, which removes it: this process ends if the start takes longer than
// `seconds`. `what` is for its message. 0 removes the alarm.
void watch_alarm(double seconds, const char* what);
// Ends this rank's watchdog. Rank 0 waits here for the other ranks to stop theirs, within the limit of any wait.
void watch_stop(void);

// The first step is done. Messages before it add that the start may need a longer limit.
void watch_settled(void);

// Call these around every wait of the host for other ranks. `what` names the wait ("dispatch", "all-gather"). A wait
// inside another counts as the outer one. Without watch_start they do nothing. Only the thread that called watch_start
// is watched: waits of other threads do not count.
void watch_begin(const char* what);
void watch_end(void);
// A helper is a thread that every rank has, for which the watched one may have to wait (a save). It calls watch_helper
// first. watch_join joins it, and meanwhile the helper's waits are the rank's, by the name `what`: the limit applies to
// each, and a rank whose helper does not wait for others is at work.
void watch_helper(void);
void watch_join(pthread_t helper, const char* what);

// For waits of the device, which the host does not see: the watchdog's thread calls the probe a few times a second. It
// does so until another watch_probe returns; watch_probe(NULL) removes the probe.
//
// A probe returns the number of collectives done so far. It sets *pending to the name of the oldest one that is queued
// and not done. NULL: there is none. The name must stay valid as long as the probe. A probe may die() on errors.
typedef int64_t (*WatchProbe)(const char** pending);
void watch_probe(WatchProbe probe);
