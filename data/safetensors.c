// The safetensors header is not trusted. Each entry is checked alone (parse_tensor), then all entries together by
// offset (offsets_tile) and by name (names_unique). The list of tensors stays in the order of names, for lookups.
#include "data/safetensors.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/check.h"
#include "device/files.h"

static const int64_t MAX_HEADER = 100 * 1000 * 1000;  // the format's own limit

// Names and sizes, indexed by StDtype.
static const struct {
    const char* name;
    size_t bytes;
} dtypes[ST_DTYPES] = {{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2},
                       {"I64", 8}, {"I32", 4}, {"U8", 1},  {"F8_E4M3", 1}};

size_t st_dtype_bytes(StDtype dtype) { return dtypes[dtype].bytes; }

// True for a nonnegative integer.
static bool is_size(const Json* json) {
    return json->type == JSON_NUMBER && json->integer >= 0 && (double)json->integer == json->number;
}

// The checks below return NULL, or the reason in fresh memory.

// Fills `tensor` from a header entry; its offset is still relative to the data.
static char* parse_tensor(const Json* entry, StTensor* tensor) {
    const char* name = entry->key;
    const char* dtype = json_text(entry, "dtype");
    const Json* shape = json_get(entry, "shape");
    const Json* offsets = json_get(entry, "data_offsets");
    if (!dtype || !shape || !offsets || shape->type != JSON_ARRAY || offsets->type != JSON_ARRAY)
        return host_format("tensor '%s' needs dtype, shape and data_offsets", name);

    // The dtype.
    int d = 0;
    while (d < ST_DTYPES && strcmp(dtype, dtypes[d].name) != 0) d++;
    if (d == ST_DTYPES)
        return host_format("tensor '%s' has dtype %s; known are F64, F32, F16, BF16, I64, I32, U8, F8_E4M3", name,
                           dtype);
    tensor->dtype = (StDtype)d;

    // The shape, and its size in bytes.
    int64_t bytes = (int64_t)dtypes[d].bytes;
    for (const Json* n = shape->child; n; n = n->next) {
        if (!is_size(n)) return host_format("tensor '%s' has a shape that is not made of sizes", name);
        if (tensor->rank == 4) return host_format("tensor '%s' has more than 4 dimensions", name);
        tensor->shape[tensor->rank++] = n->integer;
        if (__builtin_mul_overflow(bytes, n->integer, &bytes)) return host_format("tensor '%s' is too large", name);
    }

    // The offsets, whose difference must be this size.
    const Json* begin = offsets->child;
    const Json* end = begin ? begin->next : NULL;
    if (!end || end->next || !is_size(begin) || !is_size(end) || end->integer < begin->integer)
        return host_format("tensor '%s' has data_offsets that are not [begin, end]", name);
    if (end->integer - begin->integer != bytes)
        return host_format("tensor '%s' has %ld bytes of data, its shape and dtype need %ld", name,
                           end->integer - begin->integer, bytes);
    tensor->name = entry->key;
    tensor->offset = begin->integer;
    tensor->bytes = bytes;
    return NULL;
}

// qsort order: by offset, then by size.
static int by_offset(const void* a, const void* b) {
    const StTensor *x = (const StTensor*)a, *y = (const StTensor*)b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);  // empty tensors before the one that starts there
}

// Checks that the tensors, in order of offset, cover [0, data) exactly. Makes the offsets relative to the file.
static char* offsets_tile(SafeTensors* st, int64_t data_start, int64_t data) {
    // In this order, each tensor must begin where the one before it ends.
    qsort(st->tensors, (size_t)st->count, sizeof(StTensor), by_offset);
    int64_t at = 0;
    for (int i = 0; i < st->count; i++) {
        StTensor* t = &st->tensors[i];
        if (t->offset > data || t->bytes > data - t->offset)
            return host_format("tensor '%s' ends at byte %ld of the data, the file holds %ld: it was cut off", t->name,
                               t->offset + t->bytes, data);
        if (t->offset < at) return host_format("tensors '%s' and '%s' overlap", st->tensors[i - 1].name, t->name);
        if (t->offset > at)
            return host_format("%ld bytes before tensor '%s' belong to no tensor", t->offset - at, t->name);
        at += t->bytes;
        t->offset += data_start;
    }
    if (at != data) return host_format("%ld bytes after the last tensor belong to no tensor", data - at);
    return NULL;
}

// qsort and bsearch order: by name.
static int by_name(const void* a, const void* b) {
    return strcmp(((const StTensor*)a)->name, ((const StTensor*)b)->name);
}

// Sorts the tensors by name. They do not move after this, so pointers to them stay valid.
static char* names_unique(SafeTensors* st) {
    qsort(st->tensors, (size_t)st->count, sizeof(StTensor), by_name);
    for (int i = 1; i < st->count; i++)
        if (by_name(&st->tensors[i - 1], &st->tensors[i]) == 0)
            return host_format("two tensors are named '%s'", st->tensors[i].name);
    return NULL;
}

