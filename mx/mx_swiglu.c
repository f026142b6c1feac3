#include "mx/mx_swiglu.h"

#include <stdlib.h>

#include "device/check.h"
#include "grouped/experts.h"
#include "layers/swiglu.h"
#include "mx/mxfp8.h"

void mx_swiglu_quantize(MxBytes out, const floatX* h, Ragged ragged, int64_t F, MxRecipe recipe, Ctx* ctx) {
    floatX* a = host_alloc((size_t)(ragged.capacity * F) * sizeof(floatX));
    experts_swiglu_forward(a, h, ragged, F, ctx);
    mx_quantize(out, a, ragged.group_start[ragged.El], F, recipe, ctx);
    free(a);
}

void mx_swiglu_backward_quantize(MxBytes out, floatX* dh, floatX* gated_a, real* drow_gate, const floatX* da_ungated,
                                 const floatX* h, Ragged ragged, int64_t F, MxRecipe recipe, Ctx* ctx) {
    const int64_t rows = ragged.group_start[ragged.El];
    // `a`, fake-quantized: `out` holds it until dh overwrites it.
    floatX* a = host_alloc((size_t)(ragged.capacity * F) * sizeof(floatX));
    mx_swiglu_quantize(out, h, ragged, F, recipe, ctx);
    mx_dequantize(a, out, rows, F, 0, ctx);

    // dh does not depend on how `a` was rounded. It is quantized row-wise.
    experts_swiglu_backward(dh, gated_a, drow_gate, da_ungated, h, ragged, F, ctx);
    mx_quantize(out, dh, rows, 2 * F, recipe, ctx);

    // dgate = <da', a> and gate * a again, now with the fake-quantized `a`.
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        real dgate = 0;
#pragma omp simd reduction(+ : dgate)
        for (int64_t i = 0; i < F; i++) dgate += da_ungated[r * F + i] * a[r * F + i];
        for (int64_t i = 0; i < F; i++) gated_a[r * F + i] = a[r * F + i] * ragged.row_gate[r];
        drow_gate[r] = dgate;
    }
    free(a);
}

void mx_swiglu_backward_both(MxBytes out, MxBytes channels, floatX* gated_a, real* drow_gate, const floatX* da_ungated,
                             const floatX* h, int64_t length, Ragged ragged, int64_t F, int32_t scale_mode, Ctx* ctx) {
    const MxRecipe recipe = {scale_mode, MX_CHUNK};
    // The reference keeps dh in host memory and quantizes it in both directions. The kernels fuse the steps.
    floatX* dh = host_alloc((size_t)(ragged.capacity * 2 * F) * sizeof(floatX));
    if (ragged.row_gate) {
        mx_swiglu_backward_quantize(out, dh, gated_a, drow_gate, da_ungated, h, ragged, F, recipe, ctx);
        mx_quantize_channels(channels, dh, length, ragged, 2 * F, recipe, ctx);
    } else {
        swiglu_backward(dh, gated_a, da_ungated, h, ragged.capacity, F, ctx);
        mx_quantize_both(out, channels, dh, length, ragged.capacity, 2 * F, scale_mode, ctx);
    }
    free(dh);
}
