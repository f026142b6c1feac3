#include "mx/mx_swiglu.h"

#include <stdlib.h>

#include "device/check.h"
#include "grouped/experts.h"
#include "layers/activation.h"
#include "layers/swiglu.h"
#include "mx/mxfp8_cpu.h"

void mx_swiglu_quantize(uint8_t* q, uint8_t* scale, const floatX* h, Ragged ragged, int64_t F, MxRecipe recipe,
                        Ctx* ctx) {
    (void)ctx;
    const int64_t chunk = chunk_of(recipe), stride = mx_stride(F);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < ragged.group_start[ragged.El]; r++) {  // the CPU has no pad rows
        memset(scale + r * stride, 0, stride);
        for (int64_t c = 0; c < F; c += chunk) {
            // a = silu(g) u, for the elements that share a scale.
            const floatX *g = h + r * 2 * F + c, *u = g + F;
            floatX a[MX_CHUNK];
            int64_t n = min_i64(chunk, F - c);
#pragma omp simd
            for (int64_t i = 0; i < n; i++) a[i] = swiglu(g[i], u[i], sigmoid(g[i]));

            // Quantize them.
            int s = scale_of(a, n, 1, n, recipe.scale);
            memset(scale + r * stride + c / MX_BLOCK, s, (size_t)n / MX_BLOCK);
            cast_all(q + r * F + c, n, 1, a, n, 1, n, s);
        }
    }
}

void mx_swiglu_backward_quantize(uint8_t* q, uint8_t* scale, floatX* dh, floatX* gated_a, real* drow_gate,
                                 const floatX* da_ungated, const floatX* h, Ragged ragged, int64_t F, MxRecipe recipe,
                                 Ctx* ctx) {
    const int64_t chunk = chunk_of(recipe), rows = ragged.group_start[ragged.El];
    // dh does not depend on how `a` was rounded. It is quantized row-wise.
    experts_swiglu_backward(dh, gated_a, drow_gate, da_ungated, h, ragged, F, ctx);
    mx_quantize(q, scale, dh, rows, 2 * F, recipe, ctx);

    // So far gated_a and drow_gate are computed with the unquantized `a`. Compute both again with the fake-quantized
    // one.
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const floatX *g = h + r * 2 * F, *u = g + F;
        floatX* a = gated_a + r * F;
        real gate = ragged.row_gate[r], dgate = 0;
#pragma omp simd
        for (int64_t i = 0; i < F; i++) a[i] = swiglu(g[i], u[i], sigmoid(g[i]));

        // Fake-quantize a.
        for (int64_t c = 0; c < F; c += chunk) {
            int64_t n = min_i64(chunk, F - c);
            int s = scale_of(a + c, n, 1, n, recipe.scale);
            for (int64_t i = c; i < c + n; i++) a[i] = value_of((float)a[i], s);
        }

        // dgate = <da', a>. Then gate * a overwrites a.
#pragma omp simd reduction(+ : dgate)
        for (int64_t i = 0; i < F; i++) dgate += da_ungated[r * F + i] * a[i];
        for (int64_t i = 0; i < F; i++) a[i] *= gate;
        drow_gate[r] = dgate;
    }
}

void mx_swiglu_backward_both(uint8_t* q, uint8_t* scale, uint8_t* q_channels, uint8_t* scale_channels, floatX* gated_a,
                             real* drow_gate, const floatX* da_ungated, const floatX* h, int64_t length, Ragged ragged,
                             int64_t F, int32_t scale_mode, Ctx* ctx) {
    const MxRecipe recipe = {scale_mode, MX_CHUNK};
    // The reference keeps dh in host memory and quantizes it in both directions. The kernels fuse the steps.
    floatX* dh = host_alloc((size_t)(ragged.capacity * 2 * F) * sizeof(floatX));
    mx_swiglu_backward_quantize(q, scale, dh, gated_a, drow_gate, da_ungated, h, ragged, F, recipe, ctx);
    mx_quantize_channels(q_channels, scale_channels, dh, length, ragged, 2 * F, recipe, ctx);
    free(dh);
}

void mx_swiglu_backward_both_tokens(uint8_t* q, uint8_t* scale, uint8_t* q_channels, uint8_t* scale_channels, floatX* a,
                                    const floatX* da, const floatX* h, int64_t length, int64_t N, int64_t F,
                                    int32_t scale_mode, Ctx* ctx) {
    floatX* dh = host_alloc((size_t)(N * 2 * F) * sizeof(floatX));
    swiglu_backward(dh, a, da, h, N, F, ctx);
    mx_quantize_both(q, scale, q_channels, scale_channels, dh, length, N, 2 * F, scale_mode, ctx);
    free(dh);
}
