// Each thread computes the rows to one rank and from it.
#include "device/cuda.cuh"
#include "moe/dispatch_windows.h"

static __global__ void route_kernel(int64_t* rows, float* overflow, const int64_t* counts, int32_t index, int32_t P,
                                    int64_t align, int64_t received, int64_t choices) {
    const int32_t j = (int32_t)threadIdx.x;
    const double share = route_numbers(rows, counts, index, P, j, align, received, choices);
    const bool first = *overflow == 0;
    if (!__syncthreads_or(share > 1)) return;
    rows[WINDOW_ROWS * P + j] = rows[(WINDOW_NUMBERS + WINDOW_ROWS) * P + j] = 0;
    // The bits of positive floats, read as integers, have the order of the floats.
    if (first) atomicMax((int*)overflow, __float_as_int((float)share));
}

void route_on_device(const Route* r, real* overflow, const int64_t* counts, int32_t index, Ctx* ctx) {
    launch(route_kernel, 1, r->shape.ep, 0, ctx, r->by_windows, overflow, counts, index, r->shape.ep,
           row_align(BACKEND), r->received, r->choices);
}
