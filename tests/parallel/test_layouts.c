// Any layout gives the experts, gradients and losses of one rank, on the same global batches. The number of ranks is
// any power of two (mpirun -np 4). Each layout runs on the first of the ranks, while the others wait.
//
// Bounds. A layout changes only the order of float sums. These are the sums over tokens in the weights' gradients, over
// a token's experts (summed per rank first), and over the parts of an activation's gradient.
//   float32: some 1e-7 per sum, and the bound is 1e-5. bf16: a token's sum is rounded to bf16 once per rank that has
//   experts of the token (2^-9 each), and later values keep the error. The bound is 1e-2 for a gradient, as in
//   tests/model/test_model.c, and 2e-3 for a loss.
#include <unistd.h>

#include "device/files.h"
#include "model/persist.h"
#include "parallel/watch.h"
#include "pretrained/sample.h"
#include "tests/model.h"
#include "tests/mx.h"
#include "tests/weight.h"

enum { SEQUENCES = 16, STEPS = 20, BF16 = BACKEND == BACKEND_CUDA };
static const double GRADIENT_BOUND = BF16 ? 1e-2 : 1e-5, LOSS_BOUND = BF16 ? 2e-3 : 1e-5;

// With MXFP8 a sum that differs in its last bits may round to the other side. That is 2^-4 of one element, 4e-3 of a
// gradient of a few hundred elements. In float32 it is rare (2^-20 of the elements are so close to the middle), and it
// does not happen here.
static const double MX_GRADIENT_BOUND = BF16 ? 5e-2 : 4e-3, MX_LOSS_BOUND = BF16 ? 2e-3 : 1e-4;

// --mx-scale floor saturates elements above 1.75 times the power of two of their block. They are a share of 0.19,
// log2(2 / 1.75), of the blocks' largest elements, and lose at most an eighth, 0.08 rms. Blocks of --wgrad-precision
// have some 8 tokens, which an expert gets in a micro-step of a rank. The largest has some 0.3 of such a block's
// squares. The error of an operand is sqrt(0.19 * 0.3) * 0.08 = 0.02. The layout decides which tokens share a block.
// Two operands, each in two layouts, have twice that error. (RCEIL saturates nothing. A scale that does not saturate
// matters only to elements 2^14 below the largest of the block.)
static const double CUT_GRADIENT_BOUND = 4e-2;

static Ranks* world;
static const DataHash data = {7, 8, 9};
static int fast;  // 1: this device has --precision mxfp8
static const char* shards[4] = {"none", "optimizer", "grads", "weights"};

#define TINY                                                                                                           \
    "--layers 2 --dim 64 --heads 2 --kv-lora 32 --nope-dim 32 --rope-dim 16 --v-dim 32 --dense-ffn 96 --experts 8 "    \
    "--top-k 2 --expert-ffn 64 --vocab 50 --seq-len 16 --batch 2 --tokens-per-step 256 --aux-loss 0.01 --lr 1e-4 "     \
    "--warmup 1 --steps 20 --optimizer adamw "

typedef struct Case {
    int ranks, ep;
    const char *shard, *recompute;
    int one_expert;       // 1: the router is driven to send every token to expert 3
    const char* options;  // more of them, "" for none
} Case;

// The results of a run; valid on its rank 0.
typedef struct Shown {
    double loss[STEPS], norm[STEPS], further[STEPS];  // further: of the MTP module
    int64_t choices;
    int32_t* expert;  // of the first step, by sequence
    int tensors;
    real** grad;  // of the first step, whole tensors
    int64_t* elements;
} Shown;

static void shown_free(Shown* s) {
    for (int i = 0; i < s->tensors; i++) free(s->grad[i]);
    free(s->grad);
    free(s->elements);
    free(s->expert);
}

static Settings settings_of_case(Case c, const char* more) {
    char* line = host_format(TINY "--ep %d --shard %s --recompute %s %s %s %s", c.ep, c.shard, c.recompute, c.options,
                             more, c.one_expert ? "--balance none" : "");
    Settings s = settings_for(line, c.ranks);
    free(line);
    return s;
}

