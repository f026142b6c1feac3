// The whole model: against finite differences, and against itself where the order of the work must not matter.
#include "tests/model.h"

enum { BF16 = BACKEND == BACKEND_CUDA };

// Head sizes are the smallest that the CUDA attention takes. The tests with finite differences have others (below).
#define BASE                                                                                                           \
    "--layers 3 --dim 32 --heads 2 --kv-lora 16 --dense-ffn 48 --experts 6 --top-k 2 --expert-ffn 24 --vocab 50 "      \
    "--seq-len 20 "
#define SMALL BASE "--nope-dim 32 --rope-dim 16 --v-dim 32 "

static void random_batch(int32_t* ids, int64_t n, int32_t V, uint32_t stream) {
    for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)(random_uniform(99, stream, (uint64_t)i) * V);
}

// Runs the micro-batches of a step on fixed random tokens without updating; gradients stay in the units.
static double accumulate_step(Model* m, int64_t sequences, int64_t step) {
    const RunConfig* run = &m->run;
    int64_t n = sequences * run->seq_len, micro = run->batch * run->seq_len;
    int32_t* ids = (int32_t*)host_alloc((size_t)(2 * n) * 4);
    random_batch(ids, 2 * n, (int32_t)m->config.V, 7);
    poison_gradients(m);
    model_step_begin(m, step);
    for (int64_t i = 0; i < n; i += micro) {
        model_batch(m, ids + i, ids + n + i, run->batch, run->seq_len);
        model_micro_step(m, i + micro >= n);
    }
    free(ids);
    return state_of(m).loss_sum / (double)n;
}
static double accumulate(Model* m, int64_t sequences) { return accumulate_step(m, sequences, 1); }

static Model* fresh(const char* line) {
    Model* m = model_of(settings_of(line), NULL);
    model_init(m, 3);
    return m;
}

static int64_t* host_load(Model* m) {
    size_t bytes = (size_t)(config_blocks(&m->config) * m->config.E) * sizeof(int64_t);
    int64_t* load = (int64_t*)host_alloc(bytes);
    device_download(load, m->step.load, bytes, m->ctx);
    return load;
}

static void check_same_load(Model* a, Model* b) {
    int64_t *x = host_load(a), *y = host_load(b);
    const size_t bytes = (size_t)(config_blocks(&a->config) * a->config.E) * sizeof(int64_t);
    CHECK(memcmp(x, y, bytes) == 0, "expert loads differ");
    free(x);
    free(y);
}

// The sum of squares from backward is that of its gradients; both are in double.
static void check_norm(Model* m) {
    double squares = 0;
    for (int u = 0; u < params_units(&m->config); u++)
        for (int b = 0; b < BUFFERS; b++) {
            const ParamBuffer* p = &m->units[u].buffer[b];
            real* grad = host_gradient(m, p, 0, p->n);
            for (int64_t i = 0; i < p->n; i++) squares += (double)grad[i] * (double)grad[i];
            free(grad);
        }
    sharding_follow(m->sharding, m->ctx, sharding_side(m->sharding));
    const double got = state_of(m).grad_sq;
    CHECK(fabs(got / squares - 1) < 1e-9, "sum of squares %.12g, of the gradients %.12g", got, squares);
}

// Eight sequences as 1, 2 and 8 micro-steps. The products are the same in another grouping. Float32 sums over the
// tokens differ by some rounding units, a few 1e-7 of the whole.
static void check_micro_batches(const char* more) {
    static const int splits[3] = {1, 2, 8};
    char* line = host_format(SMALL "--batch 8 --tokens-per-step 160 --aux-loss 0.01 %s", more);
    Model* whole = fresh(line);
    free(line);
    double loss = accumulate(whole, 8);
    for (int k = 1; k < 3; k++) {
        char line[512];
        snprintf(line, sizeof(line), SMALL "--batch %d --tokens-per-step 160 --aux-loss 0.01 %s", 8 / splits[k], more);
        Model* split = fresh(line);
        split->work.chunk = 16;  // several products of the classifier per micro-step
        double other = accumulate(split, 8);
        CHECK(fabs(other / loss - 1) < (BF16 ? 1e-4 : 1e-6), "%d micro-steps: loss %.9g, in one %.9g", splits[k], other,
              loss);
        for (int u = 0; u < params_units(&whole->config); u++) {
            int count;
            NamedTensor* tensors = params_tensors(&whole->config, &whole->layout, u, &count);
            for (int i = 0; i < count; i++) {
                int64_t at = tensors[i].offset, n = tensors[i].count;
                real* a = host_gradient(split, buffer_of(split, u, &tensors[i]), at, n);
                real* b = host_gradient(whole, buffer_of(whole, u, &tensors[i]), at, n);
                double e = relative_error(a, b, n);
                free(a);
                free(b);
                CHECK(e < (BF16 ? 1e-2 : 1e-5), "%d micro-steps: gradient of %s is off by %g", splits[k],
                      tensors[i].name, e);
            }
            free(tensors);
        }
        check_norm(split);
        if (!BF16) check_same_load(split, whole);
        model_destroy(split);
    }
    model_destroy(whole);
}

