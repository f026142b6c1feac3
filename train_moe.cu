// train_moe: pretrains a DeepSeek-style mixture-of-experts model from tokenized shards. Host code only; read on in
// model/.
//
//   main    opens ranks, options, data, folder, model and log; trains; closes all of it
//   train   for each step: model_gradient and model_update, then report prints and logs the step before. In some steps
//           also a validation, a sample, a checkpoint
//
// The host runs one step ahead of the device: it queues step n + 1, then waits for the results of step n.
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "data/runlog.h"
#include "data/shards.h"
#include "device/check.h"
#include "device/files.h"
#include "device/threads.h"
#include "device/version.h"
#include "model/agree.h"
#include "model/memory.h"
#include "model/model.h"
#include "model/persist.h"
#include "model/record.h"
#include "model/report.h"
#include "parallel/folder.h"
#include "parallel/watch.h"
#include "pretrained/evaluate.h"
#include "pretrained/export.h"
#include "pretrained/import.h"
#include "pretrained/sample.h"
#include "pretrained/use.h"

// The signal that asked this rank to stop. It is answered at once, because a validation may take minutes; stdout is
// rank 0's alone.
static volatile sig_atomic_t stop_asked = 0;
static void ask_stop(int signal_number) {
    static const char answer[] = "stopping after this step and what is measured with it\n";
    const int before = errno;
    if (!stop_asked && write(STDOUT_FILENO, answer, sizeof(answer) - 1) < 0) errno = before;  // the reader is gone
    stop_asked = signal_number;
}

// State of a run.
typedef struct Run {
    Settings settings;
    Ranks* world;
    Model* model;
    Tokenizer* tokenizer;
    Shards *train, *val;
    bool resumed;        // --out has a checkpoint
    DataHash data;       // of train and tokenizer
    double val_bytes;    // of a token of val; 0: not known
    Choices* questions;  // question_files of them
    int question_files;
    Folder folder;         // --out, of rank 0
    RunLog* log;           // of rank 0; NULL without --out
    Saver* saver;          // NULL without --out
    int64_t saved;         // newest step on disk or being written
    Loader* loader;        // of train
    Fetch *state, *load;   // results of the last step queued
    Fetch* stats;          // of the last step that measured them; NULL without a log and --mx-stats
    double capacity;       // of the last step queued: the capacity factor; 0 without --dispatch windows
    int64_t pending;       // the last step queued, 0 if its results are reported already
    StepState last;        // of the last step reported
    double took, fullest;  // of that step: seconds; tokens of the most loaded expert over the mean
    double mfu;            // share of the device's bf16 peak; NaN if the peak is not known
    double val_loss;       // 0 without a validation
    Stopwatch* watch[2];   // of even and odd steps: one is read while the other runs
    double shown;          // when a progress line was last printed
    int64_t left_out;      // steps without such a line
    double average_ms;     // smoothed, for the ETA
    int64_t first;         // step after the one resumed from
} Run;

// Whether an option "every n steps" (0: never) includes this step.
static int due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

// A line for people, in columns of fixed widths.
static void print_step(Run* r, int val) {
    const Settings* s = &r->settings;
    int64_t left = (int64_t)(r->average_ms * (double)(s->run.steps - r->pending) / 1000);
    const int digits = snprintf(NULL, 0, "%ld", s->run.steps);
    printf("step %*ld/%ld  loss %7.4f  norm %6.3f  lr %.2e  %6.1f ms  %7.0f tok/s  load %5.2f", digits, r->pending,
           s->run.steps, r->last.loss, r->last.grad_norm, run_lr(&s->run, r->pending), 1000 * r->took,
           (double)s->run.tokens_per_step / r->took, r->fullest);
    if (isfinite(r->mfu)) printf("  MFU %4.1f%%", 100 * r->mfu);
    printf("  ETA %2ld:%02ld:%02ld", left / 3600, left / 60 % 60, left % 60);
    if (val) printf("  validation %7.4f", r->val_loss);
    if (s->model.mtp) printf("  mtp_loss_1 %7.4f", report_mtp(&s->run, &r->last));
    printf("\n");
    fflush(stdout);
    r->shown = host_seconds();
}