static Model* start(Ranks* group, Case c, const char* more) {
    Model* m = model_of(settings_of_case(c, more), group);
    model_init(m, 3);
    if (c.one_expert) {
        real high = 100;
        for (int64_t l = m->config.dense_layers; l < config_blocks(&m->config); l++)
            device_upload(m->bias + l * m->config.E + 3, &high, sizeof(real), m->ctx);
    }
    return m;
}

// One step on random tokens that depend on the step alone. Records experts (if requested) by sequence.
static StepState one_step(Model* m, int step, int32_t* expert) {
    int64_t T = m->run.seq_len, B = m->run.batch, K = m->config.K, R = m->layout.ranks, n = SEQUENCES * T;
    int32_t* ids = (int32_t*)host_alloc((size_t)(2 * n) * 4);
    for (int64_t i = 0; i < 2 * n; i++)
        ids[i] = (int32_t)(random_uniform(99, (uint32_t)step, (uint64_t)i) * (double)m->config.V);
    poison_gradients(m);
    model_step_begin(m, step);
    for (int64_t s = 0; s < SEQUENCES; s += R * B) {
        int64_t mine = s + m->layout.rank * B;
        model_batch(m, ids + mine * T, ids + n + mine * T, B, T);
        model_micro_step(m, s + R * B >= SEQUENCES);
        if (expert)
            device_download(expert + mine * T * K, m->blocks[m->config.dense_layers].moe.route.expert,
                            (size_t)(B * T * K) * 4, m->ctx);
    }
    model_update(m, 0);
    free(ids);
    return state_of(m);
}

// Adds the ranks' int32 or real values, which are 0 where a rank has no value.
static void add_up(Ranks* group, void* data, int64_t n, int reals) {
    size_t bytes = (size_t)n * (reals ? sizeof(real) : 4);
    char* all = (char*)host_alloc((size_t)ranks_count(group) * bytes);
    ranks_all_gather(group, all, data, bytes);
    memset(data, 0, bytes);
    for (int r = 0; r < ranks_count(group); r++)
        for (int64_t i = 0; i < n; i++) {
            if (reals)
                ((real*)data)[i] += ((real*)(all + (size_t)r * bytes))[i];
            else
                ((int32_t*)data)[i] += ((int32_t*)(all + (size_t)r * bytes))[i];
        }
    free(all);
}

// The summed gradients, joined from the ranks' parts.
static void gather_gradients(Shown* shown, Model* m, Ranks* group) {
    shown->grad = (real**)host_alloc(1000 * sizeof(real*));
    shown->elements = (int64_t*)host_alloc(1000 * sizeof(int64_t));
    for (int u = 0; u < params_units(&m->config); u++) {
        int count;
        NamedTensor* tensors = params_tensors(&m->config, &m->layout, u, &count);
        for (int i = 0; i < count; i++) {
            ParamBuffer* p = buffer_of(m, u, &tensors[i]);
            Slice own = tensor_slice(&tensors[i], p->first, p->part);
            real* whole = (real*)host_alloc((size_t)tensors[i].count * sizeof(real));
            const int64_t at = tensors[i].offset + own.first - p->first;
            if (own.count) {
                real* part =
                    p->rounded_grad ? host_gradient(m, p, at, own.count) : host_copy(m, p->own_grad + at, own.count);
                memcpy(whole + own.first, part, (size_t)own.count * sizeof(real));
                free(part);
            }
            add_up(group, whole, tensors[i].count, 1);
            shown->elements[shown->tensors] = tensors[i].count;
            shown->grad[shown->tensors++] = whole;
        }
        free(tensors);
    }
}

