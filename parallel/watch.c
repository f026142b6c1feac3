// The watchdog's thread on every rank measures how long its rank has been in one wait, and reports it to rank 0. There
// are two cases:
//
//   A rank waits longer than the limit. Rank 0 ends the run, and its message names the ranks at fault. These are the
//   first of the following that exist:
//     ranks that sent no note for SILENCE seconds
//     ranks that do not wait
//     ranks that have done the fewest waits
//     ranks in another wait
//
//   A rank waits even longer, because rank 0 has not ended the run. Then the rank ends the run, and names rank 0.
#include "parallel/watch.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "device/check.h"
#include "parallel/launch.h"

static const double TURN = 0.05;  // seconds between two turns of the thread
static const double REPORT = 1;   // seconds between two notes to rank 0
// Seconds without a note after which a rank counts as silent. Rank 0 waits this long beyond the limit, to find the
// silent ranks. The others wait this long once more before they end the run themselves.
static const double SILENCE = 3;
enum { NAME = 64 };

typedef struct Progress {  // a note to rank 0
    int64_t done;          // waits and collectives so far
    double waited;         // seconds in the present wait
    double silent;         // on rank 0: seconds since this note
    char what[NAME];       // "": it does not wait
    char host[NAME];
    int32_t stopped;  // 1: the last note of its rank
} Progress;

// The waits of a thread.
typedef struct Waits {
    int depth;  // of nested waits
    const char* what;
    int64_t done;
} Waits;

// The watched thread, its helper, and their present waits.
static __thread Waits* waits;                             // those of this thread; NULL: it is not watched
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  // of `watched`, which all these threads use
static struct {
    int stopping;  // atomic
    Waits main, helper;
    const char* joins;  // not NULL: the watched thread waits for its helper
} watched;

// The device's waits.
static pthread_mutex_t probing = PTHREAD_MUTEX_INITIALIZER;  // locked while the probe is called
static WatchProbe device_probe;

// The watchdog's thread, and its record of the ranks.
static struct {
    pthread_t thread;
    Ranks* group;
    double limit;
    volatile int settled;
    Progress* ranks;  // rank 0: the latest note of each rank; elsewhere only this rank's entry and all hosts are used
    double awake;     // rank 0: seconds since the thread last lost a second or more
} watcher;

// Seconds since the last call, 1 at most: while this process is stopped, nothing counts as waiting.
static double elapsed(double* last) {
    double now = host_seconds(), seconds = now - *last;
    *last = now;
    return seconds < 1 ? seconds : 1;
}

// Updates this rank's entry, `seconds` after the last update. It is still the same wait if the name is the same and no
// other wait was done since.
static void measure(Progress* mine, double seconds) {
    // The two locks of this file are never held together, so the threads cannot block each other.
    Progress now = *mine;
    now.done = 0;
    *now.what = 0;

    // The device's pending collective, or the host's own wait if there is one.
    const char* pending = NULL;
    pthread_mutex_lock(&probing);
    if (device_probe) now.done = device_probe(&pending);
    if (pending) strncpy(now.what, pending, NAME - 1);
    pthread_mutex_unlock(&probing);
    pthread_mutex_lock(&lock);
    now.done += watched.main.done + (watched.joins ? watched.helper.done : 0);
    if (watched.main.depth) strncpy(now.what, watched.main.what, NAME - 1);
    if (watched.joins) strncpy(now.what, watched.helper.depth ? watched.joins : "", NAME - 1);
    pthread_mutex_unlock(&lock);

    // Still the same wait, or a new one that begins at 0 seconds.
    int stands_still = *now.what && now.done == mine->done && strcmp(now.what, mine->what) == 0;
    now.waited = stands_still ? mine->waited + seconds : 0;
    *mine = now;
}

// An addition to messages before the first step has ended, "" later.
static const char* hint(void) {
    return watcher.settled
               ? ""
               : "; the start and the first step, which load kernels and connect the ranks, take longest: a "
                 "larger --timeout may be all that is missing";
}

// The wait of the most ranks; of equal ones the longest.
static const Progress* common_wait(int count) {
    const Progress *ranks = watcher.ranks, *common = ranks;
    int most = 0;
    for (int i = 0; i < count; i++) {
        int same = 0;
        for (int j = 0; j < count && *ranks[i].what; j++) same += strcmp(ranks[i].what, ranks[j].what) == 0;
        if (same > most || (same == most && ranks[i].waited > common->waited)) {
            most = same;
            common = &ranks[i];
        }
    }
    return common;
}

