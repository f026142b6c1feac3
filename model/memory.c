// --dry-run plans a model with the same tables of buffers as a run, but allocates nothing. If a plan does not fit in
// memory, other options are tried.
#include "model/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "model/predict.h"
#include "model/report.h"
#include "parallel/checkpoint.h"

static double gib(size_t bytes) { return (double)bytes / 0x1p30; }

// A line of the table.
static void report_line(const char* name, size_t bytes) {
    printf("  %-48s %12.3f MiB\n", name, (double)bytes / 0x1p20);
}

// The buffers of one name are one line: how many, their bytes, and bytes a token where they grow with tokens.
static void report_arena(const Arena* arena, int64_t tokens) {
    typedef struct Line {
        const ArenaEntry* first;
        int times;
        double bytes;
    } Line;
    // There are some dozens of names, however many layers.
    Line* lines = (Line*)host_alloc((size_t)arena->count * sizeof(Line));
    int count = 0;
    for (int i = 0; i < arena->count; i++) {
        const ArenaEntry* e = &arena->entries[i];
        int k = 0;
        while (k < count && strcmp(lines[k].first->name, e->name) != 0) k++;
        if (k == count) lines[count++].first = e;
        lines[k].times++;
        lines[k].bytes += (double)e->count * (double)element_bytes(e->element, arena->backend);
    }

    // The purpose, and then its buffers.
    report_line(arena->purpose, arena_bytes(arena));
    for (const Line* l = lines; l < lines + count; l++) {
        if (l->bytes == 0) continue;
        printf("    %-36s x %-7d %12.3f MiB", l->first->name, l->times, l->bytes / 0x1p20);
        if (l->first->per_token) printf("  %12.1f bytes a token", l->bytes / (double)tokens);
        printf("\n");
    }
    free(lines);
}

// Memory of a rank of the CUDA build without its buffers, as measured on H200: the context, kernels and cuBLASLt, and
// the connections of a communicator of NCCL (1.3 GiB with 2 ranks, 2.1 to 2.3 with 4). For more ranks it is a guess,
// which stays the same from 8 ranks on.
static const size_t CUDA_CONTEXT = (size_t)512 << 20, CUDA_LIBRARIES = (size_t)32 << 20;
static size_t nccl_memory(int64_t ranks) {
    return ranks > 1 ? ((size_t)350 << 20) + ((size_t)500 << 20) * (size_t)min_i64(ranks, 8) : 0;
}

// Bytes that a rank takes once its context is there: the part that is estimated, then all of it. The communicators are
// those of model_create.
static size_t memory_estimated(const RunConfig* r, Backend build) {
    const size_t groups = r->ep > 1 && r->ep < r->ranks ? nccl_memory(r->ep) + nccl_memory(r->ranks / r->ep) : 0;
    return build == BACKEND_CPU ? 0 : CUDA_LIBRARIES + nccl_memory(r->ranks) + groups;
}
static size_t memory_planned(const Model* m, Backend build) {
    size_t bytes = model_workspace(m) + memory_estimated(&m->run, build);
    for (int i = 0; i < ARENAS; i++) bytes += arena_bytes(&m->arena[i]);
    return bytes;
}

// The same of a plan that allocates no device memory.
static size_t memory_needed(const Settings* s, int rank, Backend build) {
    Model m;
    model_plan(&m, &s->model, &s->run, rank, build);
    const size_t bytes = memory_planned(&m, build);
    model_plan_free(&m);
    return bytes;
}

// A run without a checkpoint that sets its moments and its tokens a step. The use of a model has neither.
static bool is_new_run(const Settings* s) { return !s->steps_before && !*s->sample && !*s->evaluate; }