// Ends the run after three steps in a row that were not finite: the model has diverged. If no step was finite since the
// last checkpoint, that checkpoint holds the diverged model, and is set aside.
static NORETURN void end_diverged(const Run* r) {
    int64_t good = r->pending - r->last.bad_in_a_row;
    if (r->saver) checkpoint_wait(r->saver);  // it may still be being written
    int aside = r->saver && good == r->saved && checkpoint_set_aside(r->saver, good);
    ranks_barrier(r->world);  // a rank that ends now ends rank 0 too, which may still be at it
    char* note =
        aside ? host_format(" (step_%08ld, after which no step was finite, is now step_%08ld.diverged)", good, good)
              : host_strdup("");
    die(EXIT_FAILED,
        "3 steps in a row were not finite; the run ends without saving%s. Start again with a smaller --lr or a longer "
        "--warmup",
        note);
}

// Waits for the results of the pending step, and prints and logs them. With `val` it measures the validation loss,
// with `asks` the answers to --eval, which join them.
static void report(Run* r, int val, int asks) {
    if (!r->pending) return;
    const Settings* s = &r->settings;
    Model* m = r->model;

    // Results of the device, and the time of the step.
    memcpy(&r->last, fetch_end(r->state), sizeof(StepState));
    r->took = stopwatch_seconds(r->watch[r->pending % 2]);
    r->average_ms = r->average_ms > 0 ? 0.9 * r->average_ms + 0.1 * 1000 * r->took : 1000 * r->took;
    const double tokens_per_s = (double)s->run.tokens_per_step / r->took, peak = device_peak_flops(m->ctx);
    const double flops_per_s = tokens_per_s * flops_per_token(&s->model, s->run.seq_len);
    r->mfu = peak > 0 ? flops_per_s / ((double)s->run.ranks * peak) : NAN;
    r->val_loss = val ? evaluate_loss(m, r->val, evaluate_windows(s, r->val)) : 0;

    // The line of the log. Losses, optimizer and speed.
    char* line = host_format("{\"step\": %ld", r->pending);
    runlog_number(&line, "loss", r->last.loss);
    if (s->model.mtp) runlog_number(&line, "mtp_loss_1", report_mtp(&s->run, &r->last));
    runlog_number(&line, "grad_norm", r->last.grad_norm);
    runlog_number(&line, "lr", run_lr(&s->run, r->pending));
    runlog_number(&line, "max_logit", (double)r->last.max_logit);
    runlog_number(&line, "ms", 1000 * r->took);
    runlog_number(&line, "tokens_per_s", tokens_per_s);
    runlog_number(&line, "mfu", r->mfu);

    // Validation, expert loads and memory. In some steps also questions and quantization statistics.
    if (val) runlog_number(&line, "val_loss", r->val_loss);
    if (val && r->val_bytes > 0) runlog_number(&line, "val_bits_per_byte", r->val_loss / log(2) / r->val_bytes);
    r->fullest = report_load(&line, &s->model, (const int64_t*)fetch_end(r->load));
    runlog_number(&line, "mem_gib", (double)device_peak_memory() / 0x1p30);
    if (r->capacity > 0) runlog_number(&line, "capacity", r->capacity);
    host_append(&line, ", \"tokens\": %ld, \"time\": %.3f", s->tokens_before + r->pending * s->run.tokens_per_step,
                host_time());
    if (asks) evaluate_questions(&line, m, r->questions, r->question_files, r->tokenizer);
    if (r->stats && due(r->pending, s->run.stats_every))
        report_quantization(&line, m, (const QuantizationStats*)fetch_end(r->stats));
    host_append(&line, "}");

    // All of it into the log; on the terminal not more often than one can read, and once a line about the rest.
    if (r->log) folder_check(&r->folder);
    if (r->log) runlog_add(r->log, line);
    free(line);
    if (val || host_seconds() - r->shown > 0.5 || r->pending == r->first || r->pending == s->run.steps || !r->last.ok)
        print_step(r, val);
    else if (!r->left_out++)
        printf("(at most two steps a second are printed; %slog.jsonl has all)\n", r->log ? "" : "with --out its ");

    if (val && !isfinite(r->val_loss)) warn("step %ld: the validation loss is %g", r->pending, r->val_loss);

    // A step that was not finite changed no weight; the third in a row ends the run.
    if (!r->last.ok)
        warn("step %ld: loss %g, gradient norm %g: %s, so no weight was changed", r->pending, r->last.loss,
             r->last.grad_norm,
             isfinite(r->last.loss) && isfinite(r->last.grad_norm) ? "its square overflows float32" : "not finite");
    if (r->last.bad_in_a_row >= 3) end_diverged(r);
    if (r->pending == r->first) watch_settled();
    r->pending = 0;
}

