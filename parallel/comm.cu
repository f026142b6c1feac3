// Collectives through NCCL. An event follows each collective, so that the watchdog (parallel/watch.h) can report the
// one that hangs.
//
// Determinism: NCCL sums in the order of its rings and trees, which follow from the machines' layout. Sums inside the
// switch (NVLS) promise no order and stay off.
//
// Several communicators at once could deadlock: their kernels could start in different orders on different GPUs, and
// block each other. NCCL_LAUNCH_ORDER_IMPLICIT makes them start in the order of the calls, which is the same on every
// rank. One communicator that is used from two streams keeps the order of the calls by itself.
#include <pthread.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "parallel/comm_nccl.cuh"
#include "parallel/watch.h"

void nccl_failed(ncclResult_t result, ncclComm_t comm, const char* call, const char* file, int line) {
    die(EXIT_FAILED,
        "%s:%d: %s: %s: %s; if another rank failed before, its message says more, else set NCCL_DEBUG=WARN", file, line,
        call, ncclGetErrorString(result), ncclGetLastError(comm));
}

// A stream for the rows that an all-to-all leaves on this rank; all communicators share it. The events order it after
// the start of the all-to-all's stream (given), and before its end (copied).
static Ctx* copies;
static Event *given, *copied;

// Shared with the watchdog's thread, under the lock.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Comm* comms;
static int64_t queued, done;

// Removes the collectives that are done from the front of the ring. The caller has the lock.
static void forget_done(Comm* c) {
    while (c->first < c->end) {
        cudaError_t error = cudaEventQuery(c->ring[c->first % RING].event);
        if (error == cudaErrorNotReady) return;
        CUDA_CHECK(error);
        c->first++;
        done++;
    }
}

// The watchdog's probe (parallel/watch.h): the number of collectives done, and the name of the oldest that is pending.
static int64_t probe(const char** pending) {
    const Queued* oldest = NULL;
    pthread_mutex_lock(&lock);
    for (Comm* c = comms; c; c = c->next) {
        CUDA_CHECK(cudaSetDevice(c->device));
        // After a network error a collective may never end, so its event cannot report the error.
        ncclResult_t result;
        NCCL_CHECK(ncclCommGetAsyncError(c->nccl, &result), c->nccl);
        if (result != ncclSuccess && result != ncclInProgress)
            nccl_failed(result, c->nccl, c->first < c->end ? c->ring[c->first % RING].what : c->what[0], __FILE__,
                        __LINE__);
        forget_done(c);
        const Queued* mine = c->first < c->end ? &c->ring[c->first % RING] : NULL;
        if (mine && (!oldest || mine->number < oldest->number)) oldest = mine;
    }
    int64_t all_done = done;
    *pending = oldest ? oldest->what : NULL;
    pthread_mutex_unlock(&lock);
    return all_done;
}

// If the ring is full, the host waits for the oldest collective. It does so without the lock, so that the watchdog can
// report the one that hangs.
void comm_queued(Comm* c, int kind, Ctx* ctx) {
    pthread_mutex_lock(&lock);
    for (forget_done(c); c->end - c->first == RING; forget_done(c)) {
        cudaEvent_t oldest = c->ring[c->first % RING].event;
        pthread_mutex_unlock(&lock);
        CUDA_CHECK(cudaEventSynchronize(oldest));
        pthread_mutex_lock(&lock);
    }
    Queued* q = &c->ring[c->end++ % RING];
    CUDA_CHECK(cudaEventRecord(q->event, ctx->stream));
    q->what = c->what[kind];
    q->number = queued++;
    pthread_mutex_unlock(&lock);
}

// NCCL connects two ranks, and allocates memory, at their first exchange: a small all-to-all before the first step.
static void connect_pairs(Comm* c, Ctx* ctx) {
    int64_t* rows = (int64_t*)host_alloc((size_t)(2 * c->count) * sizeof(int64_t));
    int64_t *start = rows, *one = rows + c->count;
    for (int i = 0; i < c->count; i++) {
        start[i] = i;
        one[i] = 1;
    }
    char* bytes = (char*)device_alloc(2 * (size_t)c->count, "connecting the ranks");
    ExchangeBuffer buffer = {bytes, bytes + c->count, 1};
    comm_exchange(c, &buffer, 1, {start, one, start, one}, ctx);
    ctx_sync(ctx);
    device_free(bytes);
    free(rows);
}

Comm* comm_create(Ranks* group, const char* name, Ctx* ctx) {
    static const char* const kinds[KINDS] = {"all-gather", "reduce-scatter", "sum", "exchange"};
    Comm* c = (Comm*)host_alloc(sizeof(Comm));
    c->count = ranks_count(group);
    c->index = ranks_index(group);
    if (c->count == 1) return c;
    ctx->transfers = true;
    CUDA_CHECK(cudaGetDevice(&c->device));
    for (int i = 0; i < KINDS; i++) snprintf(c->what[i], sizeof(c->what[i]), "%s (%s)", kinds[i], name);
    for (int i = 0; i < RING; i++) CUDA_CHECK(cudaEventCreateWithFlags(&c->ring[i].event, cudaEventDisableTiming));
    if (!comms) {
        copies = ctx_side(ctx, 0);
        given = event_create();
        copied = event_create();
    }

    // NCCL reads its settings when the first communicator is made. Settings of the user are kept.
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    setenv("NCCL_RUNTIME_CONNECT", "0", 0);  // rings and trees get their memory now, not in the first step

    // Rank 0 makes the id of the group, and the others join by it.
    ncclUniqueId id;
    if (c->index == 0) NCCL_CHECK(ncclGetUniqueId(&id), NULL);
    ranks_broadcast(group, &id, sizeof(id), 0);
    watch_begin("connecting the GPUs");
    // The number of SMs is left to NCCL, which sees the links.
    NCCL_CHECK(ncclCommInitRank(&c->nccl, c->count, id, c->index), NULL);
    watch_end();

    // From here on the watchdog sees the new communicator.
    pthread_mutex_lock(&lock);
    c->next = comms;
    comms = c;
    pthread_mutex_unlock(&lock);
    watch_probe(probe);
    connect_pairs(c, ctx);
    return c;
}

