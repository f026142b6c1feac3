// The GPU as a device. Work is queued on a stream and runs asynchronously, in order. The host waits only
//
//   for results            ctx_sync, device_download, fetch_end, stopwatch_seconds
//   for memory             device_alloc
//   for staging buffers    device_upload, when all of them are in flight
//
// A side stream is a second queue of the same GPU. An event is recorded in one stream, and another stream waits for it.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda.cuh"
#include "device/kernels.h"
#include "device/lt.cuh"

static const char less_memory[] =
    "; use a smaller --batch, --seq-len or model, more of --shard and --recompute, or more ranks (--dry-run shows what "
    "needs how much)";

NORETURN void cuda_failed(cudaError_t error, const char* call, const char* file, int line) {
    const char* hint = "";
    if (error == cudaErrorMemoryAllocation) hint = less_memory;
    if (error == cudaErrorUnsupportedPtxVersion)
        hint =
            "; this build has only PTX for this GPU, and the driver is older than the toolkit: update the driver, or "
            "build on the machine with this GPU, whose code then needs no PTX";
    if (error == cudaErrorCallRequiresNewerDriver) hint = "; the driver is older than the toolkit: update the driver";
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
        hint = "; this build holds no code for this GPU: build with make ARCHS=all, or on the machine with it";
    die(EXIT_FAILED, "%s:%d: %s: %s%s", file, line, call, cudaGetErrorString(error), hint);
}

// Uploads go through pinned host memory, in chunks of STAGE_BYTES. The host waits for the GPU only when all staging
// buffers are in flight.
enum { STAGES = 16 };
static const size_t STAGE_BYTES = (size_t)1 << 20;
struct Staging {
    char* host;  // pinned, STAGES buffers of STAGE_BYTES
    cudaEvent_t sent[STAGES];
    int next;
};

// An asynchronous copy to the host. `there` is recorded after it.
struct Fetch {
    size_t bytes;
    void* host;  // pinned
    cudaEvent_t there;
};

struct Stopwatch {
    cudaEvent_t start, stop;
};

// Compute capability 9.0 is 90.
static int capability_of(const cudaDeviceProp& p) { return 10 * p.major + p.minor; }

// out = or += in, with grid-stride loops. Bound by memory.
template <bool ADD, typename In>
static __global__ void convert(float* out, const In* in, int64_t n) {
    wait_for_previous();
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (int64_t)blockDim.x)
        out[i] = ADD ? out[i] + (float)in[i] : (float)in[i];
}

// Ends the run with one line if there is no GPU that this build can use. Returns `portable` of the Ctx.
static int check_gpu(cudaDeviceProp* properties, int* driver) {
    // The driver, and whether it is new enough for the toolkit.
    int count = 0, device = 0;
    char* error_text;
    if (cudaDriverGetVersion(driver) != cudaSuccess || *driver == 0)
        die(EXIT_FAILED, "no GPU: no NVIDIA driver on this machine; use build/cpu/train_moe");
    if ((error_text = kernels_old_driver(*driver, CUDART_VERSION))) die(EXIT_FAILED, "%s", error_text);
    // A GPU.
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0)
        die(EXIT_FAILED, "no GPU: %s; use build/cpu/train_moe",
            error != cudaSuccess ? cudaGetErrorString(error) : "the driver lists none");
    // Its kernels, and whether this build has code for them.
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(properties, device));
    const int portable = kernels_choose(capability_of(*properties), getenv("TRAIN_MOE_KERNELS"), &error_text);
    if (portable < 0) die(EXIT_USAGE, "%s: %s", properties->name, error_text);
    cudaFuncAttributes attributes;
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, (const void*)convert<true, float>));
    return portable;
}

void device_setup(char** argv) {}

void device_choose(int index) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return;  // ctx_create reports the error
    // If a launcher shows each process a single GPU, that GPU is its own.
    if (count == 1 && getenv("CUDA_VISIBLE_DEVICES")) index = 0;
    if (index >= count)
        die(EXIT_FAILED, "this machine has %d GPU%s, and each process needs its own: start at most %d here", count,
            count == 1 ? "" : "s", count);
    CUDA_CHECK(cudaSetDevice(index));
}

