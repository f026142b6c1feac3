// The routes of expert parallelism: the rows that ranks send and receive.
#include "moe/dispatch_ops.h"
#include "moe/dispatch_windows.h"
#include "tests/routing.h"

typedef struct {
    int64_t N;
    int32_t K, P, El;
    int32_t* expert;
    real *gate, *sent;
    int32_t *rank, *row_expert;
    int64_t* counts;
    real *row_gate, *dgate;
    Ragged send;
} Sorting;

static void run_dispatch(void* arg) {
    Sorting* d = arg;
    int64_t capacity = d->send.capacity = ragged_capacity(d->N, d->P, d->P, BACKEND);
    d->send.El = d->P;
    d->rank = poisoned_ints(d->N * d->P), d->counts = kept_bytes(2 * d->P * sizeof(int64_t));
    memset(d->counts, 0x7b, 2 * d->P * sizeof(int64_t));
    d->send.group_start = kept_bytes((d->P + 1) * sizeof(int64_t)), d->send.group_rows = poisoned_ints(d->P);
    d->send.row_token = poisoned_ints(capacity), d->send.token_row = poisoned_ints(d->N * d->P);
    d->row_expert = poisoned_ints(capacity * d->K), d->row_gate = poisoned(capacity * d->K);
    d->dgate = poisoned(d->N * d->K);
    Ctx* ctx = ctx_create(permute_workspace(d->N, d->P, d->P));
    dispatch_ranks(d->rank, d->counts, d->expert, d->N, d->K, d->P, d->El, ctx);
    permute_plan(d->send, d->rank, NULL, d->N, d->P, ctx);
    dispatch_choices(d->row_expert, d->row_gate, d->expert, d->gate, d->send, d->N, d->K, d->El, ctx);
    dispatch_choices_backward(d->dgate, d->sent, d->expert, d->send, d->N, d->K, d->El, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static void check_dispatch(int64_t N, int32_t K, int32_t P, int32_t El, int kind) {
    Routing r = make_routing(N, K, P * El, P * El, 0, kind == ONE_TAKES_ALL ? RANDOM : kind);
    if (kind == ONE_TAKES_ALL)  // the experts of one rank first
        for (int64_t i = 0; i < N * K; i++) r.expert[i] = (int32_t)(((P - 1) * El + i % K) % (P * El));
    Sorting d = {.N = N, .K = K, .P = P, .El = El, .expert = r.expert, .gate = r.gate};
    d.sent = tensor(ragged_capacity(N, P, P, BACKEND) * K, 4);
    check_threads(run_dispatch, &d);
    int64_t wrong = 0, row = 0;
    for (int32_t j = 0; j < P; j++) {  // in order of ranks, then of tokens
        int64_t first = row, choices = 0;
        for (int64_t n = 0; n < N; n++) {
            int64_t here = 0;
            for (int32_t k = 0; k < K; k++) here += r.expert[n * K + k] / El == j;
            wrong += d.rank[n * P + j] != (here ? j : -1);
            choices += here;
            if (!here) continue;
            wrong += d.send.row_token[row] != n;
            for (int32_t k = 0; k < K; k++) {
                int32_t local = r.expert[n * K + k] - j * El, held = local >= 0 && local < El;
                wrong += d.row_expert[row * K + k] != (held ? local : -1);
                wrong += d.row_gate[row * K + k] != (held ? r.gate[n * K + k] : 0);
                wrong += held && d.dgate[n * K + k] != d.sent[row * K + k];
            }
            row++;
        }
        CHECK(d.counts[2 * j] == row - first && d.counts[2 * j + 1] == choices,
              "rank %d: %lld tokens, %lld choices, expected %lld and %lld", j, (long long)d.counts[2 * j],
              (long long)d.counts[2 * j + 1], (long long)(row - first), (long long)choices);
    }
    CHECK(wrong == 0, "%lld wrong values, N %lld K %d P %d El %d kind %d", (long long)wrong, (long long)N, K, P, El,
          kind);
    release_all();
}

static void test_dispatch(void) {
    for (int kind = 0; kind < 3; kind++) {
        static const int kinds[3] = {RANDOM, IN_ORDER, ONE_TAKES_ALL};
        check_dispatch(1, 1, 1, 1, kinds[kind]);
        check_dispatch(5, 2, 2, 1, kinds[kind]);
        check_dispatch(129, 3, 4, 2, kinds[kind]);
        check_dispatch(130, 1, 8, 1, kinds[kind]);
        check_dispatch(300, 6, 8, 8, kinds[kind]);
        check_dispatch(0, 3, 4, 2, kinds[kind]);
    }
}

// Each of P ranks computes its numbers from the same counts, and they must agree. The rows that one rank sends, another
// receives, without gaps and at the place known to the sender. Combine returns rows to the place that they were sent
// from. If the capacity is one token or choice below the fullest rank's load, nothing is sent, and the needed share is
// reported.
static void check_numbers(int32_t P, uint32_t seed, int empty) {
    int64_t *counts = kept_bytes(2 * P * P * sizeof(int64_t)),
            *all = kept_bytes(P * 2 * WINDOW_NUMBERS * P * sizeof(int64_t));
    int64_t tokens = 0, choices = 0;
    for (int32_t i = 0; i < P * P; i++) {
        counts[2 * i] = empty && P > 1 && i % P == 1 ? 0 : (int64_t)(random_uniform(31, seed, (uint64_t)i) * 300);
        counts[2 * i + 1] = counts[2 * i] * 2;
    }
    for (int32_t to = 0; to < P; to++) {
        int64_t sum = 0;
        for (int32_t from = 0; from < P; from++) sum += counts[(from * P + to) * 2];
        if (sum > tokens) tokens = sum, choices = 2 * sum;
    }

    // With exactly enough capacity, and with one too little of either.
    enum { ROWS = 2 * WINDOW_NUMBERS };
    for (int lacks = 0; lacks < 3; lacks++) {
        real overflow = 0;
        memset(all, 0x7b, P * ROWS * P * sizeof(int64_t));
        for (int32_t i = 0; i < P; i++) {
            const Route route = {.shape = {.ep = P},
                                 .received = tokens - (lacks == 1),
                                 .choices = choices - (lacks == 2),
                                 .by_windows = all + i * ROWS * P};
            route_on_device(&route, &overflow, counts, i, NULL);
        }
        const double share = lacks == 1   ? (double)tokens / (double)(tokens - 1)
                             : lacks == 2 ? (double)choices / (double)(choices - 1)
                                          : 0;
        CHECK(overflow == (real)share, "%d ranks: overflow %g, not %g", P, (double)overflow, share);

        // Starts also as on the GPU, where sent rows have gaps.
        int64_t wrong = 0;
        const int64_t align = lacks == 0 ? 128 : row_align(BACKEND);
        for (int32_t i = 0; i < P && lacks == 0; i++)
            for (int32_t j = 0; j < P; j++) route_numbers(all + i * ROWS * P, counts, i, P, j, align, tokens, choices);
        for (int32_t i = 0; i < P; i++) {
            int64_t sent = 0, received = 0;
            const int64_t *sends = all + i * ROWS * P, *receives = sends + WINDOW_NUMBERS * P;
            for (int32_t j = 0; j < P; j++) {
                const int64_t *sends_there = all + j * ROWS * P, *receives_there = sends_there + WINDOW_NUMBERS * P;
                const int64_t out = counts[(i * P + j) * 2], in = counts[(j * P + i) * 2];
                wrong += sends[WINDOW_ROWS * P + j] != (lacks ? 0 : out);
                wrong += receives[WINDOW_ROWS * P + j] != (lacks ? 0 : in);
                wrong += sends[WINDOW_START * P + j] != sent || receives[WINDOW_START * P + j] != received;
                wrong += sends[WINDOW_THERE * P + j] != receives_there[WINDOW_START * P + i];
                wrong += receives[WINDOW_THERE * P + j] != sends_there[WINDOW_START * P + i];
                sent += round_up(out, align), received += in;
            }
        }
        CHECK(wrong == 0, "%lld wrong numbers of %d ranks, lacks %d", (long long)wrong, P, lacks);
    }
    release_all();
}

static void test_numbers(void) {
    for (int32_t P = 1; P <= 64; P = P < 4 ? P + 1 : 4 * P)
        for (uint32_t seed = 0; seed < 3; seed++) check_numbers(P, seed, seed == 2);
}

// 8 experts on 4 ranks, 2 choices a token: a rank has one of them with probability 1 - (6/8)(5/7) = 13/28.
static void test_expected(void) {
    enum { N = 28000 };
    static const double capacities[] = {1, 1.25, 2, 3};
    for (int i = 0; i < 4; i++) {
        Route r = {.shape = {.N = N, .C = 64, .E = 8, .K = 2, .ep = 4, .capacity = capacities[i]}};
        dispatch_expect(&r, BACKEND);
        const int64_t even = (int64_t)(capacities[i] * 4 * 13000), all = 4 * N;
        CHECK(llabs(r.received - min_i64(even, all)) <= 1 && r.received <= all, "capacity %g: %lld tokens",
              capacities[i], (long long)r.received);
        CHECK(r.choices == (int64_t)(capacities[i] * 2 * N), "capacity %g: %lld choices", capacities[i],
              (long long)r.choices);
    }
}

int main(void) {
    RUN(test_expected);
    RUN(test_dispatch);
    RUN(test_numbers);
    return test_summary();
}
