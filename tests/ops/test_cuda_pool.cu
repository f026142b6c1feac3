// The pool on the GPU: memory is added at the next addresses while kernels use the earlier ones, and values stay. The
// reference test of the stack is tests/ops/test_moe.c.
#include "device/pool.h"
#include "tests/cuda.cuh"

static __global__ void fill_kernel(uint32_t* p, int64_t n, uint32_t from) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (int64_t)blockDim.x)
        p[i] = from + (uint32_t)i;
}

static __global__ void check_kernel(const uint32_t* p, int64_t n, uint32_t from, int* wrong) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (int64_t)blockDim.x)
        if (p[i] != from + (uint32_t)i) atomicAdd(wrong, 1);
}

// With the caller's memory first, and without. Buffers have odd sizes; all are read after the last was written.
static void grows(void) {
    const int64_t n[] = {1000, 3 << 20, 700001, 40 << 20, 1};
    for (int caller = 0; caller < 2; caller++) {
        void* memory = caller ? device_alloc(3 << 20, "a test") : NULL;
        Pool* pool = pool_create("pool of a test", memory, 3 << 20, (size_t)1 << 30);
        I32 wrong(1);
        wrong.host[0] = 0, wrong.send(), settle();
        for (int round = 0; round < 2; round++) {
            uint32_t* p[5];
            for (int i = 0; i < 5; i++) {
                p[i] = (uint32_t*)pool_take(pool, (size_t)n[i] * sizeof(uint32_t));
                launch(fill_kernel, 64, 256, 0, ctx, p[i], n[i], (uint32_t)(i + 100 * round));
            }
            for (int i = 0; i < 5; i++)
                launch(check_kernel, 64, 256, 0, ctx, p[i], n[i], (uint32_t)(i + 100 * round), wrong.dev);
            pool_release(pool, 0);
        }
        CHECK(wrong.got()[0] == 0, "%d values changed", wrong.got()[0]);
        ctx_sync(ctx);
        pool_destroy(pool);
        if (caller) device_free(memory);
    }
}

// The free memory comes back when a pool is destroyed: 20 pools of a quarter of it. A page table may stay.
static void gives_back(void) {
    const size_t before = device_free_memory(1), size = before / 4;
    for (int i = 0; i < 20; i++) {
        Pool* pool = pool_create("pool of a test", NULL, size / 2, size);
        launch(fill_kernel, 64, 256, 0, ctx, (uint32_t*)pool_take(pool, size - (2 << 20)), (int64_t)1000, 0u);
        pool_destroy(pool);
    }
    CHECK(device_free_memory(1) + ((size_t)64 << 20) >= before, "%zu of %zu bytes are free", device_free_memory(1),
          before);
}

// More than the GPU has: nothing is mapped, and less can still be had.
static void not_enough(void) {
    const size_t reserved = (size_t)1 << 40;
    char* addresses = device_reserve(reserved);
    CHECK(!device_map(addresses, reserved), "a TiB was mapped");
    CHECK(device_map(addresses, 2 << 20) && device_map(addresses + (2 << 20), 4 << 20), "6 MiB were not mapped");
    launch(fill_kernel, 64, 256, 0, ctx, (uint32_t*)addresses, (int64_t)(6 << 18), 0u);
    ctx_sync(ctx);
    device_unreserve(addresses, 6 << 20, reserved);
}

int main(void) {
    open_contexts(1 << 20);
    RUN(grows);
    RUN(gives_back);
    RUN(not_enough);
    return test_summary();
}
