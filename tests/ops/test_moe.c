// A whole MoE block on one rank against differences, and its memory: the pool and its plan. (Blocks on several ranks:
// tests/parallel/test_expert_parallel.c. Its ops: tests/ops/test_router.c, test_permute.c, test_grouped_gemm.c,
// test_experts.c, test_dispatch.c.)
#include <unistd.h>

#include "device/pool.h"
#include "moe/moe.h"
#include "tests/dies.h"
#include "tests/oracle.h"
#include "tests/weight.h"

// --- The pool ---

enum { ROOM = 10 * 256, MOST = 300 << 20 };
static char* pool_memory;  // the caller's, or NULL

// The warnings of `use`.
static int growths(void (*use)(Pool*), Pool* pool) {
    FILE* said = tmpfile();
    int before = dup(2), count = 0;
    dup2(fileno(said), 2);
    use(pool);
    dup2(before, 2);
    close(before);
    rewind(said);
    for (char line[256]; fgets(line, sizeof(line), said);)
        count += strstr(line, "the pool of a test grew from") != NULL;
    fclose(said);
    return count;
}

static void use_pool(Pool* pool) {
    static char* behind[2];  // of the first run, without the caller's memory and with it
    const size_t empty = pool_mark(pool);
    char *a = pool_take(pool, 1), *b = pool_take(pool, 257), *none = pool_take(pool, 0);
    CHECK((!pool_memory || a == pool_memory) && b == a + 256 && none == b + 512, "%td, %td", b - a, none - b);
    size_t mark = pool_mark(pool);
    char* c = pool_take(pool, ROOM - 3 * 256);  // all of the rest
    CHECK(c == none, "%td behind", c - none);
    pool_release(pool, mark);
    CHECK(pool_take(pool, 5) == c, "released memory was not given again");

    // More than is left. Nothing moves, and memory that was there keeps its values.
    memset(a, 3, 768);
    char* d = pool_take(pool, ROOM);
    CHECK(!pool_memory || d + ROOM <= pool_memory || d >= pool_memory + ROOM, "the same memory twice");
    CHECK((uintptr_t)d % 256 == 0 && (!behind[!!pool_memory] || d == behind[!!pool_memory]), "not aligned, or moved");
    memset(behind[!!pool_memory] = d, 1, ROOM);
    mark = pool_mark(pool);
    for (int i = 0; i < 5; i++) {
        char* e = pool_take(pool, (size_t)20 << 20);
        CHECK(e == d + ROOM + ((size_t)i * 20 << 20), "buffer %d is not behind the one before", i);
        memset(e, 2, (size_t)20 << 20);
    }
    CHECK(a[0] == 3 && a[767] == 3 && d[ROOM - 1] == 1, "other buffers changed");
    pool_release(pool, mark);
    CHECK(pool_take(pool, 1) == d + ROOM, "not where the mark was");
    pool_release(pool, empty);
}

// 100 MiB are taken in steps of 20, and a twentieth more each time. Without the caller's memory the pool has one page
// of 2 MiB, then 22, 44 and 106 at the warnings; with it 2, 22 and 64.
static void test_pool(void) {
    for (int caller = 0; caller < 2; caller++) {
        pool_memory = caller ? device_alloc(ROOM, "a test") : NULL;
        Pool* pool = pool_create("pool of a test", pool_memory, ROOM, MOST);
        int first = growths(use_pool, pool), again = growths(use_pool, pool);
        CHECK(first == 3 && again == 0, "%d growths, then %d", first, again);
        pool_destroy(pool);
        if (caller) device_free(pool_memory);
    }
}

// A step that needs more than there is ends with the load, both sizes, and what helps.
static void too_large(void) {
    Pool* pool = pool_create("pool of a test", NULL, 3 << 20, (size_t)1 << 40);
    pool_load(pool, 3.5);
    pool_take(pool, (size_t)1 << 39);
}
static void test_pool_ends_with_reason(void) {
    DIES(too_large, "the pool of a test has 0.00 GiB and needs 512.00", "3.50 times its share");
    DIES(too_large, "--resume with a smaller --batch", "--recompute");
}

// --- A whole block on one rank ---

