// Output of a run: its start, then the results of each step.
#include "model/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"

// 15.71e9, 1.864e6: four digits, exponents in steps of three, from 3 on.
static const char* big(char text[32], double x) {
    int exponent = 3;
    while (x >= 999.95 * pow(10, exponent)) exponent += 3;
    snprintf(text, 32, "%#.4ge%d", x / pow(10, exponent), exponent);
    return text;
}

// FLOPs of one update by Muon on all ranks. With --shard none all ranks that hold a matrix orthogonalize it.
static double flops_of_muon(const ModelConfig* c, const RunConfig* r) {
    const Layout whole = {.ranks = 1, .ep = 1};
    const int64_t dense = r->shard == SHARD_NONE ? r->ranks : 1,
                  experts = r->shard == SHARD_NONE ? r->ranks / r->ep : 1;
    double flops = 0;
    for (int u = 0; u < params_units(c); u++) {
        int count;
        NamedTensor* list = params_tensors(c, &whole, u, &count);
        for (int i = 0; i < count; i++)
            if (list[i].muon)
                flops +=
                    muon_flops(list[i].shape[0], list[i].shape[1]) *
                    (list[i].buffer == EXPERT_PARAMS ? (double)experts / (double)r->muon_expert_steps : (double)dense);
        free(list);
    }
    return flops;
}

// Muon's share of a step's FLOPs.
static void report_muon(const ModelConfig* c, const RunConfig* r) {
    const double muon = flops_of_muon(c, r);
    const double all = muon + (double)r->tokens_per_step * flops_per_token(c, r->seq_len);
    char flops[32];
    printf("optimizer  Muon: %s FLOPs a step, %.1f %% of all\n", big(flops, muon), 100 * muon / all);
    if (muon > all / 3)
        warn("--optimizer muon takes %.0f %% of a step's FLOPs; a larger --tokens-per-step%s lowers this share",
             100 * muon / all, r->ranks > 1 && r->shard == SHARD_NONE ? " or --shard optimizer" : "");
}

void report_settings(const Settings* s) {
    Settings usual = settings_defaults(s);
    options_print(settings_table, settings_count, s, &usual);
    settings_free(&usual);
    printf("\n");
    report_model(s);
}

void report_model(const Settings* s) {
    const ModelConfig* c = &s->model;
    const char *option, *folder = settings_folder(s, &option);
    char *name = folder ? host_printable(folder, strlen(folder), "") : option_text(&settings_table[0], s), total[32],
         active[32], flops[32];
    printf("model      %s: %s parameters (%s active a token), %s FLOPs a token at seq-len %ld\n", name,
           big(total, (double)params_total(c)), big(active, (double)params_active(c)),
           big(flops, flops_per_token(c, s->run.seq_len)), s->run.seq_len);
    if (s->run.optimizer == MUON) report_muon(c, &s->run);
    free(name);
}

// The module has T - 1 predictions in each window of T tokens.
double report_mtp(const RunConfig* r, const StepState* state) {
    const double windows = (double)r->tokens_per_step / (double)r->seq_len;
    return state->mtp_sum / (windows * (double)(r->seq_len - 1));
}

double report_load(char** line, const ModelConfig* c, const int64_t* load) {
    const int64_t blocks = config_blocks(c);
    double *most = (double*)host_alloc((size_t)(2 * blocks) * sizeof(double)), *least = most + blocks, worst = 0;
    for (int64_t l = 0; l < blocks; l++) {
        const int64_t* of = load + l * c->E;
        int64_t sum = 0, max = of[0], min = of[0];
        for (int64_t e = 0; e < c->E; e++) {
            sum += of[e];
            max = max_i64(max, of[e]);
            min = min_i64(min, of[e]);
        }
        // Dense blocks have no load: NAN.
        const double mean = l < c->dense_layers ? NAN : (double)sum / (double)c->E;
        most[l] = (double)max / mean;
        least[l] = (double)min / mean;
        worst = fmax(worst, most[l]);  // which ignores a NAN
    }
    runlog_number(line, "load_max_over_mean", worst);
    runlog_list(line, "load_max", most, blocks);
    runlog_list(line, "load_min", least, blocks);
    free(most);
    return worst;
}

