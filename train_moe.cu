// train_moe: pretrains a DeepSeek-style mixture-of-experts model from tokenized shards. Host code only; read on in
// model/.
//
//   main    connects the ranks and reads the options
//   run     opens data, folder and model: pretrained/sources.h. All that a run writes: pretrained/outputs.h
//   train   for each step: model_gradient and model_update
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "device/check.h"
#include "device/threads.h"
#include "device/version.h"
#include "model/agree.h"
#include "model/memory.h"
#include "model/report.h"
#include "parallel/watch.h"
#include "pretrained/outputs.h"

// The signal that asked this rank to stop. A signal is answered at once, because a validation may take minutes; stdout
// is rank 0's alone.
static volatile sig_atomic_t stop_asked = 0;
static void ask_stop(int signal_number) {
    static const char answer[] = "stopping after this step and what is measured with it\n";
    const int before = errno;
    if (!stop_asked && write(STDOUT_FILENO, answer, sizeof(answer) - 1) < 0) errno = before;  // the reader is gone
    stop_asked = signal_number;
}

// A full disk or quota becomes an error of write(2), with a message. A closed pipe does not stop the run. The other
// signals ask the run to save and stop; Slurm sends SIGUSR1 some time before a job's end (--signal). A signal that was
// ignored at the start stays ignored: SIGHUP after nohup, SIGINT in a script's background job.
static void catch_signals(void) {
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    static const int asking[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
    for (size_t i = 0; i < sizeof(asking) / sizeof(asking[0]); i++)
        if (signal(asking[i], ask_stop) == SIG_IGN) signal(asking[i], SIG_IGN);
}

// The steps from `saved` + 1 on.
static void train(const Settings* s, const Sources* sources, Outputs* outputs, Model* m, int64_t saved) {
    int stop = 0;
    for (int64_t step = saved + 1; step <= s->run.steps && !stop; step++) {
        // The device gets this step, and the host waits for the results of the step before.
        model_gradient(m, sources->loader, step);
        model_update(m, stop_asked != 0);
        stop = outputs_step(outputs, step);
    }

    outputs_close(outputs, stop);
    if (stop && stop_asked) printf("stopped by signal %d", (int)stop_asked);
    if (stop && !stop_asked) printf("stopped because another rank was asked to");
    const char* on = s->resume ? "; the same command goes on from here" : "; --resume goes on from here";
    if (stop) printf("%s\n", *s->out ? on : "");
}

// Opens data and model, and trains the model, or uses it.
static void run(Ranks* world, const Settings* s, bool resumes) {
    const bool trains = !s->run.frozen;
    if (trains) catch_signals();
    if (trains) report_settings(s);
    Sources sources = sources_open(world, s, resumes);

    // Too little memory, or a folder that cannot be used, ends the run before the run allocates or writes anything.
    device_choose(ranks_local());
    memory_check(s, world);
    Outputs* outputs = trains ? outputs_open(world, s, version_text()) : NULL;
    Model* m = model_create(&s->model, &s->run, world);
    if (trains) report_device(m);
    const int64_t saved = sources_weights(&sources, s, world, m);
    if (trains) {
        outputs_begin(outputs, &sources, m, saved);
        train(s, &sources, outputs, m, saved);
    } else {
        outputs_of_use(world, s, &sources, m);
    }
    model_destroy(m);
    sources_close(&sources);
}

// --timeout, before the options are parsed: ranks report errors in options together, and must be connected first.
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

// Connects the ranks. An alarm limits the time of the ranks' start, until the watchdog begins.
static Ranks* connect_ranks(int* argc, char*** argv) {
    // A file must not get the number of a closed standard stream, or the program's output would go into it.
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDWR);  // the lowest number that is free

    device_setup(*argv);  // before MPI, which starts but once in a process
    const double limit = time_limit(*argc, *argv);
    watch_alarm(limit, "MPI does not connect the ranks: one is stopped, or its machine, network or file system hangs");
    Ranks* world = ranks_start(argc, argv);
    // A run of one rank waits for no other.
    watch_alarm(ranks_count(world) > 1 ? limit : 0,
                "the ranks do not agree on a checkpoint of --out: rank 0 reads its manifest, and all wait for it; one "
                "is stopped, or its machine, network or file system hangs");
    // All shards stay open, and a large set has more files than the usual soft limit (1024) allows. The limit rises
    // after MPI's start, because a process that MPI starts may close every number up to the limit.
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    return world;
}

int main(int argc, char** argv) {
    threads_check_stacks();
    Ranks* world = connect_ranks(&argc, &argv);
    bool resumes;
    Settings s = sources_settings(world, argc, argv, &resumes);
    threads_check();
    watch_start(world, s.timeout);
    agree_on_settings(world, &s);

    const int asks = s.help || s.version, runs = !asks && !s.dry_run;
    if (runs)
        run(world, &s, resumes);
    else if (!asks)
        memory_report(&s, ranks_count(world));
    else if (!s.help)
        puts(version_text());

    // Lost output is an error here; a training run with --out has its log. An earlier flush may have lost output: then
    // this flush succeeds, and the earlier errno is gone.
    const char* lost = fflush(stdout) != 0 ? strerror(errno) : ferror(stdout) ? "a full disk or a closed pipe" : NULL;
    if (lost && !(runs && !s.run.frozen && *s.out)) die(EXIT_FAILED, "cannot write the output: %s", lost);

    settings_free(&s);
    watch_stop();
    ranks_end(world);
    return 0;
}
