// Symmetric memory (--dispatch windows): memory on every rank that all GPUs of a group can access. Ranks store rows
// directly into this memory, and read the numbers of rows from device memory. So an all-to-all needs no host. In the
// CPU build symmetric memory is plain memory, and rows are sent as messages.
#pragma once

#include "parallel/comm.h"

// comm_windows_missing: the reason of the first of all `ranks` of the run that cannot have symmetric memory, in fresh
// memory; NULL: all can. Every rank calls it once, with its group, before comm_window.
// comm_window: a window of `bytes` on every rank of the group, not zeroed. A group has at most one window.
// comm_window_free frees it. All ranks of the group make all calls. what: the purpose, for messages.
char* comm_windows_missing(Comm* comm, Ranks* ranks);
void* comm_window(Comm* comm, size_t bytes, const char* what);
void comm_window_free(Comm* comm);

// All-to-all of rows into the windows: each `recv` is at the same offset on every rank, row_bytes is a multiple of 4.
// `rows` is in device memory, (2, WINDOW_NUMBERS, ranks): the rows that this rank sends, then the rows that it
// receives, the same for all buffers. back 1: received rows go back to their senders.
enum {
    WINDOW_START,  // first row for rank j, or from rank j, in this rank's buffer
    WINDOW_ROWS,   // the number of rows
    WINDOW_THERE,  // the same rows' start in the buffer of rank j
    WINDOW_NUMBERS
};
void comm_exchange_windows(Comm* comm, const ExchangeBuffer* buffers, int buffer_count, const int64_t* rows, int back,
                           Ctx* ctx);
