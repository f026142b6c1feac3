#include "pretrained/use.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/check.h"
#include "model/memory.h"
#include "pretrained/evaluate.h"
#include "pretrained/sample.h"
#include "pretrained/sources.h"

// Bits a byte can be compared between tokenizers; nats a token cannot.
static void print_loss(Model* m, const Sources* from, const Settings* s) {
    const double loss = evaluate_loss(m, from->val, from->val_windows);
    if (!isfinite(loss)) die(EXIT_FAILED, "the loss on --val %s is not finite: %g", s->val, loss);
    printf("loss       %.6f nats a token, perplexity %.4f, ", loss, exp(loss));
    if (from->val_bytes > 0) printf("%.6f bits a byte, ", loss / log(2) / from->val_bytes);
    printf("on %ld of %ld tokens\n", from->val_windows * s->run.seq_len, shards_windows(from->val) * s->run.seq_len);
}

void use_model(Ranks* world, const Settings* s) {
    Sources from = sources_open(world, s, false);
    device_choose(ranks_local());
    memory_check(s, world);
    Model* m = model_create(&s->model, &s->run, world);
    sources_weights(&from, s, world, m);

    // A sample, or the losses of --val and --eval.
    if (*s->sample) {
        char* text = model_sample(m, s, world, from.tokenizer, 0);
        printf("%s\n", text);
        free(text);
    }
    if (from.val) print_loss(m, &from, s);
    evaluate_questions(NULL, m, from.questions, from.question_files, from.tokenizer);

    model_destroy(m);
    sources_close(&from);
}
