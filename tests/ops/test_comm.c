// Collectives on device memory, the same in both builds: on all ranks of mpirun, or on one rank without mpirun. Copies
// and sums of small whole numbers are exact. Other sums are compared with sums in double. Each of the R - 1 additions
// rounds to u = 2^-24 of a partial sum. So ||out - ref|| / ||ref|| stays below R u, about 2.4e-7 on 4 ranks; 1e-6 is
// allowed.
#include "device/device.h"
#include "parallel/comm.h"
#include "tests/ranks.h"

static Ctx* ctx;
static Comm* comm;

static void* on_device(const void* host, size_t bytes) {
    void* p = device_alloc(bytes, "a test");
    device_upload(p, host, bytes, ctx);
    return p;
}

// An array of `bytes` bytes of 0xff: NaN as a number.
static void* poison(size_t bytes) {
    void* p = host_alloc(bytes);
    memset(p, 0xff, bytes);
    return p;
}

static unsigned char byte_of(int from, int to, size_t at) {
    return (unsigned char)(from * 31 + to * 7 + at + at / 251);
}

static void all_gather(void) {
    size_t sizes[] = {1, 1000, ((size_t)3 << 20) + 5};
    int n_ranks = comm_count(comm), me = comm_index(comm);
    for (int i = 0; i < 3; i++)
        for (int in_place = 0; in_place < 2; in_place++) {
            size_t n = sizes[i], wrong = 0;
            unsigned char *all = (unsigned char*)poison(n * (size_t)n_ranks), *mine = (unsigned char*)poison(n);
            for (size_t at = 0; at < n; at++) mine[at] = byte_of(me, i, at);
            if (in_place) memcpy(all + n * (size_t)me, mine, n);
            char *all_there = (char*)on_device(all, n * (size_t)n_ranks), *mine_there = (char*)on_device(mine, n);
            comm_all_gather(comm, all_there, in_place ? all_there + n * (size_t)me : mine_there, n, ctx);
            device_download(all, all_there, n * (size_t)n_ranks, ctx);
            for (int r = 0; r < n_ranks; r++)
                for (size_t at = 0; at < n; at++) wrong += all[n * (size_t)r + at] != byte_of(r, i, at);
            CHECK(wrong == 0, "%zu bytes, in place %d: %zu are wrong", n, in_place, wrong);
            device_free(all_there);
            device_free(mine_there);
            free(all);
            free(mine);
        }
}

// The numbers of rank r, the same on every rank.
static real* numbers(int r, int64_t n) { return random_tensor(n, (uint32_t)(100 + r)); }

// Their sum over the ranks in double.
static double* true_sum(int n_ranks, int64_t n) {
    double* sum = (double*)host_alloc((size_t)n * sizeof(double));
    for (int r = 0; r < n_ranks; r++) {
        real* x = numbers(r, n);
        for (int64_t i = 0; i < n; i++) sum[i] += x[i];
        free(x);
    }
    return sum;
}

static double error_of(const real* out, const double* ref, int64_t n) {
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) diff += (out[i] - ref[i]) * (out[i] - ref[i]), norm += ref[i] * ref[i];
    return sqrt(diff / norm);
}

static const int64_t lengths[] = {1, 999, 100003};  // of sums: short and long ones (for rings), all odd

static void reduce_scatter(void) {
    int n_ranks = comm_count(comm), me = comm_index(comm);
    for (int i = 0; i < 3; i++)
        for (int in_place = 0; in_place < 2; in_place++) {
            int64_t n = lengths[i], total = n * n_ranks;
            real *all = numbers(me, total), *part = (real*)poison((size_t)n * sizeof(real));
            double* ref = true_sum(n_ranks, total);
            real* all_there = (real*)on_device(all, (size_t)total * sizeof(real));
            real* part_there = (real*)on_device(part, (size_t)n * sizeof(real));
            real* to = in_place ? all_there + me * n : part_there;
            comm_reduce_scatter(comm, to, all_there, n, ctx);
            device_download(part, to, (size_t)n * sizeof(real), ctx);
            double error = error_of(part, ref + me * n, n);
            CHECK(error < 1e-6, "%lld numbers, in place %d: off by %g", (long long)n, in_place, error);
            device_free(all_there);
            device_free(part_there);
            free(all);
            free(part);
            free(ref);
        }
}