// Starts the copies of a step's results to the host. The step before must be reported: it used the same buffers.
static void fetch_step(Run* r, int64_t step) {
    Model* m = r->model;
    fetch_begin(r->state, m->step.state, m->ctx);
    fetch_begin(r->load, m->step.load, m->ctx);
    if (r->stats && due(step, r->settings.run.stats_every)) fetch_begin(r->stats, m->step.stats, m->ctx);
    r->capacity = m->windows ? m->shapes.moe.capacity : 0;
    r->pending = step;
}

// Saves the model after `step`. A step that was not finite changed nothing, so the model is still that of the last good
// step: at the end it is saved as such, before not at all.
static void save(Run* r, int64_t step, int at_the_end) {
    int64_t good = step - r->last.bad_in_a_row;
    if (good == r->saved || (good != step && !at_the_end)) return;
    if (r->log) folder_check(&r->folder);
    if (r->log) runlog_sync(r->log);
    model_save(r->model, &r->settings, r->saver, good, r->data, &r->last);
    r->saved = good;
}

// A sample, between two lines that tell it from the rest.
static void print_sample(Run* r, int64_t step) {
    char* text = model_sample(r->model, &r->settings, r->world, r->tokenizer, step);
    printf("--- sample at step %ld\n%s\n---\n", step, text);
    fflush(stdout);
    free(text);
}

// All the steps, from r->first on.
static void train(Run* r) {
    const Settings* s = &r->settings;
    Model* m = r->model;
    r->shown = host_seconds();

    int stop = 0;
    for (int64_t step = r->first; step <= s->run.steps && !stop; step++) {
        // The device gets this step, and the host waits for the results of the one before.
        stopwatch_start(r->watch[step % 2], m->ctx);
        model_gradient(m, r->loader, step);
        model_update(m, stop_asked != 0);
        stopwatch_stop(r->watch[step % 2], m->ctx);
        report(r, 0, 0);
        fetch_step(r, step);

        // A rank that was asked to stop told the others in the step before. All ranks learn it here together.
        stop = r->last.stop != 0;
        const int last = step == s->run.steps || stop;

        // Once in a while: a validation. All that comes after it waits for the results of this step too.
        const int validates = r->val && s->val_every && (step == s->run.steps || due(step, s->val_every));
        const int samples = s->sample_every && (step == s->run.steps || due(step, s->sample_every));
        const int saves = *s->out && (last || due(step, s->save_every));
        const int asks = r->question_files && (step == s->run.steps || due(step, s->eval_every));
        if (last || validates || asks || samples || saves) report(r, validates, asks);

        // Once in a while: a sample, and a checkpoint, which a thread writes while training goes on.
        if (samples) print_sample(r, step);
        if (saves) save(r, step, last);
    }

    // The last checkpoint is on the disk, and the reason of an early end is printed.
    if (*s->out && stop) checkpoint_wait(r->saver);
    if (*s->out && !stop) checkpoint_finish(r->saver);
    if (stop && stop_asked) printf("stopped by signal %d", (int)stop_asked);
    if (stop && !stop_asked) printf("stopped because another rank was asked to");
    const char* on = s->resume ? "; the same command goes on from here" : "; --resume goes on from here";
    if (stop) printf("%s\n", *s->out ? on : "");
}

// --timeout, before the options are parsed: the ranks report errors in these together, and must be connected for that.
static double time_limit(int argc, char** argv) {
    Settings usual = settings_parse(0, NULL);
    double seconds = 0;
    for (int a = 1; a < argc; a++) {
        if (strncmp(argv[a], "--timeout=", 10) == 0) seconds = atof(argv[a] + 10);
        if (strcmp(argv[a], "--timeout") == 0 && a + 1 < argc) seconds = atof(argv[a + 1]);
    }
    if (!(seconds >= 1 && seconds <= 1e6)) seconds = usual.timeout;
    settings_free(&usual);
    return seconds;
}

