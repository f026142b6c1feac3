// Collectives through MPI, with sums whose rounding does not depend on time. Reduce-scatter: every rank receives all
// ranks' values of its share of the elements, and adds them in rank order. An all-reduce is a reduce-scatter, followed
// by an all-gather of the shares:
//
//   rank 0   a0 b0 c0         a0 a1 a2         a               a b c
//   rank 1   a1 b1 c1   ->    b0 b1 b2   ->      b       ->    a b c
//   rank 2   a2 b2 c2         c0 c1 c2             c           a b c
#include "parallel/comm_windows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cpu.h"
#include "parallel/watch.h"

enum { ALL_GATHER, REDUCE_SCATTER, SUM, EXCHANGE, KINDS };

// A communicator. It has MPI messages of its own, so those of other communicators cannot be mistaken for its.
struct Comm {
    Ranks* group;
    char what[KINDS][64];  // names of waits, for the watchdog
    char* parts;           // received values that are not summed yet; grows to the largest sum
    size_t parts_room;
    void* window;
};

Comm* comm_create(Ranks* group, const char* name, Ctx* ctx) {
    static const char* const kinds[KINDS] = {"all-gather", "reduce-scatter", "sum", "exchange"};
    Comm* c = (Comm*)host_alloc(sizeof(Comm));
    c->group = ranks_split(group, 0);
    for (int i = 0; i < KINDS; i++) snprintf(c->what[i], sizeof(c->what[i]), "%s (%s)", kinds[i], name);
    return c;
}

void comm_destroy(Comm* c) {
    ranks_free(c->group);
    free(c->parts);
    free(c);
}

int comm_count(const Comm* c) { return ranks_count(c->group); }
int comm_index(const Comm* c) { return ranks_index(c->group); }

// An all-to-all has a step for each rank. In step s a rank sends to the s-th rank after it, and receives from the s-th
// before it. So not all ranks send to one at once.
static int rank_after(const Comm* c, int step) { return (comm_index(c) + step) % comm_count(c); }
static int rank_before(const Comm* c, int step) { return (comm_index(c) + comm_count(c) - step) % comm_count(c); }

static const size_t sizes[] = {sizeof(real), sizeof(double), sizeof(int64_t), sizeof(real)};  // by Reduction

// to[i] += from[i], or their maximum.
static void reduce_one(void* to, const void* from, int64_t i, Reduction reduction) {
    switch (reduction) {
        case SUM_REAL: ((real*)to)[i] += ((const real*)from)[i]; return;
        case SUM_DOUBLE: ((double*)to)[i] += ((const double*)from)[i]; return;
        case SUM_I64: ((int64_t*)to)[i] += ((const int64_t*)from)[i]; return;
        case MAX_REAL:
            if (!(((real*)to)[i] > ((const real*)from)[i])) ((real*)to)[i] = ((const real*)from)[i];
            return;
    }
}

// out = parts[0] + parts[1] + ..., or their maximum: in rank order, so the bits depend on the number of ranks alone.
static void reduce(void* out, const char* parts, int count, int64_t n, Reduction reduction) {
    const size_t bytes = (size_t)n * sizes[reduction];
    if (n) memcpy(out, parts, bytes);
    for (int r = 1; r < count; r++) {
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < n; i++) reduce_one(out, parts + (size_t)r * bytes, i, reduction);
    }
}

void comm_all_gather(Comm* c, void* all, const void* mine, size_t bytes, Ctx* ctx) {
    watch_begin(c->what[ALL_GATHER]);
    ranks_all_gather(c->group, all, mine, bytes);
    watch_end();
}

// Rank r's share of n elements is first(r) .. first(r + 1) - 1. A rank receives its share of every rank's `all`, and
// sums them into `part`.
static int64_t first(const Comm* c, int64_t n, int r) { return n / comm_count(c) * r + min_i64(r, n % comm_count(c)); }
static int64_t share(const Comm* c, int64_t n, int r) { return first(c, n, r + 1) - first(c, n, r); }
static void reduce_parts(Comm* c, void* part, const char* all, int64_t n, Reduction reduction) {
    const size_t size = sizes[reduction], own = (size_t)share(c, n, comm_index(c)) * size;
    c->parts = (char*)host_at_least(c->parts, &c->parts_room, (size_t)comm_count(c) * own);
    for (int step = 0; step < comm_count(c); step++) {
        const int to = rank_after(c, step), from = rank_before(c, step);
        ranks_send_receive(c->group, to, all + (size_t)first(c, n, to) * size, (size_t)share(c, n, to) * size, from,
                           c->parts + (size_t)from * own, own);
    }
    reduce(part, c->parts, comm_count(c), share(c, n, comm_index(c)), reduction);
}

void comm_reduce_scatter(Comm* c, real* part, real* all, int64_t n, Ctx* ctx) {
    watch_begin(c->what[REDUCE_SCATTER]);
    reduce_parts(c, part, (const char*)all, n * comm_count(c), SUM_REAL);
    watch_end();
}

void comm_all_reduce(Comm* c, void* data, int64_t n, Reduction reduction, Ctx* ctx) {
    if (comm_count(c) == 1) return;
    watch_begin(c->what[SUM]);
    // Every rank reduces its share in place, and then sends it to all.
    const size_t size = sizes[reduction];
    char* all = (char*)data;
    reduce_parts(c, all + (size_t)first(c, n, comm_index(c)) * size, all, n, reduction);
    for (int r = 0; r < comm_count(c); r++)
        ranks_broadcast(c->group, all + (size_t)first(c, n, r) * size, (size_t)share(c, n, r) * size, r);
    watch_end();
}

void comm_exchange(Comm* c, const ExchangeBuffer* buffers, int buffer_count, ExchangeRows rows, Ctx* ctx) {
    watch_begin(c->what[EXCHANGE]);
    // The buffers are sent one after the other.
    for (int b = 0; b < buffer_count; b++) {
        const size_t bytes = buffers[b].row_bytes;
        for (int step = 0; step < comm_count(c); step++) {
            const int to = rank_after(c, step), from = rank_before(c, step);
            ranks_send_receive(c->group, to, (const char*)buffers[b].send + (size_t)rows.send_start[to] * bytes,
                               (size_t)rows.send_rows[to] * bytes, from,
                               (char*)buffers[b].recv + (size_t)rows.recv_start[from] * bytes,
                               (size_t)rows.recv_rows[from] * bytes);
        }
    }
    watch_end();
}

// On the CPU there is no shared memory: comm_exchange_windows sends messages, and a window is plain memory.
char* comm_windows_missing(Comm* c, Ranks* ranks) { return NULL; }

void* comm_window(Comm* c, size_t bytes, const char* what) { return c->window = device_alloc(bytes, what); }
void comm_window_free(Comm* c) { device_free(c->window); }

void comm_exchange_windows(Comm* c, const ExchangeBuffer* buffers, int buffer_count, const int64_t* rows, int back,
                           Ctx* ctx) {
    const int P = comm_count(c);
    const int64_t *sends = rows + back * WINDOW_NUMBERS * P, *receives = rows + !back * WINDOW_NUMBERS * P;
    const ExchangeRows by_rank = {sends + WINDOW_START * P, sends + WINDOW_ROWS * P, receives + WINDOW_START * P,
                                  receives + WINDOW_ROWS * P};
    comm_exchange(c, buffers, buffer_count, by_rank, ctx);
}
