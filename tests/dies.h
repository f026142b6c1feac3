// A call that ends the program with a message.
#ifndef TESTS_DIES_H
#define TESTS_DIES_H

#include <sys/wait.h>
#include <unistd.h>

#include "tests/test.h"

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
