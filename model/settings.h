// The options of a run: their table, the model presets, the sets of precisions, and checks between options.
#pragma once

#include "data/json.h"
#include "device/options.h"
#include "model/config.h"
#include "mx/formats.h"

// A model of --model, with the defaults that belong to it.
typedef struct Preset {
    ModelConfig model;
    double lr, muon_lr;
    Optimizer optimizer;
    int expert_steps;  // --muon-expert-steps
    bool bf16_moments;
} Preset;
extern const Preset settings_presets[];

enum { SETTINGS_MOST = 128 };  // rows of the table

// The value of every option. A choice is the number of the word in its list.
typedef struct Settings {
    int64_t preset;
    ModelConfig model;
    RunConfig run;
    char *init, *sample, *evaluate;  // folders of models
    char *train, *val, *eval, *tokenizer;
    char *out, *prompt;
    int64_t data_seed, init_moments, resume, save_every, keep, val_every, val_tokens, eval_every, sample_every,
        sample_tokens, overfit, dry_run, version, help;
    double temperature, warmup, timeout, gpu_memory;
    int64_t precision;                      // the mode (FormatId): it sets the formats, unless the command line does
    int64_t steps_before;                   // --resume: --steps of the checkpoint; not an option
    int64_t updates_before, tokens_before;  // --init-moments: of all stages before; not options
    char given[SETTINGS_MOST];              // by row of the table: 1 if the command line has the option
} Settings;

// Rows are in the order of --help; the first is --model.
extern const Option settings_table[];
extern const int settings_count;

// The command line over the defaults; argc 0: the defaults alone. Settings are read in two calls, because --out names
// the record that settings_read needs.
Settings settings_parse(int argc, char** argv);

// All options, each from the first source that has it: the command line, which settings_parse read; the record of the
// checkpoint to resume from (NULL: none), or of the step in --init (--init-moments); --model, --precision and the
// tokenizer; the default. Then runs settings_check for a run of `ranks` ranks (--dry-run: --ranks). --help prints the
// table; --help and --version skip the checks.
Settings settings_read(Settings parsed, int ranks, const Json* record);

// Sets options without a default of their own from --model and `precision`, unless the command line has them.
void settings_preset(Settings* settings, int64_t precision);

// The defaults of all options with this --model and --precision, in fresh memory. Options that the start of a
// run prints in other lines have the given values.
Settings settings_defaults(const Settings* settings);

void settings_free(Settings* settings);

// Ends the run with EXIT_USAGE if options do not fit together; the message names them with their values. Checks sizes,
// limits of the CUDA kernels, widths of quantized products, and options that need others. Warns of unlikely values.
void settings_check(const Settings* settings);
// Checks sizes, --ep and --tokens-per-step alone. Returns the fault as a message in fresh memory; NULL: there is none.
char* settings_refusal(const Settings* settings);

// The folder of the model to begin with; NULL: none. *option gets the option that named the folder.
const char* settings_folder(const Settings* settings, const char** option);

// Steps of the warm-up of a run that begins with these --warmup and --steps.
double settings_warmup(const Settings* settings);
