#include "pretrained/outputs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/runlog.h"
#include "device/check.h"
#include "model/record.h"
#include "model/report.h"
#include "parallel/folder.h"
#include "parallel/watch.h"
#include "pretrained/evaluate.h"
#include "pretrained/export.h"
#include "pretrained/sample.h"

struct Outputs {
    const Settings* settings;
    Ranks* world;
    const char* build;
    Model* model;
    const Sources* sources;
    RunLog* log;          // of rank 0; NULL without --out
    Saver* saver;         // NULL without --out
    int64_t saved;        // newest step on disk or being written
    Fetch *state, *load;  // results of the last step queued
    Fetch* stats;         // of the last step that measured them; NULL without a log and --mx-stats
    double capacity;      // of the last step queued: the capacity factor; 0 without --dispatch windows
    int64_t pending;      // the last step queued, 0 if its results are reported already
    int64_t first;        // the first step of this process
    StepState last;       // of the last step reported
    Stopwatch* watch[2];  // of even and odd steps: one is read while the other runs
    double shown;         // when a progress line was last printed
    bool told;            // that some steps have no such line
    double average_ms;    // smoothed, for the ETA
};

// Whether an option "every n steps" (0: never) includes this step.
static int due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

// ---- Folder, log and checkpoints

Outputs* outputs_open(Ranks* world, const Settings* s, const char* build) {
    Outputs* o = (Outputs*)host_alloc(sizeof(Outputs));
    o->settings = s;
    o->world = world;
    o->build = build;
    if (*s->out && ranks_index(world) == 0) folder_open(s->out, s->resume != 0);
    if (!*s->out) printf("run        no --out: no log and no checkpoint will be kept\n");
    return o;
}

void outputs_begin(Outputs* o, const Sources* from, Model* m, int64_t saved) {
    const Settings* s = o->settings;
    const int leads = ranks_index(o->world) == 0;
    const int64_t blocks = config_blocks(&m->config);
    o->model = m;
    o->sources = from;
    o->saved = saved;
    o->first = saved + 1;
    if (*s->out) {
        o->saver = saver_create(o->world, s->out, (int)s->keep);
        export_files(o->saver, s, m, from->tokenizer);
    }
    char* line = record_line(s, o->build, device_name(m->ctx));
    if (*s->out && leads) o->log = runlog_open(s->out, line, saved);
    free(line);

    // The results of a step.
    for (int i = 0; i < 2; i++) o->watch[i] = stopwatch_create();
    o->state = fetch_create(sizeof(StepState));
    o->load = fetch_create((size_t)(blocks * m->config.E) * sizeof(int64_t));
    if (o->log && m->run.stats_every)
        o->stats = fetch_create((size_t)(blocks * BLOCK_STATS) * sizeof(QuantizationStats));
    o->shown = host_seconds();
    stopwatch_start(o->watch[o->first % 2], m->ctx);
}

// Saves the model after `step`. A step that was not finite changed nothing, so the model is still that of the last good
// step: at the end it is saved as such, before not at all.
static void save(Outputs* o, int64_t step, int at_the_end) {
    int64_t good = step - o->last.bad_in_a_row;
    if (good == o->saved || (good != step && !at_the_end)) return;
    folder_check();
    if (o->log) runlog_sync(o->log);
    model_save(o->model, o->settings, o->saver, good, o->sources->hash, &o->last);
    o->saved = good;
}

// Ends the run after three steps in a row that were not finite: the model has diverged. If no step was finite since the
// last checkpoint, that checkpoint holds the diverged model, and is set aside.
static NORETURN void end_diverged(const Outputs* o) {
    int64_t good = o->pending - o->last.bad_in_a_row;
    if (o->saver) checkpoint_wait(o->saver);  // it may still be being written
    int aside = o->saver && good == o->saved && checkpoint_set_aside(o->saver, good);
    ranks_barrier(o->world);  // a rank that ends now ends rank 0 too, which may still be at it
    const char* note =
        aside ? host_format(" (step_%08ld, after which no step was finite, is now step_%08ld.diverged)", good, good)
              : "";
    die(EXIT_FAILED,
        "3 steps in a row were not finite; the run ends without saving%s. Start again with a smaller --lr or a longer "
        "--warmup",
        note);
}

// ---- The results of a step

