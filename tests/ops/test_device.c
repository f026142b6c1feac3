// The basic parts: random numbers, memory arenas, folders, kernel selection. Options and their errors are tested
// through the program (tests/model/test_options.py).
#include <errno.h>
#include <sys/stat.h>

#include "device/arena.h"
#include "device/cpu.h"
#include "device/files.h"
#include "device/kernels.h"
#include "tests/files.h"

// Known answer of Philox 4x32-10 for counter 0 and key 0, from the authors' Random123 distribution (kat_vectors).
static void philox_known_answer(void) {
    uint32_t out[4];
    philox(out, 0, 0, 0);
    CHECK(out[0] == 0x6627e8d5 && out[1] == 0xe169c58d && out[2] == 0xbc57ac4c && out[3] == 0x9b00dbd8,
          "%08x %08x %08x %08x", out[0], out[1], out[2], out[3]);
}

// Every part of the address matters.
static void philox_streams(void) {
    uint32_t base[4], other[4];
    philox(base, 1, 2, 3);
    uint64_t seeds[4] = {2, 1, 1, 1ull << 32 | 1}, indices[4] = {3, 3, 1ull << 32 | 3, 3};
    uint32_t streams[4] = {2, 3, 2, 2};
    for (int i = 0; i < 4; i++) {
        philox(other, seeds[i], streams[i], indices[i]);
        CHECK(memcmp(base, other, sizeof(base)) != 0, "case %d gives the same numbers", i);
    }
}

static void arena_lays_out(void) {
    Arena cpu, cuda;
    floatX* x;
    real* r;
    int32_t* ids;
    arena_init(&cpu, "test", BACKEND);
    arena_init(&cuda, "test", BACKEND_CUDA);
    Arena* both[2] = {&cpu, &cuda};
    for (int i = 0; i < 2; i++) {
        ARENA(both[i], "x", ELEMENT_X, 1000, 1, &x);
        ARENA(both[i], "r", ELEMENT_REAL, 3, 0, &r);
        ARENA(both[i], "ids", ELEMENT_I32, 65, 0, &ids);
    }
    CHECK(arena_bytes(&cuda) == 2048 + 256 + 512, "CUDA: %zu bytes", arena_bytes(&cuda));
    arena_allocate(&cpu);
    CHECK((uintptr_t)x % 256 == 0 && (uintptr_t)r % 256 == 0 && (uintptr_t)ids % 256 == 0, "not aligned");
    CHECK((char*)r >= (char*)(x + 1000) && (char*)ids >= (char*)(r + 3), "buffers overlap");
    CHECK((char*)(ids + 65) <= cpu.memory + arena_bytes(&cpu), "the last buffer does not fit");
    arena_free(&cpu);
    free(cuda.entries);
}

static void folders(void) {
    make_folder("device");
    char* deep = host_format("%s/a/b/c", folder);
    CHECK(make_folders(deep) == 0 && make_folders(deep) == 0, "a/b/c, made twice");
    free(deep);
    write_file("file", "12345", 5);
    char* below = host_format("%s/file/x", folder);
    CHECK(make_folders(below) == -1 && errno == ENOTDIR, "a folder below a file: errno %d", errno);
    free(below);
    CHECK(make_folders(in_folder("file")) == -1 && errno == ENOTDIR, "a folder over a file: errno %d", errno);
    // Files: read back, missing, a folder.
    size_t size;
    char* text = read_file(in_folder("file"), SIZE_MAX, &size);
    CHECK(text && size == 5 && strcmp(text, "12345") == 0, "read back %s", text ? text : "nothing");
    free(text);
    CHECK(!read_file(in_folder("none"), SIZE_MAX, &size) && errno == ENOENT, "a missing file: errno %d", errno);
    CHECK(!read_file(folder, SIZE_MAX, &size) && errno == EISDIR, "a folder as a file: errno %d", errno);
    // A closed descriptor is an error, not a file system that cannot flush.
    const int fd = new_file(in_folder("file"), "", 0);
    CHECK(sync_file(fd, "file") == 0 && is_open_as(fd, in_folder("file")), "an open file");
    close(fd);
    CHECK(sync_file(fd, "file") == -1 && errno == EBADF, "flushed without a file: errno %d", errno);
    CHECK(!is_open_as(fd, in_folder("file")), "a closed file passes as open");
    // Trees are removed. Links and FIFOs are refused.
    write_file("a/b/c/one", "1", 1);
    CHECK(
        remove_tree(in_folder("a/b")) == 0 && access(in_folder("a/b"), F_OK) != 0 && access(in_folder("a"), F_OK) == 0,
        "a/b is not gone, or more is");
    CHECK(remove_tree(in_folder("a/b")) == 0, "what is missing is gone");
    write_file("file", "12345", 5);
    CHECK(!read_file(in_folder("file"), 4, &size) && errno == EFBIG, "a file beyond the limit: errno %d", errno);
    CHECK(symlink(folder, in_folder("a/link")) == 0 && remove_tree(in_folder("a/link")) == -1 && errno == ELOOP,
          "a link is removed: errno %d", errno);
    CHECK(new_file(in_folder("a/link"), "", 0) == -1 && errno == ELOOP, "written through a link: errno %d", errno);
    CHECK(remove_tree(in_folder("a")) == 0 && access(in_folder("file"), F_OK) == 0, "removed through a link");
    CHECK(mkfifo(in_folder("fifo"), 0600) == 0 && open_file(in_folder("fifo")) == -1 && errno == ENXIO,
          "a FIFO is opened: errno %d", errno);
    remove_matching("");
}

