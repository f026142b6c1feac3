#include "layers/draw.h"

#include <omp.h>

#include "layers/normal.h"

void masters_draw(Master* master, floatX* weight, int64_t n, double mean, double std, uint64_t seed, uint32_t stream,
                  int64_t first, Ctx* ctx) {
    // No thread gets less than a third of a millisecond of work, because a model has hundreds of tensors. Start time of
    // four runs of `small` on 64 cores: 20 s with 64 threads for every tensor, 2 s with six threads each.
#pragma omp parallel for schedule(static) num_threads((int)min_i64(omp_get_max_threads(), n / 16384 + 1))
    for (int64_t four = first / 4; four < ceil_div(first + n, 4); four++) {
        uint32_t word[4];
        philox(word, seed, stream, (uint64_t)four);
        for (int64_t j = max_i64(4 * four, first); j < min_i64(4 * four + 4, first + n); j++)
            weight[j - first] = master[j - first] = (float)(mean + std * normal_of(word[j % 4]));
    }
}
