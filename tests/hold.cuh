// SMs held by another kernel, as communication between GPUs holds some. For results and timings of kernels that run at
// the same time.
#ifndef TESTS_HOLD_CUH
#define TESTS_HOLD_CUH

#include "device/cuda.cuh"

// there[i] (host): block i is running. let_go (device): the blocks may end.
static __global__ void hold_kernel(volatile int* there, const volatile int* let_go) {
    there[blockIdx.x] = 1;
    while (!*let_go) __nanosleep(1000);
}

// Holds `sms` SMs to the end of the scope, by taking their shared memory. Until then do not synchronize the whole
// device. Every kernel used must have run before, because loading a kernel synchronizes the device.
struct HeldSms {
    cudaStream_t stream, other;
    int *let_go, *host;  // host: there[sms], then a 1 to copy

    explicit HeldSms(int sms) {
        int shared, device;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
        if (shared > 200 << 10) shared = 200 << 10;
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA_CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        let_go = (int*)device_alloc(sizeof(int), "held SMs");
        CUDA_CHECK(cudaMallocHost((void**)&host, (size_t)(sms + 1) * sizeof(int)));
        for (int i = 0; i < sms; i++) host[i] = 0;
        host[sms] = 1;
        CUDA_CHECK(cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        if (sms) hold_kernel<<<sms, 32, shared, stream>>>(host, let_go);
        LAUNCH_CHECK();
        for (int i = 0; i < sms; i++)
            while (!((volatile int*)host)[i]) {
            }
        count = sms;
    }
    HeldSms(const HeldSms&) = delete;
    ~HeldSms() {
        CUDA_CHECK(cudaMemcpyAsync(let_go, host + count, sizeof(int), cudaMemcpyHostToDevice, other));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        CUDA_CHECK(cudaStreamDestroy(stream));
        CUDA_CHECK(cudaStreamDestroy(other));
        CUDA_CHECK(cudaFreeHost(host));
        device_free(let_go);
    }

   private:
    int count;
};

// The least time of five calls in ms.
template <typename Call>
static float least_ms(Call call, cudaStream_t stream) {
    cudaEvent_t from, to;
    float least = INFINITY, ms;
    CUDA_CHECK(cudaEventCreate(&from));
    CUDA_CHECK(cudaEventCreate(&to));
    for (int i = 0; i < 5; i++) {
        CUDA_CHECK(cudaEventRecord(from, stream));
        call();
        CUDA_CHECK(cudaEventRecord(to, stream));
        CUDA_CHECK(cudaEventSynchronize(to));
        CUDA_CHECK(cudaEventElapsedTime(&ms, from, to));
        least = ms < least ? ms : least;
    }
    CUDA_CHECK(cudaEventDestroy(from));
    CUDA_CHECK(cudaEventDestroy(to));
    return least;
}

#endif
