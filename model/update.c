// The end of a step: sums over the ranks, the decision whether the step is good, then the update of all parameters.
//
// Muon needs whole matrices. A rank that holds all of a buffer orthogonalizes it alone. Where ranks hold parts, the
// units are taken in waves, one unit for each rank. Rank i owns unit i of a wave:
//
//   own part   u = g + momentum m of each unit of the wave                    muon_momentum
//   all-to-all each rank gets all parts of the unit that it owns
//   owner      orthogonalizes the unit's matrices                             muon_orthogonalize
//   all-to-all each rank gets its parts back
//   own part   w = w - lr (x + weight_decay w)                                muon_update
#include <stdlib.h>

#include "device/check.h"
#include "model/model.h"

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

// The gradients of the held elements.
static const real* held_grad(const ParamBuffer* p) { return p->own_grad - (p->first - p->held_from); }

// AdamW's part of each buffer, after Muon's.
static void update_by_adamw(Model* m) {
    int count = 0, most = params_units(&m->config) * BUFFERS;
    AdamWBuffer* list = (AdamWBuffer*)host_alloc((size_t)most * sizeof(AdamWBuffer));
    for (int i = 0; i < most; i++) {
        const ParamBuffer* p = &m->units[i / BUFFERS].buffer[i % BUFFERS];
        const int64_t from = muon_held(p), n = p->held - from;
        if (p->n == 0 || n == 0) continue;
        const AdamWBuffer buffer = {p->held_weight + from,
                                    p->master + from,
                                    moments_at(p, from, m->layout.bf16_moments),
                                    p->v,
                                    held_grad(p) + from,
                                    n,
                                    clamp(p->n_decay - p->held_from - from, n)};
        list[count++] = buffer;
    }
    adamw_update(list, count, m->layout.bf16_moments, &m->inputs->adamw, m->state, m->ctx);
    free(list);
}

// The matrices of a whole buffer, in x.
static void orthogonalize(Model* m, const Unit* u, int b, floatX* x) {
    Param list[PARAMS];
    const int count = params_list(list, &m->config, u->kind);
    for (int i = 0; i < count; i++) {
        const Param* p = &list[i];
        if (p->by != MUON || param_buffer(p->id) != b) continue;
        const int64_t halves = p->second ? 2 : 1, rows = p->rows / halves, matrices = u->w[p->id].count * halves;
        for (int64_t first = 0; first < matrices; first += m->muon_matrices) {
            const int64_t some = min_i64(m->muon_matrices, matrices - first);
            muon_orthogonalize(x + u->at[p->id] + first * rows * p->columns, m->muon_work, some, rows, p->columns,
                               m->ctx);
        }
    }
}

// u of the held elements that Muon trains, and their update.
static void momentum(Model* m, const ParamBuffer* p, floatX* u) {
    muon_momentum(u, p->m, held_grad(p), muon_held(p), m->layout.bf16_moments, &m->inputs->muon, m->state, m->ctx);
}
static void apply(Model* m, const ParamBuffer* p, const floatX* x) {
    muon_update(p->held_weight, p->master, x, muon_held(p), &m->inputs->muon, m->state, m->ctx);
}

// A wave: units first .. first + count - 1 of `units`, count <= the ranks that share their buffers b.
static void update_wave(Model* m, const int* units, int count, int b, Comm* comm) {
    enum { ROW = 64 };  // elements; parts and parameters start at multiples of it
    const int ranks = comm_count(comm), index = comm_index(comm);
    int64_t* rows = (int64_t*)host_alloc((size_t)(4 * ranks) * sizeof(int64_t));
    int64_t *send_start = rows, *send = rows + ranks, *recv_start = send + ranks, *recv = recv_start + ranks;
    int64_t at = 0;
    for (int i = 0; i < ranks; i++) {
        // This rank's part of unit i goes to rank i; rank i's part of the unit that this rank owns comes.
        const ParamBuffer* to = i < count ? &m->units[units[i]].buffer[b] : NULL;
        const ParamBuffer* own = index < count ? &m->units[units[index]].buffer[b] : NULL;
        send_start[i] = at;
        send[i] = to ? muon_held(to) / ROW : 0;
        at += send[i];
        recv_start[i] = own ? i * own->part / ROW : 0;
        recv[i] = own ? muon_part(own, i) / ROW : 0;
    }

    // Own parts to the owners, and back.
    for (int i = 0; i < count; i++) momentum(m, &m->units[units[i]].buffer[b], m->muon_parts + send_start[i] * ROW);
    const ExchangeBuffer there = {m->muon_x, m->muon_parts, ROW * sizeof(floatX)};
    const ExchangeRows rows_there = {send_start, send, recv_start, recv, NULL};
    comm_exchange(comm, &there, 1, rows_there, m->ctx);
    if (index < count) orthogonalize(m, &m->units[units[index]], b, m->muon_x);
    const ExchangeBuffer back = {m->muon_parts, m->muon_x, ROW * sizeof(floatX)};
    const ExchangeRows rows_back = {recv_start, recv, send_start, send, NULL};
    comm_exchange(comm, &back, 1, rows_back, m->ctx);
    for (int i = 0; i < count; i++) apply(m, &m->units[units[i]].buffer[b], m->muon_parts + send_start[i] * ROW);
    free(rows);
}

