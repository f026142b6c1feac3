#include "model/muon_groups.h"

#include "device/check.h"
#include "layers/muon.h"

// Size of a group of matrices of one shape: enough to fill a GPU. A larger parameter of one unit is a group of its own,
// orthogonalized in parts.
static const int64_t GROUP_ELEMENTS = (int64_t)1 << 27;

// The groups, in the order of their first units.
static void group_matrices(MuonMemory* muon, const Unit* units, const ModelConfig* c) {
    const int count = params_units(c);
    MuonGroup* last[PARAMS] = {NULL};  // the last group of each parameter
    muon->groups = (MuonGroup*)host_alloc((size_t)(count * PARAMS) * sizeof(MuonGroup));
    for (int u = 0; u < count; u++) {
        Param list[PARAMS];
        const int params = params_list(list, c, units[u].kind);
        for (int i = 0; i < params; i++) {
            // The parameter's matrices in this unit: one, or one per expert; gate and up count as two.
            const Param* p = &list[i];
            if (p->by != MUON) continue;
            const int64_t halves = p->second ? 2 : 1, rows = p->rows / halves;
            const MuonGroup mine = {p->id, u, 1, units[u].w[p->id].count * halves, rows, p->columns, 0};

            // Joins the group of the unit before, if that has the same shape and is not full.
            MuonGroup* g = last[p->id];
            if (g && g->first + g->units == u && g->rows == rows && g->columns == p->columns &&
                units[u].buffer[param_buffer(p->id)].shard == SHARD_NONE &&
                (g->count + mine.count) * rows * p->columns <= GROUP_ELEMENTS) {
                g->units++;
                g->count += mine.count;
            } else {
                last[p->id] = &muon->groups[muon->group_count++];
                *last[p->id] = mine;
            }
        }
    }
}

void muon_plan(MuonMemory* muon, const Unit* units, const ModelConfig* c, Arena* arena) {
    int64_t largest = 0, work = 0;
    group_matrices(muon, units, c);
    for (int i = 0; i < muon->group_count; i++) {
        // Equal parts of at most 3 GROUP_ELEMENTS of workspace, which a square group needs.
        MuonGroup* g = &muon->groups[i];
        const int64_t each = muon_work(1, g->rows, g->columns);
        const int64_t pieces = ceil_div(g->count, max_i64(3 * GROUP_ELEMENTS / each, 1));
        g->at_once = ceil_div(g->count, pieces);
        work = max_i64(work, g->at_once * each);

        // x is for a group of whole matrices, `waves` for units that came in parts. A rank has a part of each unit in a
        // wave: together the elements of a unit, with those behind Muon's.
        const ParamBuffer* p = &units[g->first].buffer[param_buffer(g->id)];
        if (p->shard == SHARD_NONE)
            largest = max_i64(largest, g->count * g->rows * g->columns);
        else
            muon->wave_size = max_i64(muon->wave_size, round_up(p->n, 64));
    }
    if (largest) ARENA(arena, "Muon: matrices of a group", ELEMENT_X, largest, 0, &muon->x);
    if (muon->wave_size) {
        ARENA(arena, "Muon: units of two waves", ELEMENT_X, 2 * muon->wave_size, 0, &muon->waves);
        ARENA(arena, "Muon: own parts of a wave", ELEMENT_X, muon->wave_size, 0, &muon->parts);
    }
    ARENA(arena, "Muon: workspace", ELEMENT_X, work, 0, &muon->work);
}
