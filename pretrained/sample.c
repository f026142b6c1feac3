#include "pretrained/sample.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "device/random.h"

enum { SAMPLE_STREAM = 0xFFFFFFFFu - 1 };  // apart from the streams of the weights (model/params.h)

// Descending, for qsort.
static int larger_first(const void* a, const void* b) {
    real x = *(const real*)a, y = *(const real*)b;
    return (x < y) - (x > y);
}

int32_t sample_draw(real* logits, int64_t V, double temperature, int64_t top_k, double u) {
    // The likeliest token.
    int32_t best = 0;
    for (int64_t v = 1; v < V; v++)
        if (logits[v] > logits[best]) best = (int32_t)v;
    if (temperature == 0) return best;

    // Only the top_k largest weigh: all above the least of them, and the first of those equal to it.
    if (top_k < V) {
        real* sorted = (real*)host_alloc((size_t)V * sizeof(real));
        memcpy(sorted, logits, (size_t)V * sizeof(real));
        qsort(sorted, (size_t)V, sizeof(real), larger_first);
        const real least = sorted[top_k - 1];
        free(sorted);
        for (int64_t v = 0; v < V; v++) top_k -= logits[v] > least;
        for (int64_t v = 0; v < V; v++)
            if (logits[v] < least || (logits[v] == least && top_k-- <= 0)) logits[v] = -INFINITY;
    }

    // The sum of all weights, then the token at which their running sum reaches u of it.
    double sum = 0;
    // The largest logit is subtracted, so that exp does not overflow.
    for (int64_t v = 0; v < V; v++) sum += exp((logits[v] - logits[best]) / temperature);
    double left = u * sum;
    for (int64_t v = 0; v < V; v++) {
        left -= exp((logits[v] - logits[best]) / temperature);
        if (left <= 0) return (int32_t)v;
    }
    return best;
}

char* model_sample(Model* m, const Settings* s, Ranks* world, const Tokenizer* tokenizer, int64_t step) {
    // A prompt has one token a byte (check_samples in pretrained/sources.c).
    const int64_t prompt = (int64_t)strlen(s->prompt), V = m->config.V;
    int32_t* ids = (int32_t*)host_alloc((size_t)(1 + prompt + s->sample_tokens) * sizeof(int32_t));
    real* logits = (real*)host_alloc((size_t)V * sizeof(real));

    // End of text and the prompt.
    ids[0] = tokenizer->eot;
    for (int64_t i = 0; i < prompt; i++) ids[1 + i] = (unsigned char)s->prompt[i];
    int64_t n = 1 + prompt;

    // Token after token.
    for (int64_t i = 0; i < s->sample_tokens; i++) {
        // There is no KV cache: each token computes the whole context again.
        int64_t context = min_i64(n, s->run.seq_len);
        model_batch(m, ids + n - context, NULL, 1, context);
        model_forward(m, 0);
        model_logits(m, context - 1, logits);
        for (int64_t v = 0; v < V; v++)
            if (!isfinite(logits[v]))
                die(EXIT_FAILED, "no sample: the logit of token %ld is not finite: %g", v, (double)logits[v]);
        double u = random_uniform((uint64_t)s->run.seed, SAMPLE_STREAM, (uint64_t)(step * s->sample_tokens + i));
        int32_t id = sample_draw(logits, V, s->temperature, SAMPLE_TOP_K, u);
        // All ranks must go on with the same token: rank 0's.
        if (world) ranks_broadcast(world, &id, sizeof(id), 0);
        if (id == ids[0]) break;
        ids[n++] = id;
    }

    // Their bytes, one after the other.
    char* text = NULL;
    size_t length = 0;
    FILE* stream = open_memstream(&text, &length);
    for (int64_t i = 1; i < n && stream; i++) {
        int size;
        const char* piece = tokenizer_decode(tokenizer, ids[i], &size);
        if (piece) fwrite(piece, 1, (size_t)size, stream);
    }
    if (!stream || fclose(stream) != 0) die(EXIT_FAILED, "out of host memory for a sample");
    char* shown = host_printable(text, length, "\n\t");
    free(text);
    free(ids);
    free(logits);
    return shown;
}
