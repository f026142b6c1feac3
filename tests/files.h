// Shared by the tests of file readers: a folder of their own, files written into it, and a check of how a program ends.
#ifndef TESTS_FILES_H
#define TESTS_FILES_H

#include <sys/wait.h>
#include <unistd.h>

#include "tests/dies.h"

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

#endif