// The same bits on all ranks and in every call.
static void sum_is_the_same_everywhere(void) {
    int n_ranks = comm_count(comm), me = comm_index(comm);
    for (int i = 0; i < 3; i++) {
        int64_t n = lengths[i];
        size_t bytes = (size_t)n * sizeof(real);
        double* ref = true_sum(n_ranks, n);
        real *first = NULL, *all = (real*)host_alloc(bytes * (size_t)n_ranks);
        for (int again = 0; again < 2; again++) {
            real* x = numbers(me, n);
            real* there = (real*)on_device(x, bytes);
            comm_all_reduce(comm, there, n, SUM_REAL, ctx);
            device_download(x, there, bytes, ctx);
            double error = error_of(x, ref, n);
            CHECK(error < 1e-6, "%lld numbers: off by %g", (long long)n, error);
            ranks_all_gather(world, all, x, bytes);
            for (int r = 0; r < n_ranks; r++)
                CHECK(memcmp(all + r * n, x, bytes) == 0, "%lld numbers: rank %d has other bits", (long long)n, r);
            if (first) CHECK(memcmp(first, x, bytes) == 0, "%lld numbers: other bits than before", (long long)n);
            device_free(there);
            free(first);
            first = x;
        }
        free(first);
        free(all);
        free(ref);
    }
}

// double and int64, with numbers that float32 cannot represent.
static void sums_of_other_types(void) {
    int n_ranks = comm_count(comm), me = comm_index(comm);
    for (int i = 0; i < 3; i++) {
        int64_t n = lengths[i], wrong = 0, big = (int64_t)1 << 40;
        double* d = (double*)host_alloc((size_t)n * sizeof(double));
        int64_t* k = (int64_t*)host_alloc((size_t)n * sizeof(int64_t));
        for (int64_t at = 0; at < n; at++) k[at] = big + me * at, d[at] = (double)k[at];
        double* d_there = (double*)on_device(d, (size_t)n * sizeof(double));
        int64_t* k_there = (int64_t*)on_device(k, (size_t)n * sizeof(int64_t));
        comm_all_reduce(comm, d_there, n, SUM_DOUBLE, ctx);
        comm_all_reduce(comm, k_there, n, SUM_I64, ctx);
        device_download(d, d_there, (size_t)n * sizeof(double), ctx);
        device_download(k, k_there, (size_t)n * sizeof(int64_t), ctx);
        for (int64_t at = 0; at < n; at++) {
            int64_t sum = n_ranks * big + at * n_ranks * (n_ranks - 1) / 2;
            wrong += (k[at] != sum) + (d[at] != (double)sum);
        }
        CHECK(wrong == 0, "%lld of %lld numbers are wrong", (long long)wrong, (long long)n);
        device_free(d_there);
        device_free(k_there);
        free(d);
        free(k);
    }
}

// Rank i sends rows(i, j) rows to rank j, in two buffers with rows of 6 and 40 bytes, in reverse order of ranks. A row
// in between stays untouched. Then the rows are sent back and must be unchanged.
static void check_rows(Comm* c, int64_t (*rows)(int from, int to), const char* what) {
    enum { BUFFERS = 2 };
    const size_t row_bytes[BUFFERS] = {6, 40};
    int count = comm_count(c), me = comm_index(c);
    int64_t* room = (int64_t*)host_alloc((size_t)(4 * count) * sizeof(int64_t));
    int64_t *send_start = room, *send = room + count, *recv_start = room + 2 * count, *recv = room + 3 * count;
    int64_t send_end = 1, recv_end = 1, wrong = 0;
    for (int i = count - 1; i >= 0; i--) {
        send_start[i] = send_end;
        send[i] = rows(me, i);
        send_end += send[i] + 1;
        recv_start[i] = recv_end;
        recv[i] = rows(i, me);
        recv_end += recv[i] + 1;
    }
    // The buffers, on the host and on the device. `returned` is poisoned.
    unsigned char *out[BUFFERS], *in[BUFFERS];
    ExchangeBuffer go[BUFFERS], back[BUFFERS];
    for (int b = 0; b < BUFFERS; b++) {
        size_t size = row_bytes[b], out_bytes = (size_t)send_end * size, in_bytes = (size_t)recv_end * size;
        out[b] = (unsigned char*)poison(out_bytes);
        in[b] = (unsigned char*)poison(in_bytes);
        for (int i = 0; i < count; i++)
            for (size_t at = 0; at < (size_t)send[i] * size; at++)
                out[b][(size_t)send_start[i] * size + at] = byte_of(me, i, at + (size_t)b);
        void *there = on_device(in[b], in_bytes), *mine = on_device(out[b], out_bytes);
        go[b] = (ExchangeBuffer){there, mine, size};
        memset(out[b], 0xff, out_bytes);
        void* returned = on_device(out[b], out_bytes);
        back[b] = (ExchangeBuffer){returned, there, size};
    }
    // There and back.
    ExchangeRows forth = {send_start, send, recv_start, recv}, home = {recv_start, recv, send_start, send};
    comm_exchange(c, go, BUFFERS, forth, ctx);
    comm_exchange(c, back, BUFFERS, home, ctx);
    for (int b = 0; b < BUFFERS; b++) {
        size_t size = row_bytes[b];
        device_download(in[b], go[b].recv, (size_t)recv_end * size, ctx);
        device_download(out[b], back[b].recv, (size_t)send_end * size, ctx);
        for (int i = 0; i < count; i++) {
            for (size_t at = 0; at < (size_t)recv[i] * size; at++)
                wrong += in[b][(size_t)recv_start[i] * size + at] != byte_of(i, me, at + (size_t)b);
            for (size_t at = 0; at < (size_t)send[i] * size; at++)
                wrong += out[b][(size_t)send_start[i] * size + at] != byte_of(me, i, at + (size_t)b);
            for (size_t at = 1; at <= size; at++)
                wrong += (in[b][(size_t)recv_start[i] * size - at] != 0xff) +
                         (out[b][(size_t)send_start[i] * size - at] != 0xff);
        }
        device_free(go[b].recv);
        device_free((void*)go[b].send);
        device_free(back[b].recv);
        free(in[b]);
        free(out[b]);
    }
    CHECK(wrong == 0, "%s: %lld bytes are wrong", what, (long long)wrong);
    free(room);
}

