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
            if (why != EEXIST) result = -1;
            else if (stat(part, &info) == 0 && !S_ISDIR(info.st_mode)) why = ENOTDIR, result = -1;
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
    if (!folder) return;
    for (struct dirent* entry; (entry = readdir(folder));) {
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
    int fd = open(path, O_RDONLY);
    if (fd < 0) return NULL;
    struct stat info;
    char* text = NULL;
    if (fstat(fd, &info) == 0) {
        text = (char*)host_alloc((size_t)info.st_size + 1);
        size_t got = 0;
        while (got < (size_t)info.st_size) {
            ssize_t n = read(fd, text + got, (size_t)info.st_size - got);
            if (n <= 0) break;
            got += (size_t)n;
        }
        text[got] = 0;
        if (size) *size = got;
    }
    close(fd);
    return text;
}