typedef struct {
    MoeShape s;
    int blocks;         // run forward one after the other, and backward
    int64_t pool_room;  // bytes, -1: as planned by moe_plan
    real *x, *dy, *router, *w13, *w2, *shared13, *shared2, *bias;
    real *drouter_before, *dw13_before, *dw2_before, *dshared13_before, *dshared2_before;
    char* memory;
    real *y, *dx, *drouter, *dw13, *dw2, *dshared13, *dshared2;
    int32_t* expert;
    int64_t* load;
    double *xd, *dyd, *routerd, *w13d, *w2d, *shared13d, *shared2d;
} Block;

static int64_t planned(const Block* b) {
    Arena plan;
    arena_init(&plan, "a test", BACKEND);
    moe_plan(&plan, b->s, b->blocks);
    size_t bytes = arena_bytes(&plan);
    arena_free(&plan);
    return (int64_t)bytes;
}

// All blocks have the same x, weights and gradients. `y` and `dx` are those of the last call.
static void run_block(void* arg) {
    Block* b = arg;
    MoeShape s = b->s;
    int64_t N = s.router.N, C = s.router.C, E = s.router.E, F = s.F, sF = s.shared_F;
    size_t room = b->pool_room < 0 ? (size_t)planned(b) : (size_t)b->pool_room;
    b->memory = memset(kept_bytes(room), 0xff, room);  // NaN, and -1
    Ctx* ctx = ctx_create(moe_workspace(s));
    Pool* pool = pool_create("pool of a test", b->memory, room, MOST);
    Dispatch* dispatch = dispatch_create(NULL, pool, NULL, ctx);
    b->drouter = copied(b->drouter_before, E * C);
    b->dw13 = copied(b->dw13_before, E * 2 * F * C), b->dw2 = copied(b->dw2_before, E * C * F);
    b->dshared13 = copied(b->dshared13_before, 2 * sF * C), b->dshared2 = copied(b->dshared2_before, C * sF);
    Weight w13 = plain_weight(b->w13, b->dw13, E, 2 * F, C), w2 = plain_weight(b->w2, b->dw2, E, C, F);
    Weight shared13 = plain_weight(b->shared13, b->dshared13, 1, 2 * sF, C);
    Weight shared2 = plain_weight(b->shared2, b->dshared2, 1, C, sF);
    MoeWeights w = {b->router, b->drouter, b->bias, &w13, &w2, &shared13, &shared2};
    b->y = poisoned(N * C), b->dx = poisoned(N * C), b->load = kept_bytes(E * sizeof(int64_t));
    b->expert = poisoned_ints(N * s.router.K);
    // Forward of all blocks, then backward in reverse order.
    MoeSaved saved[3];
    size_t mark[3];
    for (int i = 0; i < b->blocks; i++) {
        mark[i] = pool_mark(pool);
        const BalanceCounts counts = {i == 0 ? b->load : NULL, NULL};
        moe_forward(b->y, b->x, w, &saved[i], counts, s, dispatch, pool, ctx);
    }
    memcpy(b->expert, saved[0].route.expert, N * s.router.K * sizeof(int32_t));
    for (int i = b->blocks - 1; i >= 0; i--) {
        moe_backward(b->dx, b->dy, b->x, w, &saved[i], 0, s, dispatch, pool, ctx);
        pool_release(pool, mark[i]);
    }
    dispatch_destroy(dispatch);
    pool_destroy(pool);
    ctx_destroy(ctx);
}

