#include "pretrained/evaluate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "device/check.h"

// A rank's part of a round of ranks * B sequences: *n sequences from `first` on. The ranks take batches in turns. One
// that has none left computes the first sequence again, because others need its part of weights and experts, and counts
// nothing: false.
static bool part_of_round(const Model* m, int64_t round, int64_t all, int64_t* first, int64_t* n) {
    *first = round + m->layout.rank * m->run.batch;
    *n = min_i64(all - *first, m->run.batch);
    if (*n > 0) return true;
    *first = 0;
    *n = 1;
    return false;
}

double evaluate_loss(Model* m, Shards* shards, int64_t windows) {
    const int64_t T = m->run.seq_len, B = m->run.batch, ranks = m->layout.ranks;
    int32_t* ids = (int32_t*)host_alloc((size_t)(2 * B * T) * sizeof(int32_t));
    double shown = host_seconds();
    // A state of its own, so that a validation changes nothing of the step.
    step_begin(m->val_state, m->ctx);
    for (int64_t round = 0; round < windows; round += ranks * B) {
        // This rank's windows of the round.
        int64_t first, n;
        const bool counts = part_of_round(m, round, windows, &first, &n);
        for (int64_t i = 0; i < n; i++)
            shards_read(shards, first + i, (int32_t)m->config.V, ids + i * T, ids + (B + i) * T);

        // Forward and loss. Without gradients the loss only adds to the sum.
        model_batch(m, ids, ids + B * T, n, T);
        model_forward(m, 0);
        if (counts) model_loss(m, m->val_state, 0);

        // A long validation prints how far it is.
        if (host_seconds() - shown < 5) continue;
        printf("validation %ld of %ld windows\n", min_i64(round + ranks * B, windows), windows);
        fflush(stdout);
        shown = host_seconds();
    }

    // The mean over all targets of all ranks, in nats.
    if (m->world) comm_all_reduce(m->world, &m->val_state->loss_sum, 1, SUM_DOUBLE, m->ctx);
    StepState state;
    device_download(&state, m->val_state, sizeof(state), m->ctx);
    free(ids);
    return state.loss_sum / (double)(windows * T);
}

// Puts the end of context and ending into a row of T inputs and targets. Returns the first target of the ending; its
// last is the last of the text. A first token must follow something: where nothing is before it, end of text.
static int64_t put_choice(const Choices* c, const Choice* choice, int32_t end_of_text, int64_t T, int32_t* input,
                          int32_t* target) {
    const int64_t length = choice->context_length + choice->ending_length, kept = min_i64(length, T + 1);
    const bool starts = choice->context_length == 0;
    int64_t n = 0;
    memset(input, 0, (size_t)T * sizeof(int32_t));
    memset(target, 0, (size_t)T * sizeof(int32_t));
    // input[n] is also target[n - 1].
    if (starts) input[n++] = end_of_text;
    for (int64_t i = length - kept; i < length; i++, n++) {
        const int64_t at = i - choice->context_length;
        const int32_t id = at < 0 ? c->ids[choice->context + i] : c->ids[choice->ending + at];
        if (n < T) input[n] = id;
        if (n > 0) target[n - 1] = id;
    }
    return kept - choice->ending_length - 1 + starts;
}

// Bytes of an ending's text, without a blank at its front.
static double text_bytes(const Choices* c, const Choice* choice, const Tokenizer* tokenizer) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < choice->ending_length; i++) {
        int length = 0;
        const char* text = tokenizer_decode(tokenizer, c->ids[choice->ending + i], &length);
        bytes += length - (i == 0 && length > 0 && text[0] == ' ');
    }
    return (double)max_i64(bytes, 1);
}