static void micro_batches(void) { check_micro_batches(""); }
static void micro_batches_of_module(void) { check_micro_batches("--mtp 1"); }

// A step of micro-steps first .. end - 1, two sequences each. In the even ones all tokens select expert 1 and none
// expert 4, in the odd ones the other way round.
static void steered_step(Model* m, int first, int end) {
    int64_t n = m->run.batch * m->run.seq_len;
    poison_gradients(m);
    model_step_begin(m, 1);
    for (int i = first; i < end; i++) {
        int32_t* ids = (int32_t*)host_alloc((size_t)(2 * n) * 4);
        random_batch(ids, 2 * n, (int32_t)m->config.V, 7 + (uint32_t)i);
        const real of_1 = i % 2 ? -100 : 100, of_4 = -of_1;
        for (int64_t l = m->config.dense_layers; l < m->config.L; l++) {
            device_upload(m->bias + l * m->config.E + 1, &of_1, sizeof(real), m->ctx);
            device_upload(m->bias + l * m->config.E + 4, &of_4, sizeof(real), m->ctx);
        }
        model_batch(m, ids, ids + n, m->run.batch, m->run.seq_len);
        model_micro_step(m, i == end - 1);
        free(ids);
    }
}

// A step's gradient is the sum of those of its micro-steps, even if an expert gets its first tokens in a later one. In
// every build the two differ only in the float32 roundings of a few additions: some 1e-7, and the bound is 3e-6.
static void experts_without_tokens(void) {
    Model* all = fresh(SMALL "--batch 2 --tokens-per-step 160 --aux-loss 0.01");
    Model* one = fresh(SMALL "--batch 2 --tokens-per-step 160 --aux-loss 0.01");
    for (int first = 0; first < 2; first++) {
        steered_step(all, first, first + 3);
        for (int u = 0; u < params_units(&all->config); u++) {
            int count;
            NamedTensor* tensors = params_tensors(&all->config, &all->layout, u, &count);
            for (int i = 0; i < count; i++) {
                const int64_t at = tensors[i].offset, n = tensors[i].count;
                real* sum = (real*)host_alloc((size_t)n * sizeof(real));
                for (int step = first; step < first + 3; step++) {
                    steered_step(one, step, step + 1);
                    real* part = host_gradient(one, buffer_of(one, u, &tensors[i]), at, n);
                    int64_t nonzero = 0;
                    for (int64_t j = 0; j < n; j++) nonzero += part[j] != 0, sum[j] += part[j];
                    CHECK(!strstr(tensors[i].name, step % 2 ? ".experts.1." : ".experts.4.") || nonzero == 0,
                          "%s without tokens: %lld elements are not 0", tensors[i].name, (long long)nonzero);
                    free(part);
                }
                real* got = host_gradient(all, buffer_of(all, u, &tensors[i]), at, n);
                CHECK(relative_error(got, sum, n) < 3e-6, "from micro-step %d on: gradient of %s is off by %g", first,
                      tensors[i].name, relative_error(got, sum, n));
                free(got), free(sum);
            }
            free(tensors);
        }
    }
    model_destroy(all);
    model_destroy(one);
}

