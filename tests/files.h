// Shared by the tests of file readers: a folder of their own, files written into it, and a check of how a program ends.
#ifndef TESTS_FILES_H
#define TESTS_FILES_H

#include <sys/wait.h>
#include <unistd.h>

#include "tests/test.h"

static char folder[64];  // made by make_folder, removed at the end by remove_matching("")

static void make_folder(const char* name) {
    snprintf(folder, sizeof(folder), "/tmp/%s_XXXXXX", name);
    if (!mkdtemp(folder)) die(EXIT_FAILED, "cannot make a folder in /tmp");
}

// folder/name, in one of a few rotating buffers.
static const char* in_folder(const char* name) {
    static char paths[8][256];
    static int turn;
    char* path = paths[turn++ % 8];
    snprintf(path, sizeof(paths[0]), "%s/%s", folder, name);
    return path;
}

static const char* write_file(const char* name, const void* bytes, size_t size) {
    const char* path = in_folder(name);
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(bytes, 1, size, f) != size || fclose(f) != 0) die(EXIT_FAILED, "cannot write %s", path);
    return path;
}

static void remove_matching(const char* pattern) {
    char* command = host_format("rm -rf %s/%s", folder, pattern);
    if (system(command) != 0) die(EXIT_FAILED, "cannot remove %s", pattern);
    free(command);
}

// Runs `action` in a child process. It must end with EXIT_FAILED, and its message must have every one of the NULL-ended
// parts.
static void check_dies(void (*action)(void), const char* const* parts, const char* what) {
    int ends[2], status = 0;
    fflush(stdout);
    if (pipe(ends) != 0) die(EXIT_FAILED, "pipe");
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        action();
        _exit(0);
    }
    close(ends[1]);
    char message[4096];
    size_t n = 0;
    ssize_t got;
    while ((got = read(ends[0], message + n, sizeof(message) - 1 - n)) > 0) n += (size_t)got;
    message[n] = 0;
    close(ends[0]);
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILED, "%s: status %x, said: %s", what, status, message);
    for (int i = 0; parts[i]; i++)
        CHECK(strstr(message, parts[i]), "%s: '%s' is missing from: %s", what, parts[i], message);
}
#define DIES(action, ...)                                                                                              \
    do {                                                                                                               \
        const char* parts[] = {__VA_ARGS__, NULL};                                                                     \
        check_dies(action, parts, #action);                                                                            \
    } while (0)

#endif
