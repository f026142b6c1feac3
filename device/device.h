// The machine that computes: its memory, its order of work, and the copies to and from it. `device/device.c` is the
// CPU, `device/device.cu` the GPU. Ops take a Ctx as their last argument; work given to one Ctx happens in the order
// given.
#ifndef DEVICE_DEVICE_H
#define DEVICE_DEVICE_H

#include "device/types.h"

BEGIN_C

// What an op needs besides its operands: stream, library handles, workspace, number of SMs (CPU: threads).
typedef struct Ctx Ctx;

// `workspace` bytes are shared by all ops; each header that needs some has an `x_workspace` function that says how
// much.
Ctx* ctx_create(size_t workspace);
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
// Peak memory of this process on the device in bytes (CPU: peak resident set).
size_t device_peak_memory(void);

// Device memory, zeroed, aligned to 256 bytes. Ends the run naming `what` if there is not enough.
void* device_alloc(size_t bytes, const char* what);
void device_free(void* p);

// In the order of ctx's work. upload and download return when the host buffer may be used again.
void device_zero(void* p, size_t bytes, Ctx* ctx);
void device_upload(void* to, const void* host, size_t bytes, Ctx* ctx);
void device_download(void* host, const void* from, size_t bytes, Ctx* ctx);

// A copy to the host that nobody waits for until its value is wanted: begin queues it behind the work so far,
// end waits for it and returns the host's copy. One copy in flight per Fetch.
typedef struct Fetch Fetch;
Fetch* fetch_create(size_t bytes);
void fetch_destroy(Fetch* fetch);
void fetch_begin(Fetch* fetch, const void* from, Ctx* ctx);
const void* fetch_end(Fetch* fetch);

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

END_C

#endif
