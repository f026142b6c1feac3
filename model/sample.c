#include "model/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "device/random.h"

enum { SAMPLE_STREAM = 0xFFFFFFFFu - 1 };  // beside the streams of the weights (model/params.h)

static int larger_first(const void* a, const void* b) {
    real x = *(const real*)a, y = *(const real*)b;
    return (x < y) - (x > y);
}

// Draws an index with probability exp(logit / temperature) among the top_k largest (0: all); u is uniform in (0, 1).
static int32_t draw(const real* logits, real* sorted, int64_t V, double temperature, int64_t top_k, double u) {
    int32_t best = 0;
    for (int64_t v = 1; v < V; v++)
        if (logits[v] > logits[best]) best = (int32_t)v;
    if (temperature == 0) return best;

    // The least logit that may be drawn.
    double floor_logit = -INFINITY, sum = 0;
    if (top_k > 0 && top_k < V) {
        memcpy(sorted, logits, (size_t)V * sizeof(real));
        qsort(sorted, (size_t)V, sizeof(real), larger_first);
        floor_logit = sorted[top_k - 1];
    }

    // The sum of all weights, then the token at which their running sum reaches u of it.
    for (int64_t v = 0; v < V; v++)
        if (logits[v] >= floor_logit) sum += exp((logits[v] - logits[best]) / temperature);
    double left = u * sum;
    for (int64_t v = 0; v < V; v++) {
        if (!(logits[v] >= floor_logit)) continue;
        left -= exp((logits[v] - logits[best]) / temperature);
        if (left <= 0) return (int32_t)v;
    }
    return best;
}

char* model_sample(Model* m, const Tokenizer* tokenizer, int64_t step) {
    const Settings* s = &m->settings;
    int64_t room = 1 + (int64_t)strlen(s->prompt) + s->sample_tokens, V = m->config.V;
    int32_t* ids = (int32_t*)host_alloc((size_t)room * sizeof(int32_t));
    real *logits = (real*)host_alloc(2 * (size_t)V * sizeof(real)), *sorted = logits + V;

    // End of text and the prompt.
    ids[0] = tokenizer_eot(tokenizer);
    int64_t prompt = tokenizer_encode(tokenizer, s->prompt, ids + 1, room - 1), n = 1 + prompt;
    if (prompt < 0) die(EXIT_USAGE, "--prompt cannot be encoded: %s", tokenizer_why(tokenizer));

    // Token after token.
    for (int64_t i = 0; i < s->sample_tokens; i++) {
        int64_t context = min_i64(n, s->seq_len);
        model_batch(m, ids + n - context, NULL, 1, context);
        model_forward(m, 0);
        model_logits(m, context - 1, logits);
        double u = random_uniform((uint64_t)s->seed, SAMPLE_STREAM, (uint64_t)(step * s->sample_tokens + i));
        int32_t id = draw(logits, sorted, V, s->temperature, s->sample_top_k, u);
        if (id == ids[0]) break;
        ids[n++] = id;
    }

    // Their bytes, one after the other.
    size_t length = 0;
    int bytes = 0;
    for (int64_t i = 1; i < n; i++) tokenizer_decode(tokenizer, ids[i], &bytes), length += (size_t)bytes;
    char *text = (char*)host_alloc(length + 1), *to = text;
    for (int64_t i = 1; i < n; i++) {
        const char* piece = tokenizer_decode(tokenizer, ids[i], &bytes);
        if (piece) memcpy(to, piece, (size_t)bytes);
        to += bytes;
    }
    char* shown = host_printable(text, length, "\n\t");
    free(text);
    free(ids);
    free(logits);
    return shown;
}
