// Collectives through NCCL. An event follows each collective, so that the watchdog (parallel/watch.h) can report the
// one that hangs.
//
// Determinism: NCCL sums in the order of its rings and trees, which follow from the machines' layout. Sums inside the
// switch (NVLS) promise no order and stay off.
//
// Several communicators at once could deadlock: their kernels could start in different orders on different GPUs, and
// block each other. NCCL_LAUNCH_ORDER_IMPLICIT makes them start in the order of the calls, which is the same on every
// rank. One communicator that is used from two streams keeps the order of the calls by itself.
#include <nccl.h>
#include <nccl_device.h>
#include <pthread.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda.cuh"
#include "parallel/comm.h"
#include "parallel/watch.h"

#define NCCL_CHECK(call, comm)                                                                                         \
    do {                                                                                                               \
        ncclResult_t result_ = (call);                                                                                 \
        if (result_ != ncclSuccess) nccl_failed(result_, comm, #call, __FILE__, __LINE__);                             \
    } while (0)

// Ends the run with NCCL's reason and the place of the call.
NORETURN static void nccl_failed(ncclResult_t result, ncclComm_t comm, const char* call, const char* file, int line) {
    die(EXIT_FAILED,
        "%s:%d: %s: %s: %s; if another rank failed before, its message says more, else set NCCL_DEBUG=WARN", file, line,
        call, ncclGetErrorString(result), ncclGetLastError(comm));
}

enum { ALL_GATHER, REDUCE_SCATTER, SUM, EXCHANGE, KINDS };

// A queued collective: the event after it, and its number among the collectives of all communicators.
typedef struct Queued {
    cudaEvent_t event;
    const char* what;
    int64_t number;
} Queued;
enum { RING = 256 };  // collectives of one communicator in flight; with more the host waits

// A communicator. Its ring of events shows the watchdog which collectives are pending.
struct Comm {
    ncclComm_t nccl;  // NULL: a group of one
    int count, index, device;
    char what[KINDS][64];
    Queued ring[RING];
    int64_t first, end;  // ring[i % RING] for i from first to end - 1 are in flight
    Comm* next;
    // Symmetric memory (comm_window).
    ncclDevComm* device_side;
    ncclWindow_t window;
    char* window_memory;
    size_t window_bytes;
};

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

// Adds the collective that was just queued on the stream. If the ring is full, the host waits for the oldest one. It
// does so without the lock, so that the watchdog can report the one that hangs.
static void add_to_queue(Comm* c, int kind, Ctx* ctx) {
    pthread_mutex_lock(&lock);
    forget_done(c);
    while (c->end - c->first == RING) {
        cudaEvent_t oldest = c->ring[c->first % RING].event;
        pthread_mutex_unlock(&lock);
        CUDA_CHECK(cudaEventSynchronize(oldest));
        pthread_mutex_lock(&lock);
        forget_done(c);
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
        if (c->device_side) NCCL_CHECK(ncclDevCommDestroy(c->nccl, c->device_side), c->nccl);
        free(c->device_side);
        NCCL_CHECK(ncclCommDestroy(c->nccl), NULL);
        watch_end();
        for (int i = 0; i < RING; i++) CUDA_CHECK(cudaEventDestroy(c->ring[i].event));
        if (!comms) ctx_destroy(copies), event_destroy(given), event_destroy(copied);
    }
    free(c);
}

// --- All-to-all by symmetric memory: the GPUs of an NVLink domain store into each other's memory ---
//
// A kernel of PUSH_BLOCKS thread blocks copies the rows; the other SMs stay free for the work that overlaps. Each block
// has two barriers with the blocks of the same number on the other GPUs. The first: received rows may overwrite rows
// that a rank still reads. The second: then all rows have arrived. (NCCL user guide, "Device-Initiated Communication":
// LSA.)

enum { PUSH_BLOCKS = 16, PUSH_THREADS = 512 };

// Arguments of the kernel. The row arrays are device memory, (ranks) each.
struct Push {
    struct {
        size_t recv;  // offset in the symmetric memory
        const char* send;
        size_t row_bytes;
    } buffer[EXCHANGE_BUFFERS];
    int buffers, ranks, own;
    const int64_t *send_start, *send_rows, *there_start;
};

// to = from, by all threads of the grid. T is as wide as both addresses and the size allow.
template <typename T>
static __device__ __forceinline__ void copy_by_grid(char* to, const char* from, size_t bytes) {
    enum { AT_ONCE = 4 };
    // Each thread issues AT_ONCE loads before its first store, so that their latencies overlap.
    const size_t n = bytes / sizeof(T), threads = PUSH_BLOCKS * PUSH_THREADS;
    for (size_t i = blockIdx.x * (size_t)PUSH_THREADS + threadIdx.x; i < n; i += AT_ONCE * threads) {
        T x[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (i + j * threads < n) x[j] = ((const T*)from)[i + j * threads];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (i + j * threads < n) ((T*)to)[i + j * threads] = x[j];
    }
}

// Stores this rank's rows into the memory of all ranks, its own included.
static __global__ void __launch_bounds__(PUSH_THREADS)
    push_kernel(const Push p, const __grid_constant__ ncclDevComm comm, ncclWindow_t window) {
    ncclLsaBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), comm, ncclTeamTagLsa(), blockIdx.x);
    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);
    for (int step = 0; step < p.ranks; step++) {
        const int to = (p.own + step) % p.ranks;  // each rank begins with a different one
        for (int b = 0; b < p.buffers; b++) {
            const size_t bytes = p.buffer[b].row_bytes, all = (size_t)p.send_rows[to] * bytes;
            const char* from = p.buffer[b].send + (size_t)p.send_start[to] * bytes;
            char* there = (char*)ncclGetLsaPointer(window, p.buffer[b].recv + (size_t)p.there_start[to] * bytes, to);
            if (((uintptr_t)from | (uintptr_t)there | all) % 16 == 0)
                copy_by_grid<uint4>(there, from, all);
            else
                copy_by_grid<uint32_t>(there, from, all);
        }
    }
    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);
}

