// Communicators of parallel/comm.cu and parallel/comm_windows.cu.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include "device/cuda.cuh"
#include "parallel/comm_windows.h"

#define NCCL_CHECK(call, comm)                                                                                         \
    do {                                                                                                               \
        ncclResult_t result_ = (call);                                                                                 \
        if (result_ != ncclSuccess) nccl_failed(result_, comm, #call, __FILE__, __LINE__);                             \
    } while (0)

// Ends the run with NCCL's reason and the place of the call.
NORETURN void nccl_failed(ncclResult_t result, ncclComm_t comm, const char* call, const char* file, int line);

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
    // Symmetric memory (parallel/comm_windows.cu).
    bool has_device_side;
    ncclDevComm device_side;
    ncclWindow_t window;
    char* window_memory;
    size_t window_bytes;
};

// Adds the collective that was just queued on the stream, for the watchdog.
void comm_queued(Comm* comm, int kind, Ctx* ctx);
