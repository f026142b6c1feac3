// Step 5: a ring that TMA fills, with warp specialization. One producer thread issues TMA loads as far ahead as the
// ring has free stages. Eight consumer warps multiply each stage once it has arrived.
//
//                                  stage 0 [ a | b ]  being read  --wgmma-->  two warpgroups, 64 x 128 each
//     producer warp  --TMA-->      stage 1 [ a | b ]  loaded
//                                  stage 2 [ a |   ]  in flight
//
// Each stage has two mbarriers (device/wgmma.cuh). A wait gives the parity of its phase. In turn t through the ring:
//
//     barrier    a phase ends when                      in turn t
//     full       all bytes of the stage have arrived    a consumer waits for phase t, to read
//     empty      all eight warps have read the stage    the producer waits for phase t - 1, to overwrite
//
// (Phase -1 counts as over.) TMA replaces load_tile(): it writes wgmma's swizzle, and zeros past a tensor's end.
//
// Bound by the L2 cache: at the tensor cores' full rate every SM would need a stage, 32 KB, each 512 clocks. A block
// also begins with an empty ring and ends with stores of 4 bytes a lane; a second block on the SM multiplies meanwhile.
#include "device/wgmma.cuh"
#include "learn/learn.cuh"

namespace {

enum { STAGES = 3, WARPS = 8, THREADS = 32 * (WARPS + 1) };  // the consumer warps, then the producer warp

struct Shared {
    alignas(1024) uint8_t a[STAGES][TILE_BYTES], b[STAGES][TILE_BYTES];
    uint64_t full[STAGES], empty[STAGES];
};

// The producer, one thread.
__device__ __forceinline__ void produce(Shared& s, const CUtensorMap* x, const CUtensorMap* w, const Tile& t,
                                        int blocks) {
    for (int i = 0; i < blocks; i++) {
        const int stage = i % STAGES, turn = i / STAGES;
        barrier_wait(&s.empty[stage], (turn + 1) % 2);
        barrier_expect(&s.full[stage], 2 * TILE_BYTES);
        tma_load(s.a[stage], x, &s.full[stage], i * BLOCK_K, (int)t.row);
        tma_load(s.b[stage], w, &s.full[stage], i * BLOCK_K, t.column, t.expert);
    }
}

// The consumers' mainloop: d = the sums of a warpgroup's 64 rows.
__device__ __forceinline__ void consume(Shared& s, float (&d)[SIDE / 2], int group, int blocks) {
#pragma unroll
    for (int i = 0; i < SIDE / 2; i++) d[i] = 0;
    for (int i = 0; i < blocks; i++) {
        const int stage = i % STAGES, turn = i / STAGES;
        const uint64_t a = wgmma_descriptor<BLOCK_K>(shared_address(s.a[stage]) + group * (TILE_BYTES / 2), TILE_BYTES);
        const uint64_t b = wgmma_descriptor<BLOCK_K>(shared_address(s.b[stage]), TILE_BYTES);
        barrier_wait(&s.full[stage], turn % 2);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; step++) wgmma_ss<SIDE, 0, 0>(d, a + step * 2, b + step * 2, 1);
        wgmma_commit();
        wgmma_wait<0>();
        if (threadIdx.x % 32 == 0) barrier_arrive(&s.empty[stage]);
    }
    wgmma_pin(d);
}

__global__ void __launch_bounds__(THREADS, 2)
    kernel_5(floatX* y, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w, Ragged r,
             int64_t IC, int64_t OC) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared& s = *(Shared*)memory;
    Tile t;
    if (!find_tile<SIDE, SIDE>(r, OC, t)) return;

    // mbarriers: a stage is filled by one thread, and released by every consumer warp.
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], WARPS);
        barrier_init_fence();
    }
    __syncthreads();

    // Warp specialization: the last warp is the producer.
    const int warp = threadIdx.x / 32, blocks = (int)ceil_div(IC, BLOCK_K);
    if (warp == WARPS) {
        if (threadIdx.x % 32 == 0) produce(s, &x, &w, t, blocks);
        return;
    }
    float d[SIDE / 2];
    consume(s, d, warp / 4, blocks);

    // Epilogue: each warp has 16 rows.
#pragma unroll
    for (int j = 0; j < SIDE / 8; j++) store_sums(y, OC, t, warp * 16, j * 8, d + j * 4);
}

}  // namespace

void learn_5(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    if (r.capacity == 0 || r.El == 0) return;  // TMA has no map of an empty tensor

    // x (capacity, IC) and w (El, OC, IC), innermost dimension first, in tiles.
    const int64_t size_x[] = {IC, r.capacity}, size_w[] = {IC, OC, r.El}, stride[] = {IC, OC * IC};
    const int box[] = {BLOCK_K, SIDE, 1};
    launch(kernel_5, tiles_of(r, IC, OC, SIDE, SIDE), THREADS, sizeof(Shared), ctx, y,
           tensor_map(x, 2, size_x, stride, box, ctx), tensor_map(w, 3, size_w, stride, box, ctx), r, IC, OC);
}
