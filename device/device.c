// The CPU as a device: work runs when it is queued, device memory is host memory, and a Ctx holds the workspace. Most
// of this file is about the environment: OpenBLAS's kernels and buffers, and the memory that a process may still
// allocate.
#include <errno.h>
#include <omp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "device/cpu.h"

// OpenBLAS's own controls; absent (NULL) with another CBLAS.
extern void openblas_set_num_threads(int n) __attribute__((weak));
extern char* openblas_get_corename(void) __attribute__((weak));
extern char* openblas_get_config(void) __attribute__((weak));
extern void* blas_memory_alloc(int place) __attribute__((weak));
extern void blas_memory_free(void* buffer) __attribute__((weak));

// The copy that fetch_begin made.
struct Fetch {
    size_t bytes;
    char host[];
};

struct Stopwatch {
    double start, stop;  // seconds
};

// On processors younger than itself OpenBLAS selects SSE3 kernels (Prescott) or AVX2 kernels (Haswell, Zen). Families
// that are not listed are at least as good as the possible replacement.
const char* blas_kernels(const char* chosen, int avx2, int avx512) {
    static const char* const before_avx2[] = {"Prescott", "Core2", "Nehalem", "Sandybridge", "Barcelona"};
    int old = 0, has_avx2 = strcmp(chosen, "Haswell") == 0 || strcmp(chosen, "Zen") == 0;
    for (size_t i = 0; i < sizeof(before_avx2) / sizeof(before_avx2[0]); i++)
        old |= strcmp(chosen, before_avx2[i]) == 0;
    if (avx512 && (old || has_avx2)) return "SkylakeX";
    return avx2 && old ? "Haswell" : NULL;
}

// The kernels to request from OpenBLAS on this processor. NULL: its choice is kept, or the CBLAS is another library.
static const char* better_kernels(void) {
#ifdef __x86_64__
    if (!openblas_get_corename || !openblas_get_config || !strstr(openblas_get_config(), "DYNAMIC_ARCH")) return NULL;
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    // Processors with AVX-512 VL have F, CD, BW and DQ too.
    int avx512 = avx2 && __builtin_cpu_supports("avx512vl");
    return blas_kernels(openblas_get_corename(), avx2, avx512);
#else
    return NULL;
#endif
}

// Restores this thread's affinity to all OpenMP places. With OMP_PROC_BIND it is bound to the first place, and the
// restarted program would inherit that one only.
static void unbind(void) {
    cpu_set_t all;
    CPU_ZERO(&all);
    for (int place = 0; place < omp_get_num_places(); place++) {
        int count = omp_get_place_num_procs(place), *ids = (int*)host_alloc((size_t)count * sizeof(int));
        omp_get_place_proc_ids(place, ids);
        for (int i = 0; i < count; i++) CPU_SET(ids[i], &all);
        free(ids);
    }
    if (CPU_COUNT(&all)) sched_setaffinity(0, sizeof(all), &all);
}

// Sets an environment variable if it is not set. Returns 1 if it did.
static int set_variable(const char* name, const char* value) {
    return value && !getenv(name) && setenv(name, value, 1) == 0;
}

void device_setup(char** argv) {
    // 2000 spins are 50 to 100 us, about the wake-up time of a sleeping thread. Longer spinning would take the
    // processor from other programs, and from the thread that is waited for.
    int lacked = !getenv("OMP_WAIT_POLICY") && set_variable("GOMP_SPINCOUNT", "2000");
    lacked |= set_variable("OPENBLAS_NUM_THREADS", "1");
    lacked |= set_variable("OPENBLAS_CORETYPE", better_kernels());

    // Restarts the program. Not by /proc/self/exe, which would name the process "exe". Without AT_BASE the program was
    // started by the loader, as its argument.
    if (!lacked || !getauxval(AT_BASE)) return;
    unbind();
    execv((const char*)getauxval(AT_EXECFN), argv);
}

void device_choose(int index) {}

