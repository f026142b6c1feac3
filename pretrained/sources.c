#include "pretrained/sources.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "device/check.h"
#include "model/agree.h"
#include "model/hub.h"
#include "model/record.h"
#include "model/report.h"
#include "pretrained/import.h"

// The command line is parsed first: --out and --resume in it say which record is read.
Settings sources_settings(Ranks* world, int argc, char** argv, bool* resumes) {
    const Settings parsed = settings_parse(argc, argv);
    const int wanted = parsed.resume && *parsed.out && !parsed.help && !parsed.version;
    Json* manifest = record_manifest(world, wanted ? parsed.out : NULL);
    const Settings s = settings_read(parsed, ranks_count(world), json_get(manifest, "options"));
    *resumes = manifest != NULL;
    json_free(manifest);
    return s;
}

// The shards of an option; NULL where it is empty.
static Shards* open_shards(Ranks* world, const Settings* s, const char* option, const char* text) {
    Shards* shards = *text ? shards_open(option, text, s->run.seq_len) : NULL;
    // A hash of 0 is a run without the option: all ranks must agree on that too.
    agree_on_data(world, option, shards ? shards_sample(shards) : 0);
    return shards;
}

// ---- Tokenizers

// Whether the first 64k tokens of the shards are bytes and their end of text alone.
static bool are_bytes(const Shards* shards, const Settings* s) {
    int64_t T = s->run.seq_len, windows = min_i64(shards->windows, ceil_div(1 << 16, T)), largest = 0;
    int32_t* ids = (int32_t*)host_alloc((size_t)(2 * T) * sizeof(int32_t));
    for (int64_t i = 0; i < windows; i++) {
        shards_read(shards, i, (int32_t)s->model.V, ids, ids + T);
        for (int64_t t = 0; t < T; t++) largest = max_i64(largest, ids[t]);
    }
    free(ids);
    return largest <= 256;
}

// Ends the run where the tokenizer `of` is another than the run's, by a reason (NULL: it is the same).
static void check_same(const Sources* from, const Settings* s, const char* option, const char* of,
                       const char* differs) {
    if (differs)
        die(EXIT_USAGE, "%s: the tokenizer %s is not %s, that of the run: %s; model and data need the same", option, of,
            *s->tokenizer           ? s->tokenizer
            : from->tokenizer->size ? "bytes, as without --tokenizer"
                                    : "known without --tokenizer, as the ids go beyond 256",
            differs);
}

// The same for that at `path` ("": none).
static void check_file(const Sources* from, const Settings* s, const char* option, const char* path) {
    if (!*path || strcmp(path, s->tokenizer) == 0) return;
    Tokenizer* other = tokenizer_open(path);
    check_same(from, s, option, path, tokenizer_difference(other, from->tokenizer));
    tokenizer_close(other);
}

// The files next to shards.
static void check_shards(const Sources* from, const Settings* s, const char* option, const Shards* shards) {
    const Path mark = path_of("_%s_", option + strlen("--"));
    Path last = {""};
    for (int i = 0; shards && i < shards->count; i++) {
        Path path = shards_tokenizer(shards_path(shards, i), mark.text, s->tokenizer);
        if (strcmp(path.text, last.text) != 0) check_file(from, s, option, path.text);
        last = path;
    }
}

// The file in the folder of a model, and the hash in its manifest.
static void check_folder(const Sources* from, const Settings* s) {
    const char *name, *folder = settings_folder(s, &name);
    if (!folder) return;
    const Path option = path_of("--%s", name), model = path_of("of the model in %s", folder);
    check_file(from, s, option.text, tokenizer_of_folder(name, folder).text);
    const int64_t hash = hub_tokenizer(folder);
    check_same(from, s, option.text, model.text,
               hash && hash != tokenizer_hash(from->tokenizer) ? "its tokens or end of text differ" : NULL);
}

// ---- Samples and validation

