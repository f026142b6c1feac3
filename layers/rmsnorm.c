#include "layers/rmsnorm.h"

#include "device/cpu.h"

// y = w x rstd. Returns rstd = (mean_c x_c^2 + eps)^-1/2.
static real norm_row(floatX* y, const floatX* x, const floatX* w, double eps, int64_t C) {
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < C; c++) sum += x[c] * x[c];
    real rstd = 1 / sqrt(sum / C + (real)eps);
    for (int64_t c = 0; c < C; c++) y[c] = x[c] * rstd * w[c];
    return rstd;
}

void rmsnorm_forward(floatX* y, real* rstd, const floatX* x, int64_t stride, const floatX* w, double eps, int64_t N,
                     int64_t C, Ctx* ctx) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) rstd[n] = norm_row(y + n * C, x + n * stride, w, eps, C);
}

void residual_rmsnorm_forward(floatX* sum, floatX* y, real* rstd, const floatX* a, const floatX* b, const floatX* w,
                              double eps, int64_t N, int64_t C, Ctx* ctx) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        for (int64_t i = n * C; i < n * C + C; i++) sum[i] = a[i] + b[i];
        rstd[n] = norm_row(y + n * C, sum + n * C, w, eps, C);
    }
}

size_t rmsnorm_workspace(int64_t N, int64_t C) { return (size_t)(ceil_div(N, TILE) * C) * sizeof(real); }

void rmsnorm_backward(floatX* dx, real* dw, const floatX* dy, const floatX* x, int64_t stride, const floatX* w,
                      const real* rstd, int64_t N, int64_t C, int accumulate, Ctx* ctx) {
    // dw is a sum over all tokens. Each tile of tokens writes its own partial sum; these are added in order afterwards.
    int64_t tiles = ceil_div(N, TILE);
    real* partial = ctx_workspace(ctx, tiles * C);
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < tiles; tile++) {
        // An empty partial sum of this tile.
        real* p = partial + tile * C;
        for (int64_t c = 0; c < C; c++) p[c] = 0;
        for (int64_t n = tile * TILE; n < min_i64(N, (tile + 1) * TILE); n++) {
            // k = rstd^2 mean_c(g_c x_c) with g = dy w
            const floatX *g = dy + n * C, *xn = x + n * stride;
            floatX* d = dx + n * stride;
            real r = rstd[n], dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t c = 0; c < C; c++) dot += g[c] * w[c] * xn[c];
            real k = dot / C * r * r;

            // dx = rstd (g - x k), dw += dy x rstd
            for (int64_t c = 0; c < C; c++) {
                real grad = r * (g[c] * w[c] - xn[c] * k);
                d[c] = accumulate ? d[c] + grad : grad;
                p[c] += g[c] * xn[c] * r;
            }
        }
    }
    // A fixed order makes dw independent of the number of threads.
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int64_t c = 0; c < C; c++) dw[c] += partial[tile * C + c];
}
