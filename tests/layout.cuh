// A ragged layout (grouped/permute.h) for the CUDA tests of permute, dispatch and experts. The reference lays experts
// out without gaps, the kernels at multiples of 128. A tensor of a plan has the reference's layout on the host and the
// kernels' layout on the device. Layout::place maps rows between the two.
#ifndef TESTS_LAYOUT_CUH
#define TESTS_LAYOUT_CUH

#include <algorithm>
#include <functional>

#include "grouped/permute.h"
#include "tests/cuda.cuh"

// The choices: distinct experts at random, one expert first for all tokens, only every third expert, or half of the
// choices held elsewhere (-1).
enum Kind { SPREAD, ONE, SOME_EMPTY, ELSEWHERE };

struct Layout {
    int64_t N, capacity, used;
    int32_t K, El;
    I64 start;
    I32 group_rows, row_token, token_row, expert;
    R row_gate, gate;
    Ragged dev, ref;
    std::vector<int64_t> place;  // device row of each reference row
    int64_t reference_rows;

    Layout(int64_t N, int32_t K, int32_t El, Kind kind)
        : N(N),
          capacity(ragged_capacity(N, K, El, BACKEND_CUDA)),
          K(K),
          El(El),
          start(El + 1),
          group_rows(El),
          row_token(capacity),
          token_row(N * K),
          expert(N * K),
          row_gate(capacity),
          gate(N * K, 9) {
        for (int64_t n = 0; n < N; n++)
            for (int32_t k = 0; k < K; k++) {
                // Distinct: a random start and an odd step through a range of experts.
                int32_t e = (int32_t)((draw_below(20, n, (uint32_t)El) + k) % El);
                if (kind == ONE) e = (El / 2 + k) % El;
                if (kind == SOME_EMPTY) e = e / 3 * 3;
                if (kind == SOME_EMPTY && k > 0) e = -1;
                if (kind == ELSEWHERE && draw_below(21, n * K + k, 2)) e = -1;
                expert.host[(size_t)(n * K + k)] = e;
            }
        expert.send();
        dev = {El, capacity, start.dev, group_rows.dev, row_token.dev, token_row.dev, row_gate.dev};
        ref = {El, capacity, start.ref(), group_rows.ref(), row_token.ref(), token_row.ref(), row_gate.ref()};
        CHECK(permute_workspace(N, K, El) <= ctx->workspace_bytes, "workspace");
        settle();
        permute_plan(dev, expert.dev, gate.dev, N, K, ctx);
        REFERENCE(permute_plan)(ref, expert.ref(), gate.ref(), N, K, reference_ctx);
        reference_rows = start.host[(size_t)El];
        int64_t at = 0;
        for (int32_t e = 0; e < El; e++) {
            for (int64_t r = start.host[(size_t)e]; r < start.host[(size_t)e + 1]; r++)
                place.push_back(at + r - start.host[(size_t)e]);
            at += ceil_div(group_rows.host[(size_t)e], 128) * 128;
        }
        used = at;
    }

    void check() {
        auto starts = start.got();
        auto tokens = row_token.got(), rows = token_row.got();
        auto gates = row_gate.got();
        CHECK_SAME(group_rows);
        int64_t at = 0, wrong = 0;
        for (int32_t e = 0; e <= El; e++) {
            CHECK(starts[(size_t)e] == at, "expert %d starts at %lld for %lld", e, (long long)starts[(size_t)e],
                  (long long)at);
            if (e < El) at += ceil_div(group_rows.host[(size_t)e], 128) * 128;
        }
        CHECK(used <= capacity, "%lld rows of %lld", (long long)used, (long long)capacity);
        for (int64_t i = 0; i < N * K; i++) {
            int64_t r = token_row.host[(size_t)i];
            wrong += rows[(size_t)i] != (r < 0 ? -1 : place[(size_t)r]);
        }
        CHECK(wrong == 0, "%lld of token_row wrong", (long long)wrong);
        std::vector<int32_t> token_want((size_t)used, -1);
        std::vector<double> gate_want((size_t)used, 0.0);
        for (int64_t r = 0; r < reference_rows; r++) {
            token_want[(size_t)place[(size_t)r]] = row_token.host[(size_t)r];
            gate_want[(size_t)place[(size_t)r]] = row_gate.host[(size_t)r];
        }
        for (int64_t r = 0; r < used; r++)
            wrong += tokens[(size_t)r] != token_want[(size_t)r] || gates[(size_t)r] != gate_want[(size_t)r];
        CHECK(wrong == 0, "%lld rows wrong", (long long)wrong);
    }

    // Sends a tensor of rows: each host row to its device row, NaN in pad rows.
    template <typename T>
    void send(T& t, int64_t width) {
        auto values = t.host;
        std::fill(t.host.begin(), t.host.end(), NAN);
        for (int64_t r = 0; r < reference_rows; r++)
            for (int64_t c = 0; c < width; c++)
                t.host[(size_t)(place[(size_t)r] * width + c)] = values[(size_t)(r * width + c)];
        t.send();
        t.host = values;
        settle();
    }

    // The error of the rows in use; infinity if a pad row is not zero.
    template <typename T>
    double error(T& t, int64_t width) {
        auto got = t.got();
        std::vector<double> want((size_t)(used * width), 0.0);
        for (int64_t r = 0; r < reference_rows; r++)
            for (int64_t c = 0; c < width; c++)
                want[(size_t)(place[(size_t)r] * width + c)] = t.host[(size_t)(r * width + c)];
        std::vector<char> real_row((size_t)used, 0);
        for (int64_t r : place) real_row[(size_t)r] = 1;
        double diff = 0, norm = 0;
        for (int64_t i = 0; i < used * width; i++) {
            if (!real_row[(size_t)(i / width)] && got[(size_t)i] != 0) return INFINITY;
            double d = got[(size_t)i] - want[(size_t)i];
            if (!(d == d)) return INFINITY;
            diff += d * d;
            norm += want[(size_t)i] * want[(size_t)i];
        }
        return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
    }
};

#endif
