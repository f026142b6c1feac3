// Shared parts of the CUDA ops (x.cu): the GPU's Ctx, error checks, launches with and without PDL, warp reductions. Not
// for host code.
#pragma once

#include <cublasLt.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "device/check.h"
#include "device/device.h"

// Ends the run with one line: file and line, the failed call, the reason. Errors that users can mend get a hint.
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
// After every launch: reports bad launch configurations at once (errors inside kernels surface at the next sync).
#define LAUNCH_CHECK() CUDA_CHECK(cudaGetLastError())

struct Staging;  // device/device.cu: pinned host memory for uploads
struct LtPlan;   // device/lt.cuh: a GEMM with its chosen algorithm

// The context of every op: stream, library handles and workspace.
struct Ctx {
    cudaStream_t stream;
    cublasLtHandle_t lt;
    LtPlan* lt_plans;
    Staging* staging;
    char* workspace;
    size_t workspace_bytes;
    int* counter;  // work counter of persistent kernels: 0 at the start and the end of every kernel
    int sms;
    bool transfers;                                  // 1: NCCL transfers run concurrently and need some SMs
    int portable;                                    // 1: kernels for every GPU since Ampere, 0: Hopper's
    int capability;                                  // of the GPU: 90 is 9.0
    decltype(&cuTensorMapEncodeTiled) encode_tiled;  // from the driver at run time: the binary starts without a driver
    char name[320];
};

// The two halves of a master weight (masters_upload). Half a unit of the upper half is added, and its carry rounds the
// upper half. NaN is apart: its carry could reach the sign.
static inline BOTH_SIDES uint32_t master_high(uint32_t bits) {
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : (bits + 0x8000) >> 16;
}
static inline BOTH_SIDES uint32_t master_bits(uint32_t high, uint32_t low) {
    return (high << 16) + (uint32_t)(int32_t)(int16_t)low;
}

// The workspace; ends the run if `count` exceeds the size that the op's x_workspace returned.
template <typename T>
static inline T* ctx_workspace(Ctx* ctx, int64_t count) {
    ASSERT((size_t)count * sizeof(T) <= ctx->workspace_bytes);
    return (T*)ctx->workspace;
}

// Number of blocks for `work` items, rounded up.
static inline unsigned blocks_for(int64_t work, int64_t per_block) { return (unsigned)ceil_div(work, per_block); }

// A grid of x blocks for each of `rows` rows. A grid's second dimension ends at 65,535, so the third dimension
// continues the rows. A block's row is grid_row(), and may be beyond the last row.
static inline dim3 grid_of_rows(unsigned x, int64_t rows) {
    return dim3(x, (unsigned)min_i64(rows, 1 << 15), blocks_for(rows, 1 << 15));
}
static __device__ __forceinline__ int64_t grid_row() { return blockIdx.z * (int64_t)gridDim.y + blockIdx.y; }

// Grid size when the row count is known only on the device: at most 256 blocks per SM. Many more blocks than run at
// once balance the load. Blocks without rows exit at once.
static inline unsigned walking_blocks(int64_t blocks, const Ctx* ctx) {
    return (unsigned)min_i64(blocks, 256 * (int64_t)ctx->sms);
}

// Opts in to more than 48 KiB of dynamic shared memory.
template <typename Kernel>
static inline void allow_shared(Kernel kernel, size_t bytes) {
    if (bytes > 48 << 10)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

// Launches a kernel with `shared` bytes of dynamic shared memory on the context's stream; an empty grid is skipped. The
// arguments are converted to the kernel's parameter types.
template <typename... P, typename... A>
static inline void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, Ctx* ctx, A... arguments) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    allow_shared(kernel, shared);
    kernel<<<grid, block, shared, ctx->stream>>>(P(arguments)...);
    LAUNCH_CHECK();
}

// Launch with programmatic dependent launch (PDL; compute capability 9.0 and up). The kernel may start while the
// preceding kernel of the stream still runs, which hides the gap between the two. In a CUDA graph, PDL is the type of
// an edge. The rules for correctness:
//
//   previous_is_done() returns when the preceding kernel is done and its writes are visible. Before this call a kernel
//   touches no memory that another kernel of a step writes or reads. Blocks without work may exit before the call, but
//   not all blocks of a kernel. So each kernel ends after all kernels before it.
//
//   let_next_start() lets the next kernel start, if the next kernel was launched with PDL. The call is legal from
//   the first line on, because the next kernel waits for the end of this kernel, not for the call. Blocks of the next
//   kernel start only when all blocks of this kernel have started.
//
//   After a copy, a memset or a wait for another stream there is no kernel to overlap: launch() suffices.
template <typename... P, typename... A>
static inline void launch_early(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, Ctx* ctx, A... arguments) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    allow_shared(kernel, shared);
    // The launch attribute of PDL.
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = ctx->stream;
    config.attrs = &early;
    config.numAttrs = ctx->capability >= 90;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, P(arguments)...));
}

// For persistent kernels, whose blocks occupy whole SMs for long. While NCCL transfers run, these kernels are launched
// without PDL. NCCL then gets SMs between two kernels.
template <typename... P, typename... A>
static inline void launch_long(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, Ctx* ctx, A... arguments) {
    if (ctx->transfers)
        launch(kernel, grid, block, shared, ctx, arguments...);
    else
        launch_early(kernel, grid, block, shared, ctx, arguments...);
}

// Waits until the preceding kernel is done; for kernels that are launched with PDL.
static __device__ __forceinline__ void previous_is_done() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

// Lets the next kernel start.
static __device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// The first statement of most kernels with PDL: lets the next kernel start, and waits for the preceding kernel.
static __device__ __forceinline__ void wait_for_previous() {
    let_next_start();
    previous_is_done();
}

// 2^x by the special function unit (relative error 2^-22).
static __device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// For bf16 results, fast exp2 and division (2^-21) are accurate enough.
static __device__ __forceinline__ float sigmoid_fast(float x) {
    return __fdividef(1.0f, 1.0f + exp2_approx(-1.44269504f * x));
}

// Reductions: sum and maximum over a warp, or over groups of LANES lanes, returned in every lane.
template <int LANES = 32, typename T>
static __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int lane = LANES / 2; lane; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

// Inclusive prefix sum over a warp.
template <typename T>
static __device__ __forceinline__ T warp_scan(T x) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const T before = __shfl_up_sync(0xffffffffu, x, d);
        if ((int)threadIdx.x % 32 >= d) x += before;
    }
    return x;
}

// The sum over a block, warp by warp, returned in every thread.
static __device__ __forceinline__ double block_sum(double x) {
    __shared__ double part[32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;
    for (int w = 0; w < (int)blockDim.x / 32; w++) sum += part[w];
    __syncthreads();  // another call may follow, which writes `part` again
    return sum;
}

template <int LANES = 32>
static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lane = LANES / 2; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}