// With --muon-expert-steps 2 the first step changes no expert, not by a bit, and the second one does: this rank's part.
static void check_waiting(Model* m, const real* before, int step) {
    const ParamBuffer* p = &m->units[2].buffer[EXPERT_PARAMS];
    real* now = host_masters(m, p, 0, p->owned);
    CHECK((memcmp(now, before, (size_t)p->owned * sizeof(real)) == 0) == (step == 0),
          "shard %s, step %d: the experts have changed, or not", shards[m->run.shard], step + 1);
    free(now);
}

static Shown show(Case c, int steps) {
    Shown shown;
    memset(&shown, 0, sizeof(shown));
    int takes_part = ranks_index(world) < c.ranks;
    Ranks* group = ranks_split(world, takes_part);
    if (takes_part) {
        Model* m = start(group, c, "");
        shown.choices = SEQUENCES * m->run.seq_len * m->config.K;
        shown.expert = (int32_t*)host_alloc((size_t)shown.choices * 4);
        const ParamBuffer* experts = &m->units[2].buffer[EXPERT_PARAMS];
        real* before = host_masters(m, experts, 0, experts->owned);
        for (int step = 0; step < steps; step++) {
            StepState state = one_step(m, step + 1, step ? NULL : shown.expert);
            if (m->run.muon_expert_steps == 2 && step < 2) check_waiting(m, before, step);
            shown.loss[step] = state.loss;
            shown.norm[step] = state.grad_norm;
            shown.further[step] = state.mtp_sum;
            if (step) continue;
            add_up(group, shown.expert, shown.choices, 0);
            gather_gradients(&shown, m, group);
        }
        free(before);
        model_destroy(m);
    }
    ranks_barrier(world);
    ranks_free(group);
    return shown;
}

#define FAST "--expert-precision mxfp8 --dispatch-precision mxfp8 --linear-precision mxfp8 "
#define EXACT "--expert-precision mxfp8-exact --dispatch-precision mxfp8 --linear-precision mxfp8-exact "
#define CUT "--wgrad-precision mxfp8 --mx-scale floor"

static char* name_of(Case c) {
    return host_format("%d ranks, ep %d, shard %s, recompute %s%s %s", c.ranks, c.ep, c.shard, c.recompute,
                       c.one_expert ? ", all tokens to one expert" : "", c.options);
}

static void compare(const Shown* got, const Shown* want, Case c, int steps) {
    if (ranks_index(world)) return;
    const int mx = strstr(c.options, "mxfp") != NULL;
    double gradient_bound = mx ? MX_GRADIENT_BOUND : GRADIENT_BOUND;
    if (strcmp(c.options, CUT) == 0) gradient_bound = fmax(gradient_bound, CUT_GRADIENT_BOUND);
    double loss_bound = mx ? MX_LOSS_BOUND : LOSS_BOUND;
    char* name = name_of(c);
    if (!BF16 && !mx)
        CHECK(memcmp(got->expert, want->expert, (size_t)got->choices * 4) == 0, "%s: other experts are chosen", name);
    for (int i = 0; i < got->tensors; i++) {
        double e = relative_error(got->grad[i], want->grad[i], got->elements[i]);
        CHECK(e < gradient_bound, "%s: the gradient of tensor %d is off by %g", name, i, e);
    }
    for (int step = 0; step < steps; step++) {
        CHECK(fabs(got->loss[step] / want->loss[step] - 1) < loss_bound, "%s: step %d: loss %.9g, one rank %.9g", name,
              step + 1, got->loss[step], want->loss[step]);
        CHECK(fabs(got->further[step] - want->further[step]) <= loss_bound * want->further[step],
              "%s: step %d: loss of the MTP module %.9g, one rank %.9g", name, step + 1, got->further[step],
              want->further[step]);
        CHECK(fabs(got->norm[step] / want->norm[step] - 1) < 10 * loss_bound, "%s: step %d: norm %.9g, one rank %.9g",
              name, step + 1, got->norm[step], want->norm[step]);
    }
    free(name);
}

