// Two streams: ctx's stream computes, the side stream runs the all-gathers and reductions. The streams wait for each
// other by events; the host never waits. A stream works in the order of the calls, so a few events are enough:
//
//   one per unit   gathered: its weights have arrived
//   two per slot   free: its weights are no longer in use;  reduced: its gradients have been reduced
#include "parallel/sharding.h"

#include <stdlib.h>

#include "device/check.h"

enum { SLOTS = 2 };  // they alternate

// Memory for the gathered weights and the whole gradients of one unit at a time.
typedef struct Slot {
    floatX* weight;
    real* grad;
    int unit;         // the unit whose weights are in it, or in flight
    int64_t version;  // the version of those weights
    Event* free;      // the weights are no longer in use
    Event* reduced;   // the gradients have been reduced over the ranks
} Slot;

// The units, the slots and the streams. One thread of the host makes all calls.
struct Sharding {
    int count;
    ParamBuffer** units;  // (count) x (BUFFERS)
    Comm *world, *expert_dp;
    Ctx* side_stream;          // all-gathers and reductions, in the order of the calls
    Event* handover;           // one stream waits for the work of the other so far
    Event** gathered;          // (count): the unit's weights have arrived
    int64_t version[BUFFERS];  // counts changes of the weights. Those of dense ones are changes of any
    Slot slots[SLOTS];
};

// The group that shards buffer i: all ranks, or the ranks that own the same experts.
static Comm* comm_of(const Sharding* s, int i) { return i == EXPERT_PARAMS ? s->expert_dp : s->world; }

static Slot* slot_of(Sharding* s, int unit) { return &s->slots[unit % SLOTS]; }

Sharding* sharding_plan_slots(Arena* arena, ParamBuffer** units, int count) {
    Sharding* s = (Sharding*)host_alloc(sizeof(Sharding));
    s->count = count;
    s->units = units;

    // A slot is as large as the largest of its units.
    for (int i = 0; i < SLOTS; i++) {
        int64_t weights = 0, grads = 0;
        for (int u = i; u < count; u += SLOTS) {
            const ParamBuffer *dense = &units[u][DENSE_PARAMS], *experts = &units[u][EXPERT_PARAMS];
            weights = max_i64(weights, slotted_weight(dense) * dense->n + slotted_weight(experts) * experts->n);
            grads = max_i64(grads, slotted_grad(dense) * dense->n + slotted_grad(experts) * experts->n);
        }
        s->slots[i].unit = -1;
        if (weights) ARENA(arena, "weights gathered for use", ELEMENT_X, weights, 0, &s->slots[i].weight);
        if (grads) ARENA(arena, "gradients to be reduced", ELEMENT_REAL, grads, 0, &s->slots[i].grad);
    }
    return s;
}

// Pointers into other arrays. A unit's sharded buffers follow each other in its slot, always at the same addresses. For
// replicated buffers, owned_weight and own_grad point into the whole array.
static void set_pointers(Sharding* s, int unit) {
    const Slot* slot = slot_of(s, unit);
    floatX* weight = slot->weight;
    real* grad = slot->grad;
    for (int i = 0; i < BUFFERS; i++) {
        ParamBuffer* p = &s->units[unit][i];
        if (p->n == 0) continue;
        if (slotted_weight(p)) {
            p->weight = weight;
            weight += p->n;
            if (!p->owned_weight) p->owned_weight = (floatX*)p->master;
        } else {
            if (!p->weight) p->weight = (floatX*)p->master;
            p->owned_weight = p->weight + p->owned_from;
        }
        if (slotted_grad(p)) {
            p->grad = grad;
            grad += p->n;
        } else if (p->grad) {
            p->own_grad = p->grad + p->first;
        }
    }
}

void sharding_connect(Sharding* s, Comm* world, Comm* expert_dp, size_t workspace, Ctx* ctx) {
    s->world = world;
    s->expert_dp = expert_dp;
    s->side_stream = ctx_side(ctx, workspace);
    s->handover = event_create();
    s->gathered = (Event**)host_alloc((size_t)s->count * sizeof(Event*));
    for (int u = 0; u < s->count; u++) {
        set_pointers(s, u);
        s->gathered[u] = event_create();
    }
    for (int i = 0; i < SLOTS; i++) {
        s->slots[i].free = event_create();
        s->slots[i].reduced = event_create();
    }
}

