#include "layers/muon.h"

#include "device/cpu.h"

void muon_momentum(const MuonBuffer* buffers, int count, int bf16, const StepState* state, Ctx* ctx) {
    if (!state->ok) return;
    const real scale = (real)state->grad_scale, momentum = MUON_MOMENTUM;
    for (int k = 0; k < count; k++) {
        const MuonBuffer* b = &buffers[k];
        const real* grad = b->rounded ? b->rounded : b->grad;
#pragma omp parallel for schedule(static, BLOCK)
        for (int64_t i = 0; i < b->n; i++) {
            // The momentum is a decaying sum of gradients. AdamW's first moment is a mean instead.
            const real g = scale * grad[i], after = momentum * moment(b->m, bf16, i) + g;
            set_moment(b->m, bf16, i, after);
            // Nesterov momentum: the gradient once more, with the new momentum.
            b->x[i] = g + momentum * after;
        }
    }
}

// A, then B = b A + c A A, then the next X, each for all matrices.
int64_t muon_work(int64_t count, int64_t rows, int64_t columns) {
    const int64_t small = min_i64(rows, columns);
    return count * (2 * small * small + rows * columns);
}

// next = a x + (b A + c A A) x with A = x x^T. Tall matrices are multiplied from the right, with A = x^T x. Parallel
// over tiles of rows of each result, for all matrices together.
static void newton_schulz(real* next, const real* x, real* A, real* B, int64_t count, int64_t rows, int64_t columns) {
    const int tall = rows > columns;
    const int64_t small = min_i64(rows, columns), large = max_i64(rows, columns), n = rows * columns,
                  n2 = small * small;
    const int64_t tiles = ceil_div(small, TILE), row_tiles = ceil_div(rows, TILE);

    // A = X X^T, or X^T X
#pragma omp parallel for schedule(dynamic)
    for (int64_t tile = 0; tile < count * tiles; tile++) {
        const int64_t i = tile / tiles, r = tile % tiles * TILE;
        const real* X = x + i * n;
        gemm(tall, !tall, min_i64(TILE, small - r), small, large, 1, X + (tall ? r : r * columns), columns, X, columns,
             0, A + i * n2 + r * small, small);
    }

    // B = b A + c A A
#pragma omp parallel for schedule(dynamic)
    for (int64_t tile = 0; tile < count * tiles; tile++) {
        const int64_t i = tile / tiles, r = tile % tiles * TILE, height = min_i64(TILE, small - r);
        const real *all = A + i * n2, *mine = all + r * small;
        real* out = B + i * n2 + r * small;
        for (int64_t j = 0; j < height * small; j++) out[j] = mine[j];
        gemm(0, 0, height, small, small, (real)MUON_C, mine, small, all, small, (real)MUON_B, out, small);
    }

    // X = a X + B X, or a X + X B
#pragma omp parallel for schedule(dynamic)
    for (int64_t tile = 0; tile < count * row_tiles; tile++) {
        const int64_t i = tile / row_tiles, r = tile % row_tiles * TILE, height = min_i64(TILE, rows - r);
        const real *X = x + i * n, *mine = X + r * columns, *b = B + i * n2;
        real* out = next + i * n + r * columns;
        for (int64_t j = 0; j < height * columns; j++) out[j] = mine[j];
        gemm(0, 0, height, columns, small, 1, tall ? mine : b + r * small, small, tall ? b : X, columns, (real)MUON_A,
             out, columns);
    }
}

void muon_orthogonalize(floatX* x, floatX* work, int64_t count, int64_t rows, int64_t columns, Ctx* ctx) {
    const int64_t small = min_i64(rows, columns), n = rows * columns;
    // work: A and B (count, small, small), then the second buffer of X.
    real *A = work, *B = A + count * small * small, *from = x, *to = B + count * small * small;

    // X = u / ||u||
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < count; i++) {
        double squares = 0;
        for (int64_t j = 0; j < n; j++) squares += (double)x[i * n + j] * (double)x[i * n + j];
        const real per_norm = (real)(1 / (sqrt(squares) + MUON_EPS));
        for (int64_t j = 0; j < n; j++) x[i * n + j] *= per_norm;
    }

    // Newton-Schulz iterations, with two buffers of X used in turn.
    for (int step = 0; step < MUON_STEPS; step++) {
        newton_schulz(to, from, A, B, count, rows, columns);
        real* other = from;
        from = to;
        to = other;
    }

    // The size of AdamW's updates.
    const real scale = (real)(0.2 * sqrt((double)max_i64(rows, columns)));
#pragma omp parallel for schedule(static)
    for (int64_t j = 0; j < count * n; j++) x[j] = scale * from[j];
}

void muon_update(const MuonBuffer* buffers, int count, const Muon* opt, const StepState* state, Ctx* ctx) {
    if (!state->ok) return;
    const real lr = (real)opt->lr, decay = (real)opt->weight_decay;
    for (int k = 0; k < count; k++) {
        const MuonBuffer* b = &buffers[k];
#pragma omp parallel for schedule(static, BLOCK)
        for (int64_t i = 0; i < b->n; i++) {
            // Weight decay is decoupled from the update, as in AdamW.
            b->master[i] -= lr * (b->x[i] + decay * b->master[i]);
            b->weight[i] = b->master[i];
        }
    }
}
