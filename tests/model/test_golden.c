// The whole model against goldens from an independent implementation (scripts/make_golden.py).
#include "data/safetensors.h"
#include "tests/model.h"

enum { BF16 = BACKEND == BACKEND_CUDA };

// Reads a tensor of the golden, float32 or float64, as reals, into new memory.
static real* golden_read(const SafeTensors* st, const char* prefix, const char* name, int64_t count) {
    char* full = host_format("%s%s", prefix, name);
    const StTensor* t = st_find(st, full);
    real* out = (real*)host_alloc((size_t)count * sizeof(real));
    const int is_double = t && t->dtype == ST_F64, fits = t && t->bytes == count * (is_double ? 8 : 4);
    CHECK(fits, "%s: %s is missing or has another size", st->path, full);
    if (fits) {
        void* values = host_alloc((size_t)t->bytes);
        CHECK(st_read(st, t, 0, count, values) == 0, "cannot read %s", full);
        for (int64_t i = 0; i < count; i++)
            out[i] = is_double ? (real)((const double*)values)[i] : (real)((const float*)values)[i];
        free(values);
    }
    free(full);
    return out;
}

static void load_golden_weights(Model* m, const SafeTensors* st) {
    for (int u = 0; u < params_units(&m->config); u++) {
        int count;
        NamedTensor* tensors = params_tensors(&m->config, &m->layout, u, &count);
        for (int i = 0; i < count; i++) {
            real* w = golden_read(st, "weight.", tensors[i].name, tensors[i].count);
            const ParamBuffer* p = buffer_of(m, u, &tensors[i]);
            masters_upload(p->master + tensors[i].offset, p->owned_weight + tensors[i].offset, w, tensors[i].count,
                           m->ctx);
            free(w);
        }
        free(tensors);
        char name[112];
        const int layer = m->units[u].layer;
        snprintf(name, sizeof(name), "weight.model.layers.%d.mlp.gate.e_score_correction_bias", layer);
        if (!st_find(st, name)) continue;  // softmax routers have none
        real* bias = golden_read(st, "", name, m->config.E);
        device_upload(m->bias + layer * m->config.E, bias, (size_t)m->config.E * sizeof(real), m->ctx);
        free(bias);
    }
    weights_changed(m->sharding, 1, m->ctx);
}

// The selected experts in every MoE block are exactly the golden's, in its order (best first).
static void check_experts(Model* m, const SafeTensors* st) {
    for (int64_t l = m->config.dense_layers; l < config_blocks(&m->config); l++) {
        char name[32];
        snprintf(name, sizeof(name), "expert_ids.%d", (int)l);
        const int64_t k = l == m->config.L;  // the MTP module leaves out the last token
        int64_t count = m->shapes.B * (m->shapes.T - k) * m->config.K, differ = 0;
        const StTensor* t = st_find(st, name);
        CHECK(t && t->bytes == count * 4, "%s: %s is missing or has another size", st->path, name);
        if (!t || t->bytes != count * 4) continue;
        int32_t *want = (int32_t*)host_alloc((size_t)count * 4), *got = (int32_t*)host_alloc((size_t)count * 4);
        st_read(st, t, 0, count, want);
        device_download(got, m->blocks[l].moe.route.expert, (size_t)count * 4, m->ctx);
        for (int64_t i = 0; i < count; i++) differ += want[i] != got[i];
        CHECK(differ == 0, "%s: %lld of %lld expert ids differ", name, (long long)differ, (long long)count);
        free(want);
        free(got);
    }
}

static void check_gradient(const real* got, const real* want, int64_t n, double bound, const char* name) {
    double error = relative_error(got, want, n), dot = 0, norm_got = 0, norm_want = 0;
    if (!BF16) {
        CHECK(error < bound, "gradient of %s is off by %g", name, error);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        dot += (double)got[i] * (double)want[i];
        norm_got += (double)got[i] * (double)got[i];
        norm_want += (double)want[i] * (double)want[i];
    }
    double cosine = norm_want > 0 ? dot / sqrt(norm_got * norm_want) : 1, ratio = sqrt(norm_got / norm_want);
    if (getenv("TEST_ERRORS")) printf("    %s: cosine %.6f, norm ratio %.4f\n", name, cosine, ratio);
    // The gradient of an expert without tokens is exactly 0.
    CHECK(norm_want > 0 ? cosine >= 0.999 && fabs(ratio - 1) < 0.02 : norm_got == 0,
          "gradient of %s: cosine %g, norm %g times the golden's", name, cosine, ratio);
}

