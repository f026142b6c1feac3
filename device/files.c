#include "device/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/check.h"

int make_folders(const char* path) {
    char* part = host_strdup(path);
    int result = 0;
    for (char* p = part + 1; result == 0; p++) {
        if (*p != '/' && *p != 0) continue;
        char end = *p;
        *p = 0;
        struct stat info;
        if (mkdir(part, 0777) != 0) {
            int why = errno;
            if (why != EEXIST)
                result = -1;
            else if (stat(part, &info) == 0 && !S_ISDIR(info.st_mode))
                why = ENOTDIR, result = -1;
            errno = why;
        }
        *p = end;
        if (!end) break;
    }
    free(part);
    return result;
}

void remove_folder(const char* path) {
    DIR* folder = opendir(path);
    if (!folder) {
        unlink(path);
        return;
    }
    for (struct dirent* entry; (entry = readdir(folder)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        char* file = host_format("%s/%s", path, entry->d_name);
        unlink(file);
        free(file);
    }
    closedir(folder);
    rmdir(path);
}

int sync_folder(const char* path) {
    int fd = open(path, O_RDONLY);
    if (fd < 0) return -1;
    int result = fsync(fd);
    close(fd);
    return result;
}

char* read_file(const char* path, size_t* size) {
    FILE* file = fopen(path, "rb");
    size_t room = 1 << 16, got = 0, n;
    if (!file) return NULL;
    char* text = (char*)host_alloc(room);
    while ((n = fread(text + got, 1, room - got - 1, file)) > 0) {
        got += n;
        if (got + 1 < room) continue;
        text = (char*)realloc(text, room *= 2);
        if (!text) die(EXIT_FAILED, "out of host memory reading %s", path);
    }
    int why = ferror(file) ? errno : 0;
    fclose(file);
    if (why) {
        free(text);
        errno = why;
        return NULL;
    }
    text[got] = 0;
    if (size) *size = got;
    return text;
}
