// A record is read into a Settings of its own, with defaults for missing options. Options are then compared as text.
#include "model/record.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/mixture.h"
#include "data/runlog.h"
#include "device/check.h"
#include "device/files.h"
#include "model/params.h"
#include "mx/fp4.h"
#include "parallel/checkpoint.h"
#include "parallel/slices.h"

char* record_json(const Settings* s) {
    char* json = host_strdup("{");
    for (int i = 0; i < settings_count; i++) {
        const Option* o = &settings_table[i];
        char *text = option_text(o, s), *quoted = json_quote(text);
        int number = o->type != OPTION_TEXT && o->type != OPTION_CHOICE;
        host_append(&json, "%s\"%s\": %s", i ? ", " : "", o->name, number ? text : quoted);
        free(quoted);
        free(text);
    }
    host_append(&json,
                ", \"warmup-steps\": %.17g, \"updates-before\": %ld, \"tokens-before\": %ld, \"fp4-rounding\": %d, "
                "\"mixture-order\": %d}",
                s->run.warmup_steps, s->updates_before, s->tokens_before, FP4_ROUNDING, MIXTURE_ORDER);
    return json;
}

char* record_line(const Settings* s, const char* build, const char* device) {
    char host[256] = "", *line = record_json(s);
    gethostname(host, sizeof(host) - 1);
    const char* values[3][2] = {{"build", build}, {"host", host}, {"device", device}};
    // Members go in before the closing brace.
    line[strlen(line) - 1] = 0;
    runlog_number(&line, "flops-per-token", flops_per_token(&s->model, s->run.seq_len));
    for (int i = 0; i < 3; i++) {
        char* quoted = json_quote(values[i][1]);
        host_append(&line, ", \"%s\": %s", values[i][0], quoted);
        free(quoted);
    }
    host_append(&line, "}");
    return line;
}

// The newest step whose manifest is good, -1 without checkpoints.
static int64_t newest_good(const char* out) {
    // A folder that is not there is one without checkpoints; whether it can be made is seen later.
    if (access(path_of("%s/.", out).text, F_OK) != 0) return -1;
    int count;
    int64_t *steps = checkpoint_list(out, &count), good = -1;
    char *why, *list = host_strdup("");
    for (int i = 0; i < count && good < 0; i++) {
        json_free(checkpoint_manifest(out, steps[i], &why));
        if (!why) good = steps[i];
        if (why && i < 3)
            host_append(&list, "%s checkpoint step_%08ld is refused: %s", *list ? ";" : "", steps[i], why);
        free(why);
    }
    // (Where one is good, those before it are named when the run resumes from it.)
    if (count && good < 0)
        die(EXIT_FAILED, "no checkpoint in %s is good; nothing was changed:%s%s", out, list,
            count > 3 ? "; and older ones" : "");
    free(list);
    free(steps);
    return good;
}

Json* record_manifest(Ranks* world, const char* out) {
    // Rank 0 looks for it, and all read the one that it finds. A step of -1: no checkpoint.
    Path folder = path_of("%s", out ? out : "");
    int64_t step = ranks_index(world) == 0 && out ? newest_good(out) : -1;
    ranks_broadcast(world, &folder, sizeof(folder), 0);
    ranks_broadcast(world, &step, sizeof(step), 0);
    if (step < 0) return NULL;

    char* why;
    Json* manifest = checkpoint_manifest(folder.text, step, &why);
    ranks_must_share(world, folder.text, manifest != NULL);
    return manifest;
}

Json* record_stage(const Settings* s) {
    if (!*s->init) die(EXIT_USAGE, "--init-moments needs --init: the step of a run that the new stage begins with");
    if (!*s->out) die(EXIT_USAGE, "--init-moments needs --out: the folder of the new stage");
    char* why;
    Path run;
    Json* manifest = checkpoint_manifest_in(s->init, &run, &why);
    if (why) die(EXIT_USAGE, "--init-moments: --init %s: %s", s->init, why);
    return manifest;
}

// A recorded value as text.
static char* recorded_text(const Option* o, const Json* value) {
    if (value->type == JSON_STRING) return host_strdup(value->text);
    return o->type == OPTION_FLOAT ? host_format("%.17g", value->number) : host_format("%ld", value->integer);
}

// An option that this version lacks must have been off, or at the one value that this version has. A new stage may go
// on without an option of a later version.
static void check_unknown(const Json* record, bool stage, const char* folder) {
    static const char* const others[] = {"warmup-steps", "updates-before", "tokens-before", "fp4-rounding",
                                         "mixture-order"};
    static const char* const fixed[] = {"mtp", "eps", "muon-momentum", "sample-top-k", "mtp-weight-end", "mtp-switch"};
    static const double values[] = {1, 1e-8, 0.95, 50, MTP_WEIGHT_END, MTP_SWITCH};
    for (const Json* o = record->child; o; o = o->next) {
        bool known = stage;
        for (int i = 0; i < 5; i++) known |= strcmp(o->key, others[i]) == 0;
        for (int i = 0; i < settings_count; i++) known |= strcmp(o->key, settings_table[i].name) == 0;
        for (int i = 0; i < 6; i++) {
            if (strcmp(o->key, fixed[i]) != 0) continue;
            known = true;
            if (o->number != values[i] && (i > 0 || o->number != 0))  // --mtp may be 0
                die(EXIT_USAGE,
                    "the run in %s was made with --%s %g, and this version of train_moe has only %g: go on with 0.1.0, "
                    "or begin a new run from its weights: --init %s",
                    folder, o->key, o->number, values[i], folder);
        }
        if (!known && o->number != 0)
            die(EXIT_USAGE, "the run in %s was made with --%s %g: go on with a version of train_moe that has it",
                folder, o->key, o->number);
    }
}

