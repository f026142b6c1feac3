// The micro-steps of a training step (gradient accumulation), replayed as CUDA graphs if possible (device/graph.h).
#include <stdlib.h>

#include "device/check.h"
#include "model/model.h"

void model_step_begin(Model* m, int64_t step) {
    const Settings* s = &m->settings;
    const StepInputs inputs = {{(float)settings_lr(s, step), (float)s->beta1, (float)s->beta2, (float)s->eps,
                                (float)s->weight_decay, (float)s->clip},
                               {(float)settings_muon_lr(s, step), (float)s->muon_momentum, (float)s->weight_decay}};
    const int64_t blocks = config_blocks(&m->config), experts = blocks * m->config.E;
    const double weight = settings_mtp_weight(s, step);
    // Hyperparameters go to device memory, where a replayed graph reads them.
    device_upload(m->step.inputs, &inputs, sizeof(inputs), m->ctx);
    // Host state: it selects the graph. MTP modules share one weight.
    m->step.late = weight != s->mtp_weight;
    m->step.mtp_weight = (float)(weight / (double)max_i64(m->config.mtp, 1));
    m->step.first = 1;
    // Counters of the step.
    device_zero(m->step.load, (size_t)experts * sizeof(int64_t), m->ctx);
    if (m->step.margins) device_zero(m->step.margins, (size_t)(experts * MARGIN_BINS) * sizeof(int64_t), m->ctx);
    if (m->step.measures) device_zero(m->step.mx_stats, (size_t)(blocks * BLOCK_STATS) * sizeof(MxStats), m->ctx);
    step_begin(m->step.state, m->ctx);
}

// Gradients are of the mean loss over all tokens of the step, so micro-steps and ranks add up.
static void forward_and_backward(Model* m, int last) {
    double tokens = (double)m->settings.tokens_per_step;
    model_forward(m, 1);
    model_loss(m, m->step.state, (float)(1 / tokens));
    // The balance loss is a mean over the sequences of the step.
    model_backward(m, (float)(m->settings.aux_loss * (double)m->settings.seq_len / tokens), last);
}

static void micro_step(void* model) { forward_and_backward((Model*)model, 0); }
static void last_micro_step(void* model) { forward_and_backward((Model*)model, 1); }

void model_micro_step(Model* m, int last) {
    // Micro-steps of a kind give the device the same work. After a change of the weights it also quantizes them.
    const int quantizes = m->units[0].version != weights_version(m->sharding);
    Graph* graph = m->step.measures ? NULL : m->graphs[m->step.first | last << 1 | m->step.late << 2 | quantizes << 3];
    graph_run(graph, last ? last_micro_step : micro_step, m, m->ctx);
    // Host state, which a replayed graph does not change.
    m->step.first = 0;
    for (int u = 0; u < params_units(&m->config); u++) m->units[u].version = weights_version(m->sharding);
}

void model_grow_capacity(Model* m, Ranks* world, double overflow) {
    const Settings* s = &m->settings;
    ctx_sync(m->ctx);
    device_zero(&m->step.state->overflow, sizeof(m->step.state->overflow), m->ctx);
    m->capacity = fmin(1.125 * overflow * m->capacity, DISPATCH_MOST_CAPACITY * (double)s->ep);

    // The pool, planned again as at the start.
    Arena* plan = &m->arena[IN_POOL];
    m->shapes.moe.capacity = m->capacity;
    m->shapes.moe.router.N = s->batch * s->seq_len;
    plan->count = 0;
    moe_plan(plan, m->shapes.moe, config_blocks(&m->config) - m->config.dense_layers, m->capacity);
    comm_window_free(m->ep);
    ranks_barrier(world);  // its memory is free when no rank reaches into it any more
    pool_move(m->pool, comm_window(m->ep, arena_bytes(plan), plan->purpose), arena_bytes(plan));
}