Ctx* ctx_create(size_t workspace) {
    Ctx* ctx = (Ctx*)host_alloc(sizeof(Ctx));
    cudaDeviceProp properties;
    int driver = 0;
    ctx->portable = check_gpu(&properties, &driver);

    // The GPU's properties, for kernels and for the printed name.
    ctx->sms = properties.multiProcessorCount;
    ctx->capability = capability_of(properties);
    snprintf(ctx->name, sizeof(ctx->name), "%s, %d SMs, %.1f GiB, CUDA %d.%d, %s kernels", properties.name, ctx->sms,
             (double)properties.totalGlobalMem / 0x1p30, driver / 1000, driver % 1000 / 10,
             ctx->portable ? "portable" : "Hopper's");

    // The stream, the cuBLASLt handle, and the driver's function that makes tensor maps for TMA. Every driver that
    // check_gpu passes has this function, which is of CUDA 12.0.
    CUDA_CHECK(cudaStreamCreateWithFlags(&ctx->stream, cudaStreamNonBlocking));
    CUBLAS_CHECK(cublasLtCreate(&ctx->lt));
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&ctx->encode_tiled, 12000,
                                                cudaEnableDefault));

    // Staging buffers of uploads, and the workspace of the ops.
    ctx->staging = (Staging*)host_alloc(sizeof(Staging));
    CUDA_CHECK(cudaMallocHost((void**)&ctx->staging->host, STAGES * STAGE_BYTES));
    for (int i = 0; i < STAGES; i++)
        CUDA_CHECK(cudaEventCreateWithFlags(&ctx->staging->sent[i], cudaEventDisableTiming));
    ctx->workspace = (char*)device_alloc(workspace, "workspace of the ops");
    ctx->counter = (int*)device_alloc(sizeof(*ctx->counter), "a counter of work");
    ctx->workspace_bytes = workspace;
    return ctx;
}

// High-priority stream for communication: transfers start as soon as possible and take few SMs.
Ctx* ctx_side(Ctx* ctx, size_t workspace) {
    Ctx* side = (Ctx*)host_alloc(sizeof(Ctx));
    int lowest, highest;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&side->stream, cudaStreamNonBlocking, highest));
    side->sms = ctx->sms;
    side->portable = ctx->portable;
    side->capability = ctx->capability;
    side->workspace = (char*)device_alloc(workspace, "workspace of a side stream");
    side->workspace_bytes = workspace;
    return side;
}

void ctx_destroy(Ctx* ctx) {
    ctx_sync(ctx);
    CUDA_CHECK(cudaStreamDestroy(ctx->stream));
    // A side stream has neither a cuBLASLt handle nor staging buffers.
    if (ctx->lt) {
        lt_forget(ctx);
        CUBLAS_CHECK(cublasLtDestroy(ctx->lt));
        CUDA_CHECK(cudaFreeHost(ctx->staging->host));
        for (int i = 0; i < STAGES; i++) CUDA_CHECK(cudaEventDestroy(ctx->staging->sent[i]));
        free(ctx->staging);
    }
    device_free(ctx->workspace);
    device_free(ctx->counter);
    free(ctx);
}

// An Event is a cudaEvent_t, under a name for host code.
Event* event_create(void) {
    cudaEvent_t event;
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return (Event*)event;
}

void event_destroy(Event* event) { CUDA_CHECK(cudaEventDestroy((cudaEvent_t)event)); }
void event_record(Event* event, Ctx* ctx) { CUDA_CHECK(cudaEventRecord((cudaEvent_t)event, ctx->stream)); }
void event_wait(Event* event, Ctx* ctx) { CUDA_CHECK(cudaStreamWaitEvent(ctx->stream, (cudaEvent_t)event, 0)); }

void ctx_sync(Ctx* ctx) { CUDA_CHECK(cudaStreamSynchronize(ctx->stream)); }
const char* device_name(Ctx* ctx) { return ctx->name; }
// The SMs of an H100 or H200: workspaces are sized without a device (--dry-run).
int device_workers(void) { return 132; }
double device_peak_flops(Ctx* ctx) { return kernels_peak_flops(ctx->name, ctx->sms); }

size_t device_free_memory(int sharing) {
    size_t free_bytes, total;
    return cudaMemGetInfo(&free_bytes, &total) == cudaSuccess ? free_bytes : 0;  // ctx_create reports the error
}

size_t device_peak_memory(void) {
    size_t free_bytes, total;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));  // nothing is freed during a run: current use is the peak
    return total - free_bytes;
}

