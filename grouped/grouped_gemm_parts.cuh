// What the kernels of the grouped products (grouped_gemm.cu, grouped_gemm_mx.cu) share: how units of work are handed
// out to clusters of blocks, and how results leave.
#ifndef GROUPED_GROUPED_GEMM_PARTS_CUH
#define GROUPED_GROUPED_GEMM_PARTS_CUH

#include "grouped/grouped_gemm_ptx.cuh"

namespace {

enum { CLUSTER = 2, BOTH = 3 };  // blocks of a cluster, and their bits

__device__ __forceinline__ int div_up(int a, int b) { return (a + b - 1) / b; }

// --- Units of work, first come, first served ---
//
// A cluster draws the number of its next unit from a counter in device memory. So one that starts late, because
// something else still held its SMs (a transfer between GPUs holds some for milliseconds), takes fewer units and
// nothing waits for it. Block 0 draws for both, a unit ahead, so that the counter answers while slices are loaded, and
// sends the number into both blocks' queues.

// More numbers than can be on their way: block 0 is no more tiles ahead than there are stages (4), which both share.
enum { QUEUE = 8 };
struct Queue {
    uint64_t there[QUEUE];
    uint32_t unit[QUEUE];
};

__device__ __forceinline__ void queue_init(Queue& q) {
    for (int i = 0; i < QUEUE; i++) barrier_init(&q.there[i], 1);
}

// What the producing warp knows of it.
struct Units {
    Queue& queue;
    uint32_t* counter;
    int rank, lane;
    uint32_t drawn, turn;

    __device__ __forceinline__ void draw() {
        if (rank == 0 && lane == 0) drawn = draw_number(counter);
    }
    // What was drawn, in all lanes of both blocks.
    __device__ __forceinline__ int next() {
        const uint32_t slot = turn % QUEUE, parity = turn / QUEUE % 2;
        uint64_t* there = &queue.there[slot];
        if (lane == 0) {
            barrier_expect(there, sizeof(uint32_t));
            if (rank == 0)
                for (int block = 0; block < CLUSTER; block++)
                    send_word(cluster_address(&queue.unit[slot], block), drawn, cluster_address(there, block));
        }
        barrier_wait(there, parity);
        turn++;
        return (int)queue.unit[slot];
    }
};

// --- Results ---

// A warp's 16 rows leave in pieces of 128 bytes a row, through two buffers of its own. TMA drops what lies outside.
enum { PIECE_BYTES = 16 * 128 };
struct Writer {
    uint8_t (*buffer)[PIECE_BYTES];
    int turn, lane;

    __device__ __forceinline__ uint8_t* begin() {
        if (lane == 0) tma_wait_read<1>();
        __syncwarp();
        return buffer[turn ^= 1];
    }
};

// A piece from the sums of its columns as wgmma leaves them (device/wgmma.cuh), in 16-byte units swizzled as TMA
// expects them. Rows from `valid` on become zeros whatever their sums are.

// 64 columns as bf16. (Zeros by the packed values: writing d itself would serialize wgmma.)
__device__ __forceinline__ void put(uint8_t* to, const float* d, int valid, int lane, floatX*) {
    const uint32_t keep = lane / 4 < valid ? ~0u : 0, keep8 = lane / 4 + 8 < valid ? ~0u : 0;
    // Lanes 0-7, 8-15 address rows 0-7 and 8-15 of 8 columns, lanes 16-31 those of the next 8.
    const uint32_t at = shared_address(to) + lane % 16 * 128;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const float* p = d + j * 4;
        store_matrices(at + ((j + lane / 16) ^ lane % 8) * 16, pack_bf16(p[0], p[1]) & keep,
                       pack_bf16(p[2], p[3]) & keep8, pack_bf16(p[4], p[5]) & keep, pack_bf16(p[6], p[7]) & keep8);
    }
}

// 32 columns of float32. Odd rows go through their columns in another order: no bank conflicts.
__device__ __forceinline__ void put(uint8_t* to, const float* d, int valid, int lane, float*) {
    const int r = lane / 4, odd = r % 2;
    to += r * 128 + lane % 2 * 8;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float* p = d + j * 4 + half * 2;
            float2 near = {p[0], p[1]}, far = {p[8], p[9]};
            if (r + half * 8 >= valid) near = far = {0, 0};
            const int unit = (j * 2 + lane % 4 / 2) ^ r ^ odd * 4;
            *(float2*)(to + half * 8 * 128 + unit * 16) = odd ? far : near;
            *(float2*)(to + half * 8 * 128 + (unit ^ 4) * 16) = odd ? near : far;
        }
}

// The warp's 16 rows of N columns from column n on, of `columns`; send(piece, column) hands a piece to TMA.
template <typename Out, int N, typename Send>
__device__ __forceinline__ void write(Writer& w, const float (&d)[N / 2], int n, int columns, int valid, Send send) {
    constexpr int WIDTH = 128 / sizeof(Out);
#pragma unroll
    for (int c = 0; c < N / WIDTH; c++) {
        if (n + c * WIDTH >= columns) break;
        uint8_t* piece = w.begin();
        put(piece, d + c * WIDTH / 2, valid, w.lane, (Out*)nullptr);
        fence_async();
        __syncwarp();
        if (w.lane == 0) send(piece, n + c * WIDTH), tma_commit();
    }
}

// --- The host's side ---

// A matrix (rows, cols), or `depth` of them one after another (0: one, in two dimensions), in boxes 128 bytes wide.
template <typename T>
CUtensorMap matrix_map(const T* p, int64_t depth, int64_t rows, int64_t cols, int box_rows, Ctx* ctx) {
    const int64_t size[3] = {cols, rows, depth}, stride[2] = {cols, rows * cols};
    const int box[3] = {(int)(128 / sizeof(T)), box_rows, 1};
    return tensor_map(p, depth ? 3 : 2, size, stride, box, ctx);
}

// The counter of a product's units, at 0: of the Ctx, since products of several may run at once.
uint32_t* unit_counter(Ctx* ctx) {
    uint32_t* counter = ctx_workspace<uint32_t>(ctx, 1);
    device_zero(counter, sizeof(*counter), ctx);
    return counter;
}

}  // namespace

#endif
