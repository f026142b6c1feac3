// The module of multi-token prediction (MTP), forward and backward: a block between a projection and a norm. Formulas
// and names: model/model.h.
#include "layers/rmsnorm.h"
#include "model/block.h"

// Copies rows first .. first + T - 2 of each sequence of `rows` (B, T, C) into one half of `joined`, which is
// (B, T - 1, 2C). With back 1 it copies the other way.
static void copy_half(Model* m, floatX* joined, floatX* rows, int64_t first, int back) {
    const int64_t C = m->config.C;
    const size_t row = (size_t)C * sizeof(floatX);
    for (int64_t b = 0; b < m->shapes.B; b++) {
        floatX *half = joined + b * m->shapes.T * 2 * C, *all = rows + (b * m->shapes.window + first) * C;
        device_copy_rows(back ? all : half, back ? row : 2 * row, back ? half : all, back ? 2 * row : row, row,
                         m->shapes.T, m->ctx);
    }
}

// work.joined = [norm of the embeddings, norm of the main model's output]. The norms run on all rows. The first
// embedding and the last output of a sequence are not copied.
static void join(Model* m, const Weight* w) {
    const int64_t C = m->config.C, rows = m->shapes.B * m->shapes.window;
    const double eps = m->config.norm_eps;
    Workspace* work = &m->work;
    rmsnorm_forward(work->out, work->rstd_embed, m->blocks[0].residual, C, w[ENORM].w, eps, rows, C, m->ctx);
    copy_half(m, work->joined, work->out, 1, 0);
    rmsnorm_forward(work->out, work->rstd_in, m->outputs[0].norm, C, w[HNORM].w, eps, rows, C, m->ctx);
    copy_half(m, work->joined + C, work->out, 0, 0);
}

// The module computes with shapes of its own, T - 1 tokens. It sets those of the main model again at its end.
void module_forward(Model* m) {
    const int unit = params_block_unit(&m->config, m->config.L);
    model_shapes(m, 1);
    Unit* u = unit_begin(m, unit, -1);
    join(m, u->w);
    linear_forward(m->blocks[u->layer].residual, m->work.joined, &u->w[EH_PROJ], m->shapes.N, m->ctx);
    block_forward(m, u, 1);
    output_forward(m, 1, u);
    unit_end(m, unit);
    model_shapes(m, 0);
}

// dx = or += the gradient of the rows x (B, T, C): one half of work.djoined through its norm. Rows that the module did
// not read have no gradient.
static void join_backward(Model* m, floatX* dx, const Weight* w, floatX* half, const floatX* x, const real* rstd,
                          int64_t first, int accumulate) {
    const int64_t C = m->config.C, rows = m->shapes.B * m->shapes.window;
    floatX* dnorm = m->work.out;
    device_zero(dnorm, (size_t)(rows * C) * sizeof(floatX), m->ctx);
    copy_half(m, half, dnorm, first, 1);
    rmsnorm_backward(dx, w->grad, dnorm, x, C, w->w, rstd, rows, C, accumulate, m->ctx);
}

void module_backward(Model* m, float aux, int last) {
    const int unit = params_block_unit(&m->config, m->config.L);
    const int64_t C = m->config.C;
    const Output* main = &m->outputs[0];
    Workspace* work = &m->work;
    model_shapes(m, 1);
    // The final norm and the block.
    Unit* u = unit_begin(m, unit, unit - 1);
    unit_grads_begin(m, unit);
    output_backward(m, 1, u);
    block_backward(m, u, aux);

    // The projection, then both norms.
    join(m, u->w);
    linear_backward(work->djoined, work->dx, work->joined, &u->w[EH_PROJ], m->shapes.N, m->ctx);
    join_backward(m, work->dembed, &u->w[ENORM], work->djoined, m->blocks[0].residual, work->rstd_embed, 1, 0);
    join_backward(m, main->dnorm, &u->w[HNORM], work->djoined + C, main->norm, work->rstd_in, 0, 1);
    unit_grads_end(m, unit, last);
    unit_end(m, unit);
    model_shapes(m, 0);
}
