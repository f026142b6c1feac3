// The whole model: against goldens from an independent implementation (scripts/make_golden.py), against finite
// differences, and against itself where the order of work must not matter.
#include "data/safetensors.h"
#include "model/model.h"
#include "tests/test.h"

// Settings from one line of options.
static Settings settings_of(const char* line) {
    char* text = host_format("--train none %s", line);
    char* argv[128] = {(char*)"test"};
    int argc = 1;
    for (char* word = strtok(text, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    Settings s = settings_read(argc, argv);
    free(text);
    return s;
}

static void finish(Model* m) {
    Settings s = m->settings;
    model_destroy(m);
    settings_free(&s);
}

static ParamBuffer* buffer_of(Model* m, int unit, const NamedTensor* t) {
    return t->in_experts ? &m->units[unit].experts : &m->units[unit].dense;
}

// Reads a float32 tensor of the golden as reals, in fresh memory.
static real* golden_read(const SafeTensors* st, const char* prefix, const char* name, int64_t count) {
    char* full = host_format("%s%s", prefix, name);
    const StTensor* t = st_find(st, full);
    real* out = (real*)host_alloc((size_t)count * sizeof(real));
    CHECK(t && t->bytes == count * 4, "%s: %s is missing or has another size", st->path, full);
    if (t && t->bytes == count * 4) {
        float* f = (float*)host_alloc((size_t)count * 4);
        CHECK(st_read(st, t, 0, count, f) == 0, "cannot read %s", full);
        for (int64_t i = 0; i < count; i++) out[i] = f[i];
        free(f);
    }
    free(full);
    return out;
}

static void load_golden_weights(Model* m, const SafeTensors* st) {
    for (int u = 0; u < params_units(&m->config); u++) {
        int count;
        NamedTensor* tensors = params_tensors(&m->config, u, &count);
        for (int i = 0; i < count; i++) {
            real* w = golden_read(st, "weight.", tensors[i].name, tensors[i].count);
            device_upload(buffer_of(m, u, &tensors[i])->master + tensors[i].offset, w,
                          (size_t)tensors[i].count * sizeof(real), m->ctx);
            free(w);
        }
        free(tensors);
        params_publish(&m->units[u], m->ctx);
        char name[112];
        snprintf(name, sizeof(name), "weight.model.layers.%d.mlp.gate.e_score_correction_bias", u - 1);
        if (!st_find(st, name)) continue;  // softmax routers have none
        real* bias = golden_read(st, "", name, m->config.E);
        device_upload(m->bias + (u - 1) * m->config.E, bias, (size_t)m->config.E * sizeof(real), m->ctx);
        free(bias);
    }
}

// Experts chosen in every MoE block: exactly the golden's, in its order (best first).
static void check_experts(Model* m, const SafeTensors* st) {
    for (int64_t l = m->config.dense_layers; l < m->config.L; l++) {
        char name[32];
        snprintf(name, sizeof(name), "expert_ids.%d", (int)l);
        int64_t count = m->B * m->T * m->config.K, differ = 0;
        const StTensor* t = st_find(st, name);
        CHECK(t && t->bytes == count * 4, "%s: %s is missing or has another size", st->path, name);
        if (!t || t->bytes != count * 4) continue;
        int32_t *want = (int32_t*)host_alloc((size_t)count * 4), *got = (int32_t*)host_alloc((size_t)count * 4);
        st_read(st, t, 0, count, want);
        device_download(got, m->blocks[l].moe.expert, (size_t)count * 4, m->ctx);
        for (int64_t i = 0; i < count; i++) differ += want[i] != got[i];
        CHECK(differ == 0, "%s: %lld of %lld expert ids differ", name, (long long)differ, (long long)count);
        free(want);
        free(got);
    }
}

// The goldens are float64 results rounded once. float32 against float64 was measured at 5e-7 for logits, 6e-8 for the
// loss and 1.4e-6 for the worst gradient (scripts/make_golden.py --verbose); another order of summation may be a few
// times worse. So 1e-5 and 1e-4 leave room for that and for nothing else: the mildest slip tried (YaRN's ramp not
// rounded) gives 7e-3.
static void check_golden(const char* path) {
    char error[256];
    SafeTensors* st = st_open(path, error, sizeof(error));
    CHECK(st, "%s", error);
    if (!st) return;
    char* line = host_format("%s --batch %s --seq-len %s", st_metadata(st, "options"), st_metadata(st, "batch"),
                             st_metadata(st, "seq_len"));
    Settings s = settings_of(line);
    Model* m = model_create(&s);
    load_golden_weights(m, st);
    int64_t N = s.batch * s.seq_len, V = s.model.V;
    int32_t *tokens = (int32_t*)host_alloc((size_t)N * 4), *targets = (int32_t*)host_alloc((size_t)N * 4);
    st_read(st, st_find(st, "tokens"), 0, N, tokens);
    st_read(st, st_find(st, "targets"), 0, N, targets);
    model_step_begin(m);
    model_batch(m, tokens, targets, s.batch, s.seq_len);
    model_forward(m, 1);
    check_experts(m, st);

    real *want = golden_read(st, "", "logits", N * V), *got = (real*)host_alloc((size_t)(N * V) * sizeof(real));
    for (int64_t n = 0; n < N; n++) model_logits(m, n, got + n * V);
    CHECK(relative_error(got, want, N * V) < 1e-5, "logits are off by %g", relative_error(got, want, N * V));
    free(want);
    free(got);

    model_loss(m, m->state, (float)(1.0 / (double)N));
    model_backward(m, 0);
    StepState state;
    device_download(&state, m->state, sizeof(state), m->ctx);
    want = golden_read(st, "", "loss", 1);
    CHECK(fabs(state.loss_sum / (double)N / (double)want[0] - 1) < 1e-5, "loss %.9g, golden %.9g",
          state.loss_sum / (double)N, (double)want[0]);
    free(want);

    for (int u = 0; u < params_units(&m->config); u++) {
        int count;
        NamedTensor* tensors = params_tensors(&m->config, u, &count);
        for (int i = 0; i < count; i++) {
            int64_t n = tensors[i].count;
            got = (real*)host_alloc((size_t)n * sizeof(real));
            device_download(got, buffer_of(m, u, &tensors[i])->grad + tensors[i].offset, (size_t)n * sizeof(real),
                            m->ctx);
            want = golden_read(st, "grad.", tensors[i].name, n);
            double e = relative_error(got, want, n);
            CHECK(e < 1e-4, "gradient of %s is off by %g", tensors[i].name, e);
            free(got);
            free(want);
        }
        free(tensors);
    }
    free(tokens);
    free(targets);
    free(line);
    finish(m);
    st_close(st);
}

static void golden_v3(void) { check_golden("tests/golden/v3.safetensors"); }
static void golden_v3_yarn(void) { check_golden("tests/golden/v3_yarn.safetensors"); }
static void golden_softmax(void) { check_golden("tests/golden/softmax.safetensors"); }

#define SMALL                                                                                                          \
    "--layers 3 --dim 32 --heads 2 --kv-lora 16 --nope-dim 8 --rope-dim 8 --v-dim 16 --dense-ffn 48 --experts 6 "      \
    "--top-k 2 "                                                                                                       \
    "--expert-ffn 24 --vocab 50 --seq-len 20 "

static void random_batch(int32_t* ids, int64_t n, int32_t V, uint32_t stream) {
    for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)(random_uniform(99, stream, (uint64_t)i) * V);
}

// Runs one step's micro-batches on fixed random tokens without updating; gradients stay in the units.
static double accumulate(Model* m, int64_t sequences) {
    const Settings* s = &m->settings;
    int64_t n = sequences * s->seq_len, micro = s->batch * s->seq_len;
    int32_t* ids = (int32_t*)host_alloc((size_t)(2 * n) * 4);
    random_batch(ids, 2 * n, (int32_t)s->model.V, 7);
    model_step_begin(m);
    for (int64_t i = 0; i < n; i += micro) {
        model_batch(m, ids + i, ids + n + i, s->batch, s->seq_len);
        model_micro_step(m);
    }
    free(ids);
    StepState state;
    device_download(&state, m->state, sizeof(state), m->ctx);
    return state.loss_sum / (double)n;
}

static Model* fresh(const char* line) {
    Settings s = settings_of(line);
    Model* m = model_create(&s);
    params_init(m->units, &m->config, 3, m->ctx);
    return m;
}

// Eight sequences as 1, 2 and 8 micro-steps. The same products in another grouping: float32 sums over the tokens differ
// by some rounding units, a few 1e-7 of the whole.
static void micro_batches(void) {
    static const int splits[3] = {1, 2, 8};
    Model* whole = fresh(SMALL "--batch 8 --tokens-per-step 160 --aux-loss 0.01");
    double loss = accumulate(whole, 8);
    for (int k = 1; k < 3; k++) {
        char line[512];
        snprintf(line, sizeof(line), SMALL "--batch %d --tokens-per-step 160 --aux-loss 0.01", 8 / splits[k]);
        Model* split = fresh(line);
        double other = accumulate(split, 8);
        CHECK(fabs(other / loss - 1) < 1e-6, "%d micro-steps: loss %.9g, in one %.9g", splits[k], other, loss);
        for (int u = 0; u < params_units(&whole->config); u++) {
            int count;
            NamedTensor* tensors = params_tensors(&whole->config, u, &count);
            for (int i = 0; i < count; i++) {
                const real* a = buffer_of(split, u, &tensors[i])->grad + tensors[i].offset;
                const real* b = buffer_of(whole, u, &tensors[i])->grad + tensors[i].offset;
                double e = relative_error(a, b, tensors[i].count);
                CHECK(e < 1e-5, "%d micro-steps: gradient of %s is off by %g", splits[k], tensors[i].name, e);
            }
            free(tensors);
        }
        int64_t cells = whole->config.L * whole->config.E;
        CHECK(memcmp(split->load, whole->load, (size_t)cells * 8) == 0, "%d micro-steps: expert loads differ",
              splits[k]);
        finish(split);
    }
    finish(whole);
}

// Forward may be run as often as one likes in between (validation, samples): loads count training only.
static void loads_count_training_only(void) {
    Model* m = fresh(SMALL "--batch 2");
    accumulate(m, 2);
    int64_t sum = 0;
    model_forward(m, 0);
    for (int64_t i = 0; i < m->config.L * m->config.E; i++) sum += m->load[i];
    CHECK(sum == 2 * 20 * 2 * 2, "counted %lld choices, 40 tokens x 2 experts x 2 MoE blocks are 160", (long long)sum);
    finish(m);
}

#ifdef F64
// The model's loss plus balance loss as a function of its parameters: d/dp along a random direction of every tensor,
// central differences in double with h = 1e-5 (truncation h^2 = 1e-10 relative to third derivatives, rounding 1e-16 / h
// = 1e-11). The balance loss is recomputed here from the router's scores by its definition.
static double objective(Model* m, double aux) {
    const ModelConfig* c = &m->config;
    model_step_begin(m);
    model_forward(m, 1);
    model_loss(m, m->state, 0);
    double total = m->state->loss_sum / (double)(m->B * m->T);
    for (int64_t l = c->dense_layers; l < c->L; l++) {
        const MoeSaved* s = &m->blocks[l].moe;
        for (int64_t b = 0; b < m->B; b++) {
            for (int64_t e = 0; e < c->E; e++) {
                double count = 0, share = 0;
                for (int64_t n = b * m->T; n < (b + 1) * m->T; n++) {
                    double sum = 0;
                    for (int64_t j = 0; j < c->E; j++) sum += s->scores[n * c->E + j];
                    share += s->scores[n * c->E + e] / sum / (double)m->T;
                    for (int64_t k = 0; k < c->K; k++) count += s->expert[n * c->K + k] == e;
                }
                total += aux * (double)c->E / (double)(c->K * m->T) * count * share / (double)m->B;
            }
        }
    }
    return total;
}

static void check_differences(const char* line) {
    Model* m = fresh(line);
    double aux = m->settings.aux_loss;
    for (int u = 0; u < params_units(&m->config); u++) {  // start where gradients are not tiny
        ParamBuffer* p[2] = {&m->units[u].dense, &m->units[u].experts};
        for (int b = 0; b < 2; b++)
            for (int64_t i = 0; i < p[b]->n_decay; i++) p[b]->master[i] *= 6;
    }
    accumulate(m, m->settings.batch);
    for (int u = 0; u < params_units(&m->config); u++) {
        int count;
        NamedTensor* tensors = params_tensors(&m->config, u, &count);
        for (int i = 0; i < count; i++) {
            ParamBuffer* p = buffer_of(m, u, &tensors[i]);
            int64_t n = tensors[i].count;
            real *direction = random_tensor(n, (uint32_t)(1000 * u + i)), *w = p->master + tensors[i].offset;
            double analytic = 0, norm = 0;
            for (int64_t j = 0; j < n; j++) {
                analytic += direction[j] * p->grad[tensors[i].offset + j];
                norm += direction[j] * direction[j] * p->grad[tensors[i].offset + j] * p->grad[tensors[i].offset + j];
            }
            real* grads = (real*)host_alloc((size_t)p->n * sizeof(real));  // objective() clears them
            memcpy(grads, p->grad, (size_t)p->n * sizeof(real));
            const double h = 1e-5;
            for (int64_t j = 0; j < n; j++) w[j] += h * direction[j];
            double up = objective(m, aux);
            for (int64_t j = 0; j < n; j++) w[j] -= 2 * h * direction[j];
            double down = objective(m, aux);
            for (int64_t j = 0; j < n; j++) w[j] += h * direction[j];
            double numeric = (up - down) / (2 * h);
            // Relative to the size a sum of these terms typically has, so that a sum that happens to cancel is not
            // judged by its tiny value; 1e-9 is the rounding of the difference itself (1e-16 * loss / h, with room).
            CHECK(fabs(numeric - analytic) < 1e-6 * sqrt(norm) + 1e-9,
                  "%s: %s: finite difference %.12g, gradient %.12g", line, tensors[i].name, numeric, analytic);
            accumulate(m, m->settings.batch);
            CHECK(relative_error(p->grad, grads, p->n) < 1e-7, "%s: gradients do not come back", tensors[i].name);
            free(grads);
            free(direction);
        }
        free(tensors);
    }
    finish(m);
}

static void differences_sigmoid(void) { check_differences(SMALL "--batch 2 --aux-loss 0.1"); }
static void differences_q_lora(void) {
    check_differences(SMALL "--batch 1 --q-lora 16 --score softmax --route-norm 0 --route-scale 3");
}
static void differences_groups(void) {
    check_differences(SMALL "--batch 1 --groups 3 --top-groups 2 --yarn 1 --aux-loss 0.1");
}
static void differences_no_shared(void) { check_differences(SMALL "--batch 1 --shared-experts 0 --dense-layers 0"); }
static void differences_dense(void) { check_differences(SMALL "--batch 1 --dense-layers 3"); }
#endif

// Published sizes: DeepSeek-V2-Lite 15.71e9 (2.66e9 active), DeepSeek-V3 671.0e9 (37.55e9 active).
static void parameter_counts(void) {
    Settings s = settings_of("--model 16b --seq-len 4096");
    CHECK(fabs((double)params_total(&s.model) / 15.71e9 - 1) < 5e-4, "16b: %lld", (long long)params_total(&s.model));
    CHECK(fabs((double)params_active(&s.model) / 2.66e9 - 1) < 3e-3, "16b active: %lld",
          (long long)params_active(&s.model));
    CHECK(fabs(flops_per_token(&s.model, 4096) / 16.41e9 - 1) < 5e-4, "16b FLOPs: %g", flops_per_token(&s.model, 4096));
    settings_free(&s);
    s = settings_of("--model 671b --seq-len 4096");
    CHECK(fabs((double)params_total(&s.model) / 671.0e9 - 1) < 2e-4, "671b: %lld", (long long)params_total(&s.model));
    CHECK(fabs((double)params_active(&s.model) / 37.55e9 - 1) < 3e-4, "671b active: %lld",
          (long long)params_active(&s.model));
    settings_free(&s);
}

// Weights are a function of the seed; their spread is as promised. The standard deviation of a normal cut at 3 sigma is
// 0.98658 sigma; with the 4608 draws of w2 the estimate is good to 1 / sqrt(2 * 4608) = 1.0 %: 4 % is four of its
// sigmas.
static void initial_weights(void) {
    Model *a = fresh(SMALL "--batch 1"), *b = fresh(SMALL "--batch 2");
    const Unit *u = &a->units[3], *v = &b->units[3];
    CHECK(memcmp(u->experts.master, v->experts.master, (size_t)u->experts.n * sizeof(real)) == 0,
          "the same seed gave other weights");
    double in = 0, out = 0, most = 0;
    int64_t n_in = 6 * 48 * 32, n_out = 6 * 24 * 32;
    for (int64_t i = 0; i < n_in; i++) {
        double w = fabs((double)u->experts.master[u->at.w13 + i]);
        in += w * w;
        if (w > most) most = w;
    }
    for (int64_t i = 0; i < n_out; i++) out += pow((double)u->experts.master[u->at.w2 + i], 2);
    CHECK(fabs(sqrt(in / (double)n_in) / (0.02 * 0.98658) - 1) < 0.04, "std of w13 is %g", sqrt(in / (double)n_in));
    CHECK(fabs(sqrt(out / (double)n_out) / (0.02 * 0.98658 / sqrt(6.0)) - 1) < 0.04, "std of w2 is %g",
          sqrt(out / (double)n_out));
    CHECK(most <= 0.06 && most > 0.055, "largest weight is %g, the cut is at 0.06", most);
    CHECK(u->dense.master[u->at.norm1] == 1, "norms start at 1");
    CHECK(a->units[0].dense.n == 128 * 32, "a vocabulary of 50 is padded to 128 rows");
    CHECK(a->units[0].dense.master[50 * 32] == 0, "padding rows of the embedding are not zero");
    finish(a);
    finish(b);
}

// 10 warm-up steps of 110, peak 2, end 0.2.
static void schedules(void) {
    static const char* names[4] = {"cosine", "wsd", "linear", "constant"};
    static const double middle[4] = {1.1, 2, 1.1, 2}, late[4] = {0.2440, 1.1, 0.38, 2}, end[4] = {0.2, 0.2, 0.2, 2};
    for (int i = 0; i < 4; i++) {
        char line[160];
        snprintf(line, sizeof(line), "--lr 2 --warmup 10 --steps 110 --final-lr-frac 0.1 --schedule %s", names[i]);
        Settings s = settings_of(line);
        CHECK(settings_lr(&s, 1) == 0.2 && settings_lr(&s, 10) == 2, "%s: warm-up", names[i]);
        CHECK(fabs(settings_lr(&s, 60) - middle[i]) < 1e-12, "%s: half way %.12g", names[i], settings_lr(&s, 60));
        CHECK(fabs(settings_lr(&s, 100) - late[i]) < 1e-4, "%s: at nine tenths %.12g", names[i], settings_lr(&s, 100));
        CHECK(fabs(settings_lr(&s, 110) - end[i]) < 1e-12, "%s: at the end %.12g", names[i], settings_lr(&s, 110));
        settings_free(&s);
    }
}

// A step that is not finite changes no weight, moment or bias, and the next good one does.
static void bad_step(void) {
    Model* m = fresh(SMALL "--batch 2");
    accumulate(m, 2);
    model_update(m, 1);
    size_t bytes = (size_t)m->units[2].experts.n * sizeof(real),
           bias_bytes = (size_t)(m->config.L * m->config.E) * sizeof(real);
    real *w = (real*)host_alloc(bytes), *bias = (real*)host_alloc(bias_bytes);
    memcpy(w, m->units[2].experts.master, bytes);
    memcpy(bias, m->bias, bias_bytes);
    accumulate(m, 2);
    m->units[1].dense.grad[5] = NAN;
    model_update(m, 2);
    CHECK(memcmp(w, m->units[2].experts.master, bytes) == 0, "a NaN gradient changed weights");
    CHECK(memcmp(bias, m->bias, bias_bytes) == 0, "a NaN gradient changed biases");
    CHECK(m->state->ok == 0 && m->state->bad_in_a_row == 1 && m->state->updates == 1, "ok %d, %d bad, %lld updates",
          m->state->ok, m->state->bad_in_a_row, (long long)m->state->updates);
    accumulate(m, 2);
    model_update(m, 3);
    CHECK(memcmp(w, m->units[2].experts.master, bytes) != 0 && memcmp(bias, m->bias, bias_bytes) != 0,
          "a good step changed nothing");
    CHECK(m->state->bad_in_a_row == 0 && m->state->updates == 2, "%d bad, %lld updates", m->state->bad_in_a_row,
          (long long)m->state->updates);
    free(w);
    free(bias);
    finish(m);
}

int main(void) {
    RUN(golden_v3);
    RUN(golden_v3_yarn);
    RUN(golden_softmax);
#ifdef F64
    RUN(differences_sigmoid);
    RUN(differences_q_lora);
    RUN(differences_groups);
    RUN(differences_no_shared);
    RUN(differences_dense);
#endif
    RUN(micro_batches);
    RUN(loads_count_training_only);
    RUN(parameter_counts);
    RUN(initial_weights);
    RUN(schedules);
    RUN(bad_step);
    return test_summary();
}
