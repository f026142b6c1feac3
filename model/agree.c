// Every rank gathers what all ranks have and compares it with rank 0's, so all end for the same reason.
#include "model/agree.h"

#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "device/check.h"
#include "device/files.h"

static const size_t PROGRAM_LIMIT = (size_t)4 << 30;  // bytes

// Every rank's `bytes`, in fresh memory.
static char* gather(Ranks* world, const void* mine, size_t bytes) {
    char* all = (char*)host_alloc((size_t)ranks_count(world) * bytes);
    ranks_all_gather(world, all, mine, bytes);
    return all;
}

// CRC-32 of the program's own file.
static uint32_t program_crc(void) {
    size_t size = 0;
    char* program = read_file("/proc/self/exe", PROGRAM_LIMIT, &size);
    uint32_t crc = (uint32_t)crc32_z(0, (const Bytef*)program, size);
    free(program);
    return crc;
}

// One option after the other as "name value\n".
static char* option_list(const Settings* s) {
    char* list = host_format("help %ld\nversion %ld\n", s->help, s->version);  // first: the others follow from them
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

// Ends the run. Both lists have the same order, so the line of the first difference names the option.
static NORETURN void options_differ(int rank, const char* first, const char* other) {
    size_t at = 0;
    while (first[at] == other[at]) at++;
    while (at > 0 && first[at - 1] != '\n') at--;
    die(EXIT_USAGE, "rank %d runs with --%.*s, rank 0 with --%.*s: give all ranks the same options", rank,
        (int)strcspn(other + at, "\n"), other + at, (int)strcspn(first + at, "\n"), first + at);
}

void agree_on_settings(Ranks* world, const Settings* s) {
    int R = ranks_count(world);
    if (R == 1) return;

    // The same build.
    uint32_t crc = program_crc(), *crcs = (uint32_t*)gather(world, &crc, sizeof(crc));
    for (int r = 1; r < R; r++)
        if (crcs[r] != crcs[0])
            die(EXIT_USAGE, "rank %d runs another build of the program than rank 0 (CRC-32 %08x, not %08x)", r, crcs[r],
                crcs[0]);
    free(crcs);

    // The same options. Lists may differ in length, so all are padded to the longest.
    char* list = option_list(s);
    size_t length = strlen(list) + 1, *lengths = (size_t*)gather(world, &length, sizeof(length)), longest = 0;
    for (int r = 0; r < R; r++) longest = max_size(longest, lengths[r]);
    char* padded = (char*)host_alloc(longest);
    memcpy(padded, list, length);
    char* lists = gather(world, padded, longest);
    for (int r = 1; r < R; r++)
        if (strcmp(lists + (size_t)r * longest, lists) != 0) options_differ(r, lists, lists + (size_t)r * longest);
    free(lists);
    free(padded);
    free(lengths);
    free(list);
}

void agree_on_data(Ranks* world, const char* option, uint32_t hash) {
    // All ranks call this in the same order, also those without the option.
    uint32_t* hashes = (uint32_t*)gather(world, &hash, sizeof(hash));
    for (int r = 1; r < ranks_count(world); r++)
        if (hashes[r] != hashes[0])
            die(EXIT_USAGE, "%s: rank %d sees other files than rank 0 (names, sizes or contents differ)", option, r);
    free(hashes);
}