// Matrices start at multiples of 64 elements. The padding between matrices of other sizes is 0 too. (On the GPU, sizes
// are multiples of 8, and their products are multiples of 64.)
static void padding_is_written(void) {
    Model* m = fresh(
        "--layers 2 --dim 20 --heads 1 --kv-lora 6 --dense-ffn 10 --experts 6 --top-k 2 --expert-ffn 7 "
        "--vocab 50 --seq-len 20 --nope-dim 8 --rope-dim 8 --v-dim 16 --batch 2");
    accumulate(m, 2);
    for (int u = 0; u < params_units(&m->config); u++)
        for (int b = 0; b < BUFFERS; b++) {
            const ParamBuffer* p = &m->units[u].buffer[b];
            real* grad = host_gradient(m, p, 0, p->n);
            int64_t bad = 0;
            for (int64_t i = 0; i < p->n; i++) bad += !isfinite(grad[i]);
            CHECK(bad == 0, "unit %d, buffer %d: %lld gradients are not finite", u, b, (long long)bad);
            free(grad);
        }
    model_destroy(m);
}

// Loads count training only. Other forward passes may run in between (validation, samples).
static void loads_count_training_only(void) {
    Model* m = fresh(SMALL "--batch 2");
    accumulate(m, 2);
    int64_t sum = 0;
    model_forward(m, 0);
    int64_t* load = host_load(m);
    for (int64_t i = 0; i < m->config.L * m->config.E; i++) sum += load[i];
    free(load);
    CHECK(sum == 2 * 20 * 2 * 2, "counted %lld choices, 40 tokens x 2 experts x 2 MoE blocks are 160", (long long)sum);
    model_destroy(m);
}

#ifdef F64
// The model's loss plus balance loss as a function of its parameters. Its derivative along a random direction of every
// tensor is compared with central differences in double, h = 1e-5. (Truncation is h^2 = 1e-10 relative to third
// derivatives, rounding is 1e-16 / h = 1e-11.) The balance loss is computed here from the scores, by its definition.
static double objective(Model* m, double aux) {
    const ModelConfig* c = &m->config;
    model_step_begin(m, 1);
    model_forward(m, 1);
    model_loss(m, m->step.state, 0);
    double total = m->step.state->loss_sum / (double)m->shapes.N;
    total += m->run.mtp_weight * m->step.state->mtp_sum / (double)m->shapes.N;
    for (int64_t l = c->dense_layers; l < config_blocks(c); l++) {
        const MoeSaved* s = &m->blocks[l].moe;
        const int64_t T = m->shapes.T - (l == c->L);  // the MTP module's windows are shorter
        for (int64_t b = 0; b < m->shapes.B; b++) {
            for (int64_t e = 0; e < c->E; e++) {
                double count = 0, share = 0;
                for (int64_t n = b * T; n < (b + 1) * T; n++) {
                    double sum = 0;
                    for (int64_t j = 0; j < c->E; j++) sum += s->scores[n * c->E + j];
                    share += s->scores[n * c->E + e] / sum / (double)T;
                    int64_t above = 0;
                    for (int64_t j = 0; j < c->E; j++) above += s->scores[n * c->E + j] > s->scores[n * c->E + e];
                    count += above < c->K;
                }
                total += aux * (double)c->E / (double)(c->K * T) * count * share / (double)m->shapes.B;
            }
        }
    }
    return total;
}

