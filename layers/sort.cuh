// A stable counting sort with reproducible results: integers only, and every place follows from counts alone. Three
// launches:
//
//   sort_count     counts the bins of each chunk of 1024 elements, in shared memory
//   sort_scan      per bin: exclusive prefix sum over the chunks (in place), and the total
//   sort_scatter   per chunk: place = start of the bin + earlier chunks + earlier warps + earlier elements of the warp
//                  (__match_any_sync), passed to `emit`
//
// `key(i)` returns the bin of element i; a negative bin drops the element. `emit(i, place)` is called for every
// element, with place -1 if the element is dropped. Each block of sort_scatter ends with emit.finish(start, totals,
// bins): the bins' first places and counts. Bins start at multiples of `align`. Bound by latency.
#pragma once

#include "device/cuda.cuh"

enum { SORT_CHUNK = 1024, SORT_THREADS = 256, SORT_WARPS = SORT_THREADS / 32, SORT_MAX_BINS = 1024 };

// Workspace in int32: counts (bins, chunks), then totals (bins).
static inline int64_t sort_workspace(int64_t n, int bins) { return (ceil_div(n, SORT_CHUNK) + 1) * bins; }

template <typename Key>
static __global__ void sort_count(int32_t* counts, Key key, int64_t n, int bins) {
    wait_for_previous();
    // An empty histogram.
    extern __shared__ int32_t histogram[];
    for (int b = threadIdx.x; b < bins; b += SORT_THREADS) histogram[b] = 0;
    __syncthreads();

    // Count the chunk's elements.
    for (int i = threadIdx.x; i < SORT_CHUNK; i += SORT_THREADS) {
        int64_t at = blockIdx.x * (int64_t)SORT_CHUNK + i;
        int bin = at < n ? key(at) : -1;
        if (bin >= 0) atomicAdd(&histogram[bin], 1);
    }
    __syncthreads();

    // Write the counts: one column per chunk.
    for (int b = threadIdx.x; b < bins; b += SORT_THREADS) counts[b * (int64_t)gridDim.x + blockIdx.x] = histogram[b];
}

static __global__ void sort_scan(int32_t* counts, int32_t* totals, int64_t chunks) {
    wait_for_previous();
    __shared__ int32_t warps[SORT_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t* row = counts + blockIdx.x * chunks;
    int32_t before = 0;
    for (int64_t c0 = 0; c0 < chunks; c0 += SORT_THREADS) {
        // 256 chunks at a time: a scan in each warp, then over the warps.
        int64_t c = c0 + threadIdx.x;
        int32_t count = c < chunks ? row[c] : 0, sum = warp_scan(count);
        if (lane == 31) warps[warp] = sum;
        __syncthreads();
        int32_t all = 0;
        for (int w = 0; w < SORT_WARPS; w++) {
            if (w < warp) sum += warps[w];
            all += warps[w];
        }

        // Each count becomes the sum of the earlier chunks.
        if (c < chunks) row[c] = before + sum - count;
        before += all;
        __syncthreads();
    }
    if (threadIdx.x == 0) totals[blockIdx.x] = before;
}

// start (bins + 1) in shared memory from totals, computed by the first warp; the caller synchronizes.
static __device__ __forceinline__ void sort_starts(int32_t* start, const int32_t* totals, int bins, int align) {
    if (threadIdx.x >= 32) return;
    int32_t before = 0;
    for (int b0 = 0; b0 < bins; b0 += 32) {
        int b = b0 + threadIdx.x;
        int32_t size = b < bins ? (totals[b] + align - 1) / align * align : 0, sum = warp_scan(size);
        if (b < bins) start[b] = before + sum - size;
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (threadIdx.x == 0) start[bins] = before;
}

template <typename Key, typename Emit>
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_scatter(const int32_t* counts, const int32_t* totals, Key key, Emit emit, int64_t n, int bins, int align) {
    wait_for_previous();
    extern __shared__ int32_t shared[];
    int32_t *start = shared, *next = shared + bins + 1;  // next: (warps, bins)
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t first = blockIdx.x * (int64_t)SORT_CHUNK + warp * (SORT_CHUNK / SORT_WARPS);
    enum { ROUNDS = SORT_CHUNK / SORT_WARPS / 32 };

    // Starts of the bins, and zeroed counts per warp.
    for (int i = threadIdx.x; i < SORT_WARPS * bins; i += SORT_THREADS) next[i] = 0;
    sort_starts(start, totals, bins, align);
    __syncthreads();

    // Counts per warp and bin.
    int bin[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        int64_t at = first + r * 32 + lane;
        bin[r] = at < n ? key(at) : -1;
        if (bin[r] >= 0) atomicAdd(&next[warp * bins + bin[r]], 1);
    }
    __syncthreads();

    // Counts become places: start of the bin, plus earlier chunks, plus earlier warps.
    for (int b = threadIdx.x; b < bins; b += SORT_THREADS) {
        int32_t place = start[b] + counts[b * (int64_t)gridDim.x + blockIdx.x];
        for (int w = 0; w < SORT_WARPS; w++) {
            int32_t count = next[w * bins + b];
            next[w * bins + b] = place;
            place += count;
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        // Among lanes with the same bin, lower lanes come first.
        int64_t at = first + r * 32 + lane;
        unsigned peers = __match_any_sync(0xffffffffu, bin[r]);
        int before = __popc(peers & ((1u << lane) - 1));
        int32_t place = bin[r] >= 0 ? next[warp * bins + bin[r]] + before : -1;
        __syncwarp();
        if (bin[r] >= 0 && before == 0) next[warp * bins + bin[r]] += __popc(peers);
        __syncwarp();
        if (at < n) emit(at, place);
    }
    emit.finish(start, totals, bins);
}

// The whole sort: n elements, `bins` bins, `workspace` of sort_workspace(n, bins).
template <typename Key, typename Emit>
static void counting_sort(Key key, Emit emit, int64_t n, int bins, int align, int32_t* workspace, Ctx* ctx) {
    // The workspace, then the three launches.
    int64_t chunks = ceil_div(n, SORT_CHUNK);
    int32_t *counts = workspace, *totals = workspace + chunks * bins;
    launch_early(sort_count<Key>, chunks, SORT_THREADS, bins * sizeof(int32_t), ctx, counts, key, n, bins);
    launch_early(sort_scan, bins, SORT_THREADS, 0, ctx, counts, totals, chunks);
    size_t shared = (bins + 1 + SORT_WARPS * bins) * sizeof(int32_t);  // 36 KiB for SORT_MAX_BINS
    launch_early(sort_scatter<Key, Emit>, chunks, SORT_THREADS, shared, ctx, counts, totals, key, emit, n, bins, align);
}
