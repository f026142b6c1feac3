// Dense GEMMs by cuBLASLt: bf16 inputs, float32 accumulation, bf16 output (float32 for forward_real and wgrad). Bound
// by the tensor cores at the model's sizes. At these sizes the library reaches about 80 % of the tensor cores' dense
// peak, so there is no kernel of our own.
#include "layers/matmul.h"

#include "device/lt.cuh"

enum { WORKSPACE = 32 << 20 };

size_t matmul_workspace(void) { return WORKSPACE; }

static void multiply(LtMatrix d, LtMatrix a, LtMatrix b, LtProduct product, Ctx* ctx) {
    product.workspace = WORKSPACE;
    lt_multiply(d, a, b, product, ctx);
}

void matmul_forward(floatX* y, const floatX* x, const floatX* w, int64_t N, int64_t IC, int64_t OC, Ctx* ctx) {
    multiply({y, OC}, {x, IC}, {w, IC}, {.m = N, .n = OC, .k = IC, .transpose_b = true}, ctx);
}

void matmul_forward_real(real* y, const floatX* x, const floatX* w, int64_t N, int64_t IC, int64_t OC, Ctx* ctx) {
    multiply({y, OC}, {x, IC}, {w, IC}, {.m = N, .n = OC, .k = IC, .transpose_b = true, .real_out = true}, ctx);
}

void matmul_dgrad(floatX* dx, const floatX* dy, const floatX* w, int64_t N, int64_t IC, int64_t OC, int accumulate,
                  Ctx* ctx) {
    multiply({dx, IC}, {dy, OC}, {w, IC}, {.m = N, .n = IC, .k = OC, .accumulate = accumulate != 0}, ctx);
}

void matmul_wgrad(real* dw, const floatX* dy, const floatX* x, int64_t N, int64_t IC, int64_t OC, int accumulate,
                  Ctx* ctx) {
    if (N == 0 && !accumulate) return device_zero(dw, (size_t)(OC * IC) * sizeof(real), ctx);
    multiply({dw, IC}, {dy, OC}, {x, IC},
             {.m = OC, .n = IC, .k = N, .transpose_a = true, .real_out = true, .accumulate = accumulate != 0}, ctx);
}
