#include "layers/swiglu.h"

#include "device/cpu.h"
#include "layers/activation.h"

void swiglu_forward(floatX* a, const floatX* h, int64_t N, int64_t F, Ctx* ctx) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        // A token: gate, then up.
        const floatX *g = h + n * 2 * F, *u = g + F;
#pragma omp simd
        for (int64_t i = 0; i < F; i++) a[n * F + i] = swiglu(g[i], u[i], sigmoid(g[i]));
    }
}

void swiglu_backward(floatX* dh, floatX* a, const floatX* da, const floatX* h, int64_t N, int64_t F, Ctx* ctx) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        // A token: gate, then up, and their gradients.
        const floatX *g = h + n * 2 * F, *u = g + F;
        floatX *dg = dh + n * 2 * F, *du = dg + F;
#pragma omp simd
        for (int64_t i = 0; i < F; i++) {
            real s = sigmoid(g[i]), d = da[n * F + i];
            a[n * F + i] = swiglu(g[i], u[i], s);
            du[i] = swiglu_du(d, g[i], s);
            dg[i] = swiglu_dg(d, g[i], u[i], s);
        }
    }
}