void sharding_destroy(Sharding* s) {
    if (s->side_stream) {
        ctx_destroy(s->side_stream);
        event_destroy(s->handover);
        for (int u = 0; u < s->count; u++) event_destroy(s->gathered[u]);
        for (int i = 0; i < SLOTS; i++) {
            event_destroy(s->slots[i].free);
            event_destroy(s->slots[i].reduced);
        }
        free(s->gathered);
    }
    free(s->units);
    free(s);
}

// Whether there is communication. With one rank there is none, and the slots are empty: nothing waits.
static int communicates(const Sharding* s) { return s->world != NULL; }

Ctx* sharding_side(const Sharding* s) { return s->side_stream; }

// An event is enough, because a stream works in order. It may be used again at once: a wait is for its last record.
void sharding_follow(Sharding* s, Ctx* next, Ctx* before) {
    event_record(s->handover, before);
    event_wait(s->handover, next);
}

// All-gathers a unit's weights: those in a slot (slotted 1), or the replicated ones (slotted 0).
static void gather(Sharding* s, int unit, int slotted, int experts) {
    for (int i = 0; i < BUFFERS; i++) {
        const ParamBuffer* p = &s->units[unit][i];
        if (p->shard == SHARD_NONE || slotted_weight(p) != slotted || (i == EXPERT_PARAMS && !experts)) continue;
        comm_all_gather(comm_of(s, i), p->weight, p->owned_weight, (size_t)p->part * sizeof(floatX), s->side_stream);
    }
    event_record(s->gathered[unit], s->side_stream);
}

void weights_start(Sharding* s, int unit) {
    if (unit < 0 || unit >= s->count || !communicates(s)) return;
    // Nothing is to do if the newest version of these weights is in the slot or in flight.
    Slot* slot = slot_of(s, unit);
    if (slot->unit == unit && slot->version == s->version[DENSE_PARAMS]) return;

    // The slot's old weights must no longer be in use.
    event_wait(slot->free, s->side_stream);
    gather(s, unit, 1, 1);
    slot->unit = unit;
    slot->version = s->version[DENSE_PARAMS];
}

void weights_get(Sharding* s, int unit, Ctx* ctx) {
    weights_start(s, unit);
    if (communicates(s)) event_wait(s->gathered[unit], ctx);
}

void weights_release(Sharding* s, int unit, Ctx* ctx) {
    if (communicates(s)) event_record(slot_of(s, unit)->free, ctx);
}

// Replicated weights (--shard optimizer and grads) are gathered at once, sharded ones by weights_start.
void weights_changed(Sharding* s, int experts, Ctx* ctx) {
    s->version[DENSE_PARAMS]++;
    s->version[EXPERT_PARAMS] += experts;
    if (!communicates(s)) return;
    sharding_follow(s, s->side_stream, ctx);
    for (int u = 0; u < s->count; u++) gather(s, u, 0, experts);
}

int64_t weights_version(const Sharding* s, int buffer) { return s->version[buffer]; }

// A slot has the gradients of another unit: it may be overwritten when these have been reduced.
void grads_get(Sharding* s, int unit, int first, Ctx* ctx) {
    if (communicates(s)) event_wait(slot_of(s, unit)->reduced, ctx);
    for (int i = 0; i < BUFFERS; i++) s->units[unit][i].fresh = first || slotted_grad(&s->units[unit][i]);
}

Ctx* grads_reduce(Sharding* s, int unit, int first, int last, Ctx* ctx) {
    // Backward on ctx must have written the gradients. In the last micro-step the caller also queues the update.
    if (communicates(s) || last) sharding_follow(s, s->side_stream, ctx);
    for (int i = 0; i < BUFFERS; i++) {
        ParamBuffer* p = &s->units[unit][i];
        if (p->n == 0 || p->parts == 1) continue;
        if (slotted_grad(p)) {
            // Gradient accumulation: own_grad accumulates over the micro-steps. After the first one the sum over the
            // ranks is written in place, over this rank's part of grad, and is then added.
            real* sum = first ? p->own_grad : p->grad + p->first;
            comm_reduce_scatter(comm_of(s, i), sum, p->grad, p->part, s->side_stream);
            if (!first) device_add(p->own_grad, sum, p->part, s->side_stream);
        } else if (last && p->shard == SHARD_OPTIMIZER) {  // whole gradients, but only this rank's part is needed
            comm_reduce_scatter(comm_of(s, i), p->own_grad, p->grad, p->part, s->side_stream);
        } else if (last) {  // SHARD_NONE: every rank updates all
            comm_all_reduce(comm_of(s, i), p->grad, p->n, SUM_REAL, s->side_stream);
        }
    }
    if (communicates(s)) event_record(slot_of(s, unit)->reduced, s->side_stream);
    return s->side_stream;
}
