// The end of a step: sums over the ranks, the decision whether the step is good, then the update of all parameters.
// Muon's part is in model/update_muon.c.
#include <stdlib.h>

#include "device/check.h"
#include "model/update_muon.h"

// Sums over the ranks what decides the step.
static void sum_over_ranks(Model* m) {
    if (!m->world) return;
    comm_all_reduce(m->world, &m->step.state->loss_sum, STEP_SUMS, SUM_DOUBLE, m->ctx);
    comm_all_reduce(m->world, &m->step.state->max_logit, 1, MAX_REAL, m->ctx);
    const int64_t blocks = config_blocks(&m->config), experts = blocks * m->config.E;
    comm_all_reduce(m->world, m->step.load, experts, SUM_I64, m->ctx);
    if (m->step.margins) comm_all_reduce(m->world, m->step.margins, experts * MARGIN_BINS, SUM_I64, m->ctx);
    if (m->gemms.stats)  // doubles, all of it
        comm_all_reduce(m->world, (double*)m->step.stats,
                        blocks * BLOCK_STATS * (int64_t)(sizeof(QuantizationStats) / sizeof(double)), SUM_DOUBLE,
                        m->ctx);
}

// AdamW updates the elements of each buffer behind those of Muon.
static void update_by_adamw(Model* m) {
    int count = 0, most = params_units(&m->config) * BUFFERS;
    AdamWBuffer* list = (AdamWBuffer*)host_alloc((size_t)most * sizeof(AdamWBuffer));
    for (int i = 0; i < most; i++) {
        const ParamBuffer* p = &m->units[i / BUFFERS].buffer[i % BUFFERS];
        const int64_t from = muon_owned(p), n = p->owned - from;
        if (p->n == 0 || n == 0) continue;
        void* moments = moments_at(p, from, m->layout.bf16_moments);
        const int64_t decay = min_i64(max_i64(p->n_decay - p->owned_from - from, 0), n);
        const AdamWBuffer buffer = {
            p->owned_weight + from,  p->master + from, moments, p->v, grad_at(p, from), n, decay,
            rounded_grad_at(p, from)};
        list[count++] = buffer;
    }
    adamw_update(list, count, m->layout.bf16_moments, &m->step.inputs->adamw, m->step.state, m->ctx);
    free(list);
}

// The update of the routers' selection biases from the counts of the step.
static void balance(Model* m) {
    const int64_t blocks = config_blocks(&m->config) - m->config.dense_layers, E = m->config.E;
    const int64_t first = m->config.dense_layers * E;
    real* bias = m->bias + first;
    if (m->step.margins)
        balance_quantile(bias, m->step.margins + first * MARGIN_BINS, blocks, (int32_t)E, (int32_t)m->config.K,
                         m->step.state, m->ctx);
    if (m->run.balance == BALANCE_DEEPSEEK)
        balance_sign(bias, m->step.load + first, blocks, (int32_t)E, (float)m->run.bias_rate, m->step.state, m->ctx);
}

// Work on the device alone, so that it can be replayed as a graph.
static void update(void* model) {
    Model* m = (Model*)model;
    sum_over_ranks(m);
    step_decide(m->step.state, m->run.tokens_per_step, &m->step.inputs->adamw, m->ctx);
    update_by_adamw(m);
    if (m->layout.muon) model_update_muon(m);
    balance(m);
}

void model_update(Model* m, int stop) {
    const double one = 1;
    if (stop) device_upload(&m->step.state->stop, &one, sizeof(one), m->ctx);
    graph_run(m->graphs[UPDATE_GRAPH + m->step.waits[EXPERT_PARAMS]], update, m, m->ctx);
    // Gathered and quantized copies of the weights are old now, but not those of experts that wait.
    weights_changed(m->sharding, !m->layout.muon || !m->step.waits[EXPERT_PARAMS], m->ctx);
    m->gemms.stats = NULL;
}
