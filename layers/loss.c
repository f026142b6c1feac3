#include "layers/loss.h"

#include "device/cpu.h"

void cross_entropy(real* loss, floatX* logits, const int32_t* target, int64_t N, int64_t V, int64_t Vp, float dscale,
                   Ctx* ctx) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        // The largest logit of a row, and the sum of exp(z - top).
        floatX* z = logits + n * Vp;
        real top = z[0], sum = 0;
        // The maximum may drop a NaN logit; it reaches the loss through the sum.
#pragma omp simd reduction(max : top)
        for (int64_t v = 0; v < V; v++) top = z[v] > top ? z[v] : top;
#pragma omp simd reduction(+ : sum)
        for (int64_t v = 0; v < V; v++) sum += exp(z[v] - top);

        // loss = ln sum exp(z) - z_target
        loss[n] = log(sum) + (top - z[target[n]]);  // in this order small losses keep their digits
        if (dscale == 0) continue;

        // The gradient overwrites the logits: dscale (softmax(z) - onehot(target)). It is 0 in the padding.
        real scale = (real)dscale / sum;
#pragma omp simd
        for (int64_t v = 0; v < V; v++) z[v] = scale * exp(z[v] - top);
        z[target[n]] -= (real)dscale;
        for (int64_t v = V; v < Vp; v++) z[v] = 0;
    }
}
