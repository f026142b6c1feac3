// PTX instructions of the grouped GEMM beyond device/wgmma.cuh, one per function: thread block clusters, multicast
// loads, words to another block, TMA stores to 3D tensors, and stmatrix.
//
// A cluster is a few blocks that run at the same time on neighbouring SMs. A block can address the shared memory of the
// cluster's other blocks (distributed shared memory): a `shared::cluster` address contains the block and the offset.
#pragma once

#include "device/wgmma.cuh"

// This block's rank in its cluster.
static __device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Barrier of all threads of all blocks of the cluster.
static __device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The shared::cluster address of `p` in block `rank`.
static __device__ __forceinline__ uint32_t cluster_address(const void* p, int rank) {
    uint32_t at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
    return at;
}

// Arrives at an mbarrier of another block. (With .release.cluster it would cost a memory barrier.)
static __device__ __forceinline__ void barrier_arrive_cluster(uint32_t at) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(at) : "memory");
}

// Asynchronous store of a word to a block of the cluster; its mbarrier counts the 4 bytes. Addresses: cluster_address.
static __device__ __forceinline__ void send_word(uint32_t to, uint32_t word, uint32_t bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(word),
                 "r"(bar)
                 : "memory");
}

// TMA multicast: loads a box to the same offset in several blocks of the cluster (a mask, one bit each). Each block's
// own mbarrier counts its bytes.
static __device__ __forceinline__ void tma_multicast(void* to, const CUtensorMap* map, uint64_t* bar, int x, int y,
                                                     uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y), "h"(blocks)
        : "memory");
}

static __device__ __forceinline__ void tma_multicast(void* to, const CUtensorMap* map, uint64_t* bar, int x, int y,
                                                     int z, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
}

// TMA store of a box of a 3D tensor, from shared memory.
static __device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// tma_store of three coordinates, or with `add` a TMA reduction: the box is added to the tensor.
static __device__ __forceinline__ void tma_write(bool add, const CUtensorMap* map, const void* from, int x, int y,
                                                 int z) {
    if (add)
        asm volatile(
            "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                map),
            "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
            : "memory");
    else
        tma_store(map, from, x, y, z);
}

// stmatrix: stores four matrices of 8 x 8 bf16 from the warp's registers a .. d, in wgmma's accumulator layout, to
// shared memory. Lane 8i + r gives the address of row r of matrix i.
static __device__ __forceinline__ void store_matrices(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
