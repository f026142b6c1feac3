// Symmetric memory (--dispatch windows): memory on every rank that all GPUs of a group can access. Ranks store rows
// directly into it, by numbers in device memory. So an all-to-all needs no host. In the CPU build it is plain memory,
// and rows are sent as messages.
#pragma once

#include "parallel/comm.h"

// `bytes` on every rank, not zeroed. A group has at most one window. All ranks make all calls. Call
// comm_windows_missing once before, on all `ranks` of the run, each with its group: all get the reason of the first
// rank that can have none, in fresh memory, or NULL.
char* comm_windows_missing(Comm* comm, Ranks* ranks);
void* comm_window(Comm* comm, size_t bytes, const char* what);
void comm_window_free(Comm* comm);

// All-to-all of rows into the windows: each `recv` is at the same offset on every rank, row_bytes is a multiple of 4.
// `rows` is in device memory, (2, WINDOW_NUMBERS, ranks): the rows that this rank sends, then those that it receives,
// the same for all buffers. back 1: received rows go back to their senders.
enum {
    WINDOW_START,  // of the rows for rank j, or from it, in this rank's buffer
    WINDOW_ROWS,   // their count
    WINDOW_THERE,  // the same rows' start in the buffer of rank j
    WINDOW_NUMBERS
};
void comm_exchange_windows(Comm* comm, const ExchangeBuffer* buffers, int buffer_count, const int64_t* rows, int back,
                           Ctx* ctx);
