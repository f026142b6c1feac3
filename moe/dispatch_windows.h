// Dispatch without the host (--dispatch windows): the counts stay on the device, and rows go through symmetric memory
// (parallel/comm_windows.h). Buffers have a fixed size, the capacity: the capacity factor times the mean load. Received
// rows that stay unused have no choices (received_expert -1). All ranks must have the same N.
//
// Overflow: a rank would receive more than its capacity. All ranks of the group see the overflow in the counts, and
// nothing is sent. The step then changes no weight, and runs again with more capacity (model/windows.h): no token is
// dropped.
#pragma once

#include <math.h>

#include "moe/dispatch.h"
#include "parallel/comm_windows.h"

// Sets route->by_windows from the counts of all ranks (P, P, 2): of rank i, tokens and choices for each rank j. `index`
// is this rank. Overflow is more than route->received tokens or route->choices choices; all counts of rows are then 0.
// The first overflow of a step sets *overflow to needed capacity / capacity of the fullest rank. Later layers see
// garbage and do not count.
void route_on_device(const Route* route, real* overflow, const int64_t* counts, int32_t index, Ctx* ctx);

// Rows from rank i to rank j: their first row among all rows that i sends (sent_at) or that j receives (received_at).
static inline BOTH_SIDES int64_t sent_at(const int64_t* counts, int32_t P, int32_t i, int32_t j, int64_t align) {
    int64_t at = 0;
    for (int32_t to = 0; to < j; to++) at += round_up(counts[(i * P + to) * 2], align);
    return at;
}
static inline BOTH_SIDES int64_t received_at(const int64_t* counts, int32_t P, int32_t i, int32_t j) {
    int64_t at = 0;
    for (int32_t from = 0; from < i; from++) at += counts[(from * P + j) * 2];
    return at;
}

// Writes the numbers of the rows to and from rank j, in both builds. Returns needed capacity / capacity of rank j.
static inline BOTH_SIDES double route_numbers(int64_t* rows, const int64_t* counts, int32_t index, int32_t P, int32_t j,
                                              int64_t align, int64_t received, int64_t choices) {
    int64_t *sends = rows + j, *receives = sends + WINDOW_NUMBERS * P, tokens = received_at(counts, P, P, j), pairs = 0;
    for (int32_t i = 0; i < P; i++) pairs += counts[(i * P + j) * 2 + 1];
    sends[WINDOW_START * P] = sent_at(counts, P, index, j, align);
    sends[WINDOW_ROWS * P] = counts[(index * P + j) * 2];
    sends[WINDOW_THERE * P] = received_at(counts, P, index, j);
    receives[WINDOW_START * P] = received_at(counts, P, j, index);
    receives[WINDOW_ROWS * P] = counts[(j * P + index) * 2];
    receives[WINDOW_THERE * P] = sent_at(counts, P, j, index, align);
    return fmax((double)tokens / (double)received, (double)pairs / (double)choices);
}
