// Where the value of an option comes from: the command line, a record, config.json, the presets, the defaults.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/shards.h"
#include "data/tokenizer.h"
#include "device/check.h"
#include "device/files.h"
#include "model/hub.h"
#include "model/record.h"
#include "model/settings.h"
#include "moe/moe.h"
#include "parallel/checkpoint.h"

// The row of the field at `offset`.
static int row_of(size_t offset) {
    int i = 0;
    while (settings_table[i].offset != offset) i++;
    return i;
}
// Whether the command line has the option of a field.
#define GIVEN(s, field) ((s)->given[row_of(offsetof(Settings, field))])

// Options of the model that are not given come from config.json.
static void take_folder(Settings* s, const char* option, const char* folder) {
    const Settings from = {.model = hub_read_config(option, folder)};
    char* where = host_format("--%s %s/config.json: ", option, folder);
    s->model.selection_bias = from.model.selection_bias;
    for (int i = 0; i < settings_count; i++) {
        const Option* o = &settings_table[i];
        if (strcmp(o->group, "model") == 0 && !o->initial && !s->given[i]) option_copy(o, s, &from, where);
    }
    free(where);
}

// Replaces a text of the settings.
static void replace(char** text, char* by) {
    free(*text);
    *text = by;
}

// A model that is only used needs nothing for backward. A sample is one sequence, as long as it can become; the
// validation's windows are as long as those of training.
static void set_for_use(Settings* s, const char* option, const char* folder) {
    s->run.recompute = RECOMPUTE_BLOCK;
    if (*s->sample && !GIVEN(s, run.batch)) s->run.batch = 1;
    if (*s->sample && !GIVEN(s, run.seq_len)) s->run.seq_len = 1 + (int64_t)strlen(s->prompt) + s->sample_tokens;
    if (*s->evaluate && !GIVEN(s, run.seq_len)) {
        const Settings from = {.run = {.seq_len = hub_length(folder)}};
        char* where = host_format("--evaluate %s/manifest.json: ", folder);
        option_copy(&settings_table[row_of(offsetof(Settings, run.seq_len))], s, &from, where);
        free(where);
    }
    // Its tokenizer, or where the folder has none that of the text.
    if (*s->tokenizer) return;
    Path tokenizer = tokenizer_of_folder(option, folder);
    if (!*tokenizer.text) tokenizer = shards_tokenizer(shards_first("--val", s->val).text, "_val_", "");
    replace(&s->tokenizer, host_strdup(tokenizer.text));
}

// Defaults that depend on other options. A router that selects without a bias goes on without one.
static void set_for_model(Settings* s) {
    const Preset* preset = &settings_presets[s->preset];
    // Learning rates, optimizer and type of moments, by preset. Training from --init begins with AdamW.
    if (!GIVEN(s, run.lr)) s->run.lr = preset->lr;
    if (!GIVEN(s, run.muon_lr)) s->run.muon_lr = preset->muon_lr;
    if (!GIVEN(s, run.optimizer)) s->run.optimizer = *s->init ? ADAMW : preset->optimizer;
    if (!GIVEN(s, run.muon_expert_steps)) s->run.muon_expert_steps = preset->expert_steps;
    if (!GIVEN(s, run.moments)) s->run.moments = preset->bf16_moments;
    // Load balancing: the weight of the balance loss, by --balance and --score (sigmoid, softmax). 1e-3 is
    // DeepSeek-V2's (aux_loss_alpha of its published configuration).
    static const double aux_loss[][2] = {{1e-2, 1e-3}, {1e-4, 1e-4}, {0, 0}};
    const int unbiased = *s->init && !s->model.selection_bias;
    if (unbiased && !GIVEN(s, run.balance)) s->run.balance = BALANCE_NONE;
    if (!GIVEN(s, run.aux_loss)) s->run.aux_loss = aux_loss[s->run.balance][s->model.score];
    // Weights of the model must not be lost.
    if (*s->init && !unbiased && s->model.score == SCORE_SOFTMAX && s->run.balance == BALANCE_NONE)
        die(EXIT_USAGE, "--balance none would drop the selection biases of --init %s; use quantile", s->init);
}

