// What the grouped products need beyond device/wgmma.cuh: clusters, loads into several blocks, a store that adds, and
// matrices from registers to shared memory. Each function is one instruction.
#ifndef MOE_GROUPED_GEMM_PTX_CUH
#define MOE_GROUPED_GEMM_PTX_CUH

#include "device/wgmma.cuh"

static __device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Arrives at the same barrier of block `rank` of the cluster. (With .release.cluster it would cost a memory barrier.)
static __device__ __forceinline__ void barrier_arrive_at(uint64_t* bar, int rank) {
    asm volatile(
        "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [at];\n}" ::"r"(
            shared_address(bar)),
        "r"(rank)
        : "memory");
}

// The two halves of that, for loops that arrive at the same barriers again and again.
static __device__ __forceinline__ uint32_t cluster_address(const void* p, int rank) {
    uint32_t at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
    return at;
}

static __device__ __forceinline__ void barrier_arrive_cluster(uint32_t at) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(at) : "memory");
}

// To the same place in several blocks of the cluster (a bit each), every one's own barrier counting the bytes.
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

static __device__ __forceinline__ void tma_add(const CUtensorMap* map, const void* from, int x, int y, int z) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
        "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

static __device__ __forceinline__ void store_matrices(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

#endif
