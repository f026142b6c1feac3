// Thin wrappers of the Hopper instructions (sm_90a) that the matrix kernels share: mbarriers, the copy engine (TMA),
// warpgroup matrix products (wgmma) on bf16, register reallocation. Each function is one instruction and its pitfall;
// PTX ISA 8.0, sections "mbarrier", "cp.async.bulk.tensor", "wgmma".
//
// A tile in shared memory is made of chunks: a chunk is `rows` rows of 128, 64 or 32 bytes (64, 32 or 16 bf16),
// swizzled over its width, as a TMA box of that inner width leaves it. Chunks stand one behind the other and begin on
// 1024 bytes.
#ifndef DEVICE_WGMMA_CUH
#define DEVICE_WGMMA_CUH

#include "device/cuda.cuh"

static __device__ __forceinline__ uint32_t shared_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// --- mbarrier: a count of arrivals and of bytes still to come; `parity` is that of the phase waited for ---

static __device__ __forceinline__ void barrier_init(uint64_t* bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}

// After the inits, before a __syncthreads(): the copy engine sees them too.
static __device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

// One arrival, and `bytes` that copies will bring.
static __device__ __forceinline__ void barrier_expect(uint64_t* bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
                 : "memory");
}

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

// Named barriers (1..15) among `threads` threads.
static __device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
static __device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Ordinary writes to shared memory before this are seen by wgmma and TMA after it (then a barrier among the threads).
static __device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- TMA: boxes of a tensor map to and from shared memory; coordinates in elements, innermost first. What lies outside
// the tensor is loaded as zeros and not stored. One thread issues. ---

static __device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

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

// `bytes` (a multiple of 16, both ends on 16) of plain memory.
static __device__ __forceinline__ void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(bar))
                 : "memory");
}

static __device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y)
                 : "memory");
}

static __device__ __forceinline__ void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most PENDING groups of stores still read shared memory.
template <int PENDING>
static __device__ __forceinline__ void tma_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// A tensor map of bf16, float32 or bytes: sizes and box in elements, strides of dimensions 1.. in elements (innermost:
// 1). The box's inner size is the swizzle's width: 128, 64 or 32 bytes.
template <typename T>
static inline CUtensorMap tensor_map(const T* p, int dims, const int64_t* size, const int64_t* stride, const int* box,
                                     Ctx* ctx) {
    CUtensorMap map;
    cuuint64_t sizes[5], strides[5];
    cuuint32_t boxes[5], ones[5];
    for (int i = 0; i < dims; i++) {
        sizes[i] = (cuuint64_t)size[i], boxes[i] = (cuuint32_t)box[i], ones[i] = 1;
        if (i) strides[i - 1] = (cuuint64_t)stride[i - 1] * sizeof(T);
    }
    const CUtensorMapDataType type = sizeof(T) == 4   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                      : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const size_t width = (size_t)box[0] * sizeof(T);
    const CUtensorMapSwizzle swizzle = width == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : width == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                     : CU_TENSOR_MAP_SWIZZLE_32B;
    CUresult result = ctx->encode_tiled(&map, type, (cuuint32_t)dims, (void*)p, sizes, strides, boxes, ones,
                                        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        die(EXIT_FAILED, "%s:%d: cuTensorMapEncodeTiled: error %d (pointer %p, %d dimensions, %lld x %lld)", __FILE__,
            __LINE__, (int)result, (const void*)p, dims, (long long)size[1], (long long)size[0]);
    return map;
}

// --- wgmma ---

// Descriptor of a tile whose chunks are CHUNK bf16 wide.
//   K-major (the contraction runs along a row): 8-row groups are CHUNK * 16 bytes apart; a step of k16 adds 32 bytes
//   within a chunk.
//   MN-major (rows are the contraction): CHUNK columns per chunk, chunks `chunk_bytes` apart; a step of k16 adds 16
//   rows.
// In a cluster shared addresses have high bits: masked.
template <int CHUNK>
static __device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t chunk_bytes) {
    constexpr uint64_t layout = CHUNK == 64 ? 1 : CHUNK == 32 ? 2 : 3;
    return (layout << 62) | ((uint64_t)(CHUNK * 16 >> 4) << 32) | ((uint64_t)(chunk_bytes >> 4) << 16) |
           ((address & 0x3FFFF) >> 4);
}

