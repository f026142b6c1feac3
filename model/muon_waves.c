// Muon where ranks hold parts of buffers. The units are taken in waves, one unit for each rank. Rank i owns unit i of a
// wave:
//
//   own part   u = g + momentum m of each unit of the wave                    muon_momentum
//   all-to-all each rank gets all parts of the unit that it owns
//   owner      orthogonalizes the unit's matrices                             muon_orthogonalize
//   all-to-all each rank gets its parts back
//   own part   w = w - lr (x + weight_decay w)                                muon_update
//
// The all-to-alls run on the side stream, with the work on own parts. They overlap with the Newton-Schulz steps of the
// wave before and of the whole buffers:
//
//   stream         | whole buffers | owned units of wave 0      | owned units of wave 1      |
//   side stream    | exchange 0    | exchange 1                 | return 0    | exchange 2   | return 1 ..
#include <stdlib.h>

#include "device/check.h"
#include "model/update_muon.h"

// Buffers b of `count` blocks from `first` on, at most one for each rank of `comm`, which shares them.
typedef struct Wave {
    int b;
    int64_t first, count;
    Comm* comm;
} Wave;

// The waves of all sharded buffers; returns how many. The last wave of dense buffers, or of experts, may be short.
static int list_waves(const Model* m, Wave* waves) {
    const int64_t blocks = config_blocks(&m->config);
    int n = 0;
    for (int b = 0; b < BUFFERS; b++) {
        const int64_t first = b == EXPERT_PARAMS ? m->config.dense_layers : 0;
        const ParamBuffer* p = &m->units[params_block_unit(&m->config, blocks - 1)].buffer[b];  // as in all blocks
        for (int64_t l = first; l < blocks && p->shard != SHARD_NONE; l += p->parts) {
            const Wave wave = {b, l, min_i64(p->parts, blocks - l), b == EXPERT_PARAMS ? m->expert_dp : m->world};
            waves[n++] = wave;
        }
    }
    return n;
}

// The buffer that rank i owns; NULL: the wave is shorter.
static const ParamBuffer* wave_buffer(const Model* m, const Wave* wave, int i) {
    return i < wave->count ? &m->units[params_block_unit(&m->config, wave->first + i)].buffer[wave->b] : NULL;
}

// The all-to-all of a wave, from own parts to the owners' x (back 0), or back, with the work on own parts.
static void exchange_parts(Model* m, const Wave* wave, floatX* x, int back, Ctx* ctx) {
    enum { ROW = 64 };  // elements; parts and parameters start at multiples of it
    const int ranks = comm_count(wave->comm);
    int64_t* rows = (int64_t*)host_alloc((size_t)(4 * ranks) * sizeof(int64_t));
    int64_t *send_start = rows, *send = rows + ranks, *recv_start = send + ranks, *recv = recv_start + ranks;
    MuonBuffer* list = (MuonBuffer*)host_alloc((size_t)wave->count * sizeof(MuonBuffer));
    const ParamBuffer* own = wave_buffer(m, wave, comm_index(wave->comm));
    int64_t at = 0;
    for (int i = 0; i < ranks; i++) {
        // This rank's part of buffer i goes to rank i; rank i's part of the buffer that this rank owns comes.
        const ParamBuffer* to = wave_buffer(m, wave, i);
        send_start[i] = at;
        send[i] = to ? muon_owned(to) / ROW : 0;
        if (to) list[i] = muon_buffer(m, to, 0, muon_owned(to), m->muon.parts + at * ROW);
        at += send[i];
        recv_start[i] = own ? i * own->part / ROW : 0;
        recv[i] = own ? muon_part(own, i) / ROW : 0;
    }
    ASSERT(at * ROW <= m->muon.wave_size);

    // The momentum comes before the exchange, the update after the return.
    const ExchangeBuffer buffer = {back ? m->muon.parts : x, back ? x : m->muon.parts, ROW * sizeof(floatX)};
    const ExchangeRows there = {send_start, send, recv_start, recv}, home = {recv_start, recv, send_start, send};
    if (!back) muon_momentum(list, wave->count, m->layout.bf16_moments, m->step.state, ctx);
    if (!m->step.waits[wave->b]) {
        comm_exchange(wave->comm, &buffer, 1, back ? home : there, ctx);
        if (back) muon_update(list, wave->count, &m->step.inputs->muon[wave->b], m->step.state, ctx);
    }
    free(list);
    free(rows);
}

// The matrices of the buffer that this rank owns, in x.
static void orthogonalize_own(Model* m, const Wave* wave, floatX* x) {
    if (m->step.waits[wave->b]) return;
    const ParamBuffer* own = wave_buffer(m, wave, comm_index(wave->comm));
    for (int i = 0; i < m->muon.group_count; i++) {
        const MuonGroup* g = &m->muon.groups[i];
        const Unit* u = &m->units[g->first];
        if (&u->buffer[param_buffer(g->id)] == own) muon_group_orthogonalize(m, g, x + u->at[g->id]);
    }
}

void muon_update_waves(Model* m) {
    Wave* waves = (Wave*)host_alloc((size_t)(config_blocks(&m->config) * BUFFERS) * sizeof(Wave));
    const int count = list_waves(m, waves);
    Ctx* side = sharding_side(m->sharding);
    floatX* x[2] = {m->muon.waves, m->muon.waves + m->muon.wave_size};

    // The first wave overlaps with the whole buffers.
    sharding_follow(m->sharding, side, m->ctx);
    exchange_parts(m, &waves[0], x[0], 0, side);
    muon_update_whole(m);

    // While wave i is orthogonalized, the side stream returns wave i - 1 and exchanges wave i + 1. The stream waits for
    // the exchange of i + 1 before the side stream is given the return of i.
    sharding_follow(m->sharding, m->ctx, side);
    for (int i = 0; i < count; i++) {
        if (i + 1 < count) exchange_parts(m, &waves[i + 1], x[(i + 1) % 2], 0, side);
        orthogonalize_own(m, &waves[i], x[i % 2]);
        sharding_follow(m->sharding, m->ctx, side);
        sharding_follow(m->sharding, side, m->ctx);
        exchange_parts(m, &waves[i], x[i % 2], 1, side);
    }
    sharding_follow(m->sharding, m->ctx, side);
    free(waves);
}
