// Options as one table: it parses the command line, prints --help and the configuration, and writes the checkpoint's
// record, so that these cannot drift apart. Values live in a plain struct that the table points into.
//
//   a row           {"run", "steps", OPTION_INT, offsetof(Settings, steps), "1000", 1, 1e9, NULL, 0, "updates in all"}
//   command line    --steps 500, or --steps=500
//   --help          --steps N      updates in all [1000]
//   configuration   run         steps 500
//   record          "steps": 500
#ifndef DEVICE_OPTIONS_H
#define DEVICE_OPTIONS_H

#include "device/types.h"

BEGIN_C

typedef enum {
    OPTION_INT,     // int64_t
    OPTION_FLOAT,   // double
    OPTION_TEXT,    // char*
    OPTION_CHOICE,  // int64_t: index into choices
    OPTION_FLAG     // int64_t: 0 or 1, takes no value
} OptionType;

// What an option is to a run that is resumed.
typedef enum {
    OPTION_FREE,   // it may have another value; without one, that of before
    OPTION_FIXED,  // part of what the run is: it must have the same value
    OPTION_ONCE    // of one start alone: it never has the value of before
} OptionScope;

typedef struct Option {
    const char* group;
    const char* name;  // without the dashes
    OptionType type;
    size_t offset;        // of the value in the struct
    const char* initial;  // default as text; NULL: it follows from the first option of the group, a preset's name
    double min, max;      // INT and FLOAT: allowed range, both ends included
    const char* choices;  // CHOICE: "a|b|c"
    OptionScope scope;
    const char* help;
} Option;

// Puts the defaults into `values`, whose texts must be NULL or in memory of their own. Options without a default are
// left alone.
void options_defaults(const Option* table, int count, void* values);

// Sets one option from text; a text set before is freed. Ends the run with EXIT_USAGE and a message that begins with
// `where` on a value that is no number, out of range or none of the choices.
void options_set(const Option* option, void* values, const char* text, const char* where);

// Reads `--name value`, `--name=value` and flags, -h for --help, and `--help all`, which gives that flag the value 2;
// given[i] becomes 1 for every option named. An option named twice has its last value. Ends the run with EXIT_USAGE on
// an unknown option (with a hint where a name is near), a missing value, one that a flag is given or that begins with
// "--" (`--name=--value` is fine), and where options_set does.
void options_parse(const Option* table, int count, void* values, char* given, int argc, char** argv);

// Frees the texts.
void options_free(const Option* table, int count, void* values);

// The value as text, in fresh memory: read back it is the same value.
char* option_text(const Option* option, const void* values);

// To stdout: the options named in `common`, which ends with NULL; all options where it is NULL.
void options_help(const Option* table, int count, const char* program, const char* const* common);
// To stdout, "group  name value ..." lines: the values that differ from `defaults`; all values where it is NULL.
void options_print(const Option* table, int count, const void* values, const void* defaults);

END_C

#endif