static int64_t uneven(int from, int to) { return from * 100 + to * 17; }  // rank 0 keeps nothing for itself
static int64_t nothing(int from, int to) { return (void)from, (void)to, 0; }
static int64_t one_sends(int from, int to) { return (void)to, from == 0 ? 1000 : 0; }
static int64_t one_gets(int from, int to) { return (void)from, to == 0 ? 1000 : 0; }
static int64_t many(int from, int to) { return 20000 + from + to; }
static void exchange(void) {
    check_rows(comm, uneven, "uneven");
    check_rows(comm, nothing, "nothing");
    check_rows(comm, one_sends, "one rank sends");
    check_rows(comm, one_gets, "one rank gets");
    check_rows(comm, many, "many");
}

// A group of one only copies. Then two groups communicate at the same time, on different streams.
static void groups(void) {
    Ranks *alone = ranks_split(world, rank), *odd = ranks_split(world, rank % 2);
    Comm *one = comm_create(alone, "one", ctx), *some = comm_create(odd, "some", ctx), *all = comm;
    ranks_free(alone);
    ranks_free(odd);
    CHECK(comm_count(one) == 1 && comm_index(one) == 0, "%d of %d", comm_index(one), comm_count(one));
    CHECK(comm_index(some) == rank / 2, "%d of %d", comm_index(some), comm_count(some));
    comm = one;
    all_gather();
    reduce_scatter();
    check_rows(one, many, "alone");
    comm = all;
    check_rows(some, uneven, "every second rank");

    // Sums over all ranks on the side stream, over every second rank on ctx.
    enum { N = 1 << 20, TURNS = 15 };
    Ctx* side = ctx_side(ctx, 0);
    Event* ready = event_create();
    int64_t *ones = (int64_t*)host_alloc(N * sizeof(int64_t)), wrong = 0;
    for (int i = 0; i < N; i++) ones[i] = 1;
    int64_t *x = (int64_t*)on_device(ones, N * sizeof(int64_t)), *y = (int64_t*)on_device(ones, N * sizeof(int64_t));
    event_record(ready, ctx);
    event_wait(ready, side);
    for (int i = 0; i < TURNS; i++) {
        comm_all_reduce(all, x, N, SUM_I64, side);
        comm_all_reduce(some, y, N, SUM_I64, ctx);
    }
    // Each sum multiplies the numbers by the number of ranks.
    int64_t in_all = 1, in_some = 1;
    for (int i = 0; i < TURNS; i++) in_all *= ranks, in_some *= comm_count(some);
    event_record(ready, side);
    event_wait(ready, ctx);
    device_download(ones, x, N * sizeof(int64_t), ctx);
    for (int i = 0; i < N; i++) wrong += ones[i] != in_all;
    device_download(ones, y, N * sizeof(int64_t), ctx);
    for (int i = 0; i < N; i++) wrong += ones[i] != in_some;
    CHECK(wrong == 0, "%lld sums are wrong", (long long)wrong);
    device_free(x);
    device_free(y);
    free(ones);
    event_destroy(ready);
    ctx_destroy(side);
    comm_destroy(one);
    comm_destroy(some);
}

int main(int argc, char** argv) {
    ranks_open(&argc, &argv, 60);
    if (!device_available()) {
        SKIP(comm, "no GPU");
        return ranks_close();
    }
    device_choose(ranks_local());
    ctx = ctx_create(0);
    comm = comm_create(world, "all", ctx);
    RUN_RANKS(all_gather);
    RUN_RANKS(reduce_scatter);
    RUN_RANKS(sum_is_the_same_everywhere);
    RUN_RANKS(sums_of_other_types);
    RUN_RANKS(exchange);
    RUN_RANKS(groups);
    comm_destroy(comm);
    ctx_destroy(ctx);
    return ranks_close();
}
