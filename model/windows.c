#include "model/windows.h"

#include "device/check.h"
#include "parallel/comm_windows.h"

void* windows_pool(Model* m) {
    Arena* a = &m->arena[IN_POOL];
    if (m->shapes.moe.windows) m->no_windows = comm_windows_missing(m->ep, m->ranks);
    if (m->no_windows && m->run.dispatch == DISPATCH_WINDOWS)
        die(EXIT_FAILED, "--dispatch windows: %s; --dispatch nccl works everywhere", m->no_windows);
    m->windows = m->shapes.moe.windows && !m->no_windows;
    if (!m->windows) return NULL;
    m->overflow = (real*)device_alloc(sizeof(real), "overflows");
    m->overflowed = fetch_create(sizeof(real));
    device_zero(m->overflow, sizeof(real), m->ctx);
    return comm_window(m->ep, arena_bytes(a), a->purpose);
}

void windows_close(Model* m) {
    if (!m->windows) return;
    device_free(m->overflow);
    fetch_destroy(m->overflowed);
    comm_window_free(m->ep);
}

void windows_fetch(Model* m) {
    if (!m->windows) return;
    comm_all_reduce(m->world, m->overflow, 1, MAX_REAL, m->ctx);
    fetch_begin(m->overflowed, m->overflow, m->ctx);
    device_zero(m->overflow, sizeof(real), m->ctx);
}

int windows_overflowed(Model* m, int64_t step) {
    if (!m->windows) return 0;
    const double overflow = (double)*(const real*)fetch_end(m->overflowed);
    if (overflow == 0) return 0;
    const RunConfig* s = &m->run;
    MoeShape* shape = &m->shapes.moe;
    shape->capacity = fmin(1.125 * overflow * shape->capacity, DISPATCH_MOST_CAPACITY * (double)s->ep);
    warn("step %ld overflowed the capacity of an expert's rank, and runs again with --capacity %.2f", step,
         shape->capacity);

    // The pool, planned again as at the start.
    Arena* plan = &m->arena[IN_POOL];
    shape->router.N = s->batch * s->seq_len;
    plan->count = 0;
    moe_plan(plan, *shape, config_blocks(&m->config) - m->config.dense_layers);
    ctx_sync(m->ctx);
    comm_window_free(m->ep);
    ranks_barrier(m->ranks);  // its memory is free when no rank reaches into it any more
    pool_move(m->pool, comm_window(m->ep, arena_bytes(plan), plan->purpose), arena_bytes(plan));
    return 1;
}
