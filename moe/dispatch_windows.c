#include "moe/dispatch_windows.h"

#include "device/cpu.h"

void route_on_device(const Route* r, real* overflow, const int64_t* counts, int32_t index, Ctx* ctx) {
    const int32_t P = r->shape.ep;
    int64_t *rows = r->by_windows, *sent = rows + WINDOW_ROWS * P, *received = sent + WINDOW_NUMBERS * P;
    double needed = 0;
    for (int32_t j = 0; j < P; j++)
        needed = fmax(needed, route_numbers(rows, counts, index, P, j, row_align(BACKEND), r->received, r->choices));
    if (needed <= 1) return;
    for (int32_t j = 0; j < P; j++) sent[j] = received[j] = 0;
    if (*overflow == 0) *overflow = (real)needed;
}