// That samples can be made, and are text.
static void check_samples(const Sources* from, const Settings* s) {
    if (!s->sample_every && !*s->sample) return;

    // The tokenizer must fit the model's vocabulary and the shards.
    const int32_t size = from->tokenizer->size;
    if (size > s->model.V)
        die(EXIT_USAGE,
            "samples: the tokenizer (%s) has %d tokens, more than --vocab %ld: give the tokenizer of the model",
            *s->tokenizer ? s->tokenizer : "bytes", size, s->model.V);
    if (!size)
        die(EXIT_USAGE, "samples need --tokenizer: the ids %s go beyond 256, so they are no bytes",
            *s->sample ? "of the model" : "in the shards");

    // A prompt is its bytes, so the tokenizer must be that of bytes.
    Tokenizer* bytes = tokenizer_open("");
    if (*s->prompt && tokenizer_difference(from->tokenizer, bytes))
        die(EXIT_USAGE,
            "--prompt: samples take a prompt only where tokens are bytes (0 to 255, end of text 256), not with "
            "--tokenizer %s; transformers loads the run's folder and takes any prompt (docs/running.md); --prompt= "
            "samples without one",
            s->tokenizer);
    tokenizer_close(bytes);

    // A sample's context is one sequence.
    const int64_t prompt = (int64_t)strlen(s->prompt);
    if (prompt >= s->run.seq_len)
        warn("--prompt has %ld tokens and an end of text before it, more than --seq-len %ld: its beginning is cut",
             prompt, s->run.seq_len);
}

// Bytes of text a target of a validation, on average. 0: some id has no text, so bits a byte are unknown.
static double count_bytes(const Sources* from, const Settings* s) {
    const int64_t T = s->run.seq_len;
    int32_t* ids = (int32_t*)host_alloc((size_t)(2 * T) * sizeof(int32_t));
    double bytes = 0;
    bool known = true;
    for (int64_t w = 0; w < from->val_windows && known; w++) {
        shards_read(from->val, w, (int32_t)s->model.V, ids, ids + T);
        for (int64_t t = 0; t < T && known; t++) {
            int length = 0;
            known = tokenizer_decode(from->tokenizer, ids[T + t], &length) != NULL;
            bytes += length;
        }
    }
    free(ids);
    return known ? bytes / (double)(from->val_windows * T) : 0;
}

// The shards of --val, which are read in the order of their files.
static void open_validation(Sources* from, Ranks* world, const Settings* s) {
    from->val = open_shards(world, s, "--val", s->val);
    if (!from->val) return;
    if (from->val->mixture.count > 1)
        die(EXIT_USAGE, "--val takes no weights: it is read in the order of its files, without a mixture");
    const char* both = from->train ? shards_shared(from->val, from->train) : NULL;
    if (both) warn("--train includes %s of --val: the model trains on this text, so the loss on it is too low", both);
    check_shards(from, s, "--val", from->val);
    // Whole windows of --val-tokens, at most those of the shards.
    from->val_windows = max_i64(min_i64(s->val_tokens / s->run.seq_len, from->val->windows), 1);
    if (s->val_every || *s->evaluate) from->val_bytes = count_bytes(from, s);
}

// ---- Questions

// The files of --eval. Scores need the text of every ending, in bytes.
static void open_questions(Sources* from, Ranks* world, const Settings* s) {
    const char* name = *s->tokenizer ? s->tokenizer : "bytes";
    const Tokenizer* t = from->tokenizer;
    uLong hash = 0;
    if (*s->eval && !t->size)
        die(EXIT_USAGE, "--eval needs --tokenizer: the ids in the shards go beyond 256, so they are no bytes");
    // An ending without context follows end of text, so the model must know this id.
    if (*s->eval && t->eot >= s->model.V)
        die(EXIT_USAGE, "--eval: id %d of the end of text is outside of --vocab %ld", t->eot, s->model.V);
    if (*s->eval)
        from->questions =
            choices_open(s->eval, (int32_t)min_i64(s->model.V, t->size), s->run.seq_len, &from->question_files);

    // The ids of each file are those of the tokenizer: by its hash where the file has one, and token by token.
    for (const Choices* c = from->questions; c < from->questions + from->question_files; c++) {
        if (c->tokenizer && c->tokenizer != tokenizer_hash(t))
            die(EXIT_USAGE,
                "--eval: %s was made with another tokenizer than %s, or another end of text: make it again by "
                "scripts/prepare_eval.py with the --tokenizer and --eot of the training data",
                c->name, name);
        for (const Choice* choice = c->list; choice < c->list + c->count; choice++)
            for (int64_t i = choice->ending; i < choice->ending + choice->ending_length; i++) {
                int length;
                if (!tokenizer_decode(t, c->ids[i], &length))
                    die(EXIT_USAGE,
                        "--eval: %s: token %d has no bytes in %s, and scores need the length of endings in bytes",
                        c->name, c->ids[i], name);
            }
        hash = crc32_z(hash, (const Bytef*)&c->hash, sizeof(c->hash));
    }
    agree_on_data(world, "--eval", (uint32_t)hash);
}

