#include "mx/mx_swiglu.h"

#include <stdlib.h>

#include "device/cpu.h"
#include "layers/swiglu.h"

void mx_swiglu_quantize(MxBytes out, const floatX* h, Ragged ragged, int64_t F, int32_t scale_mode, Ctx* ctx) {
    const MxRecipe recipe = {scale_mode, MX_CHUNK};
    floatX* a = host_alloc((size_t)(ragged.capacity * F) * sizeof(floatX));
    experts_swiglu_forward(a, h, ragged, F, ctx);
    mx_quantize(out, a, ragged.group_start[ragged.El], F, recipe, ctx);
    free(a);
}

void mx_swiglu_backward_both(MxBytes out, MxBytes channels, ExpertsBackward t, int64_t length, Ragged ragged, int64_t F,
                             int32_t scale_mode, Ctx* ctx) {
    const MxRecipe recipe = {scale_mode, MX_CHUNK};
    // The reference keeps dh in host memory and quantizes it in both directions. The kernels fuse the steps.
    t.dh = host_alloc((size_t)(ragged.capacity * 2 * F) * sizeof(floatX));
    if (ragged.row_gate) {
        // dh does not depend on how `a` was rounded. The gate's gradient does.
        const int64_t rows = ragged.group_start[ragged.El];
        experts_swiglu_backward(t, ragged, F, ctx);
        experts_swiglu_forward(t.gated_a, t.h, ragged, F, ctx);
        mx_round_rows(t.gated_a, t.gated_a, rows, F, recipe, ctx);
        experts_gate_backward(t, ragged, F, ctx);
        mx_quantize(out, t.dh, rows, 2 * F, recipe, ctx);
        mx_quantize_channels(channels, t.dh, length, ragged, 2 * F, recipe, ctx);
    } else {
        swiglu_backward(t.dh, t.gated_a, t.da_ungated, t.h, ragged.capacity, F, ctx);
        mx_quantize_both(out, channels, t.dh, length, ragged.capacity, 2 * F, scale_mode, ctx);
    }
    free(t.dh);
}

void experts_gate_backward(ExpertsBackward t, Ragged r, int64_t F, Ctx* ctx) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < r.group_start[r.El]; row++) {
        floatX* a = t.gated_a + row * F;
        real dgate = 0;
#pragma omp simd reduction(+ : dgate)
        for (int64_t i = 0; i < F; i++) dgate += t.da_ungated[row * F + i] * a[i];
        for (int64_t i = 0; i < F; i++) a[i] = a[i] * r.row_gate[row];
        t.drow_gate[row] = dgate;
    }
}
