// The all-to-all of expert parallelism against NCCL's all-to-all, in the same run. It times dispatch (rows, expert
// ids and gates in one transfer) and combine (rows) of one MoE block with random routing. The yardstick is an NCCL
// all-to-all: the rows that leave the ranks in dispatch, spread evenly over all pairs. GB/s: bytes that leave a GPU
// over the time. Times are medians over 30 calls, measured with CUDA events.
//
//   mpirun -np 4 build/cuda/bench/exchange [tokens a rank]
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <vector>

#include "device/cuda.cuh"
#include "parallel/comm.h"

static Ctx* ctx;
static Ranks* world;

template <typename Call>
static double seconds(Call call) {
    std::vector<double> times;
    Stopwatch* watch = stopwatch_create();
    for (int i = 0; i < 33; i++) {
        stopwatch_start(watch, ctx);
        call();
        stopwatch_stop(watch, ctx);
        double t = stopwatch_seconds(watch);
        if (i >= 3) times.push_back(t);
    }
    stopwatch_destroy(watch);
    std::sort(times.begin(), times.end());
    // The time of the slowest rank: a transfer ends when every rank has its rows.
    double mine = times[times.size() / 2], slowest = 0;
    std::vector<double> all((size_t)ranks_count(world));
    ranks_all_gather(world, all.data(), &mine, sizeof(mine));
    for (double t : all) slowest = std::max(slowest, t);
    return slowest;
}

static uint64_t random_state;
static uint32_t random32(void) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(random_state >> 33);
}

static void family(Comm* comm, ncclComm_t nccl, const char* name, int64_t N, int64_t C, int E, int K) {
    const int P = comm_count(comm);
    std::vector<int64_t> to((size_t)P), from((size_t)P), all((size_t)P * P), send_at((size_t)P), recv_at((size_t)P);

    // Random routing: K different experts for each token. A token is sent once to each rank that owns one of them.
    random_state = 1 + comm_index(comm);
    for (int64_t n = 0; n < N; n++) {
        std::vector<int> chosen;
        while ((int)chosen.size() < K) {
            int e = (int)(random32() % E);
            if (std::find(chosen.begin(), chosen.end(), e) == chosen.end()) chosen.push_back(e);
        }
        std::vector<int> there((size_t)P);
        for (int e : chosen) there[(size_t)(e / (E / P))] = 1;
        for (int p = 0; p < P; p++) to[(size_t)p] += there[(size_t)p];
    }

    // The rows to and from every rank, and where they start.
    ranks_all_gather(world, all.data(), to.data(), (size_t)P * sizeof(int64_t));
    int64_t sent = 0, received = 0;
    for (int p = 0; p < P; p++) {
        from[(size_t)p] = all[(size_t)(p * P + comm_index(comm))];
        send_at[(size_t)p] = sent, recv_at[(size_t)p] = received;
        sent += to[(size_t)p], received += from[(size_t)p];
    }
    const int64_t rows = std::max(std::max(sent, received), P * N), leaves = sent - to[(size_t)comm_index(comm)];
    floatX* x = (floatX*)device_alloc((size_t)(rows * C) * 2, "the benchmark");
    floatX* y = (floatX*)device_alloc((size_t)(rows * C) * 2, "the benchmark");
    int32_t* id = (int32_t*)device_alloc((size_t)(2 * rows * K) * 4, "the benchmark");
    real* gate = (real*)device_alloc((size_t)(2 * rows * K) * 4, "the benchmark");
    ExchangeBuffer out[3] = {
        {y, x, (size_t)C * 2}, {id + rows * K, id, (size_t)K * 4}, {gate + rows * K, gate, (size_t)K * 4}};
    ExchangeRows outward = {send_at.data(), to.data(), recv_at.data(), from.data()};
    ExchangeRows back = {recv_at.data(), from.data(), send_at.data(), to.data()};

    // The two transfers and the yardstick.
    double dispatch = seconds([&] { comm_exchange(comm, out, 3, outward, ctx); });
    double combine = seconds([&] { comm_exchange(comm, out, 1, back, ctx); });
    int64_t travel = 0;  // rows between different ranks
    for (int i = 0; i < P * P; i++) travel += i / P == i % P ? 0 : all[(size_t)i];
    const size_t each = (size_t)(travel / std::max(1, P * (P - 1)) * C) * 2;
    double yardstick = seconds([&] {
        ncclGroupStart();
        for (int p = 0; p < P; p++) {
            ncclSend((const char*)x + (size_t)p * each, each, ncclInt8, p, nccl, ctx->stream);
            ncclRecv((char*)y + (size_t)p * each, each, ncclInt8, p, nccl, ctx->stream);
        }
        ncclGroupEnd();
    });
    double rate = (double)each * (P - 1) / yardstick, bytes = (double)(leaves * C) * 2;
    double with_choices = (double)leaves * ((double)C * 2 + K * 8.0);
    printf("| %s | %.2f | %.0f | %.0f | %.2f | %.0f | %.2f |\n", name, 1e3 * dispatch, rate / 1e9,
           with_choices / dispatch / 1e9, with_choices / dispatch / rate, bytes / combine / 1e9,
           bytes / combine / rate);
    fflush(stdout);
    device_free(x);
    device_free(y);
    device_free(id);
    device_free(gate);
}

int main(int argc, char** argv) {
    world = ranks_start(&argc, &argv);
    const int64_t N = argc > 1 ? atoll(argv[1]) : 16384;
    device_choose(ranks_local());
    ctx = ctx_create(256);
    Comm* comm = comm_create(world, "benchmark", ctx);
    ncclUniqueId id;
    if (ranks_index(world) == 0) ncclGetUniqueId(&id);
    ranks_broadcast(world, &id, sizeof(id), 0);
    ncclComm_t nccl;
    if (ncclCommInitRank(&nccl, ranks_count(world), id, ranks_index(world)) != ncclSuccess)
        die(EXIT_FAILED, "NCCL cannot start: %s", ncclGetLastError(NULL));
    printf("%s, %d ranks, %lld tokens a rank\n", device_name(ctx), ranks_count(world), (long long)N);
    printf(
        "| preset | dispatch, ms | all-to-all, GB/s | dispatch, GB/s | ratio | combine, GB/s | ratio "
        "|\n|---|---|---|---|---|---|---|\n");
    family(comm, nccl, "small", N, 512, 32, 4);
    family(comm, nccl, "16b", N, 2048, 64, 6);
    family(comm, nccl, "671b", N / 4, 7168, 256, 8);
    ncclCommDestroy(nccl);
    comm_destroy(comm);
    ctx_destroy(ctx);
    ranks_end(world);
    return 0;
}
