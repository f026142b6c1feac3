// Muon (K. Jordan et al. 2024, kellerjordan.github.io/posts/muon): orthogonalized momentum for matrices, in the variant
// of Moonlight (arXiv 2502.16982, section 2.2). Moonlight's updates have the size of AdamW's, so Muon uses AdamW's
// learning rates and weight decay. For each matrix (rows, columns):
//
//   m = MUON_MOMENTUM m + g,   u = g + MUON_MOMENTUM m           muon_momentum; Nesterov, g = grad_scale * grad
//   X = u / (||u||_F + MUON_EPS)                                 muon_orthogonalize
//   MUON_STEPS times:  A = X X^T,   X = a X + (b A + c A A) X    Newton-Schulz; with X^T X if columns < rows
//   X = 0.2 sqrt(max(rows, columns)) X
//   w = w - lr (X + weight_decay w)                              muon_update
//
// For experts, muon_orthogonalize and muon_update may run in every Nth step only, with N lr for lr
// (--muon-expert-steps).
//
// Newton-Schulz moves singular values of X close to 1: values from 0.01 on to 0.68 .. 1.14. A singular value of 0 stays
// 0. An expert without tokens has g = 0: its momentum shrinks by MUON_MOMENTUM per step, and its update keeps its
// direction and size. A matrix of zeros has the update 0.
//
// GEMMs are bf16 with float32 accumulation in the CUDA build, and real on the CPU. Workspace: at most
// matmul_workspace() (layers/matmul.h).
#pragma once

#include "layers/step.h"

#define MUON_MOMENTUM 0.95f  // as in K. Jordan's code
enum { MUON_STEPS = 5 };
#define MUON_EPS 1e-7
#define MUON_A 3.4445
#define MUON_B (-4.7750)
#define MUON_C 2.0315

// Per-step hyperparameters, in device memory (as AdamW).
typedef struct Muon {
    float lr, weight_decay;
} Muon;

// A flat buffer of n elements, with its momentum, gradient and weights.
typedef struct MuonBuffer {
    floatX* x;  // u, and then the update
    void* m;    // real, or bf16
    const real* grad;
    floatX* weight;  // may be master where floatX is real
    Master* master;
    int64_t n;
    const floatX* rounded;  // the gradient in place of grad, or NULL
} MuonBuffer;

// x = u, and the new m, of each buffer. If bf16 is 1, m is bf16. If state->ok is 0, m stays unchanged and x is
// undefined. On the GPU n is a multiple of 8.
void muon_momentum(const MuonBuffer* buffers, int count, int bf16, const StepState* state, Ctx* ctx);

// Orthogonalizes x (count, rows, columns) in place, matrix by matrix. `work` has muon_work elements. On the GPU rows
// and columns are multiples of 8.
void muon_orthogonalize(floatX* x, floatX* work, int64_t count, int64_t rows, int64_t columns, Ctx* ctx);
int64_t muon_work(int64_t count, int64_t rows, int64_t columns);  // proportional to count

// master = master - lr (x + weight_decay master), weight = round(master), for each buffer. Nothing is written if
// state->ok is 0. On the GPU n is a multiple of 8.
void muon_update(const MuonBuffer* buffers, int count, const Muon* opt, const StepState* state, Ctx* ctx);

// FLOPs of muon_orthogonalize for one matrix.
static inline double muon_flops(int64_t rows, int64_t columns) {
    const double small = (double)(rows < columns ? rows : columns), large = (double)(rows < columns ? columns : rows);
    return (int)MUON_STEPS * (4 * small * small * large + 2 * small * small * small);
}