// The OpenBLAS kernels that the program requests, by the processor and the library's own choice. NULL: keep that
// choice.
static void kernels_to_ask_for(void) {
    static const struct {
        const char* chosen;
        int avx2, avx512;
        const char* better;
    } cases[] = {{"Prescott", 1, 1, "SkylakeX"},
                 {"Prescott", 1, 0, "Haswell"},
                 {"Prescott", 0, 0, NULL},
                 {"Core2", 1, 0, "Haswell"},
                 {"Nehalem", 1, 1, "SkylakeX"},
                 {"Barcelona", 1, 0, "Haswell"},
                 {"Sandybridge", 1, 1, "SkylakeX"},
                 {"Sandybridge", 0, 0, NULL},
                 {"Piledriver", 0, 0, NULL},
                 {"Haswell", 1, 1, "SkylakeX"},
                 {"Haswell", 1, 0, NULL},
                 {"Zen", 1, 1, "SkylakeX"},
                 {"Zen", 1, 0, NULL},
                 {"Excavator", 1, 0, NULL},
                 {"SkylakeX", 1, 1, NULL},
                 {"Cooperlake", 1, 1, NULL},
                 {"SapphireRapids", 1, 1, NULL},
                 {"a later one", 1, 1, NULL},
                 {"neoversen1", 0, 0, NULL},
                 {"", 1, 1, NULL}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char* better = blas_kernels(cases[i].chosen, cases[i].avx2, cases[i].avx512);
        int same = better && cases[i].better ? strcmp(better, cases[i].better) == 0 : better == cases[i].better;
        CHECK(same, "%s, AVX2 %d, AVX-512 %d: %s", cases[i].chosen, cases[i].avx2, cases[i].avx512,
              better ? better : "as it is");
    }
}

// The kernels of each GPU, and the message if there are none.
static void kernels_of_gpus(void) {
    struct {
        int capability;
        const char* asked;
        int portable;
        const char *error, *fast;  // parts of the messages
    } cases[] = {{80, NULL, 1, NULL, "9.0 (H100, H200) or 10.0"},
                 {86, "portable", 1, NULL, "--precision mxfp8-exact"},
                 {89, NULL, 1, NULL, "--precision mxfp8-exact"},
                 {90, NULL, 0, NULL, NULL},
                 {90, "portable", 1, NULL, "unset TRAIN_MOE_KERNELS"},
                 {100, NULL, 1, NULL, NULL},
                 {120, NULL, 1, NULL, NULL},
                 {90, "fast", -1, "TRAIN_MOE_KERNELS=fast: must be portable, or not set", NULL},
                 {90, "", -1, "TRAIN_MOE_KERNELS=: must be portable, or not set", NULL},
                 {75, NULL, -1, "7.5 is too old: a GPU of 8.0 or more", NULL},
                 {75, "portable", -1, "7.5 is too old", NULL}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char* error;
        const int capability = cases[i].capability, portable = kernels_choose(capability, cases[i].asked, &error);
        CHECK(portable == cases[i].portable, "case %zu: %d", i, portable);
        CHECK(cases[i].error ? error && strstr(error, cases[i].error) : !error, "case %zu: %s", i, error);
        if (portable < 0) continue;
        const char* fast = kernels_without_fast(capability, portable);
        CHECK(cases[i].fast ? fast && strstr(fast, cases[i].fast) : !fast, "case %zu: %s", i, fast);
    }
}

// Within one major version a driver runs programs of every toolkit.
static void old_drivers(void) {
    const char* reason = kernels_old_driver(12090, 13000);
    CHECK(reason && strstr(reason, "supports CUDA 12.9, this program was built with 13.0"), "%s", reason);
    CHECK(!kernels_old_driver(13000, 13050) && !kernels_old_driver(13050, 13000) && !kernels_old_driver(13000, 12080),
          "a driver that runs the program is refused");
}

// A peak that is not that of the card would make its MFU wrong.
static void peaks(void) {
    static const struct {
        const char* name;
        int sms, known;
    } cases[] = {{"NVIDIA H100 80GB HBM3", 132, 1},
                 {"NVIDIA H200", 132, 1},
                 {"NVIDIA GH200 480GB", 132, 1},
                 {"NVIDIA H100 PCIe", 114, 0},
                 {"NVIDIA H100 NVL", 132, 0},
                 {"NVIDIA H200 NVL", 132, 0},
                 {"NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 0},
                 {"NVIDIA H20", 78, 0},
                 {"NVIDIA GeForce RTX 4090", 128, 0},
                 {"NVIDIA B200", 148, 0}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        CHECK(kernels_peak_flops(cases[i].name, cases[i].sms) == (cases[i].known ? 989e12 : 0), "%s", cases[i].name);
}

// The address sanitizer would end the program where malloc must return NULL.
const char* __asan_default_options(void) { return "allocator_may_return_null=1"; }

static void out_of_memory(void) { device_alloc((size_t)1 << 60, "the moon"); }
static void wrong_usage(void) { ASSERT(1 + 1 == 3); }
static void ends_with_reason(void) {
    DIES(out_of_memory, "out of memory", "the moon");
    DIES(wrong_usage, "tests/ops/test_device.c", "1 + 1 == 3");
}

int main(void) {
    RUN(philox_known_answer);
    RUN(philox_streams);
    RUN(arena_lays_out);
    RUN(folders);
    RUN(kernels_to_ask_for);
    RUN(old_drivers);
    RUN(peaks);
    RUN(kernels_of_gpus);
    RUN(ends_with_reason);
    return test_summary();
}