// <dy, y>, with the experts that forward selected.
static double block_objective(void* arg) {
    Block* b = arg;
    MoeShape s = b->s;
    int64_t C = s.router.C, E = s.router.E, K = s.router.K;
    double objective = 0, *p = host_alloc(E * sizeof(double)), *a = host_alloc((s.F + s.shared_F) * sizeof(double));
    for (int64_t n = 0; n < s.router.N; n++) {
        const double *x = b->xd + n * C, *dy = b->dyd + n * C;
        double all = 0, chosen = 1e-20;
        for (int64_t e = 0; e < E; e++) {
            p[e] = exp(dot(b->routerd + e * C, x, C));
            all += p[e];
        }
        // Scores, then the sum over the selected experts and the shared MLP.
        for (int64_t e = 0; e < E; e++) p[e] = s.router.score == SCORE_SIGMOID ? p[e] / (1 + p[e]) : p[e] / all;
        for (int64_t k = 0; k < K; k++) chosen += p[b->expert[n * K + k]];
        for (int64_t k = -1; k < K; k++) {  // -1: the shared MLP
            int64_t e = k < 0 ? 0 : b->expert[n * K + k], F = k < 0 ? s.shared_F : s.F;
            double* w13 = k < 0 ? b->shared13d : b->w13d + e * 2 * F * C;
            double* w2 = k < 0 ? b->shared2d : b->w2d + e * C * F;
            double gate = k < 0 ? 1 : p[e] * s.router.scale / (s.router.norm ? chosen : 1);
            for (int64_t f = 0; f < F; f++) {
                double g = dot(w13 + f * C, x, C);
                a[f] = g / (1 + exp(-g)) * dot(w13 + (F + f) * C, x, C);
            }
            for (int64_t c = 0; c < C; c++) objective += dy[c] * gate * dot(w2 + c * F, a, F);
        }
    }
    free(p);
    free(a);
    return objective;
}

static real* scaled(int64_t n, uint32_t stream, double scale) {
    real* x = tensor(n, stream);
    for (int64_t i = 0; i < n; i++) x[i] = (real)(scale * x[i]);
    return x;
}

static Block make_block(MoeShape s) {
    int64_t N = s.router.N, C = s.router.C, E = s.router.E, F = s.F, sF = s.shared_F;
    int64_t n13 = E * 2 * F * C, n2 = E * C * F, s13 = 2 * sF * C, s2 = C * sF;
    double c = 1 / sqrt((double)C), f = 1 / sqrt((double)F);
    Block b = {.s = s, .blocks = 1, .pool_room = -1, .x = tensor(N * C, 1), .dy = tensor(N * C, 2)};
    b.router = scaled(E * C, 3, c), b.w13 = scaled(n13, 4, c), b.w2 = scaled(n2, 5, f), b.bias = scaled(E, 8, 0.1);
    b.shared13 = scaled(s13, 6, c), b.shared2 = scaled(s2, 7, f);
    b.drouter_before = tensor(E * C, 9), b.dw13_before = tensor(n13, 10), b.dw2_before = tensor(n2, 11);
    b.dshared13_before = tensor(s13, 12), b.dshared2_before = tensor(s2, 13);
    b.xd = doubles(b.x, N * C), b.dyd = doubles(b.dy, N * C), b.routerd = doubles(b.router, E * C);
    b.w13d = doubles(b.w13, n13), b.w2d = doubles(b.w2, n2);
    b.shared13d = doubles(b.shared13, s13), b.shared2d = doubles(b.shared2, s2);
    return b;
}

static void check_same_block(const Block* a, const Block* b) {
    int64_t N = a->s.router.N, C = a->s.router.C, E = a->s.router.E, F = a->s.F, sF = a->s.shared_F;
    CHECK_BITS(a->expert, b->expert, N * a->s.router.K * sizeof(int32_t));
    CHECK_BITS(a->load, b->load, E * sizeof(int64_t));
    CHECK_BITS(a->y, b->y, N * C * sizeof(real));
    CHECK_BITS(a->dx, b->dx, N * C * sizeof(real));
    CHECK_BITS(a->drouter, b->drouter, E * C * sizeof(real));
    CHECK_BITS(a->dw13, b->dw13, E * 2 * F * C * sizeof(real));
    CHECK_BITS(a->dw2, b->dw2, E * C * F * sizeof(real));
    CHECK_BITS(a->dshared13, b->dshared13, 2 * sF * C * sizeof(real));
    CHECK_BITS(a->dshared2, b->dshared2, C * sF * sizeof(real));
}

