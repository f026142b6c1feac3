#include "data/runlog.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/json.h"
#include "device/check.h"
#include "device/files.h"

static const size_t LIMIT = (size_t)4 << 30;  // bytes of a log that is gone on with

struct RunLog {
    char* path;
    char* beside;  // what is written while the log is put together from an old one, NULL afterwards
    FILE* file;
};

static NORETURN void give_up(const RunLog* log) {
    int why = errno;
    if (log->beside) remove_tree(log->beside);
    die(EXIT_FAILED, "cannot write %s: %s", log->beside ? log->beside : log->path, file_error(why));
}

static void put_line(RunLog* log, const char* line, size_t length) {
    if (fwrite(line, 1, length, log->file) != length || fputc('\n', log->file) == EOF || fflush(log->file) != 0)
        give_up(log);
}

// The step of a line; 0: it is a configuration, -1: it cannot be read.
static int64_t step_of(const char* line, size_t length) {
    char error[64];
    Json* json = json_parse(line, length, error, sizeof(error));
    int64_t step = !json || json->type != JSON_OBJECT ? -1 : json_get(json, "step") ? json_int(json, "step", -1) : 0;
    json_free(json);
    return step;
}

// Adds a line to those that could not be read, which lie in a file of their own.
static void set_aside(const char* path, const char* line, size_t length) {
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (fd < 0 || write(fd, line, length) != (ssize_t)length || close(fd) != 0)
        die(EXIT_FAILED, "cannot write %s: %s", path, file_error(errno));
}

// Writes the lines of an earlier run's log that belong to steps up to last_step. Its last line counts if it is whole.
static void keep_lines(RunLog* log, const char* text, size_t size, int64_t last_step) {
    char* aside = host_format("%s.unreadable", log->path);
    int64_t number = 0, odd = 0, first_odd = 0;
    for (const char *line = text, *end; (end = (const char*)memchr(line, '\n', (size_t)(text + size - line))) != NULL;
         line = end + 1) {
        int64_t step = step_of(line, (size_t)(end - line));
        number++;
        if (step > 0 && step <= last_step) put_line(log, line, (size_t)(end - line));
        if (step >= 0) continue;
        set_aside(aside, line, (size_t)(end - line) + 1);
        if (odd++ == 0) first_odd = number;
    }
    if (odd)
        warn("%s: %lld line%s cannot be read, the first is line %lld: kept in %s", log->path, (long long)odd,
             odd == 1 ? "" : "s", (long long)first_odd, aside);
    free(aside);
}

RunLog* runlog_open(const char* folder, const char* config_json, int64_t last_step) {
    RunLog* log = (RunLog*)host_alloc(sizeof(RunLog));
    size_t size = 0;
    log->path = host_format("%s/log.jsonl", folder);
    log->beside = host_format("%s.tmp", log->path);
    char* old = is_link(log->path) ? (errno = ELOOP, (char*)NULL) : read_file(log->path, LIMIT, &size);
    if (!old && errno != ENOENT) die(EXIT_FAILED, "cannot read %s: %s", log->path, file_error(errno));
    if (!old && last_step > 0) warn("%s is missing: the log begins at step %lld", log->path, (long long)last_step + 1);
    int fd = create_file(log->beside);
    log->file = fd < 0 ? NULL : fdopen(fd, "w");
    if (!log->file) give_up(log);
    put_line(log, config_json, strlen(config_json));
    if (old) keep_lines(log, old, size, last_step);
    // On the disk before it takes the old one's place.
    if (fsync(fileno(log->file)) != 0 || rename(log->beside, log->path) != 0 || sync_folder(folder) != 0) give_up(log);
    free(log->beside);
    log->beside = NULL;
    free(old);
    return log;
}

void runlog_sync(RunLog* log) {
    if (fsync(fileno(log->file)) != 0) give_up(log);
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
