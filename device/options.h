// Options as one table. The table drives the command line, --help, the printed configuration and the checkpoint's
// record, so that these cannot differ. Values are members of a plain struct; the table has their offsets.
//
//   a row           {"run", "steps", OPTION_INT, offsetof(Settings, steps), "1000", 1, 1e9, NULL,
//                    OPTION_FREE, true, "updates in all"}
//   command line    --steps 500, or --steps=500
//   --help          --steps N      updates in all [1000]
//   configuration   run         steps 500
//   record          "steps": 500
#pragma once

#include "device/types.h"

typedef enum {
    OPTION_INT,     // int64_t
    OPTION_FLOAT,   // double
    OPTION_TEXT,    // char*
    OPTION_CHOICE,  // int64_t: index into choices
    OPTION_FLAG     // int64_t: 0 or 1, takes no value
} OptionType;

// The rule for an option when a run is resumed, or when a stage begins with its moments (--init-moments). Each rule is
// stricter than the rule before it.
typedef enum {
    OPTION_ONCE,   // for a single start: the old value is never used
    OPTION_FREE,   // may change; the default is the value of the run
    OPTION_FIXED,  // defines the run: must have the same value; a new stage may have another
    OPTION_KEPT    // defines weights or moments: must have the same value, also in a new stage
} OptionScope;

typedef struct Option {
    const char* group;
    const char* name;  // without the dashes
    OptionType type;
    size_t offset;        // of the value in the struct
    const char* initial;  // default as text; NULL: set by the group's first option, a preset's name
    double min, max;      // INT and FLOAT: allowed range, both ends included
    const char* choices;  // CHOICE: "a|b|c"
    OptionScope scope;
    bool common;       // most runs need it: --help prints it
    const char* help;  // NULL: no option of the command line, only a member of the record
} Option;

// Writes the defaults into `values`, whose texts must be NULL or allocated: old texts are freed. Options without a
// default stay unchanged.
void options_defaults(const Option* table, int count, void* values);

// Sets one option from text; frees an earlier text. If the value is not a number, out of range or not one of the
// choices, the run ends with EXIT_USAGE. The message begins with `where`.
void options_set(const Option* option, void* values, const char* text, const char* where);

// Parses the command line: `--name value`, `--name=value`, flags, -h for --help, and `--flag all` (value 2, where
// max is 2). given[i] becomes 1 for every option named. If an option is named twice, the last value counts. The run
// ends with EXIT_USAGE
//
//   on an unknown option            with a hint if a name is similar
//   on a missing value
//   on a value for a flag
//   on a value that begins with --  `--name=--value` is fine
//   if options_set fails
void options_parse(const Option* table, int count, void* values, char* given, int argc, char** argv);

// Frees the texts in `values`.
void options_free(const Option* table, int count, void* values);

// The value as text, newly allocated; parsing it gives the same value.
char* option_text(const Option* option, const void* values);
// Copies the option's value from one struct to another, with the checks of options_set.
void option_copy(const Option* option, void* to, const void* from, const char* where);
// 1 if both structs have the same value.
int option_same(const Option* option, const void* values, const void* others);

// Prints help to stdout: the common options, or all.
void options_help(const Option* table, int count, bool all);
// Prints "group  name value ..." lines to stdout: values that differ from `defaults`, or all if `defaults` is NULL.
void options_print(const Option* table, int count, const void* values, const void* defaults);
