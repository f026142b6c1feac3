// The machine that computes: its memory, its order of work, and the copies to and from it. `device/device.c` is the
// CPU, `device/device.cu` the GPU. Ops take a Ctx as their last argument; work given to one Ctx happens in the order
// given.
#ifndef DEVICE_DEVICE_H
#define DEVICE_DEVICE_H

#include "device/types.h"

BEGIN_C

// What an op needs besides its operands: stream, library handles, workspace, number of SMs (CPU: threads).
typedef struct Ctx Ctx;

// First in main. On the CPU, OpenMP and OpenBLAS read the environment before main: where it lacks what makes them fast,
// the program sets that and starts once more, as the same process with the same arguments.
//
//   GOMP_SPINCOUNT        threads that wait soon leave their processor to others; not where OMP_WAIT_POLICY is set
//   OPENBLAS_NUM_THREADS  1: every product runs on one thread, and others would only take memory
//   OPENBLAS_CORETYPE     where OpenBLAS chose poorer kernels than the processor has others for
//
// What the user has set stands. Returns where all is set, and where a program cannot start again.
void device_setup(char** argv);

// Chooses the device of this process among those of this machine, before the first ctx_create; 0 without it. Ends the
// run if there is no such device. The CPU build has one device, that every process may use.
void device_choose(int index);

// `workspace` bytes are shared by all ops; each header that needs some has an `x_workspace` function that says how
// much.
Ctx* ctx_create(size_t workspace);
// A side stream on ctx's device: a second stream, with an order and a workspace of its own, for copies, sums and
// transfers. It takes no uploads and no matrix products.
Ctx* ctx_side(Ctx* ctx, size_t workspace);
void ctx_destroy(Ctx* ctx);
void ctx_sync(Ctx* ctx);  // waits until all work given to ctx is done

// 1 if this machine has a device that the build can use.
int device_available(void);
// One line for the reader: "CPU, 2 threads, OpenBLAS (Haswell kernels)".
const char* device_name(Ctx* ctx);
// Dense bf16 peak in FLOP/s that MFU is measured against; 0 where none is known (the CPU).
double device_peak_flops(Ctx* ctx);
// What the workspace functions must reckon with: threads on the CPU, SMs on the GPU.
int device_workers(void);
// Bytes of the device that this process may still take, one of `sharing` that want as much on this machine (a GPU is
// not shared); 0 if that is unknown. On the GPU the process' CUDA context is taken already.
size_t device_free_memory(int sharing);
// Peak memory of this process on the device in bytes (CPU: peak resident set).
size_t device_peak_memory(void);

// Device memory, zeroed, aligned to 256 bytes. Ends the run naming `what` if there is not enough.
void* device_alloc(size_t bytes, const char* what);
void device_free(void* p);

// In the order of ctx's work. upload and download return when the host buffer may be used again.
void device_zero(void* p, size_t bytes, Ctx* ctx);
void device_fill(void* p, int byte, size_t bytes, Ctx* ctx);
void device_upload(void* to, const void* host, size_t bytes, Ctx* ctx);
void device_download(void* host, const void* from, size_t bytes, Ctx* ctx);

// A copy to the host that nobody waits for until its value is wanted: begin queues it after the work so far, end waits
// for it and returns the host's copy. One copy in flight per Fetch.
typedef struct Fetch Fetch;
Fetch* fetch_create(size_t bytes);
void fetch_destroy(Fetch* fetch);
void fetch_begin(Fetch* fetch, const void* from, Ctx* ctx);
const void* fetch_end(Fetch* fetch);

// Order between streams: what is given to `ctx` after event_wait runs after what was given to event_record's ctx before
// event_record. Waiting for an event that was never recorded is no wait. The host never waits.
typedef struct Event Event;
Event* event_create(void);
void event_destroy(Event* event);
void event_record(Event* event, Ctx* ctx);
void event_wait(Event* event, Ctx* ctx);

// Times work on the device: from the work given before start to the work given before stop. Reading waits for the stop.
typedef struct Stopwatch Stopwatch;
Stopwatch* stopwatch_create(void);
void stopwatch_destroy(Stopwatch* watch);
void stopwatch_start(Stopwatch* watch, Ctx* ctx);
void stopwatch_stop(Stopwatch* watch, Ctx* ctx);
double stopwatch_seconds(Stopwatch* watch);

// out[i] = in[i], rounded to nearest even where floatX is narrower. May be in place only where the types are the same.
void device_to_floatX(floatX* out, const real* in, int64_t n, Ctx* ctx);
void device_to_real(real* out, const floatX* in, int64_t n, Ctx* ctx);
// out[i] += in[i]
void device_add(real* out, const real* in, int64_t n, Ctx* ctx);
// In the order of ctx's work, between buffers of the device that do not overlap.
void device_copy(void* to, const void* from, size_t bytes, Ctx* ctx);
// The same of `rows` pieces of `bytes` each, which lie `to_stride` and `from_stride` bytes apart.
void device_copy_rows(void* to, size_t to_stride, const void* from, size_t from_stride, size_t bytes, int64_t rows,
                      Ctx* ctx);

END_C

#endif