static void all_layouts(int one_expert, const char* options, int steps) {
    Case one = {1, 1, "none", "none", one_expert, options};
    Shown want = show(one, steps);
    if (one_expert && ranks_index(world) == 0) {
        int64_t hits = 0;
        for (int64_t i = 0; i < want.choices; i++) hits += want.expert[i] == 3;
        CHECK(hits == want.choices / 2, "expert 3 was chosen %lld times for %lld tokens", (long long)hits,
              (long long)want.choices / 2);
    }
    int number = 0;
    for (int ranks = 1; ranks <= ranks_count(world) && ranks <= 4; ranks *= 2)
        for (int ep = 1; ep <= ranks; ep *= 2, number++)
            for (int s = 0; s < 4; s++) {
                // The connection of GPUs takes seconds. On GPUs each pair of ranks and ep has only one level of
                // sharding. One expert gets all tokens there only if ep is the number of ranks.
                if (BF16 && (s != (number + one_expert) % 4 || (one_expert && ep < ranks))) continue;
                Case c = {ranks, ep, shards[s], "none", one_expert, options};
                Shown got = show(c, steps);
                compare(&got, &want, c, steps);
                shown_free(&got);
            }
    shown_free(&want);
}

static void layouts_agree(void) { all_layouts(0, "", STEPS); }
static void layouts_agree_with_muon(void) {
    all_layouts(0, "--optimizer muon --muon-lr 1e-4 --muon-expert-steps 2 --mtp 1", 6);
    // Without a dense block the waves of Muon's parts are full of units with a router. In bf16 one token of block 1
    // moves from expert 2 to expert 5 (layouts_agree_on_module).
    if (!BF16) all_layouts(0, "--optimizer muon --muon-lr 1e-4 --dense-layers 0", 2);
}
static void layouts_agree_on_one_expert(void) { all_layouts(1, "", STEPS); }
// The head is used twice, before and after the MTP module. In bf16 a score that rounds to the other side may move a
// token to another expert. That is a tenth of an expert's gradient, or a count of the balance loss. With five blocks
// it happened. Hence --force-balance there: experts by turns, with gates that depend on the scores.
static void layouts_agree_on_module(void) {
    all_layouts(0, BF16 ? "--force-balance --aux-loss 0 --mtp 1" : "--mtp 1", 5);
}

// Casts do not depend on the rank that computes them, except in --wgrad-precision, whose blocks are along the tokens of
// a rank. Otherwise only another order of sums can change a rounding. A token has the same random numbers in linear
// layers on every layout.
static void layouts_agree_in_mx(void) {
    const char* precisions[6] = {EXACT,
                                 fast ? FAST "--wgrad-precision mxfp8" : EXACT "--wgrad-precision mxfp8",
                                 CUT,
                                 "--expert-precision mxfp8-exact --mx-scale floor",
                                 "--dispatch-precision mxfp8 --mtp 1",
                                 "--linear-precision mxfp4 --mtp 1"};
    int R = ranks_count(world) < 4 ? ranks_count(world) : 4;
    for (int p = 0; p < (BF16 ? 3 : 6); p++) {
        Case one = {1, 1, "none", "none", 0, precisions[p]};
        Shown want = show(one, 5);
        for (int ep = 1; ep <= R; ep *= 2) {
            if (BF16 && ep != (p == 0 ? R : p == 1 && R > 1 ? 2 : 1)) continue;
            Case c = {R, ep, ep == 2 ? "grads" : "weights", ep == R ? "block" : "none", 0, precisions[p]};
            Shown got = show(c, 5);
            compare(&got, &want, c, 5);
            shown_free(&got);
        }
        shown_free(&want);
    }
}

