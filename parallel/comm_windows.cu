// Windows of NCCL: the GPUs of an NVLink domain store into each other's memory. A kernel of PUSH_BLOCKS thread blocks
// copies the rows; the other SMs stay free for the work that overlaps. Each block has two barriers with the blocks of
// the same number on the other GPUs. The first barrier is before the copy, because received rows may overwrite rows
// that a rank still reads. After the second barrier all rows have arrived. (NCCL user guide, "Device-Initiated
// Communication": LSA.)
#include "parallel/comm_nccl.cuh"
#include "parallel/slices.h"

enum { PUSH_BLOCKS = 16, PUSH_THREADS = 512 };

char* comm_windows_missing(Comm* c, Ranks* ranks) {
    // The device code is compiled from the header, so the library must be of the same version. All ranks know of one
    // where it is not before they wait for one another.
    char* why = NULL;
    int version;
    NCCL_CHECK(ncclGetVersion(&version), c->nccl);
    if (version != NCCL_VERSION_CODE)
        why = host_format("NCCL's header has version %d, its library version %d", NCCL_VERSION_CODE, version);
    if ((why = ranks_reason(ranks, why))) return why;
    ncclDevCommRequirements needs = {};  // no multicast
    needs.lsaBarrierCount = PUSH_BLOCKS;

    // All wait here for all. A failure is no error of the run: the caller decides whether it needs windows.
    const ncclResult_t result = ncclDevCommCreate(c->nccl, &needs, &c->device_side);
    c->has_device_side = result == ncclSuccess;
    if (!c->has_device_side)
        why = host_format("NCCL: %s (NCCL_CUMEM_ENABLE=0 makes windows impossible)", ncclGetErrorString(result));
    else if (c->device_side.lsaSize != c->count)
        why = host_format("only %d of %d ranks of a group share an NVLink domain", c->device_side.lsaSize, c->count);
    return ranks_reason(ranks, why);
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

// Arguments of the kernel.
struct Push {
    ExchangeBuffer buffer[EXCHANGE_BUFFERS];
    const char* memory;  // of this rank's window
    int buffers, ranks, own;
    const int64_t* rows;  // (WINDOW_NUMBERS, ranks)
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
        const size_t start = (size_t)p.rows[WINDOW_START * p.ranks + to],
                     at = (size_t)p.rows[WINDOW_THERE * p.ranks + to];
        const size_t rows = (size_t)p.rows[WINDOW_ROWS * p.ranks + to];
        for (int b = 0; b < p.buffers; b++) {
            const size_t bytes = p.buffer[b].row_bytes, all = rows * bytes;
            const size_t offset = (size_t)((const char*)p.buffer[b].recv - p.memory) + at * bytes;
            const char* from = (const char*)p.buffer[b].send + start * bytes;
            char* there = (char*)ncclGetLsaPointer(window, offset, to);
            if (((uintptr_t)from | (uintptr_t)there | all) % 16 == 0)
                copy_by_grid<uint4>(there, from, all);
            else
                copy_by_grid<uint32_t>(there, from, all);
        }
    }
    barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);
}

void comm_exchange_windows(Comm* c, const ExchangeBuffer* buffers, int buffer_count, const int64_t* rows, int back,
                           Ctx* ctx) {
    Push p = {.memory = c->window_memory, .buffers = buffer_count, .ranks = c->count, .own = c->index};
    ASSERT(c->window && buffer_count <= EXCHANGE_BUFFERS);
    for (int b = 0; b < buffer_count; b++) {
        const char* recv = (const char*)buffers[b].recv;
        ASSERT(buffers[b].row_bytes % 4 == 0 && recv >= c->window_memory && recv < c->window_memory + c->window_bytes);
        p.buffer[b] = buffers[b];
    }
    p.rows = rows + back * WINDOW_NUMBERS * c->count;
    launch(push_kernel, PUSH_BLOCKS, PUSH_THREADS, 0, ctx, p, c->device_side, c->window);
    comm_queued(c, EXCHANGE, ctx);
}
