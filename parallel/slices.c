// Slices of checkpoint files. slices_gather and ranks_* are collective: every rank of the group calls them, even
// without slices.
#include "parallel/slices.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"

Path step_path(const char* out, int64_t step, const char* suffix) {
    return path_of("%s/step_%08ld%s", out, step, suffix);
}

// The name must be exactly the one that step_path makes: step_7 and step_00000007.old are not steps.
int64_t step_number(const char* name, const char* suffix) {
    if (strncmp(name, "step_", 5) != 0) return -1;
    char exact[64];
    int64_t step = strtol(name + 5, NULL, 10);
    snprintf(exact, sizeof(exact), "step_%08ld%s", step, suffix);
    return strcmp(name, exact) == 0 ? step : -1;
}

uLong crc_of(const void* data, size_t bytes) { return crc32_z(crc32(0, NULL, 0), (const Bytef*)data, bytes); }

int64_t first_not_finite(const void* values, int64_t n, StDtype dtype) {
    const uint16_t* bf16 = (const uint16_t*)values;
    const real* reals = (const real*)values;
    int64_t i = dtype == ST_U8 ? n : 0;
    // A bf16 is not finite if all bits of its exponent are 1.
    while (i < n && (dtype == ST_BF16 ? (~bf16[i] & 0x7f80) != 0 : isfinite(reals[i]))) i++;
    return i;
}

// Order: by file, then by offset.
static int in_order(const void* a, const void* b) {
    const FileSlice *x = (const FileSlice*)a, *y = (const FileSlice*)b;
    int64_t apart = x->file != y->file ? x->file - y->file : x->offset - y->offset;
    return (apart > 0) - (apart < 0);
}

FileSlice* slices_gather(Ranks* group, const FileSlice* mine, int64_t count, int64_t* total) {
    // The number of slices that each rank has.
    const int ranks = ranks_count(group);
    int64_t* counts = (int64_t*)host_alloc((size_t)ranks * sizeof(int64_t));
    ranks_all_gather(group, counts, &count, sizeof(count));
    *total = 0;
    for (int r = 0; r < ranks; r++) *total += counts[r];

    // The slices of rank after rank, then in order for slices_join.
    FileSlice *all = (FileSlice*)host_alloc((size_t)*total * sizeof(FileSlice)), *part = all;
    for (int r = 0; r < ranks; part += counts[r++]) {
        if (r == ranks_index(group)) memcpy(part, mine, (size_t)count * sizeof(FileSlice));
        ranks_broadcast(group, part, (size_t)counts[r] * sizeof(FileSlice), r);
    }
    qsort(all, (size_t)*total, sizeof(FileSlice), in_order);
    free(counts);
    return all;
}

bool slices_join(const FileSlice** next, const FileSlice* end, int64_t file, int64_t bytes, uLong* crc) {
    bool tiled = true;  // so far without gap or overlap
    int64_t at = 0;
    *crc = 0;
    for (; *next < end && (*next)->file == file; ++*next) {
        const FileSlice* s = *next;
        tiled = tiled && s->offset == at;
        // The CRC-32 of the bytes so far, extended by the slice without reading it.
        *crc = crc32_combine(*crc, (uLong)s->crc, (z_off_t)s->bytes);
        at += s->bytes;
    }
    return tiled && at == bytes;
}

// The first rank with a yes; -1: there is none.
static int first_rank(Ranks* group, bool yes) {
    // Every rank gets all answers, so all find the same rank.
    bool* all = (bool*)host_alloc((size_t)ranks_count(group) * sizeof(bool));
    ranks_all_gather(group, all, &yes, sizeof(yes));
    int who = -1;
    for (int r = ranks_count(group) - 1; r >= 0; r--)
        if (all[r]) who = r;
    free(all);
    return who;
}

bool ranks_well(Ranks* group, bool well) {
    const int who = first_rank(group, !well);
    if (who >= 0 && who != ranks_index(group)) ranks_barrier(group);  // never passed
    return who < 0;
}

char* ranks_reason(Ranks* group, char* why) {
    char reason[16384] = "";  // with two paths
    if (why) snprintf(reason, sizeof(reason), "%s", why);
    const int who = first_rank(group, why != NULL);
    free(why);
    if (who < 0) return NULL;
    ranks_broadcast(group, reason, sizeof(reason), who);
    return host_strdup(reason);
}

void ranks_must_share(Ranks* world, const char* out, bool same) {
    if (!ranks_well(world, same))
        die(EXIT_FAILED,
            "the folder %s has other contents on this rank than on rank 0: name a folder on a file system that all "
            "ranks share",
            out);
}
