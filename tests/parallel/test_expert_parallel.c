// Expert parallelism: a MoE block with its experts on several ranks equals the block on one rank with all the tokens.
// Every rank also computes the one-rank block, and gathers all results. A single rank is tested against itself.
//
// Tolerances. On the CPU the all-to-all does not round, so only the orders of sums differ. A token's sum is taken rank
// by rank, a weight's gradient group by group. A GEMM may use other instructions for a row at another place in its
// tile. The errors are some u = 6e-8 (1e-16 in double). On CUDA, rows are sent in bf16, and each rank's partial sum is
// rounded once. Such a rounding is 8e-4 of its part (2^-9, uniform within a binade), and three of them add up.
#include "moe/moe.h"
#include "parallel/comm_windows.h"
#include "tests/ranks.h"
#include "tests/transfer.h"
#include "tests/weight.h"

#ifdef F64
#define TOLERANCE 1e-14
#else
#define TOLERANCE (BACKEND == BACKEND_CUDA ? 4e-3 : 1e-6)
#endif

enum { C = 32, E = 8, F = 24, T = 8 };
enum { OUTPUTS = 7, BLOCKS = 2 };

static Comm* comms[E + 1];  // by ep: this rank's group of ep ranks
static char* no_windows;    // the reason if there are no windows, else NULL
static real* overflow;      // for dispatches by windows

// Layouts: ep = 1, 2, 4, ... while it divides the ranks and the experts.
static int next_ep(int ep) { return ep < E && ranks % (2 * ep) == 0 ? 2 * ep : 0; }

static real* random_reals(int64_t n, uint32_t stream, double scale) {
    real *normal = random_tensor(n, stream), *x = (real*)host_room((size_t)n * sizeof(real));
    for (int64_t i = 0; i < n; i++) x[i] = (real)(scale * (double)normal[i]);
    free(normal);
    return x;
}

// --- The block ---

typedef struct Case {
    const char* name;
    int64_t N[4];  // tokens of each rank, repeated every four ranks
    int32_t K, score, groups;
    int64_t shared_F;
    int32_t force_balance;
    int32_t favourite;  // the expert that every token selects, -1: none
} Case;

// All tokens and experts, the same on every rank.
typedef struct Inputs {
    real *x, *dy, *router, *w13, *w2, *shared13, *shared2, *bias;
} Inputs;

// y (N, C), dx (N, C), and the gradients of router, w13, w2, shared13, shared2, over BLOCKS equal blocks.
typedef struct Outputs {
    real* out[OUTPUTS];
    int64_t n[OUTPUTS];
    int32_t* expert;  // (N, K)
    int64_t* load;    // (E)
    int64_t used;     // bytes of the pool's memory that were written
    real overflow;    // after the blocks
} Outputs;
static const char* const output_names[OUTPUTS] = {"y", "dx", "drouter", "dw13", "dw2", "dshared13", "dshared2"};

static int64_t tokens_before(const Case* c, int r) {
    int64_t N = 0;
    for (int i = 0; i < r; i++) N += c->N[i % 4];
    return N;
}

static int64_t total_tokens(const Case* c) { return tokens_before(c, ranks); }

static MoeShape shape_of(const Case* c, int64_t N, int ep, int recompute) {
    int32_t groups = c->groups > 1 ? c->groups : 1, top = groups > 1 ? groups / 2 : 1, norm = c->score == SCORE_SIGMOID;
    RouterShape router = {N, T, C, E, c->K, groups, top, c->score, norm, 1.5f, c->force_balance};
    MoeShape s = {router, F, c->shared_F, ep, recompute, {{NULL}, {NULL}, NULL, NULL, 0, 0}, 1, 0};
    return s;
}

static Inputs make_inputs(const Case* c) {
    int64_t N = total_tokens(c), sF = c->shared_F;
    double scale = 1 / sqrt((double)C);
    Inputs in;
    in.x = random_reals(N * C, 1, 1);
    in.dy = random_reals(N * C, 2, 1);
    in.router = random_reals(E * C, 3, scale);
    in.w13 = random_reals(E * 2 * F * C, 4, scale);
    in.w2 = random_reals(E * C * F, 5, scale);
    in.shared13 = random_reals(2 * sF * C, 6, scale);
    in.shared2 = random_reals(C * sF, 7, scale);
    in.bias = random_reals(E, 8, 0.01);
    if (c->favourite >= 0) in.bias[c->favourite] = 10;
    return in;
}

static size_t planned(MoeShape s) {
    Arena plan;
    arena_init(&plan, "a test", BACKEND);
    moe_plan(&plan, s, BLOCKS);
    size_t bytes = arena_bytes(&plan);
    arena_free(&plan);
    return bytes;
}

