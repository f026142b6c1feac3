// Thin wrappers of the matrix instructions of all NVIDIA GPUs since Ampere (sm_80). Each function is one instruction;
// see the PTX ISA, sections of these names. layers/attention_portable.cu shows how they work together.
//
//   mma.sync   a warp multiplies 16 x 16 by 16 x 8
//   ldmatrix   a warp loads operands from shared memory
//   cp.async   an asynchronous copy from global to shared memory, without registers
//   bar.sync   a barrier of some warps of a block; cvt rounds to bf16
#pragma once

#include "device/cuda.cuh"

// Named barriers (1..15) among `threads` threads: sync waits for all of them, arrive does not wait.
static __device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
static __device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Loads four 8 x 8 matrices of bf16 from shared memory. Lane l addresses 16 bytes: row l % 8 of matrix l / 8. Lane l
// receives two elements of matrix i in r[i]: row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1.
static __device__ __forceinline__ void ldmatrix_x4(uint32_t r[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(shared))
                 : "memory");
}

// ldmatrix_x4 of the transposed matrices: r[i] has column l / 4, rows 2 (l % 4) and 2 (l % 4) + 1.
static __device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t r[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(shared))
                 : "memory");
}

// d (16, 8) += a (16, 16) b (16, 8), accumulated in float32. A register of a or b has two bf16. Lane l holds, with g =
// l / 4 and c = 2 (l % 4):
//
//   a[0] row g, columns c, c + 1      a[2] row g, columns c + 8, c + 9      d[0], d[1] row g, columns c, c + 1
//   a[1] row g + 8, the same columns  a[3] row g + 8, the same columns      d[2], d[3] row g + 8, the same columns
//   b[0] rows c, c + 1 of column g    b[1] rows c + 8, c + 9 of column g
static __device__ __forceinline__ void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The sum over the four lanes that share a row of d.
static __device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Begins to copy 16 bytes: `bytes` (0 .. 16) of them from global memory, and zeros for the rest. With 0 bytes the
// address is not read. Both addresses are 16-byte aligned.
static __device__ __forceinline__ void copy_async_16(void* shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(global), "r"(bytes)
                 : "memory");
}

// Ends a group: all copies that this thread began before.
static __device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING groups of this thread are in flight. Copies of other threads are visible after a barrier.
template <int PENDING>
static __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Packs two floats into one register of a or b, `low` in the low half. (The instruction names the high half first.)
static __device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
