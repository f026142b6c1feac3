// The device: its memory, its streams, and copies to and from it. `device/device.c` is the CPU, `device/device.cu` the
// GPU. Ops take a Ctx as their last argument; work on one Ctx runs in order.
#pragma once

#include "device/types.h"

// The context of an op: stream, library handles, workspace, number of SMs.
typedef struct Ctx Ctx;

// Call device_setup before MPI starts. On the CPU, OpenMP and OpenBLAS read the environment before main. If the
// environment lacks variables that make these libraries fast, device_setup sets the variables and restarts the program.
// Process and arguments stay the same.
//
//   GOMP_SPINCOUNT        waiting threads yield their processor soon; not set if OMP_WAIT_POLICY is set
//   OPENBLAS_NUM_THREADS  1: every GEMM runs on one thread, and further threads would only take memory
//   OPENBLAS_CORETYPE     if OpenBLAS chose slower kernels than the processor supports
//
// Variables that the user has set are kept. device_setup returns if all variables are set, or if the program cannot be
// restarted. The CUDA build does nothing.
void device_setup(char** argv);

// Chooses the device of this process on this machine, before the first ctx_create; the default is 0. Ends the run if
// there is no such device. The CPU build has one device, shared by all processes.
void device_choose(int index);

// The ops on a Ctx share its workspace of `workspace` bytes. A header whose ops need workspace has an `x_workspace`
// function for the size. ctx_destroy frees a Ctx, and a side stream too.
Ctx* ctx_create(size_t workspace);
// A side stream on ctx's device: a second stream with its own order and workspace, for copies, sums and transfers. A
// side stream takes no uploads and no GEMMs.
Ctx* ctx_side(Ctx* ctx, size_t workspace);
void ctx_destroy(Ctx* ctx);
void ctx_sync(Ctx* ctx);  // waits until all work queued on ctx is done

// One line for the user, valid as long as ctx: "CPU, 2 threads, OpenBLAS (Haswell kernels)".
const char* device_name(Ctx* ctx);
// Dense bf16 peak in FLOP/s, the reference of MFU; 0 if unknown (the CPU, and GPUs that kernels_peak_flops lacks).
double device_peak_flops(Ctx* ctx);
// The number of workers for the workspace functions: threads on the CPU; on the GPU 132, the SMs of an H100 or H200.
int device_workers(void);
// Bytes of the device that this process may still allocate; 0 if unknown. `sharing` processes with the same need share
// the machine's memory; a GPU is not shared. On the GPU the process's CUDA context is already subtracted.
size_t device_free_memory(int sharing);
// Peak memory of this process in bytes: on the CPU its peak resident set, on the GPU all of the GPU's memory in use.
size_t device_peak_memory(void);

// Zeroed device memory, 256-byte aligned. Without enough memory, ends the run with a message that names `what`.
// device_free frees the memory.
void* device_alloc(size_t bytes, const char* what);
// device_reserve returns addresses for device memory, without memory. device_map puts `bytes` bytes of memory at `at`,
// which follows the memory mapped before; the contents are undefined. device_map returns 1, or 0 if there is not enough
// memory. device_unreserve frees addresses and memory. Sizes are whole pages of 2 MiB (device_pages).
static inline size_t device_pages(size_t bytes) { return (bytes + (2 << 20) - 1) >> 21 << 21; }
char* device_reserve(size_t bytes);
int device_map(char* at, size_t bytes);
void device_unreserve(char* addresses, size_t mapped, size_t reserved);
void device_free(void* p);

// Queued in the order of ctx's work. device_upload returns when the host buffer may be reused, device_download when the
// host buffer is filled.
void device_zero(void* p, size_t bytes, Ctx* ctx);
void device_fill(void* p, int byte, size_t bytes, Ctx* ctx);
void device_upload(void* to, const void* host, size_t bytes, Ctx* ctx);
void device_download(void* host, const void* from, size_t bytes, Ctx* ctx);

// An asynchronous copy to the host: fetch_begin queues the copy after the work so far. fetch_end waits for the copy and
// returns it, in memory of the Fetch. A Fetch has one copy in flight.
typedef struct Fetch Fetch;
Fetch* fetch_create(size_t bytes);
void fetch_destroy(Fetch* fetch);
void fetch_begin(Fetch* fetch, const void* from, Ctx* ctx);
const void* fetch_end(Fetch* fetch);

// Order between streams. Work queued on the waiting ctx after event_wait runs after the work that was queued on the
// recording ctx before event_record. Waiting for an event that was never recorded returns at once. The host never
// waits.
typedef struct Event Event;
Event* event_create(void);
void event_destroy(Event* event);
void event_record(Event* event, Ctx* ctx);
void event_wait(Event* event, Ctx* ctx);

// Times work on the device: all work queued between start and stop. stopwatch_seconds waits until this work is done.
typedef struct Stopwatch Stopwatch;
Stopwatch* stopwatch_create(void);
void stopwatch_destroy(Stopwatch* watch);
void stopwatch_start(Stopwatch* watch, Ctx* ctx);
void stopwatch_stop(Stopwatch* watch, Ctx* ctx);
double stopwatch_seconds(Stopwatch* watch);

// n master weights, from and to real in host memory. On the CPU `weight` may be `master`. The CUDA build stores a
// master weight in 32 bits together with its working weight (as TransformerEngine's FusedAdam does with
// store_param_remainders):
//
//   bits of the float32 = (bits of weight << 16) + master,   master as a signed number of 16 bits
//
// So the weight is the master weight rounded to nearest, ties away from zero. A NaN remains a NaN.
void masters_upload(Master* master, floatX* weight, const real* host, int64_t n, Ctx* ctx);
void masters_download(real* host, const Master* master, const floatX* weight, int64_t n, Ctx* ctx);

// out[i] = in[i]. `out` may be `in` only if both types are the same.
void device_to_real(real* out, const floatX* in, int64_t n, Ctx* ctx);
// out[i] += in[i]
void device_add(real* out, const real* in, int64_t n, Ctx* ctx);
// A copy between device buffers that do not overlap, in the order of ctx's work.
void device_copy(void* to, const void* from, size_t bytes, Ctx* ctx);
// device_copy of `rows` rows of `bytes` each, `to_stride` and `from_stride` bytes apart.
void device_copy_rows(void* to, size_t to_stride, const void* from, size_t from_stride, size_t bytes, int64_t rows,
                      Ctx* ctx);