// FP4. Ranks take the micro-batches that one rank takes one after another, with the same random numbers and tensor
// scales. Expert parallelism joins the rows of several micro-batches in an expert, with other numbers, blocks of wgrad
// and largest magnitudes. So its gradients differ as those of two seeds do. Bound: twice that. NVFP4's x differs too,
// by less than half of its error, 0.1 of a tensor (20 dB). A layout that leaves out a part is off by more. Experts by
// turns: an x that differs may else select another expert.
static void layouts_agree_in_fp4(void) {
    const char* precisions[2] = {"--precision mxfp4 --force-balance --aux-loss 0",
                                 "--precision nvfp4 --dense-layers 0 --force-balance --aux-loss 0"};
    const int R = ranks_count(world) < 4 ? ranks_count(world) : 4;
    for (int p = 0; p < 2; p++) {
        char* options = host_format("%s --seed 2", precisions[p]);
        const Case one = {1, 1, "none", "none", 0, precisions[p]}, another = {1, 1, "none", "none", 0, options};
        Shown want = show(one, 1), other = show(another, 1);
        for (int ep = BF16 ? R : 1; ep <= R; ep *= 2) {
            const Case c = {R, ep, "weights", "none", 0, precisions[p]};
            Shown got = show(c, 1);
            for (int i = 0; i < got.tensors && ranks_index(world) == 0; i++) {
                const double seeds = relative_error(other.grad[i], want.grad[i], want.elements[i]);
                const double e = relative_error(got.grad[i], want.grad[i], want.elements[i]);
                CHECK(e <= (ep > 1 ? 2 * seeds + 5e-2 : MX_GRADIENT_BOUND),
                      "%s: ep %d: the gradient of tensor %d is off by %g, seeds by %g", precisions[p], ep, i, e, seeds);
            }
            shown_free(&got);
        }
        shown_free(&want), shown_free(&other);
        free(options);
    }
}

// The name of an expert's matrix, which the experts share; NULL: no expert's.
static const char* matrix_of(const NamedTensor* t) {
    const char* expert = strstr(t->name, ".experts.");
    return expert ? strchr(expert + strlen(".experts."), '.') : NULL;
}

// Equal experts that all get all tokens, with equal gates, differ in their random numbers alone. With these no two
// gradients are alike, on whatever ranks the experts are. Without them, in MXFP4 for weights alone, all are.
static void check_equal_experts(int ep, int random) {
    const int R = ranks_count(world) < 4 ? ranks_count(world) : 4;
    const Case c = {R, ep, "none", "none", 0, "--experts 4 --top-k 4 --aux-loss 0"};
    int takes_part = ranks_index(world) < R;
    Ranks* group = ranks_split(world, takes_part);
    if (takes_part) {
        Model* m = start(group, c, random ? "--precision mxfp4" : "--precision mxfp4-weights");
        Unit* u = &m->units[2];
        for (int id = W13; id <= W2; id++) {
            const Weight* w = &u->w[id];
            const int64_t n = w->OC * w->IC;
            real* x = random_tensor(n, (uint32_t)id);
            floatX* values = values_on_device(x, n, m->ctx);
            for (int64_t e = 0; e < w->count; e++)
                device_copy((floatX*)w->w + e * n, values, (size_t)n * sizeof(floatX), m->ctx);
            ctx_sync(m->ctx);
            device_free(values);
            free(x);
        }
        device_zero((floatX*)u->w[ROUTER].w, (size_t)(m->config.E * m->config.C) * sizeof(floatX), m->ctx);

        // A micro-step in which the rows of all ranks have the same numbers, so that only streams tell experts apart.
        const int64_t n = m->run.batch * m->run.seq_len;
        int32_t* ids = (int32_t*)host_alloc((size_t)(2 * n) * 4);
        for (int64_t i = 0; i < 2 * n; i++)
            ids[i] = (int32_t)(random_uniform(99, (uint32_t)m->layout.rank, (uint64_t)i) * (double)m->config.V);
        poison_gradients(m);
        model_step_begin(m, 1);
        m->gemms.before = 0;
        model_batch(m, ids, ids + n, m->run.batch, m->run.seq_len);
        model_micro_step(m, 1);
        sharding_follow(m->sharding, m->ctx, sharding_side(m->sharding));
        free(ids);

        // The gradients of the unit's tensors follow those of the units before it.
        Shown shown;
        memset(&shown, 0, sizeof(shown));
        gather_gradients(&shown, m, group);
        int count = 0, before = 0, pairs = 0;
        for (int i = 0; i < 2; i++, before += count) free(params_tensors(&m->config, &m->layout, i, &count));
        NamedTensor* tensors = params_tensors(&m->config, &m->layout, 2, &count);
        for (int i = 0; i < count; i++)
            for (int j = 0; j < i; j++) {
                const char *a = matrix_of(&tensors[i]), *b = matrix_of(&tensors[j]);
                if (!a || !b || strcmp(a, b) != 0) continue;
                const double e = relative_error(shown.grad[before + i], shown.grad[before + j], tensors[i].count);
                CHECK(random ? e > 0.1 : e < GRADIENT_BOUND, "ep %d: the gradients of %s and %s differ by %g", ep,
                      tensors[i].name, tensors[j].name, e);
                pairs++;
            }
        CHECK(pairs == 3 * 4 * 3 / 2, "%d pairs of matrices", pairs);
        free(tensors);
        shown_free(&shown);
        model_destroy(m);
    }
    ranks_barrier(world);
    ranks_free(group);
}