static void check_differences(const char* line) {
    Model* m = fresh(line);
    double aux = m->run.aux_loss;
    for (int u = 0; u < params_units(&m->config); u++) {  // start where gradients are not tiny
        ParamBuffer* p[2] = {&m->units[u].buffer[0], &m->units[u].buffer[1]};
        for (int b = 0; b < 2; b++)
            for (int64_t i = 0; i < p[b]->n_decay; i++) p[b]->master[i] *= 6;
    }
    accumulate(m, m->run.batch);
    for (int u = 0; u < params_units(&m->config); u++) {
        int count;
        NamedTensor* tensors = params_tensors(&m->config, &m->layout, u, &count);
        for (int i = 0; i < count; i++) {
            ParamBuffer* p = buffer_of(m, u, &tensors[i]);
            int64_t n = tensors[i].count;
            real *direction = random_tensor(n, (uint32_t)(1000 * u + i)), *w = p->master + tensors[i].offset;
            real* grads = host_gradient(m, p, 0, p->n);  // objective() clears them
            double analytic = 0, norm = 0;
            for (int64_t j = 0; j < n; j++) {
                const double term = direction[j] * grads[tensors[i].offset + j];
                analytic += term;
                norm += term * term;
            }
            const double h = 1e-5;
            for (int64_t j = 0; j < n; j++) w[j] += h * direction[j];
            double up = objective(m, aux);
            for (int64_t j = 0; j < n; j++) w[j] -= 2 * h * direction[j];
            double down = objective(m, aux);
            for (int64_t j = 0; j < n; j++) w[j] += h * direction[j];
            double numeric = (up - down) / (2 * h);
            // The bound is relative to the typical size of a sum of these terms, because some sums cancel to tiny
            // values. The rounding of the difference itself (1e-16 * loss / h) is below 1e-9.
            CHECK(fabs(numeric - analytic) < 1e-6 * sqrt(norm) + 1e-9,
                  "%s: %s: finite difference %.12g, gradient %.12g", line, tensors[i].name, numeric, analytic);
            accumulate(m, m->run.batch);
            real* again = host_gradient(m, p, 0, p->n);
            CHECK(relative_error(again, grads, p->n) < 1e-7, "%s: gradients do not come back", tensors[i].name);
            free(grads), free(again);
            free(direction);
        }
        free(tensors);
    }
    model_destroy(m);
}

#define DIFFERENT BASE "--nope-dim 8 --rope-dim 8 --v-dim 16 "
static void differences_sigmoid(void) { check_differences(DIFFERENT "--batch 2 --aux-loss 0.1"); }
static void differences_q_lora(void) {
    check_differences(DIFFERENT "--batch 1 --q-lora 16 --score softmax --route-norm 0 --route-scale 3");
}
static void differences_groups(void) {
    check_differences(DIFFERENT "--batch 1 --seq-len 16 --groups 3 --top-groups 2 --yarn 1 --aux-loss 0.1");
}
static void differences_no_shared(void) {
    check_differences(DIFFERENT "--batch 1 --shared-experts 0 --dense-layers 0");
}
static void differences_module(void) { check_differences(DIFFERENT "--batch 2 --mtp 1 --aux-loss 0.1"); }
static void differences_module_rebuilt(void) {
    check_differences(DIFFERENT "--batch 2 --mtp 1 --q-lora 16 --aux-loss 0.1 --mtp-weight 2 --recompute block");
}
static void differences_dense(void) { check_differences(DIFFERENT "--batch 1 --dense-layers 3"); }
#endif

// Published sizes: DeepSeek-V2-Lite 15.71e9 (2.66e9 active), DeepSeek-V3 671.0e9 (37.55e9 active).
static void parameter_counts(void) {
    Settings s = settings_of("--model 16b --seq-len 4096");
    CHECK(fabs((double)params_total(&s.model) / 15.71e9 - 1) < 5e-4, "16b: %lld", (long long)params_total(&s.model));
    CHECK(fabs((double)params_active(&s.model) / 2.66e9 - 1) < 3e-3, "16b active: %lld",
          (long long)params_active(&s.model));
    CHECK(fabs(flops_per_token(&s.model, 4096) / 16.41e9 - 1) < 5e-4, "16b FLOPs: %g", flops_per_token(&s.model, 4096));
    settings_free(&s);
    // Published for its MTP module: 11.5e9 own parameters, 2.4e9 active with embedding and head. The projection's
    // 0.10e9 seem not to be counted there. FLOPs of a module: its active parameters, lm_head again, one attention.
    s = settings_of("--model 671b --seq-len 4096 --mtp 1");
    ModelConfig main = s.model;
    main.mtp = 0;
    const double own = (double)(params_total(&s.model) - params_total(&main)), head = (double)(main.V * main.C);
    const double active = (double)(params_active(&s.model) - params_active(&main)), proj = 2.0 * 7168 * 7168;
    const double flops = flops_per_token(&s.model, 4096) - flops_per_token(&main, 4096);
    CHECK(fabs((own - proj) / 11.5e9 - 1) < 2e-3, "a module of 671b: %g", own);
    CHECK(fabs((active - proj + 2 * head) / 2.4e9 - 1) < 2e-2, "a module of 671b, active: %g", active);
    CHECK(fabs(flops / (6 * (active + head) + 6.0 * 128 * (128 + 64 + 128) * 2048) - 1) < 1e-3, "its FLOPs: %g", flops);
    settings_free(&s);
    s = settings_of("--model 671b --seq-len 4096");
    CHECK(fabs((double)params_total(&s.model) / 671.0e9 - 1) < 2e-4, "671b: %lld", (long long)params_total(&s.model));
    CHECK(fabs((double)params_active(&s.model) / 37.55e9 - 1) < 3e-4, "671b active: %lld",
          (long long)params_active(&s.model));
    settings_free(&s);
}