// The options that the run in `folder` was made with.
static Settings recorded(const Json* record, bool stage, const char* folder) {
    check_unknown(record, stage, folder);
    // Values of the record over the defaults.
    Settings was = settings_parse(0, NULL);
    char* where = host_format("the checkpoint in %s: ", folder);
    for (int i = 0; i < settings_count; i++) {
        const Option* o = &settings_table[i];
        const Json* value = json_get(record, o->name);
        if (!value || o->scope == OPTION_ONCE) continue;
        char* text = recorded_text(o, value);
        options_set(o, &was, text, where);
        was.given[i] = 1;
        free(text);
    }
    settings_preset(&was, FORMAT_BF16);
    free(where);
    return was;
}

void record_recall(const Json* record, bool stage, Settings* s) {
    Settings was = recorded(record, stage, stage ? s->init : s->out);
    bool sets = false;  // --precision is given, and sets the rows of its group without a default after it
    for (int i = 0; i < settings_count; i++) {
        const Option* o = &settings_table[i];
        sets |= s->given[i] && o->offset == offsetof(Settings, precision);
        // Options on the command line win, and so does the group that --precision sets.
        if (s->given[i] || (sets && !o->initial)) continue;
        option_copy(o, s, &was, "");
    }
    // Other --steps change the schedule, but not the warm-up: it is behind, or has begun.
    const Json* warmup = json_get(record, "warmup-steps");
    s->run.warmup_steps = warmup ? warmup->number : settings_warmup(&was);
    s->steps_before = was.run.steps;
    s->updates_before = json_int(record, "updates-before", 0);
    s->tokens_before = json_int(record, "tokens-before", 0);
    settings_free(&was);
}

static void check_revision(const Json* record, const char* folder, const char* name, const char* subject, int64_t now) {
    const int64_t then = json_int(record, name, 1);
    if (then != now)
        die(EXIT_USAGE,
            "the run in %s was made with revision %ld of %s, and this version of train_moe has revision %ld: go "
            "on with the version that made it, or begin a new stage with --init %s --init-moments",
            folder, then, subject, now, folder);
}

void record_check(const Json* record, bool stage, const Settings* s) {
    const char* folder = stage ? s->init : s->out;
    Settings was = recorded(record, stage, folder);
    if (was.run.tokens_per_step == 0) was.run.tokens_per_step = run_micro_tokens(&s->run);
    char* list = host_strdup("");
    for (int i = 0; i < settings_count; i++) {
        const Option* o = &settings_table[i];
        // Options that may change are skipped, and Muon's if the optimizer has changed.
        if (option_same(o, s, &was) || o->scope < (stage ? OPTION_KEPT : OPTION_FIXED)) continue;
        if (s->run.optimizer != was.run.optimizer && strncmp(o->name, "muon-", 5) == 0) continue;
        char *now = option_text(o, s), *then = option_text(o, &was);
        const char* lacks = json_get(record, o->name) ? "" : " (its checkpoint does not name this option)";
        host_append(&list, "%s--%s %s%s, not %s", *list ? "; " : "", o->name, then, lacks, now);
        free(now);
        free(then);
    }
    if (*list)
        die(EXIT_USAGE, "the run in %s was made with %s. A %s: leave these options out, and they are as they were",
            folder, list,
            stage ? "new stage keeps its model, and what its moments and selection biases depend on"
                  : "resumed run keeps its model, data, optimizer and precision");
    free(list);
    settings_free(&was);

    if (stage) return;

    // Two revisions, where the run depends on them.
    Mixture mixture = mixture_parse("--train", s->train);
    const Format* formats[] = {format_of_id(s->run.expert_precision, s->run.scale_rule),
                               format_of_id(s->run.wgrad_precision, s->run.scale_rule),
                               format_of_id(s->run.linear_precision, s->run.scale_rule)};
    bool fp4 = false;
    for (int i = 0; i < 3; i++) fp4 |= formats[i] && !format_of_rows(formats[i]);
    if (mixture.count > 1) check_revision(record, s->out, "mixture-order", "the order of mixtures", MIXTURE_ORDER);
    if (fp4) check_revision(record, s->out, "fp4-rounding", "the rounding to four bits", FP4_ROUNDING);
    mixture_free(&mixture);
}
