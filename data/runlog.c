// The log is rewritten when a run begins: the configuration, then the lines of an earlier log that are still valid. The
// new file is written under a temporary name and renamed once it is on the disk. Steps are then appended.
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

static const size_t LIMIT = (size_t)4 << 30;  // bytes of an earlier log that a run continues

// An open log. Every error when it is written ends the run.
struct RunLog {
    Path folder, path, beside;  // of the run; the log; its temporary name while it is rewritten
    const char* written;        // the one that is being written
    FILE* file;
};

// Ends the run, for the reason in errno.
static NORETURN void give_up(const RunLog* log) {
    // remove_tree may change errno. Only the temporary file is removed, never the log.
    int why = errno;
    if (log->written == log->beside.text) remove_tree(log->written);
    die(EXIT_FAILED, "cannot write %s: %s", log->written, file_error(why));
}

// Writes a line and flushes it to the operating system, so that a crash of the program loses no step.
static void put_line(RunLog* log, const char* line, size_t length) {
    if (fwrite(line, 1, length, log->file) != length || fputc('\n', log->file) == EOF || fflush(log->file) != 0)
        give_up(log);
}

// The step of a line; 0: the configuration, which is the first line; -1: unreadable.
static int64_t step_of(const char* line, size_t length, int first) {
    // The reason is not reported: keep_lines gives the number of the line.
    Json* json = json_parse(line, length, NULL, 0);
    int64_t step = json_int(json, "step", -1);
    if (first && json && json->type == JSON_OBJECT && !json_get(json, "step")) step = 0;
    json_free(json);
    return step;
}

// Appends an unreadable line to the file for such lines.
static void set_aside(const char* path, const char* line, size_t length) {
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (fd < 0 || write(fd, line, length) != (ssize_t)length || close(fd) != 0)
        die(EXIT_FAILED, "cannot write %s: %s", path, file_error(errno));
}

// Copies the lines of an earlier log for steps up to last_step. Its last line counts only with its newline.
static void keep_lines(RunLog* log, const char* text, size_t size, int64_t last_step) {
    Path aside = path_of("%s.unreadable", log->path.text);
    // Line numbers count from 1, as editors show them.
    int64_t number = 0, odd = 0, first_odd = 0;

    // Each line is kept, dropped (its step will run again), or set aside (unreadable).
    for (const char *line = text, *end; (end = (const char*)memchr(line, '\n', (size_t)(text + size - line))) != NULL;
         line = end + 1) {
        int64_t step = step_of(line, (size_t)(end - line), number == 0);
        number++;
        if (step > 0 && step <= last_step) put_line(log, line, (size_t)(end - line));
        if (step >= 0) continue;
        set_aside(aside.text, line, (size_t)(end - line) + 1);
        if (odd++ == 0) first_odd = number;
    }

    if (odd)
        warn("%s: %ld line%s cannot be read, the first is line %ld: kept in %s", log->path.text, odd,
             odd == 1 ? "" : "s", first_odd, aside.text);
}

// Opens the new log under its temporary name.
static void begin(RunLog* log) {
    log->written = log->beside.text;
    int fd = create_file(log->written);
    log->file = fd < 0 ? NULL : fdopen(fd, "w");
    if (!log->file) give_up(log);
}

// Flushes it to the disk, then renames it over the old log.
static void publish(RunLog* log) {
    runlog_sync(log);
    if (rename(log->written, log->path.text) != 0 || sync_folder(log->folder.text) != 0) give_up(log);
    log->written = log->path.text;
}

RunLog* runlog_open(const char* folder, const char* config_json, int64_t last_step) {
    // The earlier log, if there is one.
    RunLog* log = (RunLog*)host_alloc(sizeof(RunLog));
    size_t size = 0;
    log->folder = path_of("%s", folder);
    log->path = path_of("%s/log.jsonl", folder);
    log->beside = path_of("%s.tmp", log->path.text);
    const char* path = log->path.text;
    if (is_link(path)) die(EXIT_FAILED, "cannot read %s: %s", path, file_error(ELOOP));
    char* old = read_file(path, LIMIT, &size);
    if (!old && errno != ENOENT) die(EXIT_FAILED, "cannot read %s: %s", path, file_error(errno));
    if (!old && last_step > 0) warn("%s is missing: the log begins at step %ld", path, last_step + 1);

    // The new log: the configuration, and the kept lines.
    begin(log);
    put_line(log, config_json, strlen(config_json));
    if (old) keep_lines(log, old, size, last_step);
    publish(log);
    free(old);
    return log;
}

void runlog_sync(RunLog* log) {
    if (sync_file(fileno(log->file), log->written) != 0) give_up(log);
}

// Writes the log again: the file that was removed or replaced is still open, with all its lines.
static void restore(RunLog* log) {
    const char* path = log->path.text;
    Path replaced = path_of("%s.replaced", path);
    FILE* lost = log->file;
    size_t size;
    char* lines = read_file(path_of("/proc/self/fd/%d", fileno(lost)).text, LIMIT, &size);
    if (!lines || (rename(path, replaced.text) != 0 && errno != ENOENT)) give_up(log);
    warn("%s was removed or replaced during the run: it is written again, with all lines of the run", path);
    begin(log);
    if (fwrite(lines, 1, size, log->file) != size || fflush(log->file) != 0) give_up(log);
    publish(log);
    free(lines);
    fclose(lost);
}

void runlog_add(RunLog* log, const char* line) {
    if (!is_open_as(fileno(log->file), log->path.text)) restore(log);
    put_line(log, line, strlen(line));
}

void runlog_number(char** line, const char* name, double x) {
    host_append(line, ", \"%s\": ", name);
    host_append(line, isfinite(x) ? "%.9g" : "null", x);
}

void runlog_list(char** line, const char* name, const double* x, int64_t n) {
    host_append(line, ", \"%s\": [", name);
    for (int64_t i = 0; i < n; i++) host_append(line, isfinite(x[i]) ? "%s%.4g" : "%snull", i ? ", " : "", x[i]);
    host_append(line, "]");
}

void runlog_close(RunLog* log) {
    if (fclose(log->file) != 0) give_up(log);
    free(log);
}