void* device_alloc(size_t bytes, const char* what) {
    void* p = NULL;
    cudaError_t error = cudaMalloc(&p, bytes ? bytes : 1);
    // The message names the free memory. Nothing is freed in a run, so a retry would fail too.
    if (error == cudaErrorMemoryAllocation) {
        size_t free_bytes = 0, total = 0;
        cudaMemGetInfo(&free_bytes, &total);
        die(EXIT_FAILED, "out of GPU memory: %.2f GiB for %s, %.2f of %.2f GiB are free%s", (double)bytes / 0x1p30,
            what, (double)free_bytes / 0x1p30, (double)total / 0x1p30, less_memory);
    }
    CUDA_CHECK(error);
    CUDA_CHECK(cudaMemset(p, 0, bytes));
    CUDA_CHECK(cudaDeviceSynchronize());  // the ops' stream does not wait for the default stream
    return p;
}

void device_free(void* p) { CUDA_CHECK(cudaFree(p)); }

// A function of the driver, found at run time: the binary starts without a driver.
static void* driver_function(const char* name) {
    void* function;
    CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault));
    return function;
}
#define DRIVER(function, ...) ((decltype(&function))driver_function(#function))(__VA_ARGS__)
#define DRIVER_CHECK(call) ASSERT((call) == CUDA_SUCCESS)

char* device_reserve(size_t bytes) {
    CUdeviceptr p;
    DRIVER_CHECK(DRIVER(cuMemAddressReserve, &p, bytes, 0, 0, 0));
    return (char*)p;
}

int device_map(char* at, size_t bytes) {
    CUmemAccessDesc access = {};
    CUmemAllocationProp properties = {};
    CUmemGenericAllocationHandle memory;
    if (!bytes) return 1;
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUDA_CHECK(cudaGetDevice(&properties.location.id));
    const CUresult result = DRIVER(cuMemCreate, &memory, bytes, &properties, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) return 0;
    DRIVER_CHECK(result);
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    DRIVER_CHECK(DRIVER(cuMemMap, (CUdeviceptr)at, bytes, 0, memory, 0));
    DRIVER_CHECK(DRIVER(cuMemSetAccess, (CUdeviceptr)at, bytes, &access, 1));
    DRIVER_CHECK(DRIVER(cuMemRelease, memory));  // freed when it is unmapped
    return 1;
}

void device_unreserve(char* addresses, size_t mapped, size_t reserved) {
    CUDA_CHECK(cudaDeviceSynchronize());
    if (mapped) DRIVER_CHECK(DRIVER(cuMemUnmap, (CUdeviceptr)addresses, mapped));
    DRIVER_CHECK(DRIVER(cuMemAddressFree, (CUdeviceptr)addresses, reserved));
}

// 16 bytes a thread and iteration. p and the size are multiples of 16.
static __global__ void zero(uint4* p, size_t vectors) {
    wait_for_previous();
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < vectors; i += gridDim.x * (size_t)blockDim.x)
        p[i] = make_uint4(0, 0, 0, 0);
}

// By a kernel: a step has many short memsets, and after a real memset no kernel can start early (PDL).
void device_zero(void* p, size_t bytes, Ctx* ctx) {
    const size_t vectors = bytes / 16;
    // An address or a size that is no multiple of 16 is rare.
    if (bytes && ((uintptr_t)p | bytes) % 16) {
        CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, ctx->stream));
        return;
    }
    launch_early(zero, (unsigned)min_i64(ceil_div((int64_t)vectors, 256), 8 * (int64_t)ctx->sms), 256, 0, ctx,
                 (uint4*)p, vectors);
}

void device_fill(void* p, int byte, size_t bytes, Ctx* ctx) {
    CUDA_CHECK(cudaMemsetAsync(p, byte, bytes, ctx->stream));
}

// In chunks: copy to the oldest staging buffer, then start the transfer to the device.
void device_upload(void* to, const void* host, size_t bytes, Ctx* ctx) {
    Staging* s = ctx->staging;
    for (size_t at = 0; at < bytes; at += STAGE_BYTES) {
        size_t n = bytes - at < STAGE_BYTES ? bytes - at : STAGE_BYTES;
        int i = s->next++ % STAGES;
        CUDA_CHECK(cudaEventSynchronize(s->sent[i]));  // the last use of this buffer; returns at once if there was none
        char* stage = s->host + i * STAGE_BYTES;
        memcpy(stage, (const char*)host + at, n);
        CUDA_CHECK(cudaMemcpyAsync((char*)to + at, stage, n, cudaMemcpyHostToDevice, ctx->stream));
        CUDA_CHECK(cudaEventRecord(s->sent[i], ctx->stream));
    }
}

void device_download(void* host, const void* from, size_t bytes, Ctx* ctx) {
    // The host waits: it reads the result next.
    CUDA_CHECK(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, ctx->stream));
    ctx_sync(ctx);
}