// Weights are a function of the seed, with the documented standard deviation. A normal distribution cut at 3 sigma has
// a standard deviation of 0.98658 sigma. With the 4608 draws of w2 the error of the estimate is 1.0 %, which is
// 1 / sqrt(2 * 4608). So 4 % is four of its sigmas.
static void initial_weights(void) {
    Model *a = fresh(SMALL "--batch 1"), *b = fresh(SMALL "--batch 2");
    const Unit* u = &a->units[3];
    real *x = host_masters(a, &u->buffer[EXPERT_PARAMS], 0, u->buffer[EXPERT_PARAMS].n),
         *y = host_masters(b, &b->units[3].buffer[EXPERT_PARAMS], 0, u->buffer[EXPERT_PARAMS].n);
    CHECK(memcmp(x, y, (size_t)u->buffer[EXPERT_PARAMS].n * sizeof(real)) == 0, "the same seed gave other weights");
    double in = 0, out = 0, most = 0;
    int64_t n_in = 6 * 48 * 32, n_out = 6 * 24 * 32;
    for (int64_t i = 0; i < n_in; i++) {
        double w = fabs((double)x[u->at[W13] + i]);
        in += w * w;
        if (w > most) most = w;
    }
    for (int64_t i = 0; i < n_out; i++) out += pow((double)x[u->at[W2] + i], 2);
    CHECK(fabs(sqrt(in / (double)n_in) / (0.02 * 0.98658) - 1) < 0.04, "std of w13 is %g", sqrt(in / (double)n_in));
    CHECK(fabs(sqrt(out / (double)n_out) / (0.02 * 0.98658 / sqrt(6.0)) - 1) < 0.04, "std of w2 is %g",
          sqrt(out / (double)n_out));
    CHECK(most <= 0.0600001 && most > 0.055, "largest weight is %g, the cut is at 0.06", most);
    real *norm = host_masters(a, &u->buffer[DENSE_PARAMS], u->at[NORM1], 1),
         *padding = host_masters(a, &a->units[0].buffer[DENSE_PARAMS], 50 * 32, 1);
    CHECK(*norm == 1, "norms start at 1");
    CHECK(a->units[0].buffer[DENSE_PARAMS].n == 128 * 32, "a vocabulary of 50 is padded to 128 rows");
    CHECK(*padding == 0, "padding rows of the embedding are not zero");
    free(norm);
    free(padding);
    free(x);
    free(y);
    model_destroy(a);
    model_destroy(b);
}

// 10 warm-up steps of 110, peak 2, end 0.2.
static void schedules(void) {
    static const char* names[4] = {"cosine", "wsd", "linear", "constant"};
    static const double middle[4] = {1.1, 2, 1.1, 2}, late[4] = {0.2440, 1.1, 0.38, 2}, end[4] = {0.2, 0.2, 0.2, 2};
    for (int i = 0; i < 4; i++) {
        char line[160];
        snprintf(line, sizeof(line), "--lr 2 --warmup 10 --steps 110 --final-lr-frac 0.1 --schedule %s", names[i]);
        Settings s = settings_of(line);
        CHECK(run_lr(&s.run, 1) == 0.2 && run_lr(&s.run, 10) == 2, "%s: warm-up", names[i]);
        CHECK(fabs(run_lr(&s.run, 60) - middle[i]) < 1e-12, "%s: half way %.12g", names[i], run_lr(&s.run, 60));
        CHECK(fabs(run_lr(&s.run, 100) - late[i]) < 1e-4, "%s: at nine tenths %.12g", names[i], run_lr(&s.run, 100));
        CHECK(fabs(run_lr(&s.run, 110) - end[i]) < 1e-12, "%s: at the end %.12g", names[i], run_lr(&s.run, 110));
        settings_free(&s);
    }
}

