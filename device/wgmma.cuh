// Thin wrappers of the Hopper instructions (sm_90a) for the matrix kernels. Each function is one instruction and its
// pitfall; PTX ISA 8.0, sections "mbarrier", "cp.async.bulk.tensor", "wgmma".
//
//   WGMMA     Four warps, a warpgroup, multiply on the tensor cores together: d (64, N) += A (64, 16) B (16, N).
//             d is in registers, A in registers or shared memory, B in shared memory. WGMMA is asynchronous:
//             issue, commit, wait.
//   TMA       Tensor memory accelerator, a copy engine in the SM. One thread requests a box of a tensor by its
//             coordinates. From a tensor map, which the host made, the engine computes the addresses. The
//             engine copies the box to or from shared memory.
//   mbarrier  8 bytes of shared memory that count arrivals of threads and bytes of copies. When the count is
//             complete, a phase ends and the next begins. A waiting thread passes the parity of the phase: 0, 1,
//             0, ..
//   swizzle   The order of the 16-byte vectors in the rows of a box. In rows of 128 bytes, vector i of row r is at
//             place i ^ r % 8. So vectors below each other are in different banks, and WGMMA reads 8 rows without
//             conflicts.
//
// A tile in shared memory consists of boxes. A box has rows of 128, 64 or 32 bytes (64, 32 or 16 bf16), swizzled over
// its width, as TMA writes it. Boxes are contiguous and 1024-byte aligned.
#pragma once

#include "device/mma.cuh"

static __device__ __forceinline__ uint32_t shared_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// --- mbarrier ---

// A phase ends after `arrivals` arrivals and the bytes that some of them announce.
static __device__ __forceinline__ void barrier_init(uint64_t* bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}

// Makes the initialized barriers visible to TMA; call it after the inits and before a __syncthreads().
static __device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

// One arrival that announces `bytes` of copies. The phase does not end before these bytes have arrived.
static __device__ __forceinline__ void barrier_expect(uint64_t* bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
                 : "memory");
}

// Waits until the phase of this parity is over. For a barrier in its first phase (0), a wait for parity 1 returns at
// once.
static __device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
    uint32_t done, at = shared_address(bar);
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.b32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(at), "r"(parity)
            : "memory");
    } while (!done);
}

// Makes ordinary writes to shared memory visible to WGMMA and TMA. Each thread that wrote calls fence_async, before a
// barrier that joins the threads.
static __device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- TMA ---
//
// One thread issues. Coordinates are in elements, innermost first. Elements outside of the tensor are loaded as zeros
// and not stored. A load's bytes arrive at `bar`. Stores are waited for in groups, in the order of their commits.

// Prefetches a tensor map.
static __device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads a box of a tensor with two, three or five dimensions.
static __device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* bar, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y)
        : "memory");
}

static __device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* bar, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

static __device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* bar, int x, int y, int z,
                                                int u, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
        "%7}], [%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
        : "memory");
}

// Loads `bytes` contiguous bytes (a multiple of 16; both addresses 16-byte aligned).
static __device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(bar))
                 : "memory");
}

// Stores a box of a two-dimensional tensor from shared memory.
static __device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y)
                 : "memory");
}

// Ends a group: all stores issued before.
static __device__ __forceinline__ void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most PENDING groups of stores still read shared memory.
template <int PENDING>
static __device__ __forceinline__ void tma_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// A tensor map of bf16, float32 or bytes, innermost dimension first. Sizes, box and strides are in elements. Strides
// are those of dimensions 1.. (dimension 0 has stride 1). The box's inner size is the swizzle's width: 128, 64 or 32
// bytes.
template <typename T>
static inline CUtensorMap tensor_map(const T* p, int dims, const int64_t* size, const int64_t* stride, const int* box,
                                     Ctx* ctx) {
    // Strides in bytes.
    cuuint64_t strides[4];
    for (int i = 0; i + 1 < dims; i++) strides[i] = (cuuint64_t)stride[i] * sizeof(T);

    // The type, and a swizzle over the box's width.
    const CUtensorMapDataType type = sizeof(T) == 4   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                      : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const size_t width = (size_t)box[0] * sizeof(T);
    const CUtensorMapSwizzle swizzle = width == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : width == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                     : CU_TENSOR_MAP_SWIZZLE_32B;

    // The driver refuses addresses and strides that are not multiples of 16 bytes, and box sizes above 256.
    const cuuint32_t every[5] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    CUresult result = ctx->encode_tiled(&map, type, (cuuint32_t)dims, (void*)p, (const cuuint64_t*)size, strides,
                                        (const cuuint32_t*)box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        die(EXIT_FAILED, "%s:%d: cuTensorMapEncodeTiled: error %d (pointer %p, %d dimensions, %lld x %lld)", __FILE__,
            __LINE__, (int)result, (const void*)p, dims, (long long)size[1], (long long)size[0]);
    return map;
}

// --- wgmma ---

// Descriptor of an operand in shared memory: its address and layout in 64 bits. Addresses and distances are in units of
// 16 bytes, so a descriptor is moved by adding to it. WIDTH is the width of the operand's boxes, in bf16.
//
//   K-major     a row of a box runs along the contraction. Groups of 8 rows are WIDTH * 16 bytes apart. The next k16 is
//               32 bytes further, within the box.
//   MN-major    a row of a box runs along M or N, and rows are the contraction. Each box holds WIDTH columns; boxes are
//               `box_bytes` apart. The next k16 is 16 rows further.
//
// In a cluster, shared addresses have high bits that do not fit: they are masked.
template <int WIDTH>
static __device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t box_bytes) {
    constexpr uint64_t swizzle = WIDTH == 64 ? 1 : WIDTH == 32 ? 2 : 3;
    return (swizzle << 62) | ((uint64_t)(WIDTH * 16 >> 4) << 32) | ((uint64_t)(box_bytes >> 4) << 16) |
           ((address & 0x3FFFF) >> 4);
}