// The first settings that are allowed and fit. Options of inner loops change first. All combinations are tried, because
// a single change may need more memory. The moments are last: a run keeps them to its end.
static bool find_fitting(Settings* o, const Settings* s, int rank, size_t available, Backend build) {
    const RunConfig* from = &s->run;
    RunConfig* r = &o->run;
    const int64_t last_shard = max_i64(from->shard, from->ranks > 1 ? SHARD_WEIGHTS : 0),
                  last_moments = is_new_run(s) || from->moments;
    const int64_t last_ep = min_i64(from->ranks, DISPATCH_MAX_RANKS);
    *o = *s;
    for (; r->moments <= last_moments; r->moments++)
        for (r->ep = from->ep; r->ep <= last_ep; r->ep *= 2)
            for (r->batch = from->batch; r->batch > 0; r->batch /= 2)
                for (r->recompute = from->recompute; r->recompute <= RECOMPUTE_BLOCK; r->recompute++)
                    for (r->shard = from->shard; r->shard <= last_shard; r->shard++) {
                        char* refusal = settings_refusal(o);
                        const bool fits = !refusal && memory_needed(o, rank, build) <= available;
                        free(refusal);
                        if (fits) return true;
                    }
    return false;
}

// The options that would fit, as on the command line, or that none does, in fresh memory. Without --tokens-per-step
// another --batch would change the tokens of a step.
static char* what_fits(const Settings* s, int rank, size_t available, Backend build) {
    Settings found;
    if (!find_fitting(&found, s, rank, available, build))
        return host_format("no --ep, --shard, --recompute or --batch fits: use a smaller model, %s, or more ranks",
                           *s->sample ? "--sample-tokens, --seq-len" : "--seq-len");
    char* text = host_strdup("it fits with");
    for (int i = 0; i < settings_count; i++) {
        const Option* o = &settings_table[i];
        const bool follows = o->offset == offsetof(Settings, run.tokens_per_step) && found.run.batch != s->run.batch;
        if (option_same(o, &found, s) && !(follows && !s->given[i] && is_new_run(s))) continue;
        char* value = option_text(o, &found);
        host_append(&text, " --%s %s", o->name, value);
        free(value);
    }
    return text;
}

// Bytes of the tensors of a checkpoint: weights, and two moments, or Muon's momentum.
static double checkpoint_bytes(const Model* m) {
    const RunConfig* s = &m->run;
    const double weight = (double)st_dtype_bytes(CHECKPOINT_DTYPE), moment = s->moments ? 2 : weight;
    double bytes = 0;
    for (int u = 0; u < params_units(&m->config); u++) {
        int count;
        NamedTensor* list = params_tensors(&m->config, &m->layout, u, &count);
        for (int i = 0; i < count; i++)
            bytes += (double)list[i].count * (weight + (s->optimizer == MUON && list[i].muon ? 1 : 2) * moment);
        free(list);
    }
    return bytes;
}

static const char* const names[] = {"CPU", "CUDA"};  // by Backend

// The memory of a rank, item by item.
static void report_items(const Model* m, Backend build) {
    const int64_t ranks = m->run.ranks;
    const size_t context = build == BACKEND_CUDA ? CUDA_CONTEXT : 0, total = memory_planned(m, build) + context;
    printf("\nmemory of each of %ld rank%s, %s build (weights and activations in %s), %ld tokens a micro-step\n", ranks,
           ranks == 1 ? "" : "s", names[build], build == BACKEND_CPU ? "float32" : "bf16", m->shapes.N);
    for (int i = 0; i < ARENAS; i++) report_arena(&m->arena[i], m->shapes.N);
    report_line(build == BACKEND ? "workspace of the ops" : "workspace of the ops (estimated)", model_workspace(m));
    if (context) report_line("CUDA context and libraries (estimated)", context + memory_estimated(&m->run, build));
    printf("  %-48s %12.3f MiB = %.3f GiB\n", "total", (double)total / 0x1p20, gib(total));
}

// The largest load of a rank, over the mean, with which the run fits: by bisection, to a thousandth.
static double load_that_fits(const Model* m, size_t available, Backend build) {
    const int64_t blocks = config_blocks(&m->config) - m->config.dense_layers;
    const size_t others = memory_planned(m, build) - arena_bytes(&m->arena[IN_POOL]);
    double fits = m->shapes.moe.capacity, fails = (double)m->run.ep;
    if (others + moe_bytes(m->shapes.moe, blocks, fails, build) <= available) return fails;
    while (fails - fits > 1e-3) {
        const double middle = (fits + fails) / 2;
        *(others + moe_bytes(m->shapes.moe, blocks, middle, build) <= available ? &fits : &fails) = middle;
    }
    return fits;
}

