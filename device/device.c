#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "device/cpu.h"

// OpenBLAS's own controls; absent (NULL) with another CBLAS.
extern void openblas_set_num_threads(int n) __attribute__((weak));
extern char* openblas_get_corename(void) __attribute__((weak));

struct Fetch {
    size_t bytes;
    void* host;
};

struct Stopwatch {
    double start, stop;
};

void device_choose(int index) { (void)index; }

Ctx* ctx_create(size_t workspace) {
    Ctx* ctx = (Ctx*)host_alloc(sizeof(Ctx));
    ctx->threads = device_workers();
    ctx->workspace = (char*)device_alloc(workspace, "workspace");
    ctx->workspace_bytes = workspace;
    // The parallelism is ours: every product runs on one thread, so its bits depend on its shape alone.
    if (openblas_set_num_threads) openblas_set_num_threads(1);
    snprintf(ctx->name, sizeof(ctx->name), "CPU, %d thread%s, %s%s%s", ctx->threads, ctx->threads == 1 ? "" : "s",
             openblas_get_corename ? "OpenBLAS (" : "CBLAS", openblas_get_corename ? openblas_get_corename() : "",
             openblas_get_corename ? " kernels)" : "");
    return ctx;
}

void ctx_destroy(Ctx* ctx) {
    device_free(ctx->workspace);
    free(ctx);
}

// On the CPU work happens when it is given, so lines of work and the order between them mean nothing.
Ctx* ctx_side(Ctx* ctx) {
    Ctx* side = (Ctx*)host_alloc(sizeof(Ctx));
    side->threads = ctx->threads;
    return side;
}

Event* event_create(void) { return NULL; }
void event_destroy(Event* event) { (void)event; }
void event_record(Event* event, Ctx* ctx) { (void)event, (void)ctx; }
void event_wait(Event* event, Ctx* ctx) { (void)event, (void)ctx; }

int device_available(void) { return 1; }
void ctx_sync(Ctx* ctx) { (void)ctx; }
const char* device_name(Ctx* ctx) { return ctx->name; }
double device_peak_flops(Ctx* ctx) { return (void)ctx, 0; }
int device_workers(void) { return omp_get_max_threads(); }

// The number after `name` in a file of lines "name number"; -1 if there is none.
static int64_t number_in(const char* path, const char* name) {
    FILE* file = fopen(path, "r");
    char line[256];
    long long number = -1;
    while (file && number < 0 && fgets(line, sizeof(line), file))
        if (strncmp(line, name, strlen(name)) == 0) sscanf(line + strlen(name), "%lld", &number);
    if (file) fclose(file);
    return number;
}

static int64_t number_of_group(const char* group, const char* file, const char* name) {
    char* path = host_format("/sys/fs/cgroup%s/%s", group, file);
    int64_t number = number_in(path, name);
    free(path);
    return number;
}

// `most`, or less where this process' control group (version 2), or one around it, has less left. What a group holds
// of files is given back when memory is short.
static int64_t left_in_groups(int64_t most) {
    FILE* file = fopen("/proc/self/cgroup", "r");
    char line[4096], *end = NULL;
    while (file && fgets(line, sizeof(line), file))
        if (strncmp(line, "0::", 3) == 0) end = line + strcspn(line, "\n");
    if (file) fclose(file);
    for (; end; end = strrchr(line + 2, '/')) {
        *end = 0;
        const char* group = line + 3;
        int64_t limit = number_of_group(group, "memory.max", ""), used = number_of_group(group, "memory.current", "");
        int64_t files = number_of_group(group, "memory.stat", "inactive_file ") +
                        number_of_group(group, "memory.stat", "active_file ");
        if (limit >= 0 && used >= 0) most = min_i64(most, limit - used + files);
    }
    return most;
}

size_t device_free_memory(int sharing) {
    int64_t available = number_in("/proc/meminfo", "MemAvailable:"), swap = number_in("/proc/meminfo", "SwapFree:");
    if (available < 0) return 0;
    int64_t left = left_in_groups(1024 * (available + max_i64(swap, 0))) / sharing;
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        left = min_i64(left, (int64_t)limit.rlim_cur - number_in("/proc/self/statm", "") * sysconf(_SC_PAGESIZE));
    return (size_t)max_i64(left, 1);  // 0 would be unknown
}

size_t device_peak_memory(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (size_t)usage.ru_maxrss * 1024;
}

void* device_alloc(size_t bytes, const char* what) {
    size_t rounded = (bytes + 255) / 256 * 256;
    void* p = aligned_alloc(256, rounded ? rounded : 256);
    if (!p)
        die(EXIT_FAILED, "out of memory: %.2f GiB for %s; use a smaller --batch, --seq-len or model", bytes / 0x1p30,
            what);
    return memset(p, 0, rounded);
}

void device_free(void* p) { free(p); }
void device_zero(void* p, size_t bytes, Ctx* ctx) {
    (void)ctx;
    if (bytes) memset(p, 0, bytes);
}

void device_upload(void* to, const void* host, size_t bytes, Ctx* ctx) { (void)ctx, memcpy(to, host, bytes); }
void device_download(void* host, const void* from, size_t bytes, Ctx* ctx) { (void)ctx, memcpy(host, from, bytes); }

Fetch* fetch_create(size_t bytes) {
    Fetch* fetch = (Fetch*)host_alloc(sizeof(Fetch));
    fetch->bytes = bytes;
    fetch->host = host_alloc(bytes);
    return fetch;
}

void fetch_destroy(Fetch* fetch) {
    free(fetch->host);
    free(fetch);
}

void fetch_begin(Fetch* fetch, const void* from, Ctx* ctx) { device_download(fetch->host, from, fetch->bytes, ctx); }
const void* fetch_end(Fetch* fetch) { return fetch->host; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

Stopwatch* stopwatch_create(void) { return (Stopwatch*)host_alloc(sizeof(Stopwatch)); }
void stopwatch_destroy(Stopwatch* watch) { free(watch); }
void stopwatch_start(Stopwatch* watch, Ctx* ctx) { (void)ctx, watch->start = now(); }
void stopwatch_stop(Stopwatch* watch, Ctx* ctx) { (void)ctx, watch->stop = now(); }
double stopwatch_seconds(Stopwatch* watch) { return watch->stop - watch->start; }

void device_to_floatX(floatX* out, const real* in, int64_t n, Ctx* ctx) {
    (void)ctx;
    if (out != in) memcpy(out, in, (size_t)n * sizeof(real));
}

void device_to_real(real* out, const floatX* in, int64_t n, Ctx* ctx) { device_to_floatX(out, in, n, ctx); }

void device_add(real* out, const real* in, int64_t n, Ctx* ctx) {
    (void)ctx;
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) out[i] += in[i];
}

void device_copy(void* to, const void* from, size_t bytes, Ctx* ctx) { (void)ctx, memcpy(to, from, bytes); }