// Connects the ranks and reads their options, which must be the same on all. From then on the ranks are watched.
static void open_ranks(Run* r, int argc, char** argv) {
    // A file must not get the number of a closed standard stream, or the program's output would go into it.
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDWR);  // the lowest number that is free

    device_setup(argv);  // before MPI, which starts but once in a process
    const double limit = time_limit(argc, argv);
    watch_alarm(limit, "MPI does not connect the ranks: one is stopped, or its machine, network or file system hangs");
    r->world = ranks_start(&argc, &argv);
    // A run of one rank waits for no other.
    watch_alarm(ranks_count(r->world) > 1 ? limit : 0,
                "the ranks do not agree on a checkpoint of --out: rank 0 reads its manifest, and all wait for it; one "
                "is stopped, or its machine, network or file system hangs");
    // All shards stay open, and a large set has more files than the usual soft limit (1024) allows. Not before MPI: a
    // process that it starts may close every number up to the limit.
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }

    const Settings parsed = settings_parse(argc, argv);
    const int resumes = parsed.resume && *parsed.out && !parsed.help && !parsed.version;
    Json* manifest = record_manifest(r->world, resumes ? parsed.out : NULL);
    r->settings = settings_read(parsed, ranks_count(r->world), json_get(manifest, "options"));
    r->resumed = manifest != NULL;
    json_free(manifest);
    threads_check();
    watch_start(r->world, r->settings.timeout);
    agree_on_settings(r->world, &r->settings);
}