static __device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler moves no use of the accumulators over this point.
template <int N>
static __device__ __forceinline__ void wgmma_pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define WGMMA_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_R8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_R16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_R24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_R32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_R40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_R48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_R56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_R64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_R72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_R80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_R88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_R96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_R104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_R112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_R120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_D8(i)                                                                                                    \
    "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), "+f"(d[(i) + 5]),              \
        "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
// Lists grow from one N to the next; those that no kernel multiplies with only carry the next one.
#define WGMMA_REGS32 WGMMA_R0 ", " WGMMA_R8
#define WGMMA_REGS48 WGMMA_REGS32 ", " WGMMA_R16
#define WGMMA_REGS64 WGMMA_REGS48 ", " WGMMA_R24
#define WGMMA_REGS80 WGMMA_REGS64 ", " WGMMA_R32
#define WGMMA_REGS96 WGMMA_REGS80 ", " WGMMA_R40
#define WGMMA_REGS128 WGMMA_REGS96 ", " WGMMA_R48 ", " WGMMA_R56
#define WGMMA_REGS192 WGMMA_REGS128 ", " WGMMA_R64 ", " WGMMA_R72 ", " WGMMA_R80 ", " WGMMA_R88
#define WGMMA_REGS256 WGMMA_REGS192 ", " WGMMA_R96 ", " WGMMA_R104 ", " WGMMA_R112 ", " WGMMA_R120
#define WGMMA_OUT32 WGMMA_D8(0), WGMMA_D8(8)
#define WGMMA_OUT48 WGMMA_OUT32, WGMMA_D8(16)
#define WGMMA_OUT64 WGMMA_OUT48, WGMMA_D8(24)
#define WGMMA_OUT80 WGMMA_OUT64, WGMMA_D8(32)
#define WGMMA_OUT96 WGMMA_OUT80, WGMMA_D8(40)
#define WGMMA_OUT128 WGMMA_OUT96, WGMMA_D8(48), WGMMA_D8(56)
#define WGMMA_OUT192 WGMMA_OUT128, WGMMA_D8(64), WGMMA_D8(72), WGMMA_D8(80), WGMMA_D8(88)
#define WGMMA_OUT256 WGMMA_OUT192, WGMMA_D8(96), WGMMA_D8(104), WGMMA_D8(112), WGMMA_D8(120)

// d (64, N) += or = (accumulate 0) A B over k16. In a warp's 16 rows, lane l holds of each 8 columns: d[4j], d[4j + 1]
// of row l / 4, columns 8j + l % 4 * 2 and the next; d[4j + 2], d[4j + 3] of row l / 4 + 8. A and B in shared memory;
// MN_A, MN_B: 1 where the operand is MN-major.
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

// The same on e4m3 over k32, N 128, both operands K-major. The tensor cores keep about 14 bits below the largest of the
// addends here, so long sums are made of short ones.
static __device__ __forceinline__ void wgmma_e4m3_n128(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" WGMMA_REGS128 "}, %64, %65, p, 1, 1;\n}"
        : WGMMA_OUT128
        : "l"(a), "l"(b), "r"(accumulate));
}

// A (64, 16) in registers: a[0] row l / 4, columns l % 4 * 2 and the next; a[1] row l / 4 + 8; a[2], a[3] columns 8 on.
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

// Two floats as one register of A; `low` is the first column.
static __device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Registers per thread of this warpgroup; the kernel needs __launch_bounds__(threads, 1) and roles in one if/else.
// Every role of a kernel with wgmma begins so, and in code for other GPUs than Hopper ends here: the compiler drops all
// that follows, which only sm_90a knows. On those GPUs ops take other roads (x_lt.cuh); to launch it is an error there.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_ONLY() (__trap(), __builtin_unreachable())
#else
#define HOPPER_ONLY()
#endif
template <int N>
static __device__ __forceinline__ void registers_more() {
    HOPPER_ONLY();
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
static __device__ __forceinline__ void registers_fewer() {
    HOPPER_ONLY();
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

#endif
