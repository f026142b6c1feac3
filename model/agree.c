// Every rank compares its values with those of rank 0. All ranks end for the reason of the first rank that differs.
#include "model/agree.h"

#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "device/check.h"
#include "device/files.h"
#include "parallel/slices.h"

static const size_t PROGRAM_LIMIT = (size_t)4 << 30;  // bytes

// CRC-32 of the program's own file.
static uint32_t program_crc(void) {
    size_t size = 0;
    char* program = read_file("/proc/self/exe", PROGRAM_LIMIT, &size);
    uint32_t crc = (uint32_t)crc32_z(0, (const Bytef*)program, size);
    free(program);
    return crc;
}

// The build, then one option after the other as "name value", a line each.
static char* describe(const Settings* s) {
    char* list = host_format("%08x\nhelp %ld\nversion %ld\n", program_crc(), s->help, s->version);
    for (int i = 0; i < settings_count; i++) {
        const Option* o = &settings_table[i];
        // Paths of data may differ between machines. agree_on_data compares the shards and questions themselves.
        if (o->type == OPTION_TEXT && strcmp(o->group, "data") == 0) continue;
        char* value = option_text(o, s);
        host_append(&list, "%s %s\n", o->name, value);
        free(value);
    }
    return list;
}

// The first line in which a rank's list differs from rank 0's, as a message in fresh memory; NULL: none. The lists have
// the same order.
static char* difference(int rank, const char* list, const char* first) {
    size_t at = 0;
    if (strcmp(list, first) == 0) return NULL;
    while (first[at] == list[at]) at++;
    while (at > 0 && first[at - 1] != '\n') at--;
    const int length = (int)strcspn(list + at, "\n"), first_length = (int)strcspn(first + at, "\n");
    return host_format(at ? "rank %d runs with --%.*s, rank 0 with --%.*s: give all ranks the same options"
                          : "rank %d runs another build of the program than rank 0 (CRC-32 %.*s, not %.*s): give all "
                            "ranks the same file",
                       rank, length, list + at, first_length, first + at);
}

void agree_on_settings(Ranks* world, const Settings* s) {
    if (ranks_count(world) == 1) return;
    // Rank 0's list, then the reason.
    char* list = describe(s);
    size_t bytes = strlen(list) + 1;
    ranks_broadcast(world, &bytes, sizeof(bytes), 0);
    char* first = (char*)host_alloc(bytes);
    if (ranks_index(world) == 0) memcpy(first, list, bytes);
    ranks_broadcast(world, first, bytes, 0);
    char* reason = ranks_reason(world, difference(ranks_index(world), list, first));
    if (reason) die(EXIT_USAGE, "%s", reason);
    free(first);
    free(list);
}

void agree_on_data(Ranks* world, const char* option, uint32_t hash) {
    // All ranks call this in the same order, also those without the option.
    uint32_t first = hash;
    ranks_broadcast(world, &first, sizeof(first), 0);
    char* why = hash == first ? NULL
                              : host_format(
                                    "%s: rank %d sees other files than rank 0 (names, sizes, headers, or tokens of 64 "
                                    "windows of shards differ): copy the same files to all machines",
                                    option, ranks_index(world));
    char* reason = ranks_reason(world, why);
    if (reason) die(EXIT_USAGE, "%s", reason);
}