// Runs BLOCKS forward passes, then BLOCKS backward passes, on tokens first .. first + N - 1 and this rank's experts.
// The pool has `room` bytes.
static Outputs run_block(const Inputs* in, MoeShape s, int64_t first, size_t room) {
    int64_t N = s.router.N, K = s.router.K, El = E / s.ep, at = s.ep > 1 ? comm_index(comms[s.ep]) * El : 0;
    int64_t sF = s.shared_F, n13 = El * 2 * F * C, n2 = El * C * F;
    floatX *x = send(in->x + first * C, N * C), *dy = send(in->dy + first * C, N * C),
           *y = (floatX*)poison((size_t)(N * C) * sizeof(floatX));
    floatX* dx = (floatX*)poison((size_t)(N * C) * sizeof(floatX));
    Outputs o = {.n = {N * C, N * C, E * C, n13, n2, 2 * sF * C, C * sF}};
    real* d[OUTPUTS];
    for (int i = 2; i < OUTPUTS; i++) d[i] = (real*)device_room((size_t)o.n[i] * sizeof(real));
    Weight w13 = plain_weight(send(in->w13 + at * 2 * F * C, n13), d[3], El, 2 * F, C);
    Weight w2 = plain_weight(send(in->w2 + at * C * F, n2), d[4], El, C, F);
    Weight shared13 = plain_weight(send(in->shared13, 2 * sF * C), d[5], 1, 2 * sF, C);
    Weight shared2 = plain_weight(send(in->shared2, C * sF), d[6], 1, C, sF);
    MoeWeights w = {send(in->router, E * C), d[2], send_real(in->bias, E), &w13, &w2, &shared13, &shared2};
    int64_t* load = (int64_t*)device_room(E * sizeof(int64_t));

    // With windows, the pool is in symmetric memory, which the other ranks can write.
    char* memory = (char*)(s.windows ? comm_window(comms[s.ep], room, "a test") : device_room(room));
    char* before = (char*)host_room(room);
    device_zero(overflow, sizeof(*overflow), ctx);
    memset(before, 0xff, room);  // NaN, and -1
    device_upload(memory, before, room, ctx);
    Pool* pool = pool_create("pool of a test", memory, room, (size_t)1 << 30);
    Dispatch* dispatch = dispatch_create(s.ep > 1 ? comms[s.ep] : NULL, pool, overflow, ctx);
    MoeSaved saved[BLOCKS];
    size_t mark[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) {
        mark[b] = pool_mark(pool);
        const BalanceCounts counts = {b ? NULL : load, NULL};
        moe_forward(y, x, w, &saved[b], counts, s, dispatch, pool, ctx);
    }
    o.expert = (int32_t*)fetch(saved[0].route.expert, (size_t)(N * K) * sizeof(int32_t));
    for (int b = BLOCKS - 1; b >= 0; b--) {
        moe_backward(dx, dy, x, w, &saved[b], 0, s, dispatch, pool, ctx);
        pool_release(pool, mark[b]);
    }
    o.out[0] = fetch_floatX(y, N * C);
    o.out[1] = fetch_floatX(dx, N * C);
    for (int i = 2; i < OUTPUTS; i++) o.out[i] = (real*)fetch(d[i], (size_t)o.n[i] * sizeof(real));
    o.load = (int64_t*)fetch(load, E * sizeof(int64_t));
    const char* after = (const char*)fetch(memory, room);
    o.used = (int64_t)room;
    while (o.used > 0 && after[o.used - 1] == (char)0xff) o.used--;
    device_download(&o.overflow, overflow, sizeof(o.overflow), ctx);
    dispatch_destroy(dispatch);
    pool_destroy(pool);
    if (s.windows) comm_window_free(comms[s.ep]);
    return o;
}

// --- All ranks' results on every rank ---

// All-gather to (ranks, bytes). Each rank has `own` bytes, padded to `bytes`.
static void* gather(const void* mine, size_t own, size_t bytes) {
    char *padded = (char*)host_room(bytes), *all = (char*)host_room((size_t)ranks * bytes);
    if (own) memcpy(padded, mine, own);
    ranks_all_gather(world, all, padded, bytes);
    return all;
}

// The rows of all tokens, in order of the ranks.
static void* gather_tokens(const Case* c, const void* mine, size_t row) {
    int64_t most = 0;
    for (int i = 0; i < 4; i++) most = c->N[i] > most ? c->N[i] : most;
    char* all = (char*)gather(mine, (size_t)c->N[rank % 4] * row, (size_t)most * row);
    char* packed = (char*)host_room((size_t)total_tokens(c) * row);
    for (int r = 0; r < ranks; r++)
        memcpy(packed + (size_t)tokens_before(c, r) * row, all + (size_t)(r * most) * row, (size_t)c->N[r % 4] * row);
    return packed;
}