static void update_by_muon(Model* m, int b) {
    Comm* comm = b == EXPERT_PARAMS ? m->holders : m->world;
    int* wave = (int*)host_alloc((size_t)m->layout.ranks * sizeof(int));
    int count = 0;
    for (int u = 0; u < params_units(&m->config); u++) {
        const ParamBuffer* p = &m->units[u].buffer[b];
        if (p->n_muon == 0) continue;
        if (p->shard == SHARD_NONE) {
            momentum(m, p, m->muon_x);
            orthogonalize(m, &m->units[u], b, m->muon_x);
            apply(m, p, m->muon_x);
            continue;
        }
        wave[count++] = u;
        if (count == p->parts) {
            update_wave(m, wave, count, b, comm);
            count = 0;
        }
    }
    if (count) update_wave(m, wave, count, b, comm);
    free(wave);
}

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
    sum_over_ranks(m);
    step_decide(m->state, m->settings.tokens_per_step, &m->inputs->adamw, m->ctx);
    update_by_adamw(m);
    for (int b = 0; b < BUFFERS && m->layout.muon; b++) update_by_muon(m, b);
    balance(m);
}

void model_update(Model* m, int stop) {
    const double one = 1;
    if (stop) device_upload(&m->state->stop, &one, sizeof(one), m->ctx);
    graph_run(m->graphs[UPDATE_GRAPH], update, m, m->ctx);
    weights_changed(m->sharding, m->ctx);
    m->measures = 0;
}

// Bytes of muon_work for `matrices` at a time are bounded, unless one matrix needs more.
static const int64_t WORK_ELEMENTS = (int64_t)1 << 29;

void model_plan_muon(Model* m, Arena* arena) {
    int64_t largest = 0, most_matrices = 1, work = 0;
    int parts = 0;

    // The largest buffer, and the most matrices of a parameter.
    for (int u = 0; u < params_units(&m->config); u++)
        for (int b = 0; b < BUFFERS; b++) {
            const ParamBuffer* p = &m->units[u].buffer[b];
            largest = max_i64(largest, p->n_muon);
            parts |= p->n_muon && p->shard != SHARD_NONE;
        }
    for (int u = 0; u < params_units(&m->config); u++)
        for (int i = 0; i < PARAMS; i++)
            if (m->units[u].at[i] >= 0) most_matrices = max_i64(most_matrices, 2 * m->units[u].w[i].count);

    // Matrices at a time: all, or half of them again and again until the workspace is small enough.
    for (m->muon_matrices = most_matrices;; m->muon_matrices = ceil_div(m->muon_matrices, 2)) {
        work = 0;
        for (int u = 0; u < params_units(&m->config); u++) {
            Param list[PARAMS];
            const int count = params_list(list, &m->config, m->units[u].kind);
            for (int i = 0; i < count; i++) {
                const int64_t halves = list[i].second ? 2 : 1, all = m->units[u].w[list[i].id].count * halves;
                if (list[i].by == MUON)
                    work = max_i64(work,
                                   muon_work(min_i64(m->muon_matrices, all), list[i].rows / halves, list[i].columns));
            }
        }
        if (m->muon_matrices == 1 || work <= WORK_ELEMENTS) break;
    }
    arena_add(arena, "Muon: updates of a unit", ELEMENT_X, largest, 0, (void**)&m->muon_x);
    if (parts)
        arena_add(arena, "Muon: own parts of a wave", ELEMENT_X, largest + 64 * m->layout.ranks, 0,
                  (void**)&m->muon_parts);
    arena_add(arena, "Muon: workspace", ELEMENT_X, work, 0, (void**)&m->muon_work);
}