// Allocates all of OpenBLAS's buffers, after a trial has shown that this is possible. A GEMM takes a buffer, which
// OpenBLAS keeps for later GEMMs. Without memory for it, OpenBLAS would retry forever.
static void take_buffers(int threads) {
    if (!blas_memory_alloc || !blas_memory_free) return;

    // The trial: map the same address space, and unmap it at once. OpenBLAS 0.3 has no buffer larger than 128 MiB on
    // x86-64 and arm64.
    const size_t bytes = (size_t)threads * (128 << 20);
    void* room = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        die(EXIT_FAILED,
            "out of memory: %.2f GiB of address space for OpenBLAS's buffers of %d threads; set OMP_NUM_THREADS to "
            "fewer, or raise the limit (ulimit -v)",
            (double)bytes / 0x1p30, threads);
    munmap(room, bytes);

    // Each thread takes a buffer, and returns it after all threads have one. OpenBLAS then has one per thread.
#pragma omp parallel num_threads(threads)
    {
        void* buffer = blas_memory_alloc(0);
#pragma omp barrier
        blas_memory_free(buffer);
    }
}

static Ctx* new_ctx(size_t workspace, const char* what) {
    Ctx* ctx = (Ctx*)host_alloc(sizeof(Ctx));
    ctx->workspace = (char*)device_alloc(workspace, what);
    ctx->workspace_bytes = workspace;
    return ctx;
}

Ctx* ctx_create(size_t workspace) {
    const int threads = device_workers();
    take_buffers(threads);
    Ctx* ctx = new_ctx(workspace, "workspace");
    // The parallelism is in the ops: every GEMM runs on one thread, so its bits depend on its shape alone.
    if (openblas_set_num_threads) openblas_set_num_threads(1);
    snprintf(ctx->name, sizeof(ctx->name), "CPU, %d thread%s, %s%s%s", threads, threads == 1 ? "" : "s",
             openblas_get_corename ? "OpenBLAS (" : "CBLAS", openblas_get_corename ? openblas_get_corename() : "",
             openblas_get_corename ? " kernels)" : "");
    return ctx;
}

void ctx_destroy(Ctx* ctx) {
    device_free(ctx->workspace);
    free(ctx);
}

// Work runs when it is queued, so streams and events do nothing.
Ctx* ctx_side(Ctx* ctx, size_t workspace) { return new_ctx(workspace, "workspace of a side stream"); }

Event* event_create(void) { return NULL; }
void event_destroy(Event* event) {}
void event_record(Event* event, Ctx* ctx) {}
void event_wait(Event* event, Ctx* ctx) {}

void ctx_sync(Ctx* ctx) {}
const char* device_name(Ctx* ctx) { return ctx->name; }
double device_peak_flops(Ctx* ctx) { return 0; }
int device_workers(void) { return omp_get_max_threads(); }

// Returns the rest of the first line in a file that begins with `name`; NULL if there is none.
static char* line_after(char line[4096], const char* path, const char* name) {
    FILE* file = fopen(path, "r");
    char* rest = NULL;
    while (file && !rest && fgets(line, 4096, file))
        if (strncmp(line, name, strlen(name)) == 0) rest = line + strlen(name);
    if (file) fclose(file);
    return rest;
}

// The same for a number; -1 if there is none.
static int64_t number_in(const char* path, const char* name) {
    char line[4096], *rest = line_after(line, path, name);
    long number;
    return rest && sscanf(rest, "%ld", &number) == 1 ? number : -1;
}

// The same for a file of a control group.
static int64_t number_of_group(const char* group, const char* file, const char* name) {
    char* path = host_format("/sys/fs/cgroup%s/%s", group, file);
    int64_t number = number_in(path, name);
    free(path);
    return number;
}

// `most`, or less if this process' control group (version 2), or a group around it, has less left. File caches of a
// group count as free: the kernel drops them when memory is short.
static int64_t left_in_groups(int64_t most) {
    char line[4096], *group = line_after(line, "/proc/self/cgroup", "0::");

    // From this process' group outwards: the parent of a group is the parent folder.
    for (char* end = group ? strchrnul(group, '\n') : NULL; end; end = strrchr(group, '/')) {
        *end = 0;
        int64_t limit = number_of_group(group, "memory.max", ""), used = number_of_group(group, "memory.current", "");
        int64_t files = number_of_group(group, "memory.stat", "inactive_file ") +
                        number_of_group(group, "memory.stat", "active_file ");
        if (limit >= 0 && used >= 0) most = min_i64(most, limit - used + files);
    }
    return most;
}

