// Sums and transfers between the device memories of ranks: by NCCL in the CUDA build (parallel/comm.cu), by MPI in the
// CPU build (parallel/comm.c, on parallel/ranks.h). A call is queued on a Ctx like any op. All ranks of a group make
// the same calls in the same order. Sums are taken in an order that depends on the layout alone, never on time.
#ifndef PARALLEL_COMM_H
#define PARALLEL_COMM_H

#include "device/device.h"
#include "parallel/ranks.h"

BEGIN_C

// A group of ranks whose device memory is connected. A group of one rank works too, and costs nothing. `group` may be
// freed after comm_create.
typedef struct Comm Comm;
Comm* comm_create(Ranks* group, const char* name, Ctx* ctx);  // name: for messages, "world" or "expert parallel"
void comm_destroy(Comm* comm);
int comm_count(const Comm* comm);
int comm_index(const Comm* comm);

// all = the ranks' parts of `bytes` one after the other. In place where mine == all + index * bytes.
void comm_all_gather(Comm* comm, void* all, const void* mine, size_t bytes, Ctx* ctx);
// part (n) = sum over ranks of their all[index * n ..]: `all` holds count * n elements. In place where part == all +
// index * n; the rest of `all` may be changed.
void comm_reduce_scatter(Comm* comm, real* part, real* all, int64_t n, Ctx* ctx);
// All-reduce: sums or maxima over the ranks, in place, the same bits on every rank.
typedef enum { SUM_REAL, SUM_DOUBLE, SUM_I64, MAX_REAL } Reduction;
void comm_all_reduce(Comm* comm, void* data, int64_t n, Reduction reduction, Ctx* ctx);
static inline void comm_sum(Comm* c, real* x, int64_t n, Ctx* ctx) { comm_all_reduce(c, x, n, SUM_REAL, ctx); }
static inline void comm_sum_double(Comm* c, double* x, int64_t n, Ctx* ctx) {
    comm_all_reduce(c, x, n, SUM_DOUBLE, ctx);
}
static inline void comm_sum_i64(Comm* c, int64_t* x, int64_t n, Ctx* ctx) { comm_all_reduce(c, x, n, SUM_I64, ctx); }
static inline void comm_max(Comm* c, real* x, int64_t n, Ctx* ctx) { comm_all_reduce(c, x, n, MAX_REAL, ctx); }

// Rows that go from every rank to every rank of the group, all in one transfer. For each rank i: rows send_start[i] ..
// + send_rows[i] of `send` go to rank i, and recv_rows[i] rows from it arrive at recv_start[i]. The four arrays are
// host memory and are read at once. Several buffers with rows of the same number travel together. An Exchange of rows
// sent back is the same with send and recv changed round.
//
// Or, with there_start, the arrays are device memory, and the host need not know what they hold: the GPUs store rows
// straight into one another's memory. `recv` lies in memory of comm_window then, at the same place on every rank,
// rows for rank i begin at there_start[i] of its `recv`, and every row_bytes is a multiple of 4.
typedef struct ExchangeRows {
    const int64_t *send_start, *send_rows, *recv_start, *recv_rows;  // (count of the group) each
    const int64_t* there_start;                                      // (count of the group), or NULL
} ExchangeRows;
typedef struct ExchangeBuffer {
    void* recv;
    const void* send;
    size_t row_bytes;
} ExchangeBuffer;
enum { EXCHANGE_BUFFERS = 8 };
void comm_exchange(Comm* comm, const ExchangeBuffer* buffers, int buffer_count, ExchangeRows rows, Ctx* ctx);

// Memory of as many bytes on every rank, not zeroed, which their GPUs can all reach; one of a group at a time. All
// ranks take part in all calls. comm_windows_missing comes first, once: why there can be none, in fresh memory, or
// NULL.
char* comm_windows_missing(Comm* comm);
void* comm_window(Comm* comm, size_t bytes, const char* what);
void comm_window_free(Comm* comm);

END_C

#endif