// Parses the header and fills st->tensors, with offsets relative to the data. It frees nothing on failure.
static char* parse_header(SafeTensors* st, const char* text, int64_t length) {
    char reason[256];
    st->header = json_parse(text, (size_t)length, reason, sizeof(reason));
    if (!st->header) return host_format("header: %s (counted from byte 8 of the file)", reason);
    if (st->header->type != JSON_OBJECT) return host_format("the header is not a JSON object");
    // The number of members bounds the tensors: the metadata is one of them.
    st->tensors = (StTensor*)host_alloc((size_t)json_count(st->header) * sizeof(StTensor));

    // Each member is a tensor, or the metadata, which nothing here depends on.
    for (const Json* entry = st->header->child; entry; entry = entry->next) {
        if (strcmp(entry->key, "__metadata__") == 0) continue;
        char* why = parse_tensor(entry, &st->tensors[st->count++]);
        if (why) return why;
    }
    return NULL;
}

// Opens st->path and runs all checks.
static char* open_checked(SafeTensors* st) {
    // The file and its size.
    st->fd = open_file(st->path);
    if (st->fd < 0) return host_format("cannot open: %s", file_error(errno));
    const int64_t size = lseek(st->fd, 0, SEEK_END);
    if (size < 8) return host_format("%ld bytes are too few for a safetensors file", size);

    // The header's length, which must fit in the file.
    uint64_t length;
    if (read_all_at(st->fd, &length, 8, 0) != 0) return host_format("cannot read: %s", strerror(errno));
    if (length > (uint64_t)MAX_HEADER)
        return host_format("byte 0 gives a header of %lu bytes, more than the format allows: not a safetensors file",
                           length);
    if ((int64_t)length > size - 8)
        return host_format("byte 0 gives a header of %lu bytes, the file has %ld: it was cut off", length, size);

    // The header, then its checks against the file's size.
    char* text = (char*)host_alloc((size_t)length + 1);
    char* why = read_all_at(st->fd, text, (int64_t)length, 8) == 0
                    ? parse_header(st, text, (int64_t)length)
                    : host_format("cannot read the header: %s", strerror(errno));
    free(text);
    if (!why) why = offsets_tile(st, 8 + (int64_t)length, size - 8 - (int64_t)length);
    return why ? why : names_unique(st);
}

SafeTensors* st_open(const char* path, char* error, size_t error_size) {
    SafeTensors* st = (SafeTensors*)host_alloc(sizeof(SafeTensors));
    st->path = host_strdup(path);
    st->fd = -1;
    char* why = open_checked(st);
    if (!why) return st;
    snprintf(error, error_size, "%s: %s", path, why);
    free(why);
    st_close(st);
    return NULL;
}

void st_close(SafeTensors* st) {
    if (!st) return;
    if (st->fd >= 0) close(st->fd);
    free(st->tensors);
    json_free(st->header);
    free(st->path);
    free(st);
}

const StTensor* st_find(const SafeTensors* st, const char* name) {
    const StTensor key = {.name = (char*)name};
    return (const StTensor*)bsearch(&key, st->tensors, (size_t)st->count, sizeof(StTensor), by_name);
}

int st_read(const SafeTensors* st, const StTensor* tensor, int64_t first, int64_t count, void* out) {
    // first and count are checked without their sum, which could overflow.
    int64_t size = (int64_t)st_dtype_bytes(tensor->dtype), elements = tensor->bytes / size;
    if (first < 0 || count < 0 || first > elements || count > elements - first) {
        errno = EINVAL;
        return -1;
    }
    return read_all_at(st->fd, out, count * size, tensor->offset + first * size);
}

char* st_plan_header(StTensor* tensors, int count, int64_t* size) {
    char* text = NULL;
    size_t length = 0;
    FILE* f = open_memstream(&text, &length);
    ASSERT(f != NULL);
    // The 8 bytes of the length are filled in last. The metadata are as transformers writes them.
    fprintf(f, "%8s{\"__metadata__\":{\"format\":\"pt\"}", "");

    // The tensors in order, with offsets from the first byte of the data.
    int64_t at = 0;
    for (int i = 0; i < count; i++) {
        StTensor* t = &tensors[i];
        ASSERT(t->rank >= 0 && t->rank <= 4);
        char* quoted = json_quote(t->name);
        fprintf(f, ",%s:{\"dtype\":\"%s\",\"shape\":[", quoted, dtypes[t->dtype].name);
        free(quoted);
        t->bytes = (int64_t)st_dtype_bytes(t->dtype);
        for (int d = 0; d < t->rank; d++) {
            fprintf(f, "%s%ld", d ? "," : "", t->shape[d]);
            t->bytes *= t->shape[d];
        }
        fprintf(f, "],\"data_offsets\":[%ld,%ld]}", at, at + t->bytes);
        t->offset = at;
        at += t->bytes;
    }
    fprintf(f, "}");

    // Pad with spaces to a multiple of 8, then write the length at the front.
    fflush(f);
    fprintf(f, "%*s", (int)((8 - length % 8) % 8), "");
    int failed = ferror(f) | fclose(f);
    if (failed) die(EXIT_FAILED, "out of host memory while a safetensors header was built");
    uint64_t json_bytes = (uint64_t)length - 8;
    memcpy(text, &json_bytes, 8);

    // Offsets from the start of the file.
    for (int i = 0; i < count; i++) tensors[i].offset += (int64_t)length;
    *size = (int64_t)length;
    return text;
}