// A line for people, in columns of fixed widths. took: seconds; load: tokens of the fullest expert over the mean;
// val_loss 0: no validation.
static void print_step(Outputs* o, double took, double load, double mfu, double val_loss) {
    const RunConfig* r = &o->settings->run;
    int64_t left = (int64_t)(o->average_ms * (double)(r->steps - o->pending) / 1000);
    const int digits = snprintf(NULL, 0, "%ld", r->steps);
    printf("step %*ld/%ld  loss %7.4f  norm %6.3f  lr %.2e  %6.1f ms  %7.0f tok/s  load %5.2f", digits, o->pending,
           r->steps, o->last.loss, o->last.grad_norm, run_lr(r, o->pending), 1000 * took,
           (double)r->tokens_per_step / took, load);
    if (isfinite(mfu)) printf("  MFU %4.1f%%", 100 * mfu);
    printf("  ETA %2ld:%02ld:%02ld", left / 3600, left / 60 % 60, left % 60);
    if (val_loss) printf("  validation %7.4f", val_loss);
    if (o->model->config.mtp) printf("  mtp_loss_1 %7.4f", report_mtp(r, &o->last));
    printf("\n");
    fflush(stdout);
    o->shown = host_seconds();
}

// Waits for the results of the pending step, and prints and logs them. With `val` it measures the validation loss,
// with `asks` the answers to --eval, which join them.
static void report(Outputs* o, int val, int asks) {
    if (!o->pending) return;
    const Settings* s = o->settings;
    const RunConfig* r = &s->run;
    const Sources* from = o->sources;
    Model* m = o->model;

    // Results of the device, and the time of the step.
    memcpy(&o->last, fetch_end(o->state), sizeof(StepState));
    const double took = stopwatch_seconds(o->watch[o->pending % 2]);
    o->average_ms = o->average_ms > 0 ? 0.9 * o->average_ms + 0.1 * 1000 * took : 1000 * took;
    const double tokens_per_s = (double)r->tokens_per_step / took, peak = device_peak_flops(m->ctx);
    const double flops_per_s = tokens_per_s * flops_per_token(&m->config, r->seq_len);
    const double mfu = peak > 0 ? flops_per_s / ((double)r->ranks * peak) : NAN;  // NAN: the peak is not known
    const double val_loss = val ? evaluate_loss(m, from->val, from->val_windows) : 0;

    // The line of the log. Losses, optimizer and speed.
    char* line = host_format("{\"step\": %ld", o->pending);
    runlog_number(&line, "loss", o->last.loss);
    if (m->config.mtp) runlog_number(&line, "mtp_loss_1", report_mtp(r, &o->last));
    runlog_number(&line, "grad_norm", o->last.grad_norm);
    runlog_number(&line, "lr", run_lr(r, o->pending));
    runlog_number(&line, "max_logit", (double)o->last.max_logit);
    runlog_number(&line, "ms", 1000 * took);
    runlog_number(&line, "tokens_per_s", tokens_per_s);
    runlog_number(&line, "mfu", mfu);

    // Validation, expert loads and memory. In some steps also questions and quantization statistics.
    if (val) runlog_number(&line, "val_loss", val_loss);
    if (val && from->val_bytes > 0) runlog_number(&line, "val_bits_per_byte", val_loss / log(2) / from->val_bytes);
    const double load = report_load(&line, &m->config, (const int64_t*)fetch_end(o->load));
    runlog_number(&line, "mem_gib", (double)device_peak_memory() / 0x1p30);
    if (o->capacity > 0) runlog_number(&line, "capacity", o->capacity);
    host_append(&line, ", \"tokens\": %ld, \"time\": %.3f", s->tokens_before + o->pending * r->tokens_per_step,
                host_time());
    if (asks) evaluate_questions(&line, m, from->questions, from->question_files, from->tokenizer);
    if (o->stats && due(o->pending, r->stats_every))
        report_quantization(&line, m, (const QuantizationStats*)fetch_end(o->stats));
    host_append(&line, "}");

    // All of it into the log; on the terminal not more often than one can read, and once a line about the rest.
    folder_check();
    if (o->log) runlog_add(o->log, line);
    free(line);
    if (val || host_seconds() - o->shown > 0.5 || o->pending == o->first || o->pending == r->steps || !o->last.ok)
        print_step(o, took, load, mfu, val_loss);
    else if (!o->told)
        o->told = printf("(at most two steps a second are printed; %slog.jsonl has all steps)\n",
                         o->log ? "" : "with --out ") > 0;

    if (!isfinite(val_loss)) warn("step %ld: the validation loss is %g", o->pending, val_loss);

    // A step that was not finite changed no weight; the third in a row ends the run.
    if (!o->last.ok)
        warn("step %ld: loss %g, gradient norm %g: %s, so no weight was changed", o->pending, o->last.loss,
             o->last.grad_norm,
             isfinite(o->last.loss) && isfinite(o->last.grad_norm) ? "its square overflows float32" : "not finite");
    if (o->last.bad_in_a_row >= 3) end_diverged(o);
    if (o->pending == o->first) watch_settled();
    o->pending = 0;
}