// The memory that is available without swapping out other processes, and the free swap.
size_t device_free_memory(int sharing) {
    int64_t available = number_in("/proc/meminfo", "MemAvailable:"), swap = number_in("/proc/meminfo", "SwapFree:");
    if (available < 0) return 0;

    // The machine's memory, shared. Less if a control group or a limit of this process allows less.
    // /proc/meminfo counts in KiB.
    int64_t left = left_in_groups(1024 * (available + max_i64(swap, 0))) / sharing;
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        left = min_i64(left, (int64_t)limit.rlim_cur - number_in("/proc/self/statm", "") * sysconf(_SC_PAGESIZE));
    return (size_t)max_i64(left, 1);  // 0 would mean unknown
}

size_t device_peak_memory(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    // Linux counts ru_maxrss in KiB.
    return (size_t)usage.ru_maxrss * 1024;
}

void* device_alloc(size_t bytes, const char* what) {
    // Aligned to 256 bytes like cudaMalloc, and zeroed like the GPU's.
    size_t rounded = (bytes + 255) / 256 * 256;
    void* p = aligned_alloc(256, rounded ? rounded : 256);
    if (!p)
        die(EXIT_FAILED, "out of memory: %.2f GiB for %s; use a smaller --batch, --seq-len or model", bytes / 0x1p30,
            what);
    return memset(p, 0, rounded);
}

void device_free(void* p) { free(p); }

char* device_reserve(size_t bytes) {
    void* p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) die(EXIT_FAILED, "no address space for %.2f GiB: %s", (double)bytes / 0x1p30, strerror(errno));
    return (char*)p;
}

// The kernel gives memory at the first access, and kills a process when none is left, so the free memory is asked
// first.
int device_map(char* at, size_t bytes) {
    const size_t available = device_free_memory(1);
    return (!available || bytes <= available) && mprotect(at, bytes, PROT_READ | PROT_WRITE) == 0;
}

void device_unreserve(char* addresses, size_t mapped, size_t reserved) { munmap(addresses, reserved); }

void device_zero(void* p, size_t bytes, Ctx* ctx) { device_fill(p, 0, bytes, ctx); }

void device_fill(void* p, int byte, size_t bytes, Ctx* ctx) {
    if (bytes) memset(p, byte, bytes);
}

void device_upload(void* to, const void* host, size_t bytes, Ctx* ctx) { memcpy(to, host, bytes); }
void device_download(void* host, const void* from, size_t bytes, Ctx* ctx) { memcpy(host, from, bytes); }

// A fetch copies at once in fetch_begin, so fetch_end does not wait.
Fetch* fetch_create(size_t bytes) {
    Fetch* fetch = (Fetch*)host_alloc(sizeof(Fetch) + bytes);
    fetch->bytes = bytes;
    return fetch;
}

void fetch_destroy(Fetch* fetch) { free(fetch); }

void fetch_begin(Fetch* fetch, const void* from, Ctx* ctx) { device_download(fetch->host, from, fetch->bytes, ctx); }
const void* fetch_end(Fetch* fetch) { return fetch->host; }

Stopwatch* stopwatch_create(void) { return (Stopwatch*)host_alloc(sizeof(Stopwatch)); }
void stopwatch_destroy(Stopwatch* watch) { free(watch); }
void stopwatch_start(Stopwatch* watch, Ctx* ctx) { watch->start = host_seconds(); }
void stopwatch_stop(Stopwatch* watch, Ctx* ctx) { watch->stop = host_seconds(); }
double stopwatch_seconds(Stopwatch* watch) { return watch->stop - watch->start; }

void device_to_real(real* out, const floatX* in, int64_t n, Ctx* ctx) {
    if (out != in) memcpy(out, in, (size_t)n * sizeof(real));  // floatX is real in this build
}

void masters_upload(Master* master, floatX* weight, const real* host, int64_t n, Ctx* ctx) {
    memcpy(master, host, (size_t)n * sizeof(real));
    if (weight != master) memcpy(weight, host, (size_t)n * sizeof(real));
}

void masters_download(real* host, const Master* master, const floatX* weight, int64_t n, Ctx* ctx) {
    memcpy(host, master, (size_t)n * sizeof(real));
}

void device_add(real* out, const real* in, int64_t n, Ctx* ctx) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) out[i] += in[i];
}

void device_copy(void* to, const void* from, size_t bytes, Ctx* ctx) { memcpy(to, from, bytes); }

void device_copy_rows(void* to, size_t to_stride, const void* from, size_t from_stride, size_t bytes, int64_t rows,
                      Ctx* ctx) {
    for (int64_t i = 0; i < rows; i++)
        memcpy((char*)to + (size_t)i * to_stride, (const char*)from + (size_t)i * from_stride, bytes);
}
