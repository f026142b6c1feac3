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
// An alarm for the start: this process ends if watch_start is not called within `seconds`. `what` names the start in
// the message. seconds 0 removes the alarm.
void watch_alarm(double seconds, const char* what);
// Ends this rank's watchdog. Rank 0 waits here for the other ranks to stop theirs, within the limit of any wait.
void watch_stop(void);

// Call this when the first step is done. Messages before it add that the start may need a longer limit.
void watch_settled(void);

// Call these around every wait of the host for other ranks. `what` names the wait ("dispatch", "all-gather"). A wait
// inside another wait counts as the outer wait. Without watch_start these calls do nothing. Only the thread that called
// watch_start is watched: waits of other threads do not count.
void watch_begin(const char* what);
void watch_end(void);
// A helper is a thread that every rank has, for which the watched thread may have to wait (a save). A helper first
// calls watch_helper. watch_join joins the helper, and meanwhile the helper's waits count as the rank's waits named
// `what`. The limit applies to each wait. A rank whose helper does not wait for other ranks is at work.
void watch_helper(void);
void watch_join(pthread_t helper, const char* what);

// For waits of the device, which the host does not see: the watchdog's thread calls the probe a few times a second,
// until another watch_probe returns. watch_probe(NULL) removes the probe.
//
// A probe returns the number of collectives done so far. The probe sets *pending to the name of the oldest collective
// that is queued and not done; NULL: none. The name must stay valid as long as the probe. A probe may die() on errors.
typedef int64_t (*WatchProbe)(const char** pending);
void watch_probe(WatchProbe probe);