// The predicted time of a step, and the share of each class of kernels.
static void report_prediction(const Model* m) {
    static const char* const classes[] = {"grouped GEMM", "dense GEMM",   "attention", "head and loss",
                                          "optimizer",    "memory-bound", "transfers"};  // by TimeClass
    const RunConfig* s = &m->run;
    double t[TIMES];
    const double step = predict_step(t, m);
    printf("step       predicted: %.4g s, %.0f tokens/s a GPU, on H200, the card whose rates were measured%s\n", step,
           (double)s->tokens_per_step / step / (double)s->ranks,
           s->ranks > 8 ? ";\n           links between hosts were not measured: they count as those within one" : "");
    for (int i = 0; i < TIMES; i++)
        if (t[i] > 0) printf("             %-13s %5.1f %%\n", classes[i], 100 * t[i] / step);
}

void memory_report(const Settings* s, int running) {
    // The plan is for a GPU of --gpu-memory, or for this machine. Nothing is known of machines for other --ranks.
    const size_t given = (size_t)(s->gpu_memory * 0x1p30);
    const Backend build = given ? BACKEND_CUDA : BACKEND;
    const size_t context = build == BACKEND_CUDA ? CUDA_CONTEXT : 0;
    size_t available = 0;  // 0: not known
    if (given)
        available = given > CUDA_CONTEXT ? given - CUDA_CONTEXT : 1;
    else if (BACKEND == BACKEND_CUDA || s->run.ranks == running)
        available = device_free_memory(ranks_here());
    Model m;
    model_plan(&m, &s->model, &s->run, 0, build);
    const size_t needed = memory_planned(&m, build);
    char* proposal = available && needed > available ? what_fits(s, 0, available, build) : NULL;

    // The answer.
    const char* answer = !available ? "" : proposal ? "does not fit: " : "fits: ";
    printf("memory     %s%.2f GiB a rank in the %s build", answer, gib(needed + context), names[build]);
    if (available) printf(", %.2f GiB %s", gib(given ? given : available + context), given ? "on the GPU" : "free");
    printf("\n");
    if (proposal)
        printf("           %s\n", proposal);
    else if (available && s->run.ep > 1 && s->model.dense_layers < s->model.L)
        printf("           fits with up to %.2f times the mean load on a rank (%ld: all tokens on one rank)\n",
               load_that_fits(&m, available, build), s->run.ep);

    // Model, checkpoints, time.
    report_model(s);
    printf("exactly    parameters %ld, active %ld, FLOPs a token %.6g\n", params_total(&s->model),
           params_active(&s->model), flops_per_token(&s->model, s->run.seq_len));
    const int64_t kept = max_i64(s->keep, 2) + 1;
    const double checkpoint = checkpoint_bytes(&m) / 0x1p30;
    if (!m.layout.frozen) {
        printf("checkpoint %.4g GiB; up to %ld at once with --keep %ld, one of them being written: %.4g GiB\n",
               checkpoint, kept, s->keep, (double)kept * checkpoint);
        report_prediction(&m);
    }

    // All options, and all buffers.
    printf(s->dry_run == 2 ? "\n" : "\n--dry-run all lists all options and all buffers.\n");
    if (s->dry_run == 2) {
        options_print(settings_table, settings_count, s, NULL);
        report_items(&m, build);
    }
    model_plan_free(&m);
    if (proposal) die(EXIT_FAILED, "memory: the run does not fit: --dry-run has sizes and a remedy in its first lines");
}

void memory_check(const Settings* s, Ranks* world) {
    const int rank = ranks_index(world);
    // 0 is unknown: the run then starts without this check.
    const size_t available = device_free_memory(ranks_here()), needed = memory_needed(s, rank, BACKEND);
    if (available && needed > available)
        die(EXIT_FAILED,
            "memory: %.2f GiB are needed (%.2f of them estimated; --dry-run all lists all), %.2f GiB are free; %s",
            gib(needed), gib(memory_estimated(&s->run, BACKEND)), gib(available),
            what_fits(s, rank, available, BACKEND));
    ranks_barrier(world);
}