// Queues the all-to-all by symmetric memory. Every recv must be in the window.
static void push(Comm* c, const ExchangeBuffer* buffers, int count, ExchangeRows rows, Ctx* ctx) {
    Push p = {};
    ASSERT(c->window && count <= EXCHANGE_BUFFERS);
    for (int b = 0; b < count; b++) {
        p.buffer[b].recv = (size_t)((char*)buffers[b].recv - c->window_memory);
        ASSERT(buffers[b].row_bytes % 4 == 0 && p.buffer[b].recv < c->window_bytes);
        p.buffer[b].send = (const char*)buffers[b].send;
        p.buffer[b].row_bytes = buffers[b].row_bytes;
    }
    p.buffers = count;
    p.ranks = c->count;
    p.own = c->index;
    p.send_start = rows.send_start;
    p.send_rows = rows.send_rows;
    p.there_start = rows.there_start;
    launch(push_kernel, PUSH_BLOCKS, PUSH_THREADS, 0, ctx, p, *c->device_side, c->window);
    add_to_queue(c, EXCHANGE, ctx);
}

char* comm_windows_missing(Comm* c) {
    // The device code is compiled from the header, so the library must be of the same version.
    int version;
    NCCL_CHECK(ncclGetVersion(&version), c->nccl);
    if (version != NCCL_VERSION_CODE)
        return host_format("NCCL's header is version %d, its library %d", NCCL_VERSION_CODE, version);
    ncclDevCommRequirements needs = {};  // no multicast
    needs.lsaBarrierCount = PUSH_BLOCKS;

    // A failure here is no error of the run: the caller decides whether it needs windows.
    ncclDevComm* side = (ncclDevComm*)host_alloc(sizeof(ncclDevComm));
    const ncclResult_t result = ncclDevCommCreate(c->nccl, &needs, side);
    if (result != ncclSuccess) {
        free(side);
        return host_format("NCCL: %s (NCCL_CUMEM_ENABLE=0 rules them out)", ncclGetErrorString(result));
    }
    c->device_side = side;
    if (side->lsaSize != c->count)
        return host_format("%d of the %d ranks of a group share an NVLink domain", side->lsaSize, c->count);
    return NULL;
}

void* comm_window(Comm* c, size_t bytes, const char* what) {
    const size_t size = (size_t)round_up((int64_t)bytes, NCCL_WIN_REQUIRED_ALIGNMENT);
    const ncclResult_t result = ncclMemAlloc((void**)&c->window_memory, size);
    if (result != ncclSuccess)
        die(EXIT_FAILED, "out of GPU memory: %.2f GiB for %s (NCCL: %s)", (double)bytes / 0x1p30, what,
            ncclGetErrorString(result));
    NCCL_CHECK(ncclCommWindowRegister(c->nccl, c->window_memory, size, &c->window, NCCL_WIN_COLL_SYMMETRIC), c->nccl);
    c->window_bytes = size;
    return c->window_memory;
}

void comm_window_free(Comm* c) {
    NCCL_CHECK(ncclCommWindowDeregister(c->nccl, c->window), c->nccl);
    NCCL_CHECK(ncclMemFree(c->window_memory), c->nccl);
    c->window = NULL;
}

int comm_count(const Comm* c) { return c->count; }
int comm_index(const Comm* c) { return c->index; }

void comm_all_gather(Comm* c, void* all, const void* mine, size_t bytes, Ctx* ctx) {
    if (c->nccl) {
        NCCL_CHECK(ncclAllGather(mine, all, bytes, ncclInt8, c->nccl, ctx->stream), c->nccl);
        add_to_queue(c, ALL_GATHER, ctx);
    } else if (mine != all)
        device_copy(all, mine, bytes, ctx);
}

void comm_reduce_scatter(Comm* c, real* part, real* all, int64_t n, Ctx* ctx) {
    if (c->nccl) {
        NCCL_CHECK(ncclReduceScatter(all, part, (size_t)n, ncclFloat, ncclSum, c->nccl, ctx->stream), c->nccl);
        add_to_queue(c, REDUCE_SCATTER, ctx);
    } else if (part != all)
        device_copy(part, all, (size_t)n * sizeof(real), ctx);
}

void comm_all_reduce(Comm* c, void* data, int64_t n, Reduction reduction, Ctx* ctx) {
    static const ncclDataType_t types[] = {ncclFloat, ncclDouble, ncclInt64, ncclFloat};  // by Reduction
    if (!c->nccl) return;
    const ncclRedOp_t op = reduction == MAX_REAL ? ncclMax : ncclSum;
    NCCL_CHECK(ncclAllReduce(data, data, (size_t)n, types[reduction], op, c->nccl, ctx->stream), c->nccl);
    add_to_queue(c, SUM, ctx);
}

void comm_exchange(Comm* c, const ExchangeBuffer* buffers, int buffer_count, ExchangeRows rows, Ctx* ctx) {
    if (rows.there_start) return push(c, buffers, buffer_count, rows, ctx);

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
    add_to_queue(c, EXCHANGE, ctx);
}