// Reasons why a rank is at fault, in the order in which they are tried.
typedef enum Fault { UNHEARD, AT_WORK, BEHIND, ELSEWHERE, FAULTS } Fault;
// Whether rank i is at fault for this reason, given the common wait and the least number of waits done.
static int at_fault(Fault fault, int i, const Progress* wait, int64_t least) {
    const Progress* p = &watcher.ranks[i];
    if (fault == UNHEARD) return !p->stopped && p->silent > SILENCE;
    if (fault == AT_WORK) return !*p->what;
    if (fault == BEHIND) return p->done == least && least < wait->done;
    return strcmp(p->what, wait->what) != 0;
}

// Ends the run if a rank waits too long.
static void judge(void) {
    int count = ranks_count(watcher.group), too_long = 0, late = -1, lates = 0, waiting = 0, fault = -1;
    int64_t least = watcher.ranks[0].done;

    // Whether a rank waits too long, and the least number of waits done.
    for (int i = 0; i < count; i++) {
        too_long |= watcher.ranks[i].waited > watcher.limit + SILENCE;
        if (watcher.ranks[i].done < least) least = watcher.ranks[i].done;
    }
    if (!too_long) return;

    // The first of the reasons for which some rank is at fault; `late` is the lowest such rank.
    const Progress* wait = common_wait(count);
    while (!lates && ++fault < FAULTS)
        for (int i = count - 1; i >= 0; i--)
            if (at_fault((Fault)fault, i, wait, least)) {
                late = i;
                lates++;
            }
    if (!lates)
        die(EXIT_FAILED,
            "all %d ranks have waited for %.0f s in '%s': the network or a GPU hangs; --timeout %g is the limit%s",
            count, wait->waited, wait->what, watcher.limit, hint());

    // One message with the rank, the wait and the reason.
    for (int i = 0; i < count; i++) waiting += *watcher.ranks[i].what && !at_fault((Fault)fault, i, wait, least);
    char* more = lates > 1 ? host_format(" and %d more", lates - 1) : host_strdup("");
    char* why = fault == UNHEARD   ? host_format("stopped, or its machine hangs (no sign of it for %.0f s)",
                                                 watcher.ranks[late].silent)
                : fault == AT_WORK ? host_strdup("its own work or its disk hangs, or takes too long")
                                   : host_format("it waits in '%s'", watcher.ranks[late].what);
    die(EXIT_FAILED,
        "rank %d (%s)%s holds up '%s', where %d of %d ranks have waited for %.0f s: %s; --timeout %g is the limit%s",
        late, watcher.ranks[late].host, more, wait->what, waiting, count, wait->waited, why, watcher.limit, hint());
}

// A turn of rank 0: reads the notes and judges. Returns 1 once every other rank has stopped.
static int collect(double seconds) {
    int count = ranks_count(watcher.group), from, stopped = 0;
    Progress note;
    while ((from = ranks_poll(watcher.group, &note, sizeof(note))) >= 0) watcher.ranks[from] = note;

    // A rank 0 that was stopped (SIGSTOP) has an old record of the notes, and may have been continued only to be
    // killed. So rank 0 judges only after it has been awake for SILENCE seconds.
    watcher.awake = seconds < 1 ? watcher.awake + seconds : 0;
    if (watcher.awake > SILENCE) judge();
    for (int i = 1; i < count; i++) {
        watcher.ranks[i].silent += seconds;
        stopped += watcher.ranks[i].stopped;
    }
    return stopped == count - 1;
}