void report_data(const Settings* s, const Shards* train, const Tokenizer* tokenizer) {
    const RunConfig* r = &s->run;
    const int64_t windows = train->windows;
    const Mixture* mixture = &train->mixture;
    const double epochs = (double)r->steps * (double)r->tokens_per_step / (double)r->seq_len / (double)windows;
    const int shards = train->count;
    printf("data       %d shard%s, %ld tokens, %ld windows of %ld (%.3g epochs in %ld steps of %ld tokens)\n", shards,
           shards == 1 ? "" : "s", train->tokens, windows, r->seq_len, epochs, r->steps, r->tokens_per_step);
    for (int k = 0; k < mixture->count && mixture->count > 1; k++) {
        const MixtureSet* set = &mixture->sets[k];
        const double share = (double)set->part / (double)mixture->parts;
        char* shown = host_printable(set->pattern, strlen(set->pattern), "");
        printf("           %.4g %% from %s: %ld windows (%.3g epochs)\n", 100 * share, shown, set->windows,
               share * epochs * (double)windows / (double)set->windows);
        free(shown);
    }
    char* name = host_printable(s->tokenizer, strlen(s->tokenizer), "");
    if (tokenizer->size)
        printf("tokenizer  %s, %d tokens%s\n", *name ? name : "bytes", tokenizer->size,
               *name ? "" : ": no tokenizer file is next to the shards");
    else
        printf("tokenizer  none: token ids go beyond 256, so they are no bytes\n");
    free(name);
}

void report_schedule(const Settings* s, int64_t step) {
    const RunConfig* r = &s->run;
    RunConfig was = *r;
    was.steps = s->steps_before;
    const double lr = run_lr(r, step + 1), mtp = run_mtp_weight(r, step + 1);
    const int mtp_changes = s->model.mtp && mtp != run_mtp_weight(&was, step + 1);
    if (lr == run_lr(&was, step + 1) && !mtp_changes) return;
    printf("schedule   --steps was %ld and is %ld: learning rate %.4g at step %ld, %.4g at step %ld", was.steps,
           r->steps, run_lr(&was, step), step, lr, step + 1);
    if (mtp_changes) printf("; MTP weight %.4g, then %.4g", run_mtp_weight(&was, step), mtp);
    printf("\n");
}

void report_device(const Model* m) {
    const char* unreplayed = model_unreplayed(m);
    const char* dispatch = m->windows ? "windows" : BACKEND == BACKEND_CUDA ? "nccl" : "MPI";
    printf("device     %s\n", device_name(m->ctx));
    if (m->layout.ranks > 1) printf("ranks      %d, %d share a set of experts\n", m->layout.ranks, m->layout.ep);
    if (m->layout.ep > 1)
        printf("dispatch   %s%s%s\n", dispatch, m->no_windows ? ": " : "", m->no_windows ? m->no_windows : "");
    if (BACKEND == BACKEND_CUDA)
        printf("graph      %s%s\n", unreplayed ? "off: " : "steps are replayed", unreplayed ? unreplayed : "");
}

void report_quantization(char** line, const Model* m, const QuantizationStats* sums) {
    const char* before = "";
    host_append(line, ", \"mx_stats\": [");
    for (int64_t l = 0; l < config_blocks(&m->config); l++) {
        const Unit* u = &m->units[params_block_unit(&m->config, l)];
        Param list[PARAMS];
        const int count = WEIGHT_STATS * params_list(list, &m->config, u->kind);
        for (int i = 0; i < count; i++) {
            const int id = (int)list[i / WEIGHT_STATS].id, operand = i % WEIGHT_STATS;
            const QuantizationStats* s = &sums[l * BLOCK_STATS + id * WEIGHT_STATS + operand];
            // x and dy may be quantized for the dispatch alone, or W alone.
            const int sent = (id == W13 && operand == STATS_X) || (id == W2 && operand == STATS_DY);
            const Format* f = u->w[id].format;
            const int quantized = f && (f->round || operand == STATS_W);
            if (!quantized && !(sent && m->run.dispatch_precision)) continue;
            host_append(line, "%s{\"layer\": %ld, \"tensor\": \"%s\"", before, l,
                        list[i / WEIGHT_STATS].stats[operand]);
            runlog_number(line, "saturated", s->saturated / s->elements);
            runlog_number(line, "flushed", s->flushed / s->elements);
            runlog_number(line, "inexact", s->inexact / s->elements);
            runlog_number(line, "snr_db", 10 * log10(s->signal / s->noise));
            host_append(line, "}");
            before = ", ";
        }
    }
    host_append(line, "]");
}