static void experts_have_their_own_random_numbers(void) {
    const int R = ranks_count(world) < 4 ? ranks_count(world) : 4;
    for (int ep = BF16 ? R : 1; ep <= R; ep *= 2)
        for (int random = 0; random < 2; random++) check_equal_experts(ep, random);
}

static void same_bits(const Shown* a, const Shown* b, const char* name, int steps) {
    if (ranks_index(world)) return;
    for (int i = 0; i < a->tensors; i++)
        CHECK(memcmp(a->grad[i], b->grad[i], (size_t)a->elements[i] * sizeof(real)) == 0,
              "%s: the gradient of tensor %d has other bits", name, i);
    CHECK(memcmp(a->loss, b->loss, (size_t)steps * sizeof(double)) == 0, "%s: losses have other bits", name);
    CHECK(memcmp(a->further, b->further, (size_t)steps * sizeof(double)) == 0,
          "%s: the MTP module's losses have other bits", name);
}

// The same layout twice, and with activation checkpointing, gives the same bits. FP4 too: an element has a random
// number of its own, whatever is computed before it.
static void recompute_is_exact(void) {
    static const char* kinds[3] = {"none", "moe", "block"};
    int R = ranks_count(world) < 4 ? ranks_count(world) : 4;
    for (int ep = BF16 ? R : 1; ep <= 4 * R; ep *= 2) {
        const char* recipe = ep > 2 * R ? "--precision mxfp4 --mtp 1" : fast ? FAST : EXACT;
        const char* options = ep > R ? recipe : ep == R ? "--mtp 1" : "";  // the last three rounds
        Case plain = {R, ep > R ? R : ep, "weights", "none", 0, options};
        Shown want = show(plain, 3);
        for (int k = 0; k < 3; k++) {
            if (BF16 && k == (ep > R ? 0 : 1)) continue;
            Case c = {R, plain.ep, "weights", kinds[k], 0, options};
            Shown got = show(c, 3);
            char* name = name_of(c);
            same_bits(&got, &want, name, 3);
            free(name);
            shown_free(&got);
        }
        shown_free(&want);
    }
}

// The manifest's list of a checkpoint's files, with their CRC-32s. Layout and --out come before the list.
static char* files_of(const char* out) {
    char *text = read_file(path_of("%s/step_00000010/manifest.json", out).text, SIZE_MAX, NULL), *files, *end;
    ASSERT(text && (files = strstr(text, "\"files\"")) && (end = strstr(files, "manifest_crc32")));
    *end = 0;
    memmove(text, files, strlen(files) + 1);
    return text;
}