// A step that is not finite changes no weight, moment or bias, and the next good one does.
static void bad_step(void) {
    Model* m = fresh(SMALL "--batch 2");
    accumulate(m, 2);
    model_update(m, 0);
    int64_t n = m->units[2].buffer[EXPERT_PARAMS].n, cells = m->config.L * m->config.E;
    real *w = host_masters(m, &m->units[2].buffer[EXPERT_PARAMS], 0, n), *bias = host_copy(m, m->bias, cells);
    // The same batch; one gradient is NaN from the last norm down.
    floatX nan_value;
    memset((void*)&nan_value, 0xff, sizeof(nan_value));
    model_step_begin(m, 2);
    model_forward(m, 1);
    model_loss(m, m->step.state, 1.0f / 40);
    device_upload(m->work.dnorm + 5, &nan_value, sizeof(nan_value), m->ctx);
    model_backward(m, 0, 1);
    model_update(m, 0);
    real *w2 = host_masters(m, &m->units[2].buffer[EXPERT_PARAMS], 0, n), *bias2 = host_copy(m, m->bias, cells);
    CHECK(memcmp(w, w2, (size_t)n * sizeof(real)) == 0, "a NaN gradient changed weights");
    CHECK(memcmp(bias, bias2, (size_t)cells * sizeof(real)) == 0, "a NaN gradient changed biases");
    StepState bad = state_of(m);
    CHECK(isfinite(bad.loss) && bad.ok == 0 && bad.bad_in_a_row == 1 && bad.updates == 1, "ok %d, %d bad, %lld updates",
          bad.ok, bad.bad_in_a_row, (long long)bad.updates);
    accumulate(m, 2);
    model_update(m, 0);
    real *w3 = host_masters(m, &m->units[2].buffer[EXPERT_PARAMS], 0, n), *bias3 = host_copy(m, m->bias, cells);
    CHECK(memcmp(w, w3, (size_t)n * sizeof(real)) != 0, "a good step changed no weight");
    CHECK(memcmp(bias, bias3, (size_t)cells * sizeof(real)) != 0, "a good step changed no bias");
    StepState good = state_of(m);
    CHECK(good.bad_in_a_row == 0 && good.updates == 2, "%d bad, %lld updates", good.bad_in_a_row,
          (long long)good.updates);
    real* all[6] = {w, w2, w3, bias, bias2, bias3};
    for (int i = 0; i < 6; i++) free(all[i]);
    model_destroy(m);
}

// --muon-expert-steps 2: step 1 leaves the experts' weights and adds to their momentum, and step 2 has twice the rate.
// So two steps with it have the bits of two updates at every step, with the experts' rate 0 and then doubled.
static void experts_every_second_step(void) {
    const char* options = SMALL "--batch 2 --optimizer muon --warmup 0 --muon-expert-steps";
    Model* m[2];
    real* initial[BUFFERS];
    for (int every = 1; every <= 2; every++) {
        char* line = host_format("%s %d", options, every);
        m[every - 1] = fresh(line);
        free(line);
    }
    const ParamBuffer* p[2] = {m[0]->units[2].buffer, m[1]->units[2].buffer};
    for (int b = 0; b < BUFFERS; b++) initial[b] = host_masters(m[0], &p[0][b], 0, p[0][b].n);
    for (int64_t step = 1; step <= 2; step++) {
        for (int i = 0; i < 2; i++) {
            accumulate_step(m[i], 2, step);
            const float rate = step == 1 ? 0 : 2 * (float)run_muon_lr(&m[i]->run, step);
            if (i == 0) device_upload(&m[i]->step.inputs->muon[EXPERT_PARAMS].lr, &rate, sizeof(rate), m[i]->ctx);
            model_update(m[i], 0);
        }
        for (int b = 0; b < BUFFERS; b++) {
            const size_t bytes = (size_t)p[0][b].n * sizeof(real);
            if (!bytes) continue;
            real *always = host_masters(m[0], &p[0][b], 0, p[0][b].n),
                 *waits = host_masters(m[1], &p[1][b], 0, p[1][b].n);
            CHECK(memcmp(always, waits, bytes) == 0, "buffer %d, step %d: other bits", b, (int)step);
            CHECK((memcmp(waits, initial[b], bytes) == 0) == (b == EXPERT_PARAMS && step == 1),
                  "buffer %d, step %d: changed, or not", b, (int)step);
            free(always);
            free(waits);
        }
    }
    for (int b = 0; b < BUFFERS; b++) free(initial[b]);
    for (int i = 0; i < 2; i++) model_destroy(m[i]);
}