// ---- All of it

// The order in which this rank reads the training shards.
static Loader* open_loader(const Sources* from, Ranks* world, const Settings* s) {
    const RunConfig* r = &s->run;
    const int64_t windows = from->train->windows;
    if (windows < r->batch)
        die(EXIT_FAILED,
            "--train has %ld windows of %ld tokens, fewer than one batch of %ld; use a smaller --batch or --seq-len",
            windows, r->seq_len, r->batch);
    const LoaderOrder order = {.seed = (uint64_t)(s->data_seed ? s->data_seed : r->seed),
                               .first = ranks_index(world) * r->batch,
                               .stride = r->ranks * r->batch,
                               .wrap = s->overfit ? r->tokens_per_step / r->seq_len : 0};
    return loader_start(from->train, r->batch, (int32_t)s->model.V, order);
}

Sources sources_open(Ranks* world, const Settings* s, bool resumes) {
    // Text to learn from, and the tokenizer.
    Sources from = {.train = open_shards(world, s, "--train", s->run.frozen ? "" : s->train)};
    const bool known = *s->tokenizer || *s->evaluate || s->model.V <= 257 || (from.train && are_bytes(from.train, s));
    from.tokenizer = tokenizer_open(known ? s->tokenizer : NULL);
    agree_on_data(world, "--tokenizer", tokenizer_hash(from.tokenizer));
    if (!resumes) check_folder(&from, s);
    check_shards(&from, s, "--train", from.train);

    // Measurements and samples of the model.
    open_questions(&from, world, s);
    check_samples(&from, s);
    open_validation(&from, world, s);
    if (!from.train) return from;

    // The order of training, and the hashes that a resumed run compares.
    const DataHash hash = {from.train->hash, tokenizer_hash(from.tokenizer), from.tokenizer->eot};
    from.hash = hash;
    report_data(s, from.train, from.tokenizer);
    from.loader = open_loader(&from, world, s);
    return from;
}

void sources_close(Sources* from) {
    if (from->loader) loader_stop(from->loader);
    shards_close(from->train);
    shards_close(from->val);
    choices_close(from->questions, from->question_files);
    tokenizer_close(from->tokenizer);
}

int64_t sources_weights(const Sources* from, const Settings* s, Ranks* world, Model* m) {
    const char *option, *folder = settings_folder(s, &option);
    const double began = host_seconds();
    const int64_t saved = s->resume ? model_resume(m, s, world, from->hash) : 0;
    const char* place = saved ? s->out : folder ? folder : "";
    char* shown = host_printable(place, strlen(place), "");
    if (saved) {
        printf("resumed    from %s/step_%08ld\n", shown, saved);
        if (saved >= s->run.steps)
            printf("nothing to do: the run has %ld steps, --steps is %ld; raise --steps\n", saved, s->run.steps);
        else
            report_schedule(s, saved);
    } else if (folder) {
        if (s->init_moments)
            model_stage(m, s, world);
        else
            import_weights(m, world, option, folder);
        // The time is that of this rank.
        printf("weights    %sfrom %s, in %.1f s\n", s->init_moments ? "and moments " : "", shown,
               host_seconds() - began);
    } else {
        model_init(m, (uint64_t)s->run.seed);
    }
    free(shown);
    return saved;
}
