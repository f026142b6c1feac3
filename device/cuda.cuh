// What the CUDA ops (x.cu) share: the GPU's Ctx, error checks, reductions. Not for host code.
#ifndef DEVICE_CUDA_CUH
#define DEVICE_CUDA_CUH

#include <cublasLt.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "device/check.h"
#include "device/device.h"

// One line for a failed call: where, which, why, and what to do about the two that users meet.
NORETURN void cuda_failed(cudaError_t error, const char* call, const char* file, int line);
#define CUDA_CHECK(call)                                                                                               \
    do {                                                                                                               \
        cudaError_t error_ = (call);                                                                                   \
        if (error_ != cudaSuccess) cuda_failed(error_, #call, __FILE__, __LINE__);                                     \
    } while (0)
#define CUBLAS_CHECK(call)                                                                                             \
    do {                                                                                                               \
        cublasStatus_t status_ = (call);                                                                               \
        if (status_ != CUBLAS_STATUS_SUCCESS)                                                                          \
            die(EXIT_FAILED, "%s:%d: %s: %s", __FILE__, __LINE__, #call, cublasLtGetStatusString(status_));            \
    } while (0)
// Behind every launch: catches bad launch configurations at once (errors inside kernels surface at the next sync).
#define LAUNCH_CHECK() CUDA_CHECK(cudaGetLastError())

struct Staging;  // device/device.cu: pinned memory for uploads
struct LtPlan;   // device/lt.cuh: a product whose algorithm is chosen

// What every op gets: the stream, libraries' handles and the workspace.
struct Ctx {
    cudaStream_t stream;
    cublasLtHandle_t lt;
    LtPlan* lt_plans;
    Staging* staging;
    char* workspace;
    size_t workspace_bytes;
    int* counter;  // 0 when a kernel begins: one that hands out its work by it leaves it at 0
    int sms;
    bool transfers;                                  // between GPUs go on beside: their kernels want some of the SMs
    int portable;                                    // 1: kernels for every GPU since Ampere, 0: Hopper's
    int capability;                                  // of the GPU: 90 is 9.0
    decltype(&cuTensorMapEncodeTiled) encode_tiled;  // from the driver at run time: the binary starts without one
    char name[320];
};

// Tensor cores that take a scale for every 32 elements of MXFP8, through cuBLASLt (mx/grouped_gemm_blackwell.cu).
static inline bool has_block_scales(const Ctx* ctx) { return ctx->capability >= 100; }

// The workspace; ends the run if the op asks for more than its x_workspace said.
template <typename T>
static inline T* ctx_workspace(Ctx* ctx, int64_t count) {
    ASSERT((size_t)count * sizeof(T) <= ctx->workspace_bytes);
    return (T*)ctx->workspace;
}

// Blocks for so much work, rounded up.
static inline unsigned blocks_for(int64_t work, int64_t per_block) { return (unsigned)ceil_div(work, per_block); }

// Of a grid that walks rows of which only the device knows how many there are, at most `blocks` at once: many more than
// run at a time, for balance; those past the rows in use end at once.
static inline unsigned walking_blocks(int64_t blocks, const Ctx* ctx) {
    return (unsigned)min_i64(blocks, 256 * (int64_t)ctx->sms);
}

// Dynamic shared memory beyond 48 KiB has to be asked for.
template <typename Kernel>
static inline void allow_shared(Kernel kernel, size_t bytes) {
    if (bytes > 48 << 10)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

// Launches a kernel with `shared` bytes of dynamic shared memory on the context's stream; a grid without blocks is left
// out. The arguments become what the kernel takes.
template <typename... P, typename... A>
static inline void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, Ctx* ctx, A... arguments) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    allow_shared(kernel, shared);
    kernel<<<grid, block, shared, ctx->stream>>>(P(arguments)...);
    LAUNCH_CHECK();
}

// As launch, of a kernel that may start while the stream's previous one still runs (programmatic dependent launch,
// compute capability 9.0 and up): the gap between the two is hidden. In a graph it becomes the kind of an edge. What
// makes it right:
//
//   The kernel touches no memory that another kernel of a step writes or reads before it has called previous_is_done(),
//   which returns when the previous kernel is done and its writes can be seen. Blocks without work may leave before,
//   but not all of them: so this kernel ends after all that came before it too.
//
//   let_next_start() lets the next kernel start, if that one was launched early. It is legal from the first line on,
//   because the next one waits for this kernel's end and not for the call; the next one's blocks come only when all of
//   this one's have begun.
//
//   After a copy, a zeroing or a wait for another stream there is nothing to start beside, and the launch is as any.
template <typename... P, typename... A>
static inline void launch_early(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, Ctx* ctx, A... arguments) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    allow_shared(kernel, shared);
    // The attribute of programmatic dependent launch.
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared;
    config.stream = ctx->stream, config.attrs = &early, config.numAttrs = ctx->capability >= 90;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, P(arguments)...));
}

// As launch_early, of a kernel whose blocks hold whole SMs for long: where transfers want some of these, it leaves them
// the moment between two kernels.
template <typename... P, typename... A>
static inline void launch_long(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, Ctx* ctx, A... arguments) {
    if (ctx->transfers)
        launch(kernel, grid, block, shared, ctx, arguments...);
    else
        launch_early(kernel, grid, block, shared, ctx, arguments...);
}

// In a kernel that was launched early: the previous kernel is done.
static __device__ __forceinline__ void previous_is_done() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

// The next kernel may start.
static __device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// First in most kernels that are launched early: the next one may start, and this one goes on when it may.
static __device__ __forceinline__ void wait_for_previous() {
    let_next_start();
    previous_is_done();
}

// 2^x by the special function unit (2^-22).
static __device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// For results in bf16: the fast power of two and division (2^-21) are exact enough.
static __device__ __forceinline__ float sigmoid_fast(float x) {
    return __fdividef(1.0f, 1.0f + exp2_approx(-1.44269504f * x));
}

// Sum and maximum over a warp, or over each LANES lanes of it, in every lane.
template <int LANES = 32, typename T>
static __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int lane = LANES / 2; lane; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

template <int LANES = 32>
static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lane = LANES / 2; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}

#endif