// Call wgmma_fence before the first WGMMA, and after ordinary code accessed registers that WGMMAs use.
static __device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group: all WGMMAs issued before.
static __device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING groups of WGMMAs are in flight.
template <int PENDING>
static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler moves no use of the accumulators across this point. After a wait, wgmma_pin keeps readers of the
// accumulators behind the wait.
template <int N>
static __device__ __forceinline__ void wgmma_pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Operand lists of the inline assembly. An instruction with N columns names N / 2 registers: "%0, %1, ..". REGS: these
// names for an N; OUT: their operands; D8: eight operands. Each list extends the one before it.
#define WGMMA_REGS32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_REGS48 WGMMA_REGS32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_REGS64 WGMMA_REGS48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_REGS80 WGMMA_REGS64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_REGS96 WGMMA_REGS80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_REGS128 WGMMA_REGS96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_REGS192                                                                                                  \
    WGMMA_REGS128                                                                                                      \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"                                 \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_REGS256                                                                                                  \
    WGMMA_REGS192                                                                                                      \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"                     \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_D8(i)                                                                                                    \
    "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), "+f"(d[(i) + 5]),              \
        "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define WGMMA_OUT32 WGMMA_D8(0), WGMMA_D8(8)
#define WGMMA_OUT48 WGMMA_OUT32, WGMMA_D8(16)
#define WGMMA_OUT64 WGMMA_OUT48, WGMMA_D8(24)
#define WGMMA_OUT80 WGMMA_OUT64, WGMMA_D8(32)
#define WGMMA_OUT96 WGMMA_OUT80, WGMMA_D8(40)
#define WGMMA_OUT128 WGMMA_OUT96, WGMMA_D8(48), WGMMA_D8(56)
#define WGMMA_OUT192 WGMMA_OUT128, WGMMA_D8(64), WGMMA_D8(72), WGMMA_D8(80), WGMMA_D8(88)
#define WGMMA_OUT256 WGMMA_OUT192, WGMMA_D8(96), WGMMA_D8(104), WGMMA_D8(112), WGMMA_D8(120)

// d (64, N) += A B over k16, or d = A B if `accumulate` is 0. A and B are in shared memory; MN_A, MN_B: 1 if the
// operand is MN-major.
//
// Warp w of the four has rows 16w .. 16w + 15 of d. Lane l holds four accumulators of each 8 columns 8j .. 8j + 7:
//
//   d[4j], d[4j + 1]         row l / 4,      columns 8j + l % 4 * 2 and the next
//   d[4j + 2], d[4j + 3]     row l / 4 + 8,  the same columns
template <int N, int MN_A, int MN_B>
static __device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
    static_assert(N == 64 || N == 80 || N == 128 || N == 256, "add this N below");
#define WGMMA_SS(n, A, B, C, TA, TB)                                                                                   \
    if constexpr (N == n)                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C                                                           \
                     ", 0;\n"                                                                                          \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" WGMMA_REGS##n                        \
                     "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";\n}"                                            \
                     : WGMMA_OUT##n                                                                                    \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(MN_A), "n"(MN_B));
    WGMMA_SS(64, 32, 33, 34, 35, 36)
    WGMMA_SS(80, 40, 41, 42, 43, 44)
    WGMMA_SS(128, 64, 65, 66, 67, 68)
    WGMMA_SS(256, 128, 129, 130, 131, 132)
#undef WGMMA_SS
}

// wgmma_ss with A (64, 16) in registers instead of shared memory, two bf16 in each register:
//
//   a[0]          row l / 4,      columns l % 4 * 2 and the next
//   a[1]          row l / 4 + 8,  the same columns
//   a[2], a[3]    the rows of a[0] and a[1], 8 columns further
template <int N, int MN_B>
static __device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, int accumulate) {
    static_assert(N == 32 || N == 48 || N == 64 || N == 96 || N == 128 || N == 192, "add this N below");
#define WGMMA_RS(n, A, A1, A2, A3, B, C, TB)                                                                           \
    if constexpr (N == n)                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C                                                           \
                     ", 0;\n"                                                                                          \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" WGMMA_REGS##n                        \
                     "}, {%" #A ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, %" #TB ";\n}"                      \
                     : WGMMA_OUT##n                                                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(MN_B));
    WGMMA_RS(32, 16, 17, 18, 19, 20, 21, 22)
    WGMMA_RS(48, 24, 25, 26, 27, 28, 29, 30)
    WGMMA_RS(64, 32, 33, 34, 35, 36, 37, 38)
    WGMMA_RS(96, 48, 49, 50, 51, 52, 53, 54)
    WGMMA_RS(128, 64, 65, 66, 67, 68, 69, 70)
    WGMMA_RS(192, 96, 97, 98, 99, 100, 101, 102)
#undef WGMMA_RS
}

// --- Register reallocation between warpgroups (setmaxnreg) ---
//
// A kernel starts with the same number of registers in every thread. Then each warpgroup enters its role (an if/else)
// and sets its number per thread: consumers take the registers that the producer releases. The kernel needs
// __launch_bounds__(threads, 1).
template <int N>
static __device__ __forceinline__ void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
static __device__ __forceinline__ void registers_fewer() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