// The watchdog's thread: turns until the run stops.
static void* look_on(void* unused) {
    int index = ranks_index(watcher.group);
    Progress* mine = &watcher.ranks[index];
    double until_report = 0, last = host_seconds();
    // Time counts by the clock, not by turns: a turn may take longer than its sleep.
    const struct timespec turn = {0, (long)(TURN * 1e9)};
    for (;;) {
        // This rank's own state.
        nanosleep(&turn, NULL);
        double seconds = elapsed(&last);
        measure(mine, seconds);
        int stopping = __atomic_load_n(&watched.stopping, __ATOMIC_SEQ_CST);

        // Rank 0 collects the notes and judges.
        if (index == 0) {
            int all_stopped = collect(seconds);
            if (stopping && all_stopped) return NULL;
            continue;
        }

        // The others watch rank 0. Their limits are staggered, so that the first can end the others.
        int turn_to_speak = index < 10 ? index : 10;
        if (mine->waited > watcher.limit + 2 * SILENCE + turn_to_speak)
            die(EXIT_FAILED,
                "rank 0 (%s) holds up '%s', where this rank has waited for %.0f s: stopped, or its machine or network "
                "hangs; --timeout %g is the limit%s",
                watcher.ranks[0].host, mine->what, mine->waited, watcher.limit, hint());

        // They send their notes. The last one has `stopped` set.
        until_report -= seconds;
        if (!stopping && until_report > 0) continue;
        mine->stopped = stopping;
        if (ranks_post(watcher.group, mine, sizeof(*mine)) && stopping) return NULL;
        until_report = REPORT;
    }
}

void watch_start(Ranks* world, double seconds) {
    int count = ranks_count(world);
    if (count == 1) return;
    Progress mine = {.done = 0};
    gethostname(mine.host, NAME - 1);

    // Entries for all ranks, on every rank.
    watcher.ranks = (Progress*)host_alloc((size_t)count * sizeof(Progress));
    watcher.limit = seconds;
    watcher.awake = 0;
    watcher.group = ranks_split(world, 0);
    ranks_all_gather(watcher.group, watcher.ranks, &mine, sizeof(mine));

    // The calling thread is the watched one.
    memset(&watched, 0, sizeof(watched));
    waits = &watched.main;
    int error = pthread_create(&watcher.thread, NULL, look_on, NULL);
    if (error) die(EXIT_FAILED, "cannot start the thread that watches the ranks: %s", strerror(error));
    watch_alarm(0, "");
}

void watch_settled(void) { watcher.settled = 1; }

// The last message of a process that hangs. It must take no memory and no lock.
static char last_words[512];
static void too_late(int signal_number) {
    ssize_t written = write(STDERR_FILENO, last_words, strlen(last_words));
    (void)written;
    _Exit(EXIT_FAILED);
}

// Alarms are staggered over the ranks, so that the first can end the others.
void watch_alarm(double seconds, const char* what) {
    const int index = launch_index();
    char host[NAME] = "";
    alarm(0);
    if (seconds == 0) return;
    gethostname(host, NAME - 1);
    snprintf(last_words, sizeof(last_words), "train_moe: error: rank %d (%s): %s; --timeout %g is the limit\n", index,
             host, what, seconds);
    signal(SIGALRM, too_late);
    alarm((unsigned)(seconds + 2 * SILENCE) + 3 * (unsigned)(index < 10 ? index : 10));
}

void watch_stop(void) {
    if (!waits) return;
    watch_begin("the end of the run");
    __atomic_store_n(&watched.stopping, 1, __ATOMIC_SEQ_CST);

    // The thread of rank 0 ends when the last notes of all others have arrived.
    pthread_join(watcher.thread, NULL);
    waits = NULL;
    ranks_free(watcher.group);
    free(watcher.ranks);

    // The end of MPI is not watched by the thread any more, but by an alarm. SIGTERM is ignored from here on: the run
    // is complete.
    signal(SIGTERM, SIG_IGN);
    watch_alarm(watcher.limit,
                "other ranks do not end, though the run is complete: one is stopped, or its machine hangs");
}

void watch_begin(const char* what) {
    pthread_mutex_lock(&lock);
    if (waits && waits->depth++ == 0) waits->what = what;
    pthread_mutex_unlock(&lock);
}

void watch_end(void) {
    pthread_mutex_lock(&lock);
    if (waits && --waits->depth == 0) waits->done++;
    pthread_mutex_unlock(&lock);
}

void watch_helper(void) { waits = &watched.helper; }

void watch_join(pthread_t helper, const char* what) {
    pthread_mutex_lock(&lock);
    watched.joins = what;
    pthread_mutex_unlock(&lock);
    pthread_join(helper, NULL);
    pthread_mutex_lock(&lock);
    watched.joins = NULL;
    pthread_mutex_unlock(&lock);
}

void watch_probe(WatchProbe probe) {
    pthread_mutex_lock(&probing);
    device_probe = probe;
    pthread_mutex_unlock(&probing);
}
