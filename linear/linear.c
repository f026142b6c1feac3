#include "linear/linear.h"

#include "device/check.h"
#include "grouped/grouped_gemm.h"
#include "layers/matmul.h"
#include "layers/swiglu.h"
#include "linear/quantized.h"

// --- linear_: GEMMs of all tokens with one matrix ---

void linear_forward(floatX* y, const floatX* x, const Weight* w, int64_t N, Ctx* ctx) {
    if (w->format)
        quantized_linear(y, x, w, NULL, N, ctx);
    else
        matmul_forward(y, x, w->w, N, w->IC, w->OC, ctx);
}

void linear_dgrad(floatX* dx, LinearGradient* product, int64_t N, int accumulate, Ctx* ctx) {
    const Weight* w = product->weight;
    // Quantized GEMMs write dx; only the floatX GEMM can add to it.
    ASSERT(!accumulate || !w->format);
    if (w->format)
        quantized_linear(dx, product->dy, w, product, N, ctx);
    else
        matmul_dgrad(dx, product->dy, w->w, N, w->IC, w->OC, accumulate, ctx);
}

void linear_wgrads(LinearGradient* products, int count, int64_t N, Ctx* ctx) {
    int quantized = 0;
    for (LinearGradient* p = products; p < products + count; p++) {
        const Weight* w = p->weight;
        if (w->wgrad)
            quantized = 1;
        else
            matmul_wgrad(w->grad, p->dy, p->x, N, w->IC, w->OC, w->accumulate, ctx);
    }
    if (quantized) quantized_wgrads(products, count, N, ctx);
}

void linear_backward(floatX* dx, const floatX* dy, const floatX* x, const Weight* w, int64_t N, Ctx* ctx) {
    LinearGradient product = {w, dy, x, 0};
    linear_dgrad(dx, &product, N, 0, ctx);
    linear_wgrads(&product, 1, N, ctx);
}

void linear_mlp_hidden(floatX* a, floatX* h, const floatX* x, const Weight* w13, int64_t N, Ctx* ctx) {
    linear_forward(h, x, w13, N, ctx);
    swiglu_forward(a, h, N, w13->OC / 2, ctx);
}

void linear_mlp_backward(floatX* dx, const floatX* dy, const floatX* x, const floatX* h, MlpBuffers t,
                         const Weight* w13, const Weight* w2, int64_t N, Ctx* ctx) {
    LinearGradient products[] = {{w2, dy, t.a, 0}, {w13, t.dh, x, 0}};
    linear_dgrad(t.da, &products[0], N, 0, ctx);
    // dh is written as floatX only if a kernel reads it.
    if (!w13->format || !quantized_swiglu_backward(dx, t.a, t.da, h, &products[1], N, ctx)) {
        swiglu_backward(t.dh, t.a, t.da, h, N, w13->OC / 2, ctx);
        linear_dgrad(dx, &products[1], N, 0, ctx);
    }
    linear_wgrads(products, 2, N, ctx);
}

// --- grouped_: GEMMs of each expert's rows with its matrix ---

void grouped_forward(floatX* y, Rows x, const Weight* w, Ragged r, Ctx* ctx) {
    if (w->format)
        quantized_grouped(y, x, w, 0, r, ctx);
    else
        grouped_gemm_forward(y, x.value, w->w, r, w->IC, w->OC, ctx);
}

void grouped_dgrad(floatX* dx, Rows dy, const Weight* w, Ragged r, Ctx* ctx) {
    if (w->format)
        quantized_grouped(dx, dy, w, 1, r, ctx);
    else
        grouped_gemm_dgrad(dx, dy.value, w->w, r, w->IC, w->OC, ctx);
}

Rows grouped_forward_swiglu(Rows out, floatX* h, Rows x, const Weight* w13, const Weight* w2, Ragged r, Ctx* ctx) {
    const int64_t F = w2->IC;
    if (w2->format) {
        grouped_forward(h, x, w13, r, ctx);
        return quantized_grouped_swiglu(out, h, w2, r, ctx);
    }
    const GroupedRows order = is_by_token(x) ? X_BY_TOKEN : ALL_BY_ROW;
    grouped_gemm_swiglu(h, out.value, x.value, w13->w, order, r, w13->IC, F, ctx);
    return rows_of_values(out.value, r.capacity, F);
}

Rows grouped_dgrad_swiglu(Rows out, Rows* for_wgrad, int32_t* gate_parts, ExpertsBackward t, floatX* da, Rows dy,
                          const Weight* w2, const Weight* w13, Ragged r, Ctx* ctx) {
    const int64_t F = w2->IC;
    *for_wgrad = rows_of_values(t.dh, r.capacity, 2 * F);
    *gate_parts = 1;
    t.da_ungated = da;
    if (w13->format) return quantized_grouped_dgrad_swiglu(out, for_wgrad, t, da, dy, w2, w13, r, ctx);

    // SwiGLU in the epilogue of the GEMM, or after it.
    const GroupedRows order = is_by_token(dy) ? DY_BY_TOKEN : ALL_BY_ROW;
    *gate_parts = grouped_gemm_dgrad_swiglu(t, dy.value, w2->w, order, r, w2->OC, F, ctx);
    return *for_wgrad;
}

void grouped_wgrad(const Weight* w, Rows dy, Rows dy_memory, Rows x, Rows x_memory, Ragged r, Ctx* ctx) {
    ASSERT(!w->rounded_grad || !w->accumulate);
    if (format_packed(w->wgrad)) {
        quantized_grouped_wgrad(w, dy, dy_memory, x, x_memory, r, ctx);
        return;
    }

    // The GEMM gathers an operand by token, or reads it by row.
    if (is_by_token(dy)) dy = rows_gathered(dy_memory, dy, w->wgrad, r, ctx);
    if (is_by_token(x)) x = rows_gathered(x_memory, x, w->wgrad, r, ctx);
    if (w->format || w->wgrad) {
        dy = quantized_wgrad_rows(w, STATS_DY, dy, dy_memory, r, ctx);
        x = quantized_wgrad_rows(w, STATS_X, x, x_memory, r, ctx);
    }
    ASSERT(!is_by_token(dy) || !is_by_token(x));
    const GroupedRows order = is_by_token(dy) ? DY_BY_TOKEN : is_by_token(x) ? X_BY_TOKEN : ALL_BY_ROW;
    grouped_gemm_wgrad(w->grad, w->rounded_grad, dy.value, x.value, order, r, w->IC, w->OC, w->accumulate, ctx);
}
