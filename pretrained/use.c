#include "pretrained/use.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/check.h"
#include "model/memory.h"
#include "pretrained/evaluate.h"
#include "pretrained/import.h"
#include "pretrained/sample.h"

void use_model(Ranks* world, const Settings* s) {
    // Inputs.
    Tokenizer* tokenizer = *s->sample ? sample_tokenizer(s, NULL) : tokenizer_open(s->tokenizer);
    evaluate_tokenizer(world, s, tokenizer, false);
    sample_check(s, tokenizer);
    int files;
    Choices* questions = evaluate_open(world, s, tokenizer, &files);
    Shards* val = evaluate_shards(world, s, tokenizer, NULL);

    // The model.
    device_choose(ranks_local());
    memory_check(s, ranks_index(world));
    ranks_barrier(world);  // no rank allocates before all have read the free memory
    Model* m = model_create(&s->model, &s->run, world);
    model_begin(m, s, world);

    // A sample, or the losses of --val and --eval.
    if (*s->sample) {
        char* text = model_sample(m, s, world, tokenizer, 0);
        printf("%s\n", text);
        free(text);
    } else {
        if (val) {
            const double loss = evaluate_loss(m, val, evaluate_windows(s, val));
            if (!isfinite(loss)) die(EXIT_FAILED, "the loss on --val %s is not finite: %g", s->val, loss);
            // Bits a byte can be compared between tokenizers; nats a token cannot.
            const double bytes = evaluate_bytes(s, val, tokenizer);
            printf("loss       %.6f nats a token, perplexity %.4f, ", loss, exp(loss));
            if (bytes > 0) printf("%.6f bits a byte, ", loss / log(2) / bytes);
            printf("on %ld of %ld tokens\n", evaluate_windows(s, val) * s->run.seq_len,
                   shards_windows(val) * s->run.seq_len);
        }
        evaluate_questions(NULL, m, questions, files, tokenizer);
    }

    model_destroy(m);
    choices_close(questions, files);
    shards_close(val);
    tokenizer_close(tokenizer);
}