// Options that would have no effect end the run. Experts that would never change get a warning.
static void check_effect(Settings* s) {
    if (s->run.balance != BALANCE_DEEPSEEK && GIVEN(s, run.bias_rate))
        die(EXIT_USAGE, "--bias-rate goes with --balance deepseek, not with --balance %s",
            s->run.balance == BALANCE_NONE ? "none" : "quantile");
    if (s->run.optimizer != MUON && (GIVEN(s, run.muon_lr) || GIVEN(s, run.muon_expert_steps)))
        die(EXIT_USAGE, "--muon-lr and --muon-expert-steps go with --optimizer muon");
    if (GIVEN(s, run.muon_expert_steps) && s->run.muon_expert_steps > s->run.steps &&
        s->model.dense_layers < s->model.L)
        warn("--muon-expert-steps %ld is more than --steps %ld: the experts never change", s->run.muon_expert_steps,
             s->run.steps);
}

// Finds the tokenizer of the shards, and the size of the vocabulary, unless given or recorded. Shards in a new place
// may have their tokenizer there.
static void find_tokenizer(Settings* s, int recorded, int has_vocab) {
    if (!GIVEN(s, tokenizer) && (!recorded || GIVEN(s, train))) {
        Path beside = shards_tokenizer(shards_first("--train", s->train).text, "_train_", s->tokenizer);
        if (*beside.text) replace(&s->tokenizer, host_strdup(beside.text));
    }
    // The vocabulary of a new model is the tokenizer's.
    if (!*s->tokenizer || has_vocab || GIVEN(s, model.V)) return;
    Tokenizer* tokenizer = tokenizer_open(s->tokenizer);
    s->model.V = tokenizer->size;
    tokenizer_close(tokenizer);
}

// The folder of a run becomes that of its newest step.
static void take_newest(char** folder) {
    int count = 0;
    const bool is_folder = **folder && access(path_of("%s/.", *folder).text, F_OK) == 0;
    if (!is_folder || access(path_of("%s/config.json", *folder).text, F_OK) == 0) return;
    int64_t* steps = checkpoint_list(*folder, &count);
    if (count) replace(folder, host_format("%s/step_%08ld", *folder, steps[0]));
    free(steps);
}

Settings settings_defaults(const Settings* s) {
    Settings usual = settings_parse(0, NULL);
    usual.preset = s->preset;
    settings_preset(&usual, s->precision);
    set_for_model(&usual);
    usual.preset = 0;
    // Lines of their own have these.
    usual.resume = s->resume;
    usual.run.ranks = s->run.ranks;
    usual.run.tokens_per_step = s->run.tokens_per_step;
    replace(&usual.tokenizer, host_strdup(s->tokenizer));
    return usual;
}

Settings settings_read(Settings s, int ranks, const Json* record) {
    // The command line over the record over the presets over the defaults.
    settings_preset(&s, s.precision);
    if (s.help) options_help(settings_table, settings_count, s.help == 2);
    if (s.help || s.version) return s;
    take_newest(&s.init);
    take_newest(&s.sample);
    take_newest(&s.evaluate);
    // A resumed run began where its record has it, whatever --init.
    if (record) GIVEN(&s, init) = 0;
    // A record, of a run to resume or of the step that a new stage begins with, or the folder of a model.
    const char *option, *folder = record ? NULL : settings_folder(&s, &option);
    Json* stage = !record && s.init_moments ? record_stage(&s) : NULL;
    if (stage) record = json_get(stage, "options");
    if (record) record_recall(record, stage, &s);
    if (folder && !stage) take_folder(&s, option, folder);
    if (folder && folder != s.init) set_for_use(&s, option, folder);
    if (!record) set_for_model(&s);
    check_effect(&s);
    if (!record || stage) s.run.warmup_steps = settings_warmup(&s);
    if (stage) s.updates_before = json_int(stage, "updates", 0);
    if (stage) s.tokens_before += json_int(stage, "step", 0) * json_int(record, "tokens-per-step", 0);
    find_tokenizer(&s, record != NULL, record || folder);

    // Checks.
    if (s.run.ranks && !s.dry_run)
        die(EXIT_USAGE, "--ranks is for --dry-run; start %ld ranks with mpirun -np %ld", s.run.ranks, s.run.ranks);
    if (s.gpu_memory && !s.dry_run)
        die(EXIT_USAGE, "--gpu-memory is for --dry-run; a run looks at what is free on the GPU itself");
    if (!s.run.ranks) s.run.ranks = ranks;
    s.run.frozen = *s.sample || *s.evaluate;
    if (s.run.tokens_per_step == 0) s.run.tokens_per_step = run_micro_tokens(&s.run);
    if (record) record_check(record, stage, &s);
    settings_check(&s);
    json_free(stage);
    return s;
}