static void check_block(MoeShape s) {
    Block b = make_block(s);
    int64_t N = s.router.N, C = s.router.C, E = s.router.E, K = s.router.K, F = s.F, sF = s.shared_F, loads = 0;
    check_threads(run_block, &b);
    double y = 0;
    for (int64_t i = 0; i < N * C; i++) y += (double)b.y[i] * b.dy[i];
    for (int64_t e = 0; e < E; e++) loads += b.load[e];
    CHECK(loads == N * K, "%lld loads", (long long)loads);
    // Every gradient against differences, y as <dy, y>: each of its roundings counts 1 / sqrt(N C) there.
    double objective = block_objective(&b);
    CHECK(fabs(y - objective) <= TOL(1e-6, 1e-14) * sqrt(dot(b.dyd, b.dyd, N * C) * (double)(N * C)), "%.9g and %.9g",
          y, objective);
    CHECK_GRADIENT(block_objective, &b, b.xd, b.dx, NULL, N * C, 2e-6);
    CHECK_GRADIENT(block_objective, &b, b.routerd, b.drouter, b.drouter_before, E * C, 2e-6);
    CHECK_GRADIENT(block_objective, &b, b.w13d, b.dw13, b.dw13_before, E * 2 * F * C, 2e-6);
    CHECK_GRADIENT(block_objective, &b, b.w2d, b.dw2, b.dw2_before, E * C * F, 2e-6);
    if (sF) CHECK_GRADIENT(block_objective, &b, b.shared13d, b.dshared13, b.dshared13_before, 2 * sF * C, 2e-6);
    if (sF) CHECK_GRADIENT(block_objective, &b, b.shared2d, b.dshared2, b.dshared2_before, C * sF, 2e-6);

    b.blocks = 2;  // so that memory which one block released is used again
    run_block(&b);
    Block again = b;
    again.s.recompute = 1;
    run_block(&again);
    check_same_block(&again, &b);
    again.s.recompute = 0;
    again.pool_room = 512;  // almost nothing: the pool must grow for every buffer
    run_block(&again);
    check_same_block(&again, &b);
    release_all();
}

#define BF16 {{NULL}, {NULL}, NULL, NULL, 0, 0}, 1, 0  // nothing in MXFP8, and one rank
static void test_block(void) {
    //             N    T   C  E  K  groups   score    norm scale force  F  shared ep recompute
    check_block((MoeShape){{1, 1, 3, 1, 1, 1, 1, SCORE_SIGMOID, 1, 1, 0}, 2, 2, 1, 0, BF16});
    check_block((MoeShape){{23, 23, 6, 5, 2, 1, 1, SCORE_SIGMOID, 1, 2.5f, 0}, 4, 3, 1, 0, BF16});
    check_block((MoeShape){{130, 65, 9, 8, 3, 1, 1, SCORE_SOFTMAX, 0, 1, 0}, 5, 0, 1, 0, BF16});
    check_block((MoeShape){{40, 20, 8, 8, 2, 4, 2, SCORE_SIGMOID, 0, 1, 0}, 3, 7, 1, 0, BF16});
}

static int64_t rounded(int64_t reals) { return ((int64_t)sizeof(real) * reals + 255) / 256 * 256; }

// With one rank all sizes are known: the plan equals the use of the pool, to the last buffer.
static void test_plan_of_block(void) {
    for (int i = 0; i < 4; i++) {
        RouterShape router = {150, 50, 24, 8, 3, 1, 1, SCORE_SIGMOID, 1, 1, 0};
        MoeShape s = {router, i & 1 ? 40 : 16, i & 2 ? 700 : 0, 1, 0, BF16};  // also where shared_F > K F
        Block b = make_block(s);
        b.blocks = 3;
        int64_t bytes[2], hidden = rounded(150 * 3 * 2 * s.F) + rounded(150 * 2 * s.shared_F);
        for (int recompute = 0; recompute < 2; recompute++) {
            b.s.recompute = recompute;
            bytes[recompute] = planned(&b);
            int64_t used = b.pool_room = 2 * bytes[recompute];
            run_block(&b);
            while (used > 0 && b.memory[used - 1] == (char)0xff) used--;  // unused
            CHECK(used <= bytes[recompute] && used > bytes[recompute] - 256, "%lld bytes planned, %lld used",
                  (long long)bytes[recompute], (long long)used);
        }
        CHECK(bytes[0] - bytes[1] == (b.blocks - 1) * hidden, "recomputing saves %lld bytes, not %lld",
              (long long)(bytes[0] - bytes[1]), (long long)((b.blocks - 1) * hidden));
        release_all();
    }
}

int main(void) {
    RUN(test_pool);
    RUN(test_pool_ends_with_reason);
    RUN(test_block);
    RUN(test_plan_of_block);
    return test_summary();
}
