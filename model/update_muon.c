// Muon's part of an update, where this rank has whole buffers. Matrices of a group are updated together
// (model/muon_groups.c). Where ranks hold parts of buffers: model/muon_waves.c.
#include "model/update_muon.h"

#include <stdlib.h>

#include "device/check.h"

void muon_group_orthogonalize(Model* m, const MuonGroup* g, floatX* x) {
    for (int64_t first = 0; first < g->count; first += g->at_once)
        muon_orthogonalize(x + first * g->rows * g->columns, m->muon.work, min_i64(g->at_once, g->count - first),
                           g->rows, g->columns, m->ctx);
}

MuonBuffer muon_buffer(const Model* m, const ParamBuffer* p, int64_t from, int64_t n, floatX* x) {
    void* momentum = moments_at(p, from, m->layout.bf16_moments);
    const MuonBuffer buffer = {
        x, momentum, grad_at(p, from), p->owned_weight + from, p->master + from, n, rounded_grad_at(p, from)};
    return buffer;
}

// A group whose buffers this rank has whole.
static void update_group(Model* m, const MuonGroup* g) {
    const int64_t n = g->count / g->units * g->rows * g->columns;
    // x holds the matrices of all units of the group, in their order.
    MuonBuffer* list = (MuonBuffer*)host_alloc((size_t)g->units * sizeof(MuonBuffer));
    for (int i = 0; i < g->units; i++) {
        const Unit* u = &m->units[g->first + i];
        list[i] = muon_buffer(m, &u->buffer[param_buffer(g->id)], u->at[g->id], n, m->muon.x + i * n);
    }
    const int b = param_buffer(g->id);
    muon_momentum(list, g->units, m->layout.bf16_moments, m->step.state, m->ctx);
    if (!m->step.waits[b]) {
        muon_group_orthogonalize(m, g, m->muon.x);
        muon_update(list, g->units, &m->step.inputs->muon[b], m->step.state, m->ctx);
    }
    free(list);
}

void muon_update_whole(Model* m) {
    for (int i = 0; i < m->muon.group_count; i++) {
        const MuonGroup* g = &m->muon.groups[i];
        if (m->units[g->first].buffer[param_buffer(g->id)].shard == SHARD_NONE) update_group(m, g);
    }
}

void model_update_muon(Model* m) {
    if (m->muon.wave_size)
        muon_update_waves(m);
    else
        muon_update_whole(m);
}