// Bounds. The golden of --mtp keeps its float64, and the double build is within 1e-9. Its errors are roundings of 1e-16
// over some 10^3 terms, and 3e-14 from RMSNorm's epsilon, which is float32 in the program. The other goldens are
// rounded once. Differences of float32 and float64 were measured: logits 5e-7, loss 6e-8, the worst gradient 1.4e-6
// (scripts/make_golden.py --verbose). Another order of summation may be a few times worse. The bounds 1e-5 and 1e-4
// allow for that alone: the smallest bug that was tried (YaRN's ramp not rounded) gives 7e-3. In bf16 every stored
// value has an error of 2^-9 (rms 1.1e-3), and a few dozen roundings in a row one of about 1 %. So logits and the norm
// of a gradient are within 2 %, and a gradient's direction is within acos(0.999) = 2.6 degrees.
static void check_golden(const char* path) {
    char error[256];
    SafeTensors* st = st_open(path, error, sizeof(error));
    CHECK(st, "%s", error);
    if (!st) return;
    const Json* about = json_get(st->header, "__metadata__");
    char* line = host_format("%s --batch %s --seq-len %s", json_text(about, "options"), json_text(about, "batch"),
                             json_text(about, "seq_len"));
    Model* m = model_of(settings_of(line), NULL);
    load_golden_weights(m, st);
    int64_t N = m->run.batch * m->run.seq_len, V = m->config.V;
    int32_t *tokens = (int32_t*)host_alloc((size_t)N * 4), *targets = (int32_t*)host_alloc((size_t)N * 4);
    st_read(st, st_find(st, "tokens"), 0, N, tokens);
    st_read(st, st_find(st, "targets"), 0, N, targets);
    model_step_begin(m, 1);
    model_batch(m, tokens, targets, m->run.batch, m->run.seq_len);
    model_forward(m, 1);
    check_experts(m, st);

    real *want = golden_read(st, "", "logits", N * V), *got = (real*)host_alloc((size_t)(N * V) * sizeof(real));
    for (int64_t n = 0; n < N; n++) model_logits(m, n, got + n * V);
    const int exact = sizeof(real) == 8 && st_find(st, "logits")->dtype == ST_F64;
    const double bound = BF16 ? 2e-2 : exact ? 1e-9 : 1e-5;
    CHECK(relative_error(got, want, N * V) < bound, "logits are off by %g", relative_error(got, want, N * V));
    free(want);
    free(got);

    model_loss(m, m->step.state, (float)(1.0 / (double)N));
    model_backward(m, 0, 1);
    StepState state = state_of(m);
    want = golden_read(st, "", "loss", 1 + m->config.mtp);
    for (int64_t k = 0; k <= m->config.mtp; k++) {
        const double loss = (k ? state.mtp_sum : state.loss_sum) / (double)N;
        CHECK(fabs(loss / (double)want[k] - 1) < (BF16 ? 2e-3 : bound), "loss %ld: %.12g, golden %.12g", (long)k, loss,
              (double)want[k]);
    }
    free(want);

    for (int u = 0; u < params_units(&m->config); u++) {
        int count;
        NamedTensor* tensors = params_tensors(&m->config, &m->layout, u, &count);
        for (int i = 0; i < count; i++) {
            int64_t n = tensors[i].count;
            got = host_gradient(m, buffer_of(m, u, &tensors[i]), tensors[i].offset, n);
            want = golden_read(st, "grad.", tensors[i].name, n);
            check_gradient(got, want, n, exact ? 1e-9 : 1e-4, tensors[i].name);
            free(got);
            free(want);
        }
        free(tensors);
    }
    free(tokens);
    free(targets);
    free(line);
    model_destroy(m);
    st_close(st);
}

static void golden_v3(void) { check_golden("tests/golden/v3.safetensors"); }
static void golden_v3_yarn(void) { check_golden("tests/golden/v3_yarn.safetensors"); }
static void golden_softmax(void) { check_golden("tests/golden/softmax.safetensors"); }
static void golden_mtp(void) { check_golden("tests/golden/mtp.safetensors"); }

int main(void) {
    RUN(golden_v3);
    RUN(golden_v3_yarn);
    RUN(golden_softmax);
    RUN(golden_mtp);
    return test_summary();
}
