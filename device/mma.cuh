// Thin wrappers of the instructions for tensor cores and asynchronous copies that every NVIDIA GPU since Ampere has
// (compute capability 8.0). Each function is one instruction; PTX ISA, sections "ldmatrix", "mma", "cp.async".
// grouped/grouped_gemm_portable.cu opens with how they work together.
#ifndef DEVICE_MMA_CUH
#define DEVICE_MMA_CUH

#include "device/cuda.cuh"

// Four matrices of 8 x 8 bf16, one a register. Lane 8i + r gives the address of row r of matrix i (16 bytes, on 16).
// Of each matrix lane l gets row l / 4, columns l % 4 * 2 and the next.
static __device__ __forceinline__ void ldmatrix_x4(uint32_t r[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(shared))
                 : "memory");
}

// The same of the matrices' transposes: lane l gets column l / 4, rows l % 4 * 2 and the next.
static __device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t r[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(shared))
                 : "memory");
}

// d (16, 8) += a (16, 16) b (16, 8): bf16 in, float32 sums. Two bf16 in a register, the first in the low half; lane l:
//
//   a[0]        row l / 4,     columns l % 4 * 2 and the next       b[0]        column l / 4, rows l % 4 * 2, + 1
//   a[1]        row l / 4 + 8, the same columns                     b[1]        the same column, 8 rows further
//   a[2], a[3]  these rows, 8 columns further
//   d[0], d[1]  row l / 4,     columns l % 4 * 2 and the next       d[2], d[3]  row l / 4 + 8, the same columns
static __device__ __forceinline__ void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 16 bytes to shared memory, without a register between: the first `bytes` (0 .. 16) are copied, the rest are zeros; of
// 0 bytes `global` is not read. Both addresses are on 16.
static __device__ __forceinline__ void copy_async_16(void* shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(global), "r"(bytes)
                 : "memory");
}

// The copies that this thread began before are a group.
static __device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's groups are under way; those of others are there after a __syncthreads().
template <int N>
static __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#endif
