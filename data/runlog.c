// The log is rewritten when a run begins: the configuration, then the lines of an earlier log that are still valid. The
// new file is written under a temporary name and renamed once it is on the disk. Steps are then appended. All lines
// stay in memory too, some 500 bytes a step: a file that others have changed can be written again.
#include "data/runlog.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/json.h"
#include "device/check.h"
#include "device/files.h"

static const size_t LIMIT = (size_t)4 << 30;  // bytes of an earlier log that a run continues

// An open log. Every error when it is written ends the run.
struct RunLog {
    Path folder, path, beside;  // of the run; the log; its temporary name while it is rewritten
    int fd;                     // it appends: where others truncate the file, the next line leaves no hole before it
    FILE* copy;                 // a stream into `text`
    char* text;                 // all lines
    size_t length;
};

// Ends the run, for the reason in errno. The temporary file is removed first, which may change errno.
static NORETURN void give_up(const RunLog* log, const Path* written) {
    int why = errno;
    remove_tree(log->beside.text);
    die(EXIT_FAILED, "cannot write %s: %s", written->text, file_error(why));
}

// Adds a line to the text.
static void keep_line(RunLog* log, const char* line, size_t length) {
    if (fwrite(line, 1, length, log->copy) != length || fputc('\n', log->copy) == EOF || fflush(log->copy) != 0)
        give_up(log, &log->path);
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
    if (fd < 0 || write_all(fd, line, length) != 0 || close(fd) != 0)
        die(EXIT_FAILED, "cannot write %s: %s", path, file_error(errno));
}

// Copies the lines of an earlier log for steps up to last_step.
static void keep_lines(RunLog* log, const char* text, size_t size, int64_t last_step) {
    Path aside = path_of("%s.unreadable", log->path.text);
    // Line numbers count from 1, as editors show them.
    int64_t number = 0, odd = 0, first_odd = 0;

    // Each line is kept, dropped (its step will run again), or set aside (unreadable).
    for (const char *line = text, *end; (end = (const char*)memchr(line, '\n', (size_t)(text + size - line))) != NULL;
         line = end + 1) {
        int64_t step = step_of(line, (size_t)(end - line), number == 0);
        number++;
        if (step > 0 && step <= last_step) keep_line(log, line, (size_t)(end - line));
        if (step >= 0) continue;
        set_aside(aside.text, line, (size_t)(end - line) + 1);
        if (odd++ == 0) first_odd = number;
    }

    if (odd)
        warn("%s: %ld line%s cannot be read, the first is line %ld: kept in %s", log->path.text, odd,
             odd == 1 ? "" : "s", first_odd, aside.text);
}

// Writes all lines under the temporary name, flushes them to the disk, then renames the file over the old log.
static void publish(RunLog* log) {
    const char *from = log->beside.text, *to = log->path.text;
    log->fd = new_file(from, log->text, log->length);
    if (log->fd < 0 || rename(from, to) != 0 || sync_folder(log->folder.text) != 0) give_up(log, &log->beside);
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

    // The last line may lack its newline, by an editor or a kill. It gets the place of the NUL that read_file adds.
    if (old && size && old[size - 1] != '\n') old[size++] = '\n';

    // The new log: the configuration, and the kept lines.
    log->copy = open_memstream(&log->text, &log->length);
    if (!log->copy) die(EXIT_FAILED, "out of host memory for %s", path);
    keep_line(log, config_json, strlen(config_json));
    if (old) keep_lines(log, old, size, last_step);
    publish(log);
    free(old);
    return log;
}

// Whether the log is still this file, and has `length` bytes.
static bool is_as_written(const RunLog* log, size_t length) {
    struct stat now;
    return is_open_as(log->fd, log->path.text) && (fstat(log->fd, &now) != 0 || (size_t)now.st_size == length);
}

// Writes the log again, with all lines. A file that has its name is kept.
static void restore(RunLog* log) {
    const char* path = log->path.text;
    warn("%s was removed, replaced or changed during the run: it is written again, with all lines of the run", path);
    if (rename(path, path_of("%s.replaced", path).text) != 0 && errno != ENOENT) give_up(log, &log->path);
    close(log->fd);
    publish(log);
}

void runlog_sync(RunLog* log) {
    size_t size;
    char* text = read_file(log->path.text, LIMIT, &size);
    const bool differs = text && (size != log->length || memcmp(text, log->text, size) != 0);
    free(text);
    if (differs || !is_as_written(log, log->length)) restore(log);
    if (sync_file(log->fd, log->path.text) != 0) give_up(log, &log->path);
}

void runlog_add(RunLog* log, const char* line) {
    const size_t before = log->length;
    keep_line(log, line, strlen(line));
    // Written at once, so that a crash of the program loses no step.
    if (!is_as_written(log, before))
        restore(log);
    else if (write_all(log->fd, log->text + before, log->length - before) != 0)
        give_up(log, &log->path);
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
    runlog_sync(log);
    if (close(log->fd) != 0) give_up(log, &log->path);
    fclose(log->copy);
    free(log->text);
    free(log);
}