// Starts the copies of a step's results to the host. The step before must be reported: it used the same buffers.
static void fetch_step(Outputs* o, int64_t step) {
    Model* m = o->model;
    fetch_begin(o->state, m->step.state, m->ctx);
    fetch_begin(o->load, m->step.load, m->ctx);
    if (o->stats && due(step, m->run.stats_every)) fetch_begin(o->stats, m->step.stats, m->ctx);
    o->capacity = m->windows ? m->shapes.moe.capacity : 0;
    o->pending = step;
}

// A sample, between two lines that tell it from the rest.
static void print_sample(const Outputs* o, int64_t step) {
    char* text = model_sample(o->model, o->settings, o->world, o->sources->tokenizer, step);
    printf("--- sample at step %ld\n%s\n---\n", step, text);
    fflush(stdout);
    free(text);
}

int outputs_step(Outputs* o, int64_t step) {
    const Settings* s = o->settings;
    stopwatch_stop(o->watch[step % 2], o->model->ctx);
    report(o, 0, 0);
    fetch_step(o, step);

    // A rank that was asked to stop told the others in the step before. All ranks learn it here together.
    const int stop = o->last.stop != 0, ends = step == s->run.steps, last = ends || stop;

    // Once in a while: a validation. All that comes after it waits for the results of this step too.
    const int validates = o->sources->val && s->val_every && (ends || due(step, s->val_every));
    const int samples = s->sample_every && (ends || due(step, s->sample_every));
    const int saves = *s->out && (last || due(step, s->save_every));
    const int asks = o->sources->questions && (ends || due(step, s->eval_every));
    if (last || validates || asks || samples || saves) report(o, validates, asks);

    // Once in a while: a sample, and a checkpoint, which a thread writes while training goes on.
    if (samples) print_sample(o, step);
    if (saves) save(o, step, last);
    stopwatch_start(o->watch[(step + 1) % 2], o->model->ctx);
    return stop && !ends;
}

void outputs_close(Outputs* o, int stopped) {
    if (o->saver && !stopped) checkpoint_finish(o->saver);
    if (o->saver) saver_destroy(o->saver);
    folder_check();
    if (o->log) runlog_close(o->log);
    folder_close();
    for (int i = 0; i < 2; i++) stopwatch_destroy(o->watch[i]);
    fetch_destroy(o->state);
    fetch_destroy(o->load);
    if (o->stats) fetch_destroy(o->stats);
    free(o);
}

// ---- The use of a model

// Bits a byte can be compared between tokenizers; nats a token cannot.
static void print_loss(const Settings* s, const Sources* from, Model* m) {
    const double loss = evaluate_loss(m, from->val, from->val_windows);
    if (!isfinite(loss)) die(EXIT_FAILED, "the loss on --val %s is not finite: %g", s->val, loss);
    printf("loss       %.6f nats a token, perplexity %.4f, ", loss, exp(loss));
    if (from->val_bytes > 0) printf("%.6f bits a byte, ", loss / log(2) / from->val_bytes);
    printf("on %ld of %ld tokens\n", from->val_windows * s->run.seq_len, from->val->windows * s->run.seq_len);
}

void outputs_of_use(Ranks* world, const Settings* s, const Sources* from, Model* m) {
    char* text = *s->sample ? model_sample(m, s, world, from->tokenizer, 0) : NULL;
    if (text) printf("%s\n", text);
    free(text);
    if (from->val) print_loss(s, from, m);
    if (from->questions) evaluate_questions(NULL, m, from->questions, from->question_files, from->tokenizer);
}