// Sum over the ranks; with parts > 1 rank r has part r % parts of the whole.
static real* gather_sum(const real* mine, int64_t n, int parts) {
    const real* all = (const real*)gather(mine, (size_t)n * sizeof(real), (size_t)n * sizeof(real));
    real* sum = (real*)host_room((size_t)(n * parts) * sizeof(real));
    for (int64_t i = 0; i < n * parts; i++) {
        double of_ranks = 0;
        for (int r = (int)(i / n); r < ranks; r += parts) of_ranks += (double)all[r * n + i % n];
        sum[i] = (real)of_ranks;
    }
    return sum;
}

static int same_bits(const Outputs* a, const Outputs* b) {
    int same = 1;
    for (int i = 0; i < OUTPUTS; i++) same &= !memcmp(a->out[i], b->out[i], (size_t)a->n[i] * sizeof(real));
    return same;
}

// --- Tests ---

// K = 1 has softmax: with sigmoid, one normalised gate is constant, and the router's gradient is only rounding.
static const Case cases[] = {
    //                      tokens of the ranks   K  score        groups shared force favourite
    {"random", {40, 56, 33, 129}, 3, SCORE_SIGMOID, 1, 40, 0, -1},
    {"balanced", {40, 8, 64, 128}, 3, SCORE_SIGMOID, 1, 40, 1, -1},  // N K % E = 0: the turns agree with one rank
    {"all to one expert", {40, 56, 33, 129}, 1, SCORE_SOFTMAX, 1, 16, 0, 5},
    {"one expert and others", {150, 56, 33, 129}, 3, SCORE_SIGMOID, 1, 0, 0, 2},
    {"none on one rank", {40, 0, 33, 129}, 3, SCORE_SIGMOID, 1, 40, 0, -1},
    {"all on one rank, to one expert", {57, 0, 0, 0}, 1, SCORE_SOFTMAX, 1, 16, 0, 0},
    {"groups", {129, 1, 3, 33}, 2, SCORE_SOFTMAX, 4, 40, 0, -1},
};
enum { CASES = sizeof(cases) / sizeof(cases[0]) };

static void check_layout(const Case* c, int ep, const Inputs* in, const Outputs* one) {
    int64_t first = tokens_before(c, rank), N = total_tokens(c);
    MoeShape s = shape_of(c, c->N[rank % 4], ep, 0), again = shape_of(c, c->N[rank % 4], ep, 1);
    Outputs o = run_block(in, s, first, planned(s)), recomputed = run_block(in, again, first, planned(again));
    CHECK(same_bits(&o, &recomputed), "%s, ep %d: recomputed is not the same", c->name, ep);
    Outputs grown = run_block(in, s, first, 512);
    CHECK(same_bits(&o, &grown), "%s, ep %d: not the same in a pool that had to grow", c->name, ep);

    int32_t* expert = (int32_t*)gather_tokens(c, o.expert, (size_t)c->K * sizeof(int32_t));
    CHECK(!memcmp(expert, one->expert, (size_t)(N * c->K) * sizeof(int32_t)), "%s, ep %d: other experts", c->name, ep);
    const int64_t* loads = (const int64_t*)gather(o.load, E * sizeof(int64_t), E * sizeof(int64_t));
    for (int e = 0; e < E; e++) {
        int64_t load = 0;
        for (int r = 0; r < ranks; r++) load += loads[r * E + e];
        CHECK(load == one->load[e], "%s, ep %d: load of expert %d is %lld for %lld", c->name, ep, e, (long long)load,
              (long long)one->load[e]);
    }
    for (int i = 0; i < OUTPUTS; i++) {
        real* whole = i < 2 ? (real*)gather_tokens(c, o.out[i], C * sizeof(real))
                            : gather_sum(o.out[i], o.n[i], i == 3 || i == 4 ? ep : 1);
        double error = relative_error(whole, one->out[i], one->n[i]);
        if (getenv("TEST_ERRORS") && rank == 0 && one->n[i])
            printf("    %s, ep %d, %s: %.2g of %.2g\n", c->name, ep, output_names[i], error, (double)TOLERANCE);
        CHECK(error <= TOLERANCE, "%s, ep %d: %s is off by %g", c->name, ep, output_names[i], error);
    }
}

static void test_layouts(void) {
    for (int i = 0; i < CASES; i++) {
        const Case* c = &cases[i];
        Inputs in = make_inputs(c);
        MoeShape s = shape_of(c, total_tokens(c), 1, 0);
        Outputs one = run_block(&in, s, 0, planned(s));
        for (int ep = 1; ep; ep = next_ep(ep)) check_layout(c, ep, &in, &one);
        forget(0, 0);
    }
}

