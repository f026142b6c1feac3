// A record is read into a Settings of its own, with defaults for missing options. Options are then compared as text.
#include "model/record.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/check.h"
#include "device/files.h"
#include "parallel/checkpoint.h"

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
    host_append(&json, "}");
    return json;
}

char* record_line(const Settings* s, const char* build, const char* device) {
    char host[256] = "", *line = record_json(s);
    gethostname(host, sizeof(host) - 1);
    const char* values[3][2] = {{"build", build}, {"host", host}, {"device", device}};
    // Members go in before the closing brace.
    line[strlen(line) - 1] = 0;
    for (int i = 0; i < 3; i++) {
        char* quoted = json_quote(values[i][1]);
        host_append(&line, ", \"%s\": %s", values[i][0], quoted);
        free(quoted);
    }
    host_append(&line, "}");
    return line;
}

// The text of a manifest, NULL with the reason in `error` if it is not good.
static char* manifest_text(const char* out, int64_t step, char* error, size_t error_size) {
    CheckpointRecord record;
    Json* manifest = checkpoint_manifest(out, step, &record, error, error_size);
    if (!manifest) return NULL;
    json_free(manifest);
    Path path = path_of("%s/step_%08ld/manifest.json", out, step);
    char* text = read_file(path.text, (size_t)64 << 20, NULL);
    if (!text) die(EXIT_FAILED, "%s: %s", path.text, file_error(errno));
    return text;
}

// That of the newest one that is good, NULL without checkpoints.
static char* newest_manifest(const char* out) {
    // A folder that is not there is one without checkpoints; whether it can be made is seen later.
    if (access(path_of("%s/.", out).text, F_OK) != 0) return NULL;
    int count;
    int64_t* steps = checkpoint_list(out, &count);
    char *text = NULL, error[512];
    for (int i = 0; i < count && !text; i++) text = manifest_text(out, steps[i], error, sizeof(error));

    // All are bad: each is named. (Where one is good, those before it are when the run resumes from it.)
    for (int i = 0; i < count && !text; i++) {
        manifest_text(out, steps[i], error, sizeof(error));
        warn("checkpoint step_%08ld is refused: %s", steps[i], error);
    }
    if (count && !text) die(EXIT_FAILED, "no checkpoint in %s is good; nothing was changed", out);
    free(steps);
    return text;
}

Json* record_manifest(Ranks* world, const char* out) {
    // Rank 0 reads, and the others get its text. A size of 0: no checkpoint.
    const bool leads = ranks_index(world) == 0;
    char *text = leads && out ? newest_manifest(out) : NULL, error[512];
    size_t size = text ? strlen(text) + 1 : 0;
    ranks_broadcast(world, &size, sizeof(size), 0);
    if (size == 0) return NULL;
    if (!leads) text = (char*)host_alloc(size);
    ranks_broadcast(world, text, size, 0);

    Json* manifest = json_parse(text, size - 1, error, sizeof(error));
    if (!manifest) die(EXIT_FAILED, "the newest manifest of --resume: %s", error);
    free(text);
    return manifest;
}

// A recorded value as text.
static char* recorded_text(const Option* o, const Json* value) {
    if (value->type == JSON_STRING) return host_strdup(value->text);
    return o->type == OPTION_FLOAT ? host_format("%.17g", value->number) : host_format("%ld", value->integer);
}

int64_t record_optimizer(const Json* record) {
    const char* name = json_text(record, "optimizer");
    return name && strcmp(name, "muon") == 0 ? MUON : ADAMW;
}

// The options that the run in `out` was made with.
static Settings recorded(const Json* record, const char* out) {
    Settings was = {.preset = 0};
    char* where = host_format("the checkpoint in %s: ", out);
    // Values of the record over the defaults.
    options_defaults(settings_table, settings_count, &was);
    for (int i = 0; i < settings_count; i++) {
        const Option* o = &settings_table[i];
        const Json* value = json_get(record, o->name);
        if (!value || o->scope == OPTION_ONCE) continue;
        char* text = recorded_text(o, value);
        options_set(o, &was, text, where);
        was.given[i] = 1;
        free(text);
    }
    // Older records lack options: their values follow from others.
    was.optimizer = record_optimizer(record);  // before --optimizer it was AdamW
    if (!json_get(record, "balance")) was.balance = was.bias_rate > 0 ? BALANCE_DEEPSEEK : BALANCE_NONE;
    settings_preset(&was, PRECISION_BF16);
    free(where);
    return was;
}

void record_recall(const Json* record, Settings* s) {
    Settings was = recorded(record, s->out);
    bool sets = false;  // --precision is given, and sets the rows of its group without a default after it
    for (int i = 0; i < settings_count; i++) {
        const Option* o = &settings_table[i];
        sets |= s->given[i] && o->offset == offsetof(Settings, precision);
        // Options on the command line win, and so does the group that --precision sets.
        if (s->given[i] || (sets && !o->initial)) continue;
        char* text = option_text(o, &was);
        options_set(o, s, text, "");
        free(text);
    }
    if (json_int(record, "even-start", 0))
        printf(
            "options    --even-start of the checkpoint no longer exists: from here on routers select by their scores "
            "and biases, with --balance %s\n",
            was.balance == BALANCE_DEEPSEEK ? "deepseek" : "none");
    settings_free(&was);
}

// Whether an option has the same value in both. Records of the past have 9 digits of a number.
static int same(const Option* o, const Settings* a, const Settings* b) {
    if (o->type != OPTION_FLOAT) return option_same(o, a, b);
    const double x = *(const double*)((const char*)a + o->offset), y = *(const double*)((const char*)b + o->offset);
    return fabs(x - y) <= 1e-8 * fabs(x);
}

void record_check(const Json* record, const Settings* s) {
    Settings was = recorded(record, s->out);
    if (was.tokens_per_step == 0) was.tokens_per_step = settings_micro_tokens(s);
    char* list = host_strdup("");
    for (int i = 0; i < settings_count; i++) {
        const Option* o = &settings_table[i];
        // Options that may change at --resume are skipped, and Muon's if the optimizer has changed.
        if (o->scope != OPTION_FIXED || same(o, s, &was)) continue;
        if (s->optimizer != was.optimizer && strncmp(o->name, "muon-", 5) == 0) continue;
        char *now = option_text(o, s), *then = option_text(o, &was);
        const char* lacks = json_get(record, o->name) ? "" : " (its checkpoint does not name this option)";
        host_append(&list, "%s--%s %s%s, not %s", *list ? "; " : "", o->name, then, lacks, now);
        free(now);
        free(then);
    }
    if (*list)
        die(EXIT_USAGE,
            "the run in %s was made with %s. A resumed run keeps its model, data, optimizer and precision: options "
            "that are left out are as they were",
            s->out, list);
    free(list);
    settings_free(&was);
}
