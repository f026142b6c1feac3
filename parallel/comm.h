// Collectives on device memory: all-gather, reduce-scatter, all-reduce and all-to-all. NCCL in the CUDA build
// (parallel/comm.cu), MPI in the CPU build (parallel/comm.c, on parallel/ranks.h). A call is queued on a Ctx like any
// op. All ranks of a group make the same calls in the same order. The order of a sum depends on the layout alone, never
// on time.
#pragma once

#include "device/device.h"
#include "parallel/ranks.h"

// A communicator: a group of ranks whose device memory is connected. A group of one rank works too, and costs nothing.
// `group` may be freed after comm_create. An error of NCCL or MPI ends the run.
typedef struct Comm Comm;
Comm* comm_create(Ranks* group, const char* name, Ctx* ctx);  // name: for messages, such as "all ranks"
void comm_destroy(Comm* comm);
int comm_count(const Comm* comm);
int comm_index(const Comm* comm);

// All-gather: all = the ranks' parts of `bytes`, concatenated. In place if mine == all + index * bytes.
void comm_all_gather(Comm* comm, void* all, const void* mine, size_t bytes, Ctx* ctx);
// Reduce-scatter: part (n) = sum over ranks of their all[index * n ..]; `all` has count * n elements. In place if part
// == all + index * n; the rest of `all` may be changed.
void comm_reduce_scatter(Comm* comm, real* part, real* all, int64_t n, Ctx* ctx);
// All-reduce: sums or maxima over the ranks, in place, the same bits on every rank.
typedef enum { SUM_REAL, SUM_DOUBLE, SUM_I64, MAX_REAL } Reduction;
void comm_all_reduce(Comm* comm, void* data, int64_t n, Reduction reduction, Ctx* ctx);

// All-to-all of rows. For each rank i: rows send_start[i] .. + send_rows[i] of `send` go to rank i, and recv_rows[i]
// rows from it arrive at recv_start[i]. The four arrays are in host memory, and are read during the call. Several
// buffers with the same number of rows are sent together. To send rows back, swap send and recv.
typedef struct ExchangeRows {
    const int64_t *send_start, *send_rows, *recv_start, *recv_rows;  // (count of the group) each
} ExchangeRows;
typedef struct ExchangeBuffer {
    void* recv;
    const void* send;
    size_t row_bytes;
} ExchangeBuffer;
// The most buffers of one comm_exchange.
enum { EXCHANGE_BUFFERS = 8 };
void comm_exchange(Comm* comm, const ExchangeBuffer* buffers, int buffer_count, ExchangeRows rows, Ctx* ctx);
