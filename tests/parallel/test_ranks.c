// Ranks and their messages on the host. tests/parallel/test_ranks_faults.py runs the faults at the end of this file.
// All comparisons are exact.
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include "tests/ranks.h"

// Byte `at` of the message from rank `from` to rank `to`.
static unsigned char byte_of(int from, int to, size_t at) {
    return (unsigned char)(from * 31 + to * 7 + at + at / 251);
}

static const size_t LARGE = ((size_t)40 << 20) + 13;  // messages are sent in chunks of 16 MiB

static void* nap(void* milliseconds) {
    struct timespec t = {*(int*)milliseconds / 1000, *(int*)milliseconds % 1000 * 1000000};
    nanosleep(&t, NULL);
    return NULL;
}

static void who_we_are(void) {
    int32_t* all = (int32_t*)host_alloc((size_t)ranks * 2 * sizeof(int32_t));
    int32_t mine[2] = {rank, ranks_local()};
    ranks_all_gather(world, all, mine, sizeof(mine));
    for (int r = 0; r < ranks; r++)
        CHECK(all[2 * r] == r && all[2 * r + 1] == r, "rank %d is %d, local %d", r, all[2 * r], all[2 * r + 1]);
    free(all);
}

static void broadcast_any_size(void) {
    size_t sizes[] = {0, 1, 1000, LARGE};
    for (int i = 0; i < 4; i++) {
        size_t n = sizes[i], wrong = 0;
        int root = i % ranks;
        unsigned char* data = (unsigned char*)host_alloc(n);
        if (rank == root)
            for (size_t at = 0; at < n; at++) data[at] = byte_of(root, 0, at);
        ranks_broadcast(world, data, n, root);
        for (size_t at = 0; at < n; at++) wrong += data[at] != byte_of(root, 0, at);
        CHECK(wrong == 0, "%zu bytes from rank %d: %zu are wrong", n, root, wrong);
        free(data);
    }
}

static void all_gather_any_size(void) {
    size_t sizes[] = {0, 1, 1000, LARGE};
    for (int i = 0; i < 4; i++)
        for (int in_place = 0; in_place < 2; in_place++) {
            size_t n = sizes[i], wrong = 0;
            unsigned char *all = (unsigned char*)host_alloc(n * (size_t)ranks), *apart = (unsigned char*)host_alloc(n);
            unsigned char* mine = in_place ? all + n * (size_t)rank : apart;
            for (size_t at = 0; at < n; at++) mine[at] = byte_of(rank, i, at);
            ranks_all_gather(world, all, mine, n);
            for (int r = 0; r < ranks; r++)
                for (size_t at = 0; at < n; at++) wrong += all[n * (size_t)r + at] != byte_of(r, i, at);
            CHECK(wrong == 0, "%zu bytes, in place %d: %zu are wrong", n, in_place, wrong);
            free(all);
            free(apart);
        }
}

// Rank i sends bytes(i, j) bytes to rank j. Buffers have reverse order of ranks, with gaps of 3 bytes, which must not
// change.
static void check_exchange(Ranks* group, size_t (*bytes)(int from, int to), const char* what) {
    int count = ranks_count(group), me = ranks_index(group);
    size_t* room = (size_t*)host_alloc((size_t)(4 * count) * sizeof(size_t));
    size_t *send_at = room, *send = room + count, *recv_at = room + 2 * count, *recv = room + 3 * count;
    size_t send_end = 3, recv_end = 3, wrong = 0;
    for (int i = count - 1; i >= 0; i--) {
        send_at[i] = send_end;
        send[i] = bytes(me, i);
        send_end += send[i] + 3;
        recv_at[i] = recv_end;
        recv[i] = bytes(i, me);
        recv_end += recv[i] + 3;
    }
    unsigned char *out = (unsigned char*)host_alloc(send_end), *in = (unsigned char*)host_alloc(recv_end);
    for (int i = 0; i < count; i++)
        for (size_t at = 0; at < send[i]; at++) out[send_at[i] + at] = byte_of(me, i, at);
    memset(in, 0xee, recv_end);
    for (int step = 0; step < count; step++) {
        int to = (me + step) % count, from = (me + count - step) % count;
        ranks_send_receive(group, to, out + send_at[to], send[to], from, in + recv_at[from], recv[from]);
    }
    for (int i = 0; i < count; i++) {
        for (size_t at = 0; at < recv[i]; at++) wrong += in[recv_at[i] + at] != byte_of(i, me, at);
        for (size_t at = 1; at <= 3; at++) wrong += in[recv_at[i] - at] != 0xee;
    }
    CHECK(wrong == 0, "%s: %zu bytes are wrong", what, wrong);
    free(room);
    free(out);
    free(in);
}

static size_t uneven(int from, int to) { return (size_t)(from * 1000 + to * 17); }  // rank 0 sends no bytes to itself
static size_t nothing(int from, int to) { return (void)from, (void)to, 0; }
static size_t some_nothing(int from, int to) { return from == 1 || to == 2 ? 0 : 100; }
static size_t one_way(int from, int to) { return from == 0 && to == 1 ? LARGE : 0; }
static void exchange_any_sizes(void) {
    check_exchange(world, uneven, "uneven");
    check_exchange(world, nothing, "nothing");
    check_exchange(world, some_nothing, "ranks that send or get nothing");
    check_exchange(world, one_way, "in pieces");
}