// A full disk or quota becomes an error of write(2), with a message. A closed pipe does not stop the run. The other
// signals ask the run to save and stop; Slurm sends SIGUSR1 some time before a job's end (--signal). A signal that was
// ignored at the start stays so: SIGHUP after nohup, SIGINT in a script's background job.
static void catch_signals(void) {
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    static const int asking[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
    for (size_t i = 0; i < sizeof(asking) / sizeof(asking[0]); i++)
        if (signal(asking[i], ask_stop) == SIG_IGN) signal(asking[i], SIG_IGN);
}

// Inputs: tokenizer and shards, which must be the same on all ranks.
static void open_data(Run* r) {
    const Settings* s = &r->settings;
    r->train = shards_open("--train", s->train, s->run.seq_len);
    agree_on_data(r->world, "--train", shards_sample(r->train));
    r->tokenizer = sample_tokenizer(s, r->train);
    r->data.shards = shards_hash(r->train);
    r->data.tokenizer = tokenizer_hash(r->tokenizer);
    r->data.end_of_text = tokenizer_eot(r->tokenizer);
    evaluate_tokenizer(r->world, s, r->tokenizer, r->resumed);
    evaluate_tokenizers("train", r->train, s, r->tokenizer);
    r->questions = evaluate_open(r->world, s, r->tokenizer, &r->question_files);
    sample_check(s, r->tokenizer);
    r->val = evaluate_shards(r->world, s, r->tokenizer, r->train);
    if (r->val && s->val_every) r->val_bytes = evaluate_bytes(s, r->val, r->tokenizer);

    report_data(s, r->train, r->tokenizer);
    const int64_t windows = shards_windows(r->train);
    if (windows < s->run.batch)
        die(EXIT_FAILED,
            "--train has %ld windows of %ld tokens, fewer than one batch of %ld; use a smaller --batch or --seq-len",
            windows, s->run.seq_len, s->run.batch);
    const LoaderOrder order = {.seed = (uint64_t)(s->data_seed ? s->data_seed : s->run.seed),
                               .first = ranks_index(r->world) * s->run.batch,
                               .stride = s->run.ranks * s->run.batch,
                               .wrap = s->overfit ? s->run.tokens_per_step / s->run.seq_len : 0};
    r->loader = loader_start(r->train, s->run.batch, (int32_t)s->model.V, order);
}

// The model: as it begins, or as it was saved.
static void open_model(Run* r) {
    const Settings* s = &r->settings;
    r->model = model_create(&s->model, &s->run, r->world);
    report_device(r->model);
    r->saved = s->resume ? model_resume(r->model, s, r->world, r->data) : 0;
    r->first = r->saved + 1;
    char* out = host_printable(s->out, strlen(s->out), "");
    if (r->saved)
        printf("resumed    from %s/step_%08ld\n", out, r->saved);
    else
        model_begin(r->model, s, r->world);
    if (r->saved >= s->run.steps)
        printf("nothing to do: the run has %ld steps, --steps is %ld; a larger one goes on\n", r->saved, s->run.steps);
    else if (r->saved)
        report_schedule(s, r->saved);
    free(out);
}

// Outputs: log, checkpoints, and the results of a step.
static void open_outputs(Run* r) {
    const Settings* s = &r->settings;
    if (*s->out) {
        r->saver = saver_create(r->world, s->out, (int)s->keep, ranks_index(r->world) == 0 ? &r->folder : NULL);
        export_files(r->saver, s, r->model, r->tokenizer);
    }
    char* first = record_line(s, version_text(), device_name(r->model->ctx));
    if (*s->out && ranks_index(r->world) == 0) r->log = runlog_open(s->out, first, r->saved);
    free(first);
    for (int i = 0; i < 2; i++) r->watch[i] = stopwatch_create();
    r->state = fetch_create(sizeof(StepState));
    r->load = fetch_create((size_t)(config_blocks(&s->model) * s->model.E) * sizeof(int64_t));
    if (r->log && s->run.stats_every)
        r->stats = fetch_create(config_blocks(&s->model) * BLOCK_STATS * sizeof(QuantizationStats));
}

// All of it back.
static void close_all(Run* r) {
    if (r->log) folder_check(&r->folder);
    if (r->log) runlog_close(r->log);
    if (r->saver) saver_destroy(r->saver);
    folder_close(&r->folder);
    for (int i = 0; i < 2; i++) stopwatch_destroy(r->watch[i]);
    fetch_destroy(r->state);
    fetch_destroy(r->load);
    if (r->stats) fetch_destroy(r->stats);
    model_destroy(r->model);
    loader_stop(r->loader);
    shards_close(r->train);
    shards_close(r->val);
    choices_close(r->questions, r->question_files);
    tokenizer_close(r->tokenizer);
}

int main(int argc, char** argv) {
    static Run r = {.folder = {.fd = -1, .lock = -1}};
    threads_check_stacks();
    open_ranks(&r, argc, argv);
    const Settings* s = &r.settings;
    const int asks = s->help || s->version, trains = !asks && !s->dry_run && !*s->sample && !*s->evaluate;
    if (trains) {
        // Options, model and data.
        catch_signals();
        Settings usual = settings_defaults(s);
        options_print(settings_table, settings_count, s, &usual);
        settings_free(&usual);
        printf("\n");
        report_model(s);
        open_data(&r);

        // Where. Memory that does not suffice and a folder that cannot be used end the run before it takes anything.
        device_choose(ranks_local());
        memory_check(s, ranks_index(r.world));
        if (ranks_index(r.world) == 0 && *s->out) r.folder = folder_open(s->out, s->resume != 0);
        if (!*s->out) printf("run        no --out: no log and no checkpoint will be kept\n");
        ranks_barrier(r.world);  // no rank allocates before all have read the free memory

        open_model(&r);
        open_outputs(&r);
        train(&r);
        close_all(&r);
    } else if (asks) {
        if (!s->help) puts(version_text());
    } else if (s->dry_run) {
        memory_report(s, ranks_count(r.world));
    } else {
        use_model(r.world, s);
    }

    // Lost output is an error here; a training run with --out has its log. An earlier flush may have lost it: then this
    // one succeeds, and its errno is gone.
    const char* lost = fflush(stdout) != 0 ? strerror(errno) : ferror(stdout) ? "a full disk or a closed pipe" : NULL;
    if (lost && !(trains && *s->out)) die(EXIT_FAILED, "cannot write the output: %s", lost);

    settings_free(&r.settings);
    watch_stop();
    ranks_end(r.world);
    return 0;
}
