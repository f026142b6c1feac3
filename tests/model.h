// Shared by the tests of whole models. They run in every build: device memory is read only by copies.
#ifndef TESTS_MODEL_H
#define TESTS_MODEL_H

#include "model/model.h"
#include "model/settings.h"
#include "tests/test.h"

// Settings of a run of `ranks` from one line of options.
static inline Settings settings_for(const char* line, int ranks) {
    char* text = host_format("--train none %s", line);
    char* argv[128] = {(char*)"test"};
    int argc = 1;
    for (char* word = strtok(text, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    Settings s = settings_read(settings_parse(argc, argv), ranks, NULL);
    free(text);
    return s;
}

static inline Settings settings_of(const char* line) { return settings_for(line, 1); }

// A model of these settings, which it frees.
static inline Model* model_of(Settings s, Ranks* world) {
    Model* m = model_create(&s.model, &s.run, world);
    settings_free(&s);
    return m;
}

// A dense block and two MoE blocks, sequences of 20 tokens. Its weights are zeros. `options` may change it.
static inline Settings small_settings(const char* options) {
    char* line = host_format(
        "--layers 3 --dim 32 --heads 2 --kv-lora 16 --nope-dim 32 --rope-dim 16 --v-dim 32 --dense-ffn 48 --experts 6 "
        "--top-k 2 --expert-ffn 24 --vocab 50 --seq-len 20 --batch 2 %s",
        options);
    Settings s = settings_of(line);
    free(line);
    return s;
}

static inline Model* small_model(const char* options) { return model_of(small_settings(options), NULL); }

static inline ParamBuffer* buffer_of(Model* m, int unit, const NamedTensor* t) {
    return &m->units[unit].buffer[t->buffer];
}

// n reals of the device, in fresh memory.
static inline real* host_copy(Model* m, const real* device, int64_t n) {
    real* host = (real*)host_alloc((size_t)n * sizeof(real));
    if (n) device_download(host, device, (size_t)n * sizeof(real), m->ctx);
    return host;
}

// n elements of the buffer's gradient from element `at` on, in fresh memory.
static inline real* host_gradient(Model* m, const ParamBuffer* p, int64_t at, int64_t n) {
    if (!p->rounded_grad) return host_copy(m, p->grad + at, n);
    floatX* rounded = (floatX*)host_alloc((size_t)n * sizeof(floatX));
    real* host = (real*)host_alloc((size_t)n * sizeof(real));
    if (n) device_download(rounded, p->rounded_grad + at, (size_t)n * sizeof(floatX), m->ctx);
    for (int64_t i = 0; i < n; i++) host[i] = (real)rounded[i];
    free(rounded);
    return host;
}

// n of the buffer's owned master weights from element `at` on, in fresh memory.
static inline real* host_masters(Model* m, const ParamBuffer* p, int64_t at, int64_t n) {
    real* host = (real*)host_alloc((size_t)n * sizeof(real));
    masters_download(host, p->master + at, p->owned_weight + at, n, m->ctx);
    return host;
}

// A step may not use old contents of the gradients: NaN everywhere, padding included.
static inline void poison_gradients(Model* m) {
    for (int u = 0; u < params_units(&m->config); u++)
        for (int b = 0; b < BUFFERS; b++) {
            const ParamBuffer* p = &m->units[u].buffer[b];
            if (p->n == 0) continue;
            // All bits set are a NaN in every type.
            char* nan = (char*)host_alloc((size_t)p->n * sizeof(real));
            memset(nan, 0xff, (size_t)p->n * sizeof(real));
            if (p->rounded_grad) device_upload(p->rounded_grad, nan, (size_t)p->n * sizeof(floatX), m->ctx);
            if (p->grad) device_upload(p->grad, nan, (size_t)p->n * sizeof(real), m->ctx);
            if (p->own_grad) device_upload(p->own_grad, nan, (size_t)p->part * sizeof(real), m->ctx);
            free(nan);
        }
}

static inline StepState state_of(Model* m) {
    StepState state;
    device_download(&state, m->step.state, sizeof(state), m->ctx);
    return state;
}

#endif