// Groups of several ranks, of one rank, and of groups.
static void groups(void) {
    Ranks *odd = ranks_split(world, rank % 2), *alone = ranks_split(world, rank),
          *inner = ranks_split(odd, rank / 2 % 2);
    CHECK(ranks_count(odd) == (ranks + 1 - rank % 2) / 2 && ranks_index(odd) == rank / 2, "%d of %d", ranks_index(odd),
          ranks_count(odd));
    CHECK(ranks_count(alone) == 1 && ranks_index(alone) == 0, "%d of %d", ranks_index(alone), ranks_count(alone));
    CHECK(ranks_index(inner) == rank / 4, "%d of %d", ranks_index(inner), ranks_count(inner));
    check_exchange(odd, uneven, "every second rank");
    check_exchange(alone, uneven, "a rank with itself");
    int32_t first = rank, *all = (int32_t*)host_alloc((size_t)ranks * sizeof(int32_t));
    ranks_broadcast(odd, &first, sizeof(first), 0);
    CHECK(first == rank % 2, "rank %d is first", first);
    ranks_all_gather(odd, all, &rank, sizeof(int32_t));
    for (int i = 0; i < ranks_count(odd); i++) CHECK(all[i] == 2 * i + rank % 2, "%d: rank %d", i, all[i]);
    ranks_broadcast(alone, &first, sizeof(first), 0);
    ranks_all_gather(alone, all, &rank, sizeof(int32_t));
    ranks_barrier(alone);
    CHECK(all[0] == rank, "alone: %d", all[0]);
    free(all);
    ranks_free(odd);
    ranks_free(alone);
    ranks_free(inner);
}

// Two threads with one group each. Their order of calls differs between ranks.
static Ranks* thread_group;
static int thread_failures;
static void many_calls(Ranks* group, int sign, int* failures) {
    int32_t* all = (int32_t*)host_alloc((size_t)ranks * sizeof(int32_t));
    for (int i = 0; i < 200; i++) {
        int32_t mine = sign * (i * 16 + rank), from_root = sign * i;
        ranks_all_gather(group, all, &mine, sizeof(mine));
        for (int r = 0; r < ranks; r++) *failures += all[r] != sign * (i * 16 + r);
        if (rank != i % ranks) from_root = 0;
        ranks_broadcast(group, &from_root, sizeof(from_root), i % ranks);
        *failures += from_root != sign * i;
    }
    free(all);
}
static void* in_thread(void* unused) {
    many_calls(thread_group, -1, &thread_failures);
    return unused;
}
static void two_threads(void) {
    pthread_t thread;
    int failures = 0, wait = rank % 2 ? 5 : 0;
    thread_group = ranks_split(world, 0);
    thread_failures = 0;
    pthread_create(&thread, NULL, in_thread, NULL);
    nap(&wait);
    many_calls(world, 1, &failures);
    pthread_join(thread, NULL);
    CHECK(failures == 0 && thread_failures == 0, "%d wrong here, %d in the thread", failures, thread_failures);
    ranks_free(thread_group);
}

static void barrier_waits(void) {
    struct timespec began, ended;
    ranks_barrier(world);
    clock_gettime(CLOCK_MONOTONIC, &began);
    int late = 200;
    if (rank == ranks - 1) nap(&late);
    ranks_barrier(world);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    double took = (double)(ended.tv_sec - began.tv_sec) + 1e-9 * (double)(ended.tv_nsec - began.tv_nsec);
    CHECK(took > 0.15, "it took %g s, and the last rank came after 0.2", took);
}

// ---- Faults, by name: each happens in a run of many barriers. ----

static void handle(int signal_number) { (void)signal_number; }
static void* dies(void* unused) {
    (void)unused;
    die(EXIT_FAILED, "the fault of a thread");
    return NULL;
}

static int fault(const char* name) {
    int moment = 20, for_ever = 3600 * 1000, late = 150 * rank;
    signal(SIGTERM, handle);  // like the program, which saves before it ends
    warn("a warning of rank %d", rank);
    fprintf(stderr, "rank %d is %d\n", rank, (int)getpid());
    for (int turn = 0;; turn++) {
        ranks_barrier(world);
        nap(&moment);
        if (turn < 10) continue;
        if (strcmp(name, "none") == 0 || strcmp(name, "last") == 0 || strcmp(name, "asked") == 0) break;
        if (strcmp(name, "one") == 0 && rank == 2) die(EXIT_USAGE, "the fault of one");
        if (strcmp(name, "all") == 0) die(EXIT_USAGE, "the fault of all");
        if (strcmp(name, "threads") == 0 && rank == 1) {
            pthread_t threads[4];
            for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, dies, NULL);
        }
        if (strcmp(name, "busy") == 0 && rank == 1) nap(&for_ever);
        if (strcmp(name, "elsewhere") == 0 && rank == 3) {
            watch_begin("another wait");
            nap(&for_ever);
        }
    }
    nap(&late);  // ranks may stop at different times
    if (strcmp(name, "none") == 0 || rank != 2) return ranks_close();
    watch_stop();
    if (strcmp(name, "last") == 0) nap(&for_ever);
    raise(SIGTERM);
    ranks_end(world);
    return 0;
}

int main(int argc, char** argv) {
    ranks_open(&argc, &argv, argc > 2 ? atof(argv[2]) : 60);
    if (argc > 1) return fault(argv[1]);
    RUN_RANKS(who_we_are);
    RUN_RANKS(broadcast_any_size);
    RUN_RANKS(all_gather_any_size);
    RUN_RANKS(exchange_any_sizes);
    RUN_RANKS(groups);
    RUN_RANKS(two_threads);
    RUN_RANKS(barrier_waits);
    return ranks_close();
}
