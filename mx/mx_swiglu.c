#include "mx/mx_swiglu.h"

#include <stdlib.h>

#include "device/cpu.h"
#include "layers/swiglu.h"

void mx_swiglu_quantize(MxBytes out, const floatX* h, Ragged ragged, int64_t F, MxRecipe recipe, Ctx* ctx) {
    floatX* a = host_alloc((size_t)(ragged.capacity * F) * sizeof(floatX));
    experts_swiglu_forward(a, h, ragged, F, ctx);
    mx_quantize(out, a, ragged.group_start[ragged.El], F, recipe, ctx);
    free(a);
}

void mx_swiglu_backward_quantize(MxBytes out, ExpertsBackward t, Ragged ragged, int64_t F, MxRecipe recipe, Ctx* ctx) {
    const int64_t rows = ragged.group_start[ragged.El];
    // `a`, fake-quantized: `out` holds it until dh overwrites it.
    floatX* a = host_alloc((size_t)(ragged.capacity * F) * sizeof(floatX));
    mx_swiglu_quantize(out, t.h, ragged, F, recipe, ctx);
    mx_dequantize(a, out, rows, F, 0, ctx);

    // dh does not depend on how `a` was rounded. It is quantized row-wise.
    experts_swiglu_backward(t, ragged, F, ctx);
    mx_quantize(out, t.dh, rows, 2 * F, recipe, ctx);

    // dgate = <da', a> and gate * a again, now with the fake-quantized `a`.
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        real dgate = 0;
#pragma omp simd reduction(+ : dgate)
        for (int64_t i = 0; i < F; i++) dgate += t.da_ungated[r * F + i] * a[r * F + i];
        for (int64_t i = 0; i < F; i++) t.gated_a[r * F + i] = a[r * F + i] * ragged.row_gate[r];
        t.drow_gate[r] = dgate;
    }
    free(a);
}

void mx_swiglu_backward_both(MxBytes out, MxBytes channels, ExpertsBackward t, int64_t length, Ragged ragged, int64_t F,
                             int32_t scale_mode, Ctx* ctx) {
    const MxRecipe recipe = {scale_mode, MX_CHUNK};
    // The reference keeps dh in host memory and quantizes it in both directions. The kernels fuse the steps.
    t.dh = host_alloc((size_t)(ragged.capacity * 2 * F) * sizeof(floatX));
    if (ragged.row_gate) {
        mx_swiglu_backward_quantize(out, t, ragged, F, recipe, ctx);
        mx_quantize_channels(channels, t.dh, length, ragged, 2 * F, recipe, ctx);
    } else {
        swiglu_backward(t.dh, t.gated_a, t.da_ungated, t.h, ragged.capacity, F, ctx);
        mx_quantize_both(out, channels, t.dh, length, ragged.capacity, 2 * F, scale_mode, ctx);
    }
    free(t.dh);
}
