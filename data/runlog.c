#include "data/runlog.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "device/check.h"
#include "device/files.h"

struct RunLog {
    char* path;
    char* beside;  // what is written while the log is put together from an old one, NULL afterwards
    FILE* file;
};

static NORETURN void give_up(const RunLog* log) {
    int why = errno;
    if (log->beside) remove(log->beside);
    die(EXIT_FAILED, "cannot write %s: %s", log->beside ? log->beside : log->path, strerror(why));
}

static void put_line(RunLog* log, const char* line, size_t length) {
    if (fwrite(line, 1, length, log->file) != length || fputc('\n', log->file) == EOF || fflush(log->file) != 0)
        give_up(log);
}

// Writes the lines of an earlier run's log that belong to steps up to last_step.
static void keep_lines(RunLog* log, const char* text, int64_t last_step) {
    const char* line = strchr(text, '\n');  // behind the old configuration
    while (line && *++line) {
        const char* end = strchr(line, '\n');
        if (!end) return;  // torn by a kill
        char error[64];
        Json* json = json_parse(line, (size_t)(end - line), error, sizeof(error));
        int64_t step = json ? json_int(json, "step", INT64_MAX) : INT64_MAX;
        json_free(json);
        if (step > last_step) return;
        put_line(log, line, (size_t)(end - line));
        line = end;
    }
}

RunLog* runlog_open(const char* folder, const char* config_json, int64_t last_step) {
    RunLog* log = (RunLog*)host_alloc(sizeof(RunLog));
    log->path = host_format("%s/log.jsonl", folder);
    log->beside = host_format("%s.tmp", log->path);
    char* old = read_file(log->path, NULL);
    if (!old && errno != ENOENT) die(EXIT_FAILED, "cannot read %s: %s", log->path, strerror(errno));
    log->file = fopen(log->beside, "w");
    if (!log->file) give_up(log);
    put_line(log, config_json, strlen(config_json));
    if (old) keep_lines(log, old, last_step);
    if (rename(log->beside, log->path) != 0) give_up(log);
    free(log->beside);
    log->beside = NULL;
    free(old);
    return log;
}

static const char* number(char text[32], double x) {
    if (isfinite(x))
        snprintf(text, 32, "%.9g", x);
    else
        snprintf(text, 32, "null");
    return text;
}

// The field "mx_stats" with its comma, in fresh memory; "" where nothing was measured.
static char* casts_json(const StepRecord* r) {
    char a[32], b[32], c[32], d[32];
    char* json = host_strdup(r->cast_count ? ", \"mx_stats\": [" : "");
    for (int i = 0; i < r->cast_count; i++) {
        const CastRecord* cast = &r->casts[i];
        char* longer = host_format(
            "%s{\"layer\": %lld, \"tensor\": \"%s\", \"saturated\": %s, \"flushed\": %s, \"inexact\": %s, "
            "\"snr_db\": %s}%s",
            json, (long long)cast->layer, cast->tensor, number(a, cast->saturated), number(b, cast->flushed),
            number(c, cast->inexact), number(d, cast->snr_db), i + 1 < r->cast_count ? ", " : "]");
        free(json);
        json = longer;
    }
    return json;
}

void runlog_add(RunLog* log, const StepRecord* r) {
    char a[32], b[32], c[32], d[32], e[32], f[32], g[32], h[32], i[32];
    char* val = r->validated ? host_format("\"val_loss\": %s, ", number(i, r->val_loss)) : host_strdup("");
    char* casts = casts_json(r);
    char* line = host_format(
        "{\"step\": %lld, \"loss\": %s, \"grad_norm\": %s, \"lr\": %s, \"ms\": %s, \"tokens_per_s\": %s, \"mfu\": %s, "
        "%s\"load_max_over_mean\": %s, \"mem_gib\": %s%s}",
        (long long)r->step, number(a, r->loss), number(b, r->grad_norm), number(c, r->lr), number(d, r->ms),
        number(e, r->tokens_per_s), number(f, r->mfu), val, number(g, r->load_max_over_mean), number(h, r->mem_gib),
        casts);
    put_line(log, line, strlen(line));
    free(val);
    free(casts);
    free(line);
}

void runlog_close(RunLog* log) {
    if (fclose(log->file) != 0) give_up(log);
    free(log->path);
    free(log);
}
