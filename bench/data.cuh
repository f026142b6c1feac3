// Random data for the benchmarks' buffers, and the difference of two results.
#ifndef BENCH_DATA_CUH
#define BENCH_DATA_CUH

#include "device/cuda.cuh"

// Approximately normal with variance 1. A function of index and seed alone, the same on the host and the GPU.
static __host__ __device__ float normal(int64_t i, uint64_t seed) {
    float sum = 0;
    for (int k = 0; k < 4; k++) {
        uint64_t x = (uint64_t)i * 4 + k + (seed << 40);
        x ^= x >> 31, x *= 0x7fb5d329728ea185ull, x ^= x >> 27, x *= 0x81dadef4bc2dd44dull, x ^= x >> 33;
        sum += (float)(uint32_t)x * 0x1p-32f - 0.5f;
    }
    return sum * 1.7320508f;
}

// p[i] = scale * normal(first + i)
template <typename T>
static __global__ void fill(T* p, int64_t n, uint64_t seed, float scale = 1, int64_t first = 0) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (int64_t)blockDim.x)
        p[i] = (T)(normal(first + i, seed) * scale);
}

// sums[0] += sum of (a - b)^2, sums[1] += sum of b^2
template <typename T>
static __global__ void difference(const T* a, const T* b, int64_t n, double* sums) {
    double diff = 0, norm = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (int64_t)blockDim.x) {
        double x = (double)(float)a[i], y = (double)(float)b[i];
        diff += (x - y) * (x - y), norm += y * y;
    }
    atomicAdd(sums, diff), atomicAdd(sums + 1, norm);
}

#endif
