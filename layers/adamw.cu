// One launch updates up to 32 buffers. Each launch reads master, m, v and grad once and writes master, m, v and weight
// once: 28 bytes a parameter, or 20 with bf16 moments; 2 less with a rounded gradient. Bound by memory. A thread owns 8
// elements, so that 8 loads of 16 bytes are in flight at once (6 with bf16 moments).
#include "layers/adamw.h"

#include "layers/buffer_list.cuh"

template <typename Moment>
static __global__ void __launch_bounds__(LIST_THREADS, 4)
    adamw_kernel(const __grid_constant__ BufferList<AdamWBuffer> list, const AdamW* option, const StepState* state) {
    const auto [buffer, i] = list_place(list);
    Moment *m = (Moment*)buffer.m, *v = (Moment*)buffer.v;
    wait_for_previous();
    const AdamW opt = *option;
    if (i >= buffer.n || !state->ok) return;

    // Eight elements: all loads are issued first.
    const float scale = (float)state->grad_scale, fix1 = (float)(1 / state->correction1),
                fix2 = (float)(1 / state->correction2);
    float g[8], p[8], m1[8], v1[8];
    load_masters(p, buffer.weight + i, buffer.master + i);
    load(m1, m + i);
    load(v1, v + i);
    load_gradients(g, buffer, i);

    // The update of m, v and master (formulas in the header).
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float gj = scale * g[j], decay = i + j < buffer.n_decay ? opt.weight_decay : 0;
        m1[j] = opt.beta1 * m1[j] + (1 - opt.beta1) * gj;
        v1[j] = opt.beta2 * v1[j] + (1 - opt.beta2) * gj * gj;
        p[j] -= opt.lr * (m1[j] * fix1 / (sqrtf(v1[j] * fix2) + ADAMW_EPS) + decay * p[j]);
    }

    // Store everything.
    store_masters(buffer.weight + i, buffer.master + i, p);
    store(m + i, m1);
    store(v + i, v1);
}

void adamw_update(const AdamWBuffer* buffers, int count, int bf16, const AdamW* opt, const StepState* state, Ctx* ctx) {
    for (int b = 0; b < count; b++)
        ASSERT(wide(buffers[b].n, buffers[b].weight, buffers[b].master, buffers[b].m, buffers[b].v, buffers[b].grad,
                    buffers[b].rounded));
    launch_list(bf16 ? adamw_kernel<floatX> : adamw_kernel<float>, buffers, count, ctx, opt, state);
}
