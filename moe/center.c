#include "moe/center.h"

#include "device/cpu.h"
#include "layers/adamw.h"

void center_add(int64_t* sum, const floatX* x, int64_t N, int64_t C, Ctx* ctx) {
    (void)ctx;
#pragma omp parallel for schedule(static)
    for (int64_t c0 = 0; c0 < C; c0 += TILE) {
        const int64_t end = min_i64(C, c0 + TILE);
        for (int64_t n = 0; n < N; n++)
            for (int64_t c = c0; c < end; c++) sum[c] += center_input((double)x[n * C + c]);
    }
}

void center_direction(real* u, const int64_t* sum, int64_t C, Ctx* ctx) {
    (void)ctx;
    double square = 0;
    for (int64_t c = 0; c < C; c++) square += (double)sum[c] * (double)sum[c];
    const double factor = square > 0 ? 1 / sqrt(square) : 0;
    for (int64_t c = 0; c < C; c++) u[c] = (real)((double)sum[c] * factor);
}

void center_along(int64_t* along, const real* own, const real* u, int64_t first, int64_t n, int64_t E, int64_t C,
                  Ctx* ctx) {
    (void)ctx;
    for (int64_t e = 0; e < E; e++) along[e] = 0;
    for (int64_t i = first; i < first + n; i++)
        along[i / C] += center_product((double)own[i - first] * (double)u[i % C]);
}

void center_apply(floatX* weight, real* w, const int64_t* along, const real* u, int64_t first, int64_t n, int64_t C,
                  const StepState* state, Ctx* ctx) {
    (void)ctx;
    if (!state->ok) return;
    for (int64_t i = first; i < first + n; i++) {
        w[i - first] -= (real)((double)along[i / C] * 0x1p-32 * (double)u[i % C]);
        weight[i - first] = (floatX)w[i - first];
    }
}
