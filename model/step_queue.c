#include "model/step_queue.h"

#include <stdlib.h>

#include "device/check.h"

// Results of a step: copies in flight, and its time.
typedef struct Results {
    Fetch *state, *load, *mx_stats;  // mx_stats: NULL without --mx-stats
    Stopwatch* watch;
} Results;

struct StepQueue {
    Model* model;
    Ranks* world;
    Loader* loader;
    Results results[2];  // of even and odd steps: one is read while the other is in flight
    int64_t newest;      // step
    int stop;            // of the newest step
};

StepQueue* step_queue_create(Model* m, Ranks* world, const Shards* shards) {
    const Settings* s = &m->settings;
    const int64_t blocks = config_blocks(&m->config);
    // Rank r reads the windows from r * batch on of each micro-step.
    const LoaderOrder order = {.seed = (uint64_t)(s->data_seed ? s->data_seed : s->seed),
                               .first = m->layout.rank * s->batch,
                               .stride = s->ranks * s->batch,
                               .wrap = s->overfit ? s->tokens_per_step / s->seq_len : 0};
    StepQueue* q = (StepQueue*)host_alloc(sizeof(StepQueue));
    q->model = m;
    q->world = world;
    q->loader = loader_start(shards, s->batch, (int32_t)m->config.V, order);
    for (int i = 0; i < 2; i++) {
        Results* r = &q->results[i];
        r->state = fetch_create(sizeof(StepState));
        r->load = fetch_create((size_t)(blocks * m->config.E) * sizeof(int64_t));
        if (s->mx_stats) r->mx_stats = fetch_create((size_t)(blocks * BLOCK_STATS) * sizeof(MxStats));
        r->watch = stopwatch_create();
    }
    return q;
}

void step_queue_destroy(StepQueue* q) {
    for (int i = 0; i < 2; i++) {
        fetch_destroy(q->results[i].state);
        fetch_destroy(q->results[i].load);
        if (q->results[i].mx_stats) fetch_destroy(q->results[i].mx_stats);
        stopwatch_destroy(q->results[i].watch);
    }
    loader_stop(q->loader);
    free(q);
}

// --mx-stats n: every n steps, 0 is never.
static int measures(const Model* m, int64_t step) { return m->settings.mx_stats && step % m->settings.mx_stats == 0; }

// Gives the device a step.
static void queue_step(StepQueue* q, int64_t step) {
    Model* m = q->model;
    const Settings* s = &m->settings;
    const Results* r = &q->results[step % 2];
    const int64_t micro_steps = s->tokens_per_step / settings_micro_tokens(s);
    stopwatch_start(r->watch, m->ctx);
    m->step.measures = measures(m, step);
    model_step_begin(m, step);
    for (int64_t i = 0; i < micro_steps; i++) {
        const int32_t *input, *target;
        loader_read(q->loader, (step - 1) * micro_steps + i, &input, &target);
        model_batch(m, input, target, s->batch, s->seq_len);
        model_micro_step(m, i == micro_steps - 1);
    }
    model_update(m, q->stop);
    stopwatch_stop(r->watch, m->ctx);

    // Copies of the results.
    fetch_begin(r->state, m->step.state, m->ctx);
    fetch_begin(r->load, m->step.load, m->ctx);
    if (measures(m, step)) fetch_begin(r->mx_stats, m->step.mx_stats, m->ctx);
}

void step_queue_add(StepQueue* q, int64_t step, int stop) {
    q->newest = step;
    q->stop = stop;
    queue_step(q, step);
}

StepResults step_queue_wait(StepQueue* q, int64_t step) {
    Model* m = q->model;
    const Results* r = &q->results[step % 2];
    const StepState* state = (const StepState*)fetch_end(r->state);
    // A step that overflowed changed nothing, and neither did the one that was queued after it: both run again.
    while (state->overflow != 0) {
        model_grow_capacity(m, q->world, (double)state->overflow);
        warn("step %ld overflowed the capacity of an expert's rank, and runs again with --capacity %.2f", step,
             m->capacity);
        for (int64_t again = step; again <= q->newest; again++) queue_step(q, again);
        state = (const StepState*)fetch_end(r->state);
    }
    const StepResults results = {*state, stopwatch_seconds(r->watch), (const int64_t*)fetch_end(r->load),
                                 measures(m, step) ? (const MxStats*)fetch_end(r->mx_stats) : NULL};
    return results;
}