// A checkpoint that the resuming layout saves again is the same, moments included.
static void check_saved_again(Model* m, const Settings* s, Ranks* group, const char* folder, const char* name) {
    char* again = host_format("%s/again", folder);
    const StepState state = state_of(m);
    Saver* saver = saver_create(group, again, 2);
    model_save(m, s, saver, 10, data, &state);
    saver_destroy(saver);
    if (ranks_index(group) == 0) {
        char *want = files_of(folder), *got = files_of(again);
        CHECK(strcmp(got, want) == 0, "%s: saved again, its files are others: %s", name, got);
        free(want);
        free(got);
        remove_tree(again);
    }
    free(again);
}

// A run saves after ten of twenty steps. Each layout repeats the other ten from that checkpoint, with the same curve.
static void check_resume(const char* options) {
    int R = ranks_count(world) < 4 ? ranks_count(world) : 4;
    Case layout[5] = {{R, R, "weights", "none", 0, options},
                      {R, R, "weights", "none", 0, options},
                      {1, 1, "none", "none", 0, options},
                      {R / 2, 1, "grads", "none", 0, options},
                      {R, 1, "optimizer", "none", 0, options}};
    StepState want[STEPS + 1];  // of the first run, which makes the checkpoint
    char folder[] = "/tmp/train_moe_layouts_XXXXXX";
    if (ranks_index(world) == 0) ASSERT(mkdtemp(folder));
    ranks_broadcast(world, folder, sizeof(folder), 0);
    char* out = host_format("--out %s", folder);
    for (int i = 0; i < 5; i++) {
        Case c = layout[i];
        if (c.ranks == 0) continue;
        int takes_part = ranks_index(world) < c.ranks;
        Ranks* group = ranks_split(world, takes_part);
        if (takes_part) {
            Settings s = settings_of_case(c, out);
            Model* m = start(group, c, out);
            int64_t done = i ? model_resume(m, &s, group, data) : 0;
            if (i) CHECK(done == 10, "resumed step %ld", done);
            char* name = name_of(c);
            if (i) check_saved_again(m, &s, group, folder, name);
            for (int step = (int)done + 1; step <= STEPS; step++) {
                StepState state = one_step(m, step, NULL);
                if (i == 0) {
                    want[step] = state;
                    if (step != 10) continue;
                    Saver* saver = saver_create(group, folder, 2);
                    model_save(m, &s, saver, 10, data, &state);
                    saver_destroy(saver);
                } else {
                    int same = state.loss == want[step].loss && state.grad_norm == want[step].grad_norm;
                    CHECK(i == 1 ? same : fabs(state.loss / want[step].loss - 1) < LOSS_BOUND,
                          "%s, resumed: step %d: loss %.9g, uninterrupted %.9g", name, step, state.loss,
                          want[step].loss);
                }
            }
            free(name);
            model_destroy(m);
            settings_free(&s);
        }
        ranks_barrier(world);
        ranks_free(group);
    }
    free(out);
    if (ranks_index(world) == 0) remove_tree(folder);
}

static void resumes_anywhere(void) { check_resume(""); }
static void resumes_module_anywhere(void) { check_resume("--mtp 1"); }
static void resumes_bf16_moments_anywhere(void) { check_resume("--moments bf16"); }

// Ranks whose draws would differ, here by their seeds, take those of rank 0.
static void samples_are_rank_0s(void) {
    enum { ROOM = 1024 };
    Case c = {ranks_count(world) < 4 ? ranks_count(world) : 4, 1, "none", "none", 0, "--vocab 257 --sample-tokens 40"};
    c.ep = c.ranks;
    int takes_part = ranks_index(world) < c.ranks;
    Ranks* group = ranks_split(world, takes_part);
    if (takes_part) {
        Model* m = start(group, c, "");
        Tokenizer* bytes = tokenizer_open("");
        Settings s = settings_of_case(c, "");
        s.run.seed += ranks_index(group);
        char *text = model_sample(m, &s, group, bytes, 0), first[ROOM] = "";
        snprintf(first, ROOM, "%s", text);
        ranks_broadcast(group, first, ROOM, 0);
        CHECK(strlen(text) > 0 && strcmp(text, first) == 0, "rank %d: '%s', not '%s'", ranks_index(group), text, first);
        free(text);
        tokenizer_close(bytes);
        model_destroy(m);
        settings_free(&s);
    }
    ranks_free(group);
}