// Experts that wait are not quantized again, and all other weights are. A number of each copy is overwritten before a
// step, by one that four bits and a scale cannot have. A copy that still has it was not quantized.
static void experts_that_wait_are_not_quantized(void) {
    Model* m = fresh(SMALL
                     "--batch 2 --kv-lora 32 --dense-ffn 64 --expert-ffn 32 --optimizer muon --warmup 0 "
                     "--muon-expert-steps 3 --precision mxfp4");
    const ParamId ids[] = {W13, W2, WO};
    floatX mark, found;
    memset((void*)&mark, 0x11, sizeof(mark));  // 1e-28
    for (int64_t step = 1; step <= 7; step++) {
        accumulate_step(m, 2, step);
        for (int i = 0; i < 3; i++) {
            const Weight* w = &m->units[2].w[ids[i]];
            device_download(&found, w->forward.value, sizeof(found), m->ctx);
            const int quantized = memcmp(&found, &mark, sizeof(mark)) != 0;
            // The update before step 4 and that before step 7 changed the experts.
            CHECK(quantized == (param_buffer(ids[i]) == DENSE_PARAMS || step % 3 == 1), "step %d, weight %d: %d",
                  (int)step, i, quantized);
            device_upload(w->forward.value, &mark, sizeof(mark), m->ctx);
        }
        model_update(m, 0);
    }
    model_destroy(m);
}

// No two tensors of a step have a stream of random numbers in common, over layers, the MTP module, experts and their
// ranks. A linear layer has the same on every rank, where the rows have other numbers.
static void tensors_have_their_own_streams(void) {
    enum { RANKS = 4, FACTOR = 2 * WEIGHT_STREAMS };
    Settings s =
        settings_for(BASE
                     "--nope-dim 32 --rope-dim 16 --v-dim 32 --kv-lora 32 --q-lora 32 --dense-ffn 64 --experts 8 "
                     "--expert-ffn 32 --mtp 1 --precision mxfp4 --ep 4",
                     RANKS);
    uint32_t taken[1000];
    int count = 0, matrices = 0;
    for (int rank = 0; rank < RANKS; rank++) {
        Model m;
        model_plan(&m, &s.model, &s.run, rank, BACKEND);
        for (int u = 0; u < params_units(&m.config); u++)
            for (int id = 0; id < PARAMS; id++) {
                const Weight* w = &m.units[u].w[id];
                if (!w->format || (rank && id != W13 && id != W2)) continue;
                CHECK(w->stream % FACTOR + (uint32_t)w->count <= WEIGHT_STREAMS, "unit %d, %d: stream %u", u, id,
                      w->stream);
                for (int64_t i = 0; i < w->count; i++, matrices++) {
                    taken[count] = w->stream + (uint32_t)i;
                    for (int k = 0; k < count; k++)
                        CHECK(taken[k] != taken[count], "unit %d, %d, rank %d: taken", u, id, rank);
                    count++;
                }
            }
        model_plan_free(&m);
    }
    // Four matrices of attention in each of four blocks, a dense MLP, and three times a shared MLP and eight experts.
    CHECK(matrices == 4 * 4 + 2 + 3 * (2 + 2 * 8), "%d matrices", matrices);
    settings_free(&s);
}

int main(void) {
#ifdef F64
    RUN(differences_sigmoid);
    RUN(differences_q_lora);
    RUN(differences_groups);
    RUN(differences_no_shared);
    RUN(differences_dense);
    RUN(differences_module);
    RUN(differences_module_rebuilt);
#endif
    RUN(micro_batches);
    RUN(micro_batches_of_module);
    RUN(experts_without_tokens);
    if (!BF16) RUN(padding_is_written);
    RUN(loads_count_training_only);
    RUN(parameter_counts);
    RUN(initial_weights);
    RUN(schedules);
    RUN(bad_step);
    RUN(experts_every_second_step);
    if (!BF16) RUN(experts_that_wait_are_not_quantized);
    RUN(tensors_have_their_own_streams);
    return test_summary();
}
