// Thin wrappers of the matrix instructions that every NVIDIA GPU has since Ampere (sm_80). Each function is one
// instruction; PTX ISA, sections of these names. layers/attention_portable.cuh shows how they work together.
//
//   mma.sync   a warp multiplies 16 x 16 by 16 x 8
//   ldmatrix   a warp reads operands from shared memory
//   cp.async   a copy from global to shared memory that needs no registers and does not wait
#ifndef DEVICE_MMA_CUH
#define DEVICE_MMA_CUH

#include "device/cuda.cuh"

// Four 8 x 8 matrices of bf16 from shared memory. Lane l names the 16 bytes that are row l % 8 of matrix l / 8. Of
// matrix i it gets r[i]: the elements 2 (l % 4) and the next of row l / 4.
static __device__ __forceinline__ void ldmatrix_x4(uint32_t r[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(shared))
                 : "memory");
}

// The same of the transposed matrices: r[i] is the elements of column l / 4 in rows 2 (l % 4) and the next.
static __device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t r[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(shared))
                 : "memory");
}

// d (16, 8) += a (16, 16) b (16, 8), sums in float32. Two bf16 to a register. Lane l holds, with g = l / 4 and
// c = 2 (l % 4):
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

// Begins to copy 16 bytes: `bytes` (0 .. 16) of them from global memory, zeros in the place of the rest. With 0 the
// address is not read. Both lie on 16 bytes.
static __device__ __forceinline__ void copy_async_16(void* shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(global), "r"(bytes)
                 : "memory");
}

// The copies that this thread began before are a group.
static __device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING groups of this thread still travel. What the others copied is there after a barrier.
template <int PENDING>
static __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#endif