// The loss of each ending: the sum over its tokens, in nats. A rank takes B endings of a round and leaves the others 0.
static void choice_losses(Model* m, const Choices* c, int32_t end_of_text, double* loss) {
    const int64_t T = m->run.seq_len, B = m->run.batch, ranks = m->layout.ranks;
    int32_t* ids = (int32_t*)host_alloc((size_t)(2 * B * T) * sizeof(int32_t));
    int64_t* first = (int64_t*)host_alloc((size_t)B * sizeof(int64_t));
    real* losses = (real*)host_alloc((size_t)(B * T) * sizeof(real));
    for (int64_t round = 0; round < c->count; round += ranks * B) {
        // This rank's endings.
        int64_t from, n;
        const bool counts = part_of_round(m, round, c->count, &from, &n);
        for (int64_t i = 0; i < n; i++)
            first[i] = put_choice(c, &c->list[from + i], end_of_text, T, ids + i * T, ids + (B + i) * T);

        // Losses of all tokens; each ending sums its own.
        model_batch(m, ids, ids + B * T, n, T);
        model_forward(m, 0);
        step_begin(m->val_state, m->ctx);
        model_loss(m, m->val_state, 0);
        if (!counts) continue;
        device_download(losses, m->losses, (size_t)(n * T) * sizeof(real), m->ctx);
        for (int64_t i = 0; i < n; i++) {
            for (int64_t t = 0; t < c->list[from + i].ending_length; t++)
                loss[from + i] += (double)losses[i * T + first[i] + t];
        }
    }
    free(ids);
    free(first);
    free(losses);
}

// Sums over the ranks. Each number is known to one rank; the others have 0.
static void sum_over_ranks(Model* m, double* values, int64_t n) {
    if (!m->world) return;
    const size_t bytes = (size_t)n * sizeof(double);
    double* there = (double*)device_alloc(bytes, "the losses of endings");
    device_upload(there, values, bytes, m->ctx);
    comm_all_reduce(m->world, there, n, SUM_DOUBLE, m->ctx);
    device_download(values, there, bytes, m->ctx);
    device_free(there);
}

// The same tokens must have the same loss: last bits depend on the other rows of a batch. An ending takes the loss of
// the first ending with its tokens.
static void equal_losses(const Choices* c, double* loss) {
    for (int64_t i = 0, first = 0; i < c->count; i++) {
        const Choice *a = &c->list[i], *b = &c->list[first];
        if (b->question != a->question) b = &c->list[first = i];
        for (; b < a; b++) {
            const size_t bytes = (size_t)a->ending_length * sizeof(c->ids[0]);
            if (b->ending_length != a->ending_length || memcmp(&c->ids[a->ending], &c->ids[b->ending], bytes)) continue;
            loss[i] = loss[b - c->list];
            break;
        }
    }
}

// The number of questions whose correct ending has the least loss.
static int64_t count_right(const Choices* c, const double* loss) {
    int64_t right = 0;
    for (int64_t i = 0; i < c->count;) {
        int64_t best = i;
        const int32_t question = c->list[i].question;
        // The endings of a question follow one another.
        for (; i < c->count && c->list[i].question == question; i++)
            if (loss[i] < loss[best]) best = i;
        right += c->list[best].number == c->label[question];
    }
    return right;
}

ScoreRecord evaluate_choices(Model* m, const Choices* c, const Tokenizer* tokenizer) {
    double* loss = (double*)host_alloc((size_t)c->count * sizeof(double));
    choice_losses(m, c, tokenizer->eot, loss);
    sum_over_ranks(m, loss, c->count);
    for (int64_t i = 0; i < c->count; i++)
        if (!isfinite(loss[i]))
            die(EXIT_FAILED, "--eval: %s: the loss of ending %d of question %d is not finite: %g", c->name,
                c->list[i].number, c->list[i].question, loss[i]);
    equal_losses(c, loss);

    // By the loss of an ending, then by its loss per byte.
    ScoreRecord score = {.accuracy = (double)count_right(c, loss) / c->questions};
    for (int64_t i = 0; i < c->count; i++) loss[i] /= text_bytes(c, &c->list[i], tokenizer);
    score.normalised = (double)count_right(c, loss) / c->questions;
    free(loss);
    return score;
}

void evaluate_questions(char** line, Model* m, const Choices* files, int count, const Tokenizer* tokenizer) {
    for (int i = 0; i < count; i++) {
        const ScoreRecord score = evaluate_choices(m, &files[i], tokenizer);
        printf("%s: %d questions, accuracy %.4f, normalised %.4f, %d cut to --seq-len %ld\n", files[i].name,
               files[i].questions, score.accuracy, score.normalised, files[i].cut, m->run.seq_len);
        if (!line) continue;
        // A file's name may be any text. It is quoted, without the closing quote: the suffix follows inside the string.
        char* name = json_quote(files[i].name);
        name[strlen(name) - 1] = 0;
        host_append(line, ", %s_acc\": %.9g, %s_acc_norm\": %.9g, %s_cut\": %d", name, score.accuracy, name,
                    score.normalised, name, files[i].cut);
        free(name);
    }
    fflush(stdout);
}
