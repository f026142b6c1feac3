#include "model/evaluate.h"

#include <stdio.h>
#include <stdlib.h>

#include "device/check.h"

// The ranks take batches in turns. One that has none left computes the first batch again, because others need its part
// of weights and experts, and counts nothing.
double evaluate_loss(Model* m, Shards* shards) {
    const int64_t T = m->settings.seq_len, B = m->settings.batch, ranks = m->layout.ranks;
    const int64_t windows = max_i64(min_i64(m->settings.val_tokens / T, shards_windows(shards)), 1);
    int32_t* ids = (int32_t*)host_alloc((size_t)(2 * B * T) * sizeof(int32_t));
    double shown = host_seconds();
    step_begin(m->val_state, m->ctx);
    for (int64_t round = 0; round < windows; round += ranks * B) {
        // This rank's windows of the round.
        int64_t first = round + m->layout.rank * B, n = min_i64(windows - first, B);
        const int counts = n > 0;
        if (!counts) first = 0, n = 1;
        for (int64_t i = 0; i < n; i++)
            shards_read(shards, first + i, (int32_t)m->config.V, ids + i * T, ids + (B + i) * T);

        model_batch(m, ids, ids + B * T, n, T);
        model_forward(m, 0);
        if (counts) model_loss(m, m->val_state, 0);

        // A long validation prints how far it is.
        if (host_seconds() - shown < 5) continue;
        printf("validation %ld of %ld windows\n", min_i64(round + ranks * B, windows), windows);
        fflush(stdout);
        shown = host_seconds();
    }

    if (m->world) comm_sum_double(m->world, &m->val_state->loss_sum, 1, m->ctx);
    StepState state;
    device_download(&state, m->val_state, sizeof(state), m->ctx);
    free(ids);
    return state.loss_sum / (double)(windows * T);
}
