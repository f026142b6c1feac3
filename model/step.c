// A training step: its micro-steps and its update, replayed as graphs where that can be (device/graph.h).
#include <stdlib.h>

#include "device/check.h"
#include "model/model.h"

void model_step_begin(Model* m, int64_t step) {
    const Settings* s = &m->settings;
    const AdamW inputs = {(float)settings_lr(s, step), (float)s->beta1, (float)s->beta2, (float)s->eps,
                          (float)s->weight_decay,      (float)s->clip};
    const int64_t blocks = config_blocks(&m->config);
    const double weight = settings_mtp_weight(s, step);
    device_upload(m->inputs, &inputs, sizeof(inputs), m->ctx);
    m->late = weight != s->mtp_weight;
    m->further_weight = (float)(weight / (double)max_i64(m->config.mtp, 1));
    m->first = 1;
    device_zero(m->load, (size_t)(blocks * m->config.E) * sizeof(int64_t), m->ctx);
    if (m->margins) device_zero(m->margins, (size_t)(blocks * m->config.E * MARGIN_BINS) * sizeof(int64_t), m->ctx);
    if (m->measures) device_zero(m->mx_stats, (size_t)(blocks * BLOCK_STATS) * sizeof(MxStats), m->ctx);
    step_begin(m->state, m->ctx);
}

static void forward_and_backward(Model* m, int last) {
    double tokens = (double)m->settings.tokens_per_step;
    model_forward(m, 1);
    model_loss(m, m->state, (float)(1 / tokens));
    // The balance loss is a mean over the sequences of the step.
    model_backward(m, (float)(m->settings.aux_loss * (double)m->settings.seq_len / tokens), last);
}

static void micro_step(void* model) { forward_and_backward((Model*)model, 0); }
static void last_micro_step(void* model) { forward_and_backward((Model*)model, 1); }

// Micro-steps of a kind give the device the same work.
static Graph* micro_step_graph(const Model* m, int last) {
    const int casts = m->units[0].version != weights_version(m->sharding);
    return m->measures ? NULL : m->graphs[m->first | last << 1 | m->late << 2 | casts << 3];
}

void model_micro_step(Model* m, int last) {
    graph_run(micro_step_graph(m, last), last ? last_micro_step : micro_step, m, m->ctx);
    // What a replay does not note.
    m->first = 0;
    for (int u = 0; u < params_units(&m->config); u++) m->units[u].version = weights_version(m->sharding);
}

// Sums over the ranks what decides the step.
static void sum_over_ranks(Model* m) {
    if (!m->world) return;
    comm_sum_double(m->world, &m->state->loss_sum, STEP_SUMS, m->ctx);
    const int64_t experts = config_blocks(&m->config) * m->config.E;
    comm_sum_i64(m->world, m->load, experts, m->ctx);
    if (m->margins) comm_sum_i64(m->world, m->margins, experts * MARGIN_BINS, m->ctx);
    if (m->measures)  // doubles, all of it
        comm_sum_double(m->world, (double*)m->mx_stats,
                        config_blocks(&m->config) * BLOCK_STATS * (int64_t)(sizeof(MxStats) / sizeof(double)), m->ctx);
}

static int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : x < most ? x : most; }

// The update of the routers' selection biases from the counts of the step.
static void balance(Model* m) {
    const Settings* s = &m->settings;
    const int64_t blocks = config_blocks(&m->config) - m->config.dense_layers, E = m->config.E;
    const int64_t first = m->config.dense_layers * E;
    real* bias = m->bias + first;
    if (m->margins)
        router_balance_quantile(bias, m->margins + first * MARGIN_BINS, blocks, (int32_t)E, (int32_t)m->config.K,
                                m->state, m->ctx);
    if (s->balance == BALANCE_DEEPSEEK)
        router_balance_sign(bias, m->load + first, blocks, (int32_t)E, (float)s->bias_rate, m->state, m->ctx);
}

static void update(void* model) {
    Model* m = (Model*)model;
    const AdamW* opt = m->inputs;
    sum_over_ranks(m);
    step_decide(m->state, m->settings.tokens_per_step, opt, m->ctx);
    int count = 0, most = params_units(&m->config) * BUFFERS;
    AdamWBuffer* list = (AdamWBuffer*)host_alloc((size_t)most * sizeof(AdamWBuffer));
    for (int i = 0; i < most; i++) {
        const ParamBuffer* p = &m->units[i / BUFFERS].buffer[i % BUFFERS];
        const real* grad = p->own_grad - (p->first - p->held_from);
        const AdamWBuffer buffer = {
            p->held_weight, p->master, p->m, p->v, grad, p->held, clamp(p->n_decay - p->held_from, p->held)};
        if (p->n) list[count++] = buffer;
    }
    adamw_update(list, count, m->layout.bf16_moments, opt, m->state, m->ctx);
    free(list);
    balance(m);
}

void model_make_room(Model* m, Ranks* world, double needed) {
    const Settings* s = &m->settings;
    ctx_sync(m->ctx);
    device_zero(&m->state->replay, sizeof(m->state->replay), m->ctx);
    device_zero(&m->state->needed, sizeof(m->state->needed), m->ctx);

    // The pool as it is planned at the start.
    MoeShape shape = m->moe_shape;
    Arena plan;
    m->capacity = fmin(1.125 * needed * m->capacity, DISPATCH_MOST_CAPACITY * (double)s->ep);
    shape.capacity = m->capacity, shape.router.N = s->batch * s->seq_len;
    arena_init(&plan, m->arena[IN_POOL].purpose, BACKEND);
    moe_plan(&plan, shape, config_blocks(&m->config) - m->config.dense_layers, m->capacity);
    comm_window_free(m->experts);
    ranks_barrier(world);  // its memory is free when no rank reaches into it any more
    pool_move(m->pool, comm_window(m->experts, arena_bytes(&plan), plan.purpose), arena_bytes(&plan));
    arena_free(&plan);
}

void model_update(Model* m, int stop) {
    const double one = 1;
    if (stop) device_upload(&m->state->stop, &one, sizeof(one), m->ctx);
    graph_run(m->graphs[UPDATE_GRAPH], update, m, m->ctx);
    weights_changed(m->sharding, m->ctx);
    m->measures = 0;
}