// The embedding of one rank alone is infinite for a step. This is a bad step for all ranks, and it changes nothing on
// any rank. The next step then equals that of an undisturbed model.
static void not_finite_on_one_rank(void) {
    Case c = {ranks_count(world) < 4 ? ranks_count(world) : 4, 1, "none", "none", 0, ""};
    c.ep = c.ranks;
    int takes_part = ranks_index(world) < c.ranks;
    Ranks* group = ranks_split(world, takes_part);
    if (takes_part) {
        Model *m = start(group, c, ""), *other = start(group, c, "");
        ParamBuffer *embedding = &m->units[0].buffer[DENSE_PARAMS], *block = &m->units[2].buffer[EXPERT_PARAMS];
        size_t bytes = (size_t)embedding->n * sizeof(real), block_bytes = (size_t)block->n * sizeof(real);
        real *good = (real*)host_alloc(bytes), *bad = (real*)host_alloc(bytes);
        real *before = (real*)host_alloc(block_bytes), *after = (real*)host_alloc(block_bytes);
        masters_download(good, embedding->master, embedding->owned_weight, embedding->n, m->ctx);
        masters_download(before, block->master, block->owned_weight, block->n, m->ctx);
        for (int64_t i = 0; i < embedding->n; i++) bad[i] = INFINITY;
        int poisoned = ranks_index(group) == c.ranks - 1;
        masters_upload(embedding->master, embedding->owned_weight, poisoned ? bad : good, embedding->n, m->ctx);
        StepState state = one_step(m, 1, NULL);
        CHECK(!state.ok && state.bad_in_a_row == 1 && state.updates == 0 && !isfinite(state.loss),
              "rank %d: ok %d, loss %g", ranks_index(group), state.ok, state.loss);
        masters_upload(embedding->master, embedding->owned_weight, good, embedding->n, m->ctx);
        masters_download(after, block->master, block->owned_weight, block->n, m->ctx);
        CHECK(memcmp(before, after, block_bytes) == 0, "rank %d: experts have changed", ranks_index(group));
        state = one_step(m, 2, NULL);
        StepState expected = one_step(other, 2, NULL);
        CHECK(
            state.ok && state.bad_in_a_row == 0 && state.loss == expected.loss && state.grad_norm == expected.grad_norm,
            "rank %d: loss %.9g, without the bad step %.9g", ranks_index(group), state.loss, expected.loss);
        free(good);
        free(bad);
        free(before);
        free(after);
        model_destroy(m);
        model_destroy(other);
    }
    ranks_barrier(world);
    ranks_free(group);
}

int main(int argc, char** argv) {
    world = ranks_start(&argc, &argv);
    watch_start(world, 60);
    device_choose(ranks_local());
    Ctx* ctx = ctx_create(0);
    fast = has_fast(ctx);
    ctx_destroy(ctx);
    RUN(layouts_agree);
    RUN(layouts_agree_with_muon);
    RUN(layouts_agree_on_one_expert);
    RUN(layouts_agree_on_module);
    RUN(layouts_agree_in_mx);
    RUN(layouts_agree_in_fp4);
    RUN(experts_have_their_own_random_numbers);
    RUN(recompute_is_exact);
    RUN(samples_are_rank_0s);
    RUN(not_finite_on_one_rank);
    RUN(resumes_anywhere);
    RUN(resumes_module_anywhere);
    RUN(resumes_bf16_moments_anywhere);
    int failed = test_summary();
    watch_stop();
    ranks_end(world);
    return failed;
}
