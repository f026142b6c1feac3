// A module of multi-token prediction (MTP), forward and backward: a block between a projection and a norm. Formulas and
// names: model/model.h.
#include "layers/rmsnorm.h"
#include "model/block.h"

// Copies rows first .. first + T - k - 1 of each sequence of `rows` (B, from, C) into one half of `joined`, which is
// (B, T - k, 2C). With back 1 it copies the other way.
static void copy_half(Model* m, floatX* joined, floatX* rows, int64_t from, int64_t first, int back) {
    const int64_t C = m->config.C;
    const size_t row = (size_t)C * sizeof(floatX);
    for (int64_t b = 0; b < m->shapes.B; b++) {
        floatX *half = joined + b * m->shapes.T * 2 * C, *all = rows + (b * from + first) * C;
        device_copy_rows(back ? all : half, back ? row : 2 * row, back ? half : all, back ? 2 * row : row, row,
                         m->shapes.T, m->ctx);
    }
}

// work.joined = [norm of the embeddings, norm of the output before]. The norms run on all rows; k and 1 rows a sequence
// are not copied.
static void join(Model* m, int k, const Weight* w) {
    const int64_t C = m->config.C, T = m->shapes.window, before = T - k + 1;
    Workspace* work = &m->work;
    rmsnorm_forward(work->out, work->rstd_embed, m->blocks[0].residual, C, w[ENORM].w, m->config.norm_eps,
                    m->shapes.B * T, C, m->ctx);
    copy_half(m, work->joined, work->out, T, k, 0);
    rmsnorm_forward(work->out, work->rstd_in, m->outputs[k - 1].norm, C, w[HNORM].w, m->config.norm_eps,
                    m->shapes.B * before, C, m->ctx);
    copy_half(m, work->joined + C, work->out, before, 0, 0);
}

// A module computes with shapes of its own, T - k tokens. It sets those of the main model again at its end.
void module_forward(Model* m, int k) {
    const int unit = params_block_unit(&m->config, m->config.L - 1 + k);
    model_shapes(m, k);
    Unit* u = unit_begin(m, unit, unit + 1);
    join(m, k, u->w);
    linear_forward(m->blocks[u->layer].residual, m->work.joined, &u->w[EH_PROJ], m->shapes.N, m->ctx);
    block_forward(m, u, 1);
    output_forward(m, k, u);
    unit_end(m, unit);
    model_shapes(m, 0);
}

// dx = or += the gradient of the rows x (B, from, C): one half of work.djoined through its norm. Rows before `first`
// have no gradient.
static void join_backward(Model* m, floatX* dx, const Weight* w, floatX* half, const floatX* x, const real* rstd,
                          int64_t from, int64_t first, int accumulate) {
    const int64_t C = m->config.C, rows = m->shapes.B * from;
    floatX* dnorm = m->work.out;
    // The gradient of the norm's output, with 0 in rows that the module did not read.
    device_zero(dnorm, (size_t)(rows * C) * sizeof(floatX), m->ctx);
    copy_half(m, half, dnorm, from, first, 1);
    rmsnorm_backward(dx, w->grad, dnorm, x, C, w->w, rstd, rows, C, accumulate, m->ctx);
}

void module_backward(Model* m, int k, float aux, int last) {
    const int unit = params_block_unit(&m->config, m->config.L - 1 + k);
    const int64_t T = m->shapes.window, C = m->config.C;
    const Output* before = &m->outputs[k - 1];
    Workspace* work = &m->work;
    model_shapes(m, k);
    // The final norm and the block.
    Unit* u = unit_begin(m, unit, unit - 1);
    unit_grads_begin(m, unit);
    output_backward(m, k, u);
    block_backward(m, u, aux);

    // The projection, then both norms. The last module is the first that the embeddings get a gradient from.
    join(m, k, u->w);
    linear_backward(work->djoined, work->dx, work->joined, &u->w[EH_PROJ], m->shapes.N, m->ctx);
    join_backward(m, work->dembed, &u->w[ENORM], work->djoined, m->blocks[0].residual, work->rstd_embed, T, k,
                  k < m->mtp_modules);
    join_backward(m, before->dnorm, &u->w[HNORM], work->djoined + C, before->norm, work->rstd_in, T - k + 1, 0, 1);
    unit_grads_end(m, unit, last);
    unit_end(m, unit);
    model_shapes(m, 0);
}
