// Host and device memory that a test frees all at once, and copies between the two. For C tests that run in either
// build.
#ifndef TESTS_TRANSFER_H
#define TESTS_TRANSFER_H

#include "tests/test.h"

enum { MOST_ROOMS = 1024 };
static Ctx* ctx;
static void *on_host[MOST_ROOMS], *on_device[MOST_ROOMS];
static int host_count, device_count;

static inline void* host_room(size_t bytes) {
    ASSERT(host_count < MOST_ROOMS);
    return on_host[host_count++] = host_alloc(bytes);
}

static inline void* device_room(size_t bytes) {
    ASSERT(device_count < MOST_ROOMS);
    return on_device[device_count++] = device_alloc(bytes, "a test");
}

// Frees all buffers but the first `host` and `device` of them.
static inline void forget(int host, int device) {
    while (host_count > host) free(on_host[--host_count]);
    while (device_count > device) device_free(on_device[--device_count]);
}

static inline real* send_real(const real* x, int64_t n) {
    real* to = (real*)device_room((size_t)n * sizeof(real));
    device_upload(to, x, (size_t)n * sizeof(real), ctx);
    return to;
}

static inline floatX* send(const real* x, int64_t n) {
    const size_t bytes = (size_t)n * sizeof(floatX);
    floatX *to = (floatX*)device_room(bytes), *rounded = (floatX*)host_room(bytes);
    for (int64_t i = 0; i < n; i++) rounded[i] = (floatX)x[i];
    device_upload(to, rounded, bytes, ctx);
    return to;
}

static inline void* filled_with(int byte, size_t bytes) {
    char *to = (char*)device_room(bytes), *fill = (char*)host_room(bytes);
    memset(fill, byte, bytes);
    device_upload(to, fill, bytes, ctx);
    return to;
}

static inline void* poison(size_t bytes) { return filled_with(0xff, bytes); }  // NaN

static inline void* fetch(const void* x, size_t bytes) {
    void* host = host_room(bytes);
    if (bytes) device_download(host, x, bytes, ctx);
    return host;
}

static inline real* fetch_floatX(const floatX* x, int64_t n) {
    real* wide = (real*)device_room((size_t)n * sizeof(real));
    if (n) device_to_real(wide, x, n, ctx);
    return (real*)fetch(wide, (size_t)n * sizeof(real));
}

#endif