// With even loads, the pool uses the number of bytes that moe_plan planned.
static void test_plan(void) {
    static const Case even = {"even", {2048, 2048, 2048, 2048}, 3, SCORE_SIGMOID, 1, 40, 0, -1};
    Inputs in = make_inputs(&even);
    for (int ep = 1; ep; ep = next_ep(ep))
        for (int recompute = 0; recompute < 2; recompute++) {
            MoeShape s = shape_of(&even, even.N[0], ep, recompute);
            size_t bytes = planned(s);
            Outputs o = run_block(&in, s, rank * even.N[0], 2 * bytes);
            const int64_t* used = (const int64_t*)gather(&o.used, sizeof(int64_t), sizeof(int64_t));
            double mean = 0;
            for (int r = 0; r < ranks; r++) mean += (double)used[r] / ranks;
            if (getenv("TEST_ERRORS") && rank == 0)
                printf("    ep %d, recompute %d: %.0f of %.0f bytes\n", ep, recompute, mean, (double)bytes);
            CHECK(mean > 0.97 * (double)bytes && mean < 1.03 * (double)bytes,
                  "ep %d, recompute %d: %.0f bytes used, %.0f planned", ep, recompute, mean, (double)bytes);
        }
    forget(0, 0);
}

// Dispatch by windows, where GPUs write tokens directly and no host has the counts. With enough capacity, it gives the
// same bits as dispatch by NCCL. If one expert gets all tokens, with capacity 1, every block overflows and sends no
// token. All ranks then have the needed capacity.
static void test_windows(void) {
    for (int i = 0; i < CASES; i++) {
        Case c = cases[i];
        for (int r = 0; r < 4; r++) c.N[r] = cases[i].N[0];
        Inputs in = make_inputs(&c);
        for (int ep = 2; ep && ranks > 1; ep = next_ep(ep))
            for (int recompute = 0; recompute < 2; recompute++) {
                MoeShape s = shape_of(&c, c.N[0], ep, recompute), room = s, tight = s;
                room.windows = tight.windows = 1;
                room.capacity = ep;
                Outputs sent = run_block(&in, s, rank * c.N[0], planned(s));
                Outputs stored = run_block(&in, room, rank * c.N[0], planned(room));
                CHECK(same_bits(&sent, &stored), "%s, ep %d, recompute %d: stored is not sent", c.name, ep, recompute);
                CHECK(stored.overflow == 0, "%s, ep %d: overflow %g", c.name, ep, (double)stored.overflow);
                if (c.K > 1 || c.favourite < 0) continue;
                Outputs none = run_block(&in, tight, rank * c.N[0], planned(tight));
                CHECK(none.overflow == ep, "%s, ep %d: overflow %g", c.name, ep, (double)none.overflow);
                for (int64_t n = 0; n < none.n[0]; n++) CHECK(isfinite(none.out[0][n]), "y is not finite");
            }
        forget(0, 0);
    }
}

int main(int argc, char** argv) {
    setenv("NCCL_CUMEM_ENABLE", "1", 1);  // windows need it; other tests turn it off for a faster start
    ranks_open(&argc, &argv, 60);
    if (!device_available()) {
        SKIP(test_layouts, "no GPU");
        SKIP(test_plan, "no GPU");
        SKIP(test_windows, "no GPU");
        return ranks_close();
    }
    device_choose(ranks_local());
    int most = 1;
    while (next_ep(most)) most = next_ep(most);
    Case large = {"", {0}, 3, SCORE_SIGMOID, 1, 40, 0, -1};
    ctx = ctx_create(moe_workspace(shape_of(&large, 2048, most, 0)));
    Ranks* groups[E + 1];
    for (int ep = 2; ep <= most; ep *= 2) {
        groups[ep] = ranks_split(world, rank / ep);
        comms[ep] = comm_create(groups[ep], "expert parallel", ctx);
        if (!no_windows) no_windows = comm_windows_missing(comms[ep], world);
    }
    overflow = (real*)device_alloc(sizeof(real), "a test");
    RUN_RANKS(test_layouts);
    RUN_RANKS(test_plan);
    if (no_windows || ranks == 1)
        SKIP(test_windows, ranks == 1 ? "one rank" : no_windows);
    else
        RUN_RANKS(test_windows);
    device_free(overflow);
    for (int ep = 2; ep <= most; ep *= 2) {
        comm_destroy(comms[ep]);
        ranks_free(groups[ep]);
    }
    ctx_destroy(ctx);
    return ranks_close();
}