Fetch* fetch_create(size_t bytes) {
    Fetch* fetch = (Fetch*)host_alloc(sizeof(Fetch));
    fetch->bytes = bytes;
    CUDA_CHECK(cudaMallocHost(&fetch->host, bytes));
    CUDA_CHECK(cudaEventCreateWithFlags(&fetch->there, cudaEventDisableTiming));
    return fetch;
}

void fetch_destroy(Fetch* fetch) {
    CUDA_CHECK(cudaFreeHost(fetch->host));
    CUDA_CHECK(cudaEventDestroy(fetch->there));
    free(fetch);
}

void fetch_begin(Fetch* fetch, const void* from, Ctx* ctx) {
    CUDA_CHECK(cudaMemcpyAsync(fetch->host, from, fetch->bytes, cudaMemcpyDeviceToHost, ctx->stream));
    CUDA_CHECK(cudaEventRecord(fetch->there, ctx->stream));
}

const void* fetch_end(Fetch* fetch) {
    CUDA_CHECK(cudaEventSynchronize(fetch->there));
    return fetch->host;
}

Stopwatch* stopwatch_create(void) {
    Stopwatch* watch = (Stopwatch*)host_alloc(sizeof(Stopwatch));
    CUDA_CHECK(cudaEventCreate(&watch->start));
    CUDA_CHECK(cudaEventCreate(&watch->stop));
    return watch;
}

void stopwatch_destroy(Stopwatch* watch) {
    CUDA_CHECK(cudaEventDestroy(watch->start));
    CUDA_CHECK(cudaEventDestroy(watch->stop));
    free(watch);
}

void stopwatch_start(Stopwatch* watch, Ctx* ctx) { CUDA_CHECK(cudaEventRecord(watch->start, ctx->stream)); }
void stopwatch_stop(Stopwatch* watch, Ctx* ctx) { CUDA_CHECK(cudaEventRecord(watch->stop, ctx->stream)); }

double stopwatch_seconds(Stopwatch* watch) {
    float ms;
    CUDA_CHECK(cudaEventSynchronize(watch->stop));
    CUDA_CHECK(cudaEventElapsedTime(&ms, watch->start, watch->stop));
    return ms / 1000;
}

void device_to_real(real* out, const floatX* in, int64_t n, Ctx* ctx) {
    launch_early(convert<false, floatX>, 8 * ctx->sms, 256, 0, ctx, out, in, n);
}

// Through host memory: calls f(at, count, high, low) for chunks of numbers, with buffers for the halves of each.
template <typename F>
static void each_chunk(int64_t n, F f) {
    const int64_t most = 1 << 20;
    uint16_t* high = (uint16_t*)host_alloc(2 * most * sizeof(uint16_t));
    for (int64_t at = 0; at < n; at += most) f(at, min_i64(n - at, most), high, high + most);
    free(high);
}

void masters_upload(Master* master, floatX* weight, const real* host, int64_t n, Ctx* ctx) {
    each_chunk(n, [&](int64_t at, int64_t count, uint16_t* high, uint16_t* low) {
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, host + at + i, sizeof(bits));
            high[i] = (uint16_t)master_high(bits);
            low[i] = (uint16_t)bits;
        }
        device_upload(weight + at, high, (size_t)count * sizeof(uint16_t), ctx);
        device_upload(master + at, low, (size_t)count * sizeof(uint16_t), ctx);
    });
}

void masters_download(real* host, const Master* master, const floatX* weight, int64_t n, Ctx* ctx) {
    each_chunk(n, [&](int64_t at, int64_t count, uint16_t* high, uint16_t* low) {
        device_download(high, weight + at, (size_t)count * sizeof(uint16_t), ctx);
        device_download(low, master + at, (size_t)count * sizeof(uint16_t), ctx);
        for (int64_t i = 0; i < count; i++) {
            const uint32_t bits = master_bits(high[i], low[i]);
            memcpy(host + at + i, &bits, sizeof(bits));
        }
    });
}

void device_add(real* out, const real* in, int64_t n, Ctx* ctx) {
    launch_early(convert<true, float>, 8 * ctx->sms, 256, 0, ctx, out, in, n);
}

void device_copy(void* to, const void* from, size_t bytes, Ctx* ctx) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, ctx->stream));
}

void device_copy_rows(void* to, size_t to_stride, const void* from, size_t from_stride, size_t bytes, int64_t rows,
                      Ctx* ctx) {
    CUDA_CHECK(cudaMemcpy2DAsync(to, to_stride, from, from_stride, bytes, (size_t)rows, cudaMemcpyDeviceToDevice,
                                 ctx->stream));
}