void comm_destroy(Comm* c) {
    if (c->nccl) {
        pthread_mutex_lock(&lock);
        Comm** link = &comms;
        while (*link != c) link = &(*link)->next;
        *link = c->next;
        WatchProbe others = comms ? probe : NULL;
        pthread_mutex_unlock(&lock);
        watch_probe(others);  // returns when the watchdog no longer reads this one
        watch_begin("disconnecting the GPUs");
        if (c->has_device_side) NCCL_CHECK(ncclDevCommDestroy(c->nccl, &c->device_side), c->nccl);
        NCCL_CHECK(ncclCommDestroy(c->nccl), NULL);
        watch_end();
        for (int i = 0; i < RING; i++) CUDA_CHECK(cudaEventDestroy(c->ring[i].event));
        if (!comms) ctx_destroy(copies), event_destroy(given), event_destroy(copied);
    }
    free(c);
}

int comm_count(const Comm* c) { return c->count; }
int comm_index(const Comm* c) { return c->index; }

void comm_all_gather(Comm* c, void* all, const void* mine, size_t bytes, Ctx* ctx) {
    if (c->nccl) {
        NCCL_CHECK(ncclAllGather(mine, all, bytes, ncclInt8, c->nccl, ctx->stream), c->nccl);
        comm_queued(c, ALL_GATHER, ctx);
    } else if (mine != all)
        device_copy(all, mine, bytes, ctx);
}

void comm_reduce_scatter(Comm* c, real* part, real* all, int64_t n, Ctx* ctx) {
    if (c->nccl) {
        NCCL_CHECK(ncclReduceScatter(all, part, (size_t)n, ncclFloat, ncclSum, c->nccl, ctx->stream), c->nccl);
        comm_queued(c, REDUCE_SCATTER, ctx);
    } else if (part != all)
        device_copy(part, all, (size_t)n * sizeof(real), ctx);
}

void comm_all_reduce(Comm* c, void* data, int64_t n, Reduction reduction, Ctx* ctx) {
    static const ncclDataType_t types[] = {ncclFloat, ncclDouble, ncclInt64, ncclFloat};  // by Reduction
    if (!c->nccl) return;
    const ncclRedOp_t op = reduction == MAX_REAL ? ncclMax : ncclSum;
    NCCL_CHECK(ncclAllReduce(data, data, (size_t)n, types[reduction], op, c->nccl, ctx->stream), c->nccl);
    comm_queued(c, SUM, ctx);
}

void comm_exchange(Comm* c, const ExchangeBuffer* buffers, int buffer_count, ExchangeRows rows, Ctx* ctx) {
    // Rows that stay on this rank: copies on another stream, at the same time as the sends.
    int own = c->index;
    ASSERT(rows.send_rows[own] == rows.recv_rows[own]);
    Ctx* beside = c->nccl ? copies : ctx;
    if (c->nccl) event_record(given, ctx), event_wait(given, beside);
    for (int b = 0; b < buffer_count; b++) {
        size_t bytes = buffers[b].row_bytes;
        device_copy((char*)buffers[b].recv + (size_t)rows.recv_start[own] * bytes,
                    (const char*)buffers[b].send + (size_t)rows.send_start[own] * bytes,
                    (size_t)rows.send_rows[own] * bytes, beside);
    }
    if (!c->nccl) return;
    event_record(copied, beside);

    // All sends and receives are one NCCL group, so their order does not matter and none waits for another.
    NCCL_CHECK(ncclGroupStart(), c->nccl);
    for (int step = 1; step < c->count; step++) {
        int to = (own + step) % c->count, from = (own + c->count - step) % c->count;
        for (int b = 0; b < buffer_count; b++) {
            size_t bytes = buffers[b].row_bytes;
            if (rows.send_rows[to])
                NCCL_CHECK(ncclSend((const char*)buffers[b].send + (size_t)rows.send_start[to] * bytes,
                                    (size_t)rows.send_rows[to] * bytes, ncclInt8, to, c->nccl, ctx->stream),
                           c->nccl);
            if (rows.recv_rows[from])
                NCCL_CHECK(ncclRecv((char*)buffers[b].recv + (size_t)rows.recv_start[from] * bytes,
                                    (size_t)rows.recv_rows[from] * bytes, ncclInt8, from, c->nccl, ctx->stream),
                           c->nccl);
        }
    }
    NCCL_CHECK(ncclGroupEnd(), c->nccl);

    // The all-to-all is done when the copies are done too.
    event_wait(copied, ctx);
    comm_queued(c, EXCHANGE, ctx);
}
