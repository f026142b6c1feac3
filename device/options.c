// A value is a member of the caller's struct, at its row's offset. The row's type says how text becomes the value
// (options_set) and the value text (option_text).
#include "device/options.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"

static void* value_at(const Option* o, void* values) { return (char*)values + o->offset; }

// Index of `text` in "a|b|c", -1 if it is none of them.
static int64_t choice_index(const char* choices, const char* text) {
    int64_t index = 0;
    for (const char* c = choices; *c; index++) {
        size_t length = strcspn(c, "|");
        if (length == strlen(text) && strncmp(c, text, length) == 0) return index;
        c += length + (c[length] == '|');
    }
    return -1;
}

// Number `index` of "a|b|c", in fresh memory.
static char* choice_name(const char* choices, int64_t index) {
    while (index-- > 0) choices = strchr(choices, '|') + 1;
    return host_format("%.*s", (int)strcspn(choices, "|"), choices);
}

// The number that `text` is, in the option's range. A whole one is exact: no range goes beyond 2^53.
static double number(const Option* o, const char* text, const char* where) {
    int whole = o->type == OPTION_INT, digits = whole ? 15 : 6;
    char* end = NULL;
    errno = 0;
    double v = whole ? (double)strtol(text, &end, 10) : strtod(text, &end);
    if (end == text || *end || (whole ? errno != 0 : !isfinite(v)))
        die(EXIT_USAGE, "%s--%s takes a %s from %.*g to %.*g, not '%s'", where, o->name,
            whole ? "whole number" : "number", digits, o->min, digits, o->max, text);
    if (v < o->min || v > o->max)
        die(EXIT_USAGE, "%s--%s %s is out of range: from %.*g to %.*g are allowed", where, o->name, text, digits,
            o->min, digits, o->max);
    return v;
}

void options_set(const Option* o, void* values, const char* text, const char* where) {
    void* value = value_at(o, values);
    switch (o->type) {
        case OPTION_INT: *(int64_t*)value = (int64_t)number(o, text, where); return;
        case OPTION_FLOAT: *(double*)value = number(o, text, where); return;
        case OPTION_CHOICE:
            *(int64_t*)value = choice_index(o->choices, text);
            if (*(int64_t*)value < 0)
                die(EXIT_USAGE, "%s--%s takes one of %s, not '%s'", where, o->name, o->choices, text);
            return;
        case OPTION_TEXT:
            free(*(char**)value);
            *(char**)value = host_strdup(text);
            return;
        case OPTION_FLAG: *(int64_t*)value = text[0] == '1'; return;
    }
}

void options_defaults(const Option* table, int count, void* values) {
    for (int i = 0; i < count; i++)
        if (table[i].initial) options_set(&table[i], values, table[i].initial, "");
}

void options_free(const Option* table, int count, void* values) {
    for (int i = 0; i < count; i++) {
        char** text = (char**)value_at(&table[i], values);
        if (table[i].type != OPTION_TEXT) continue;
        free(*text);
        *text = NULL;
    }
}

// Edit distance (Levenshtein), for "did you mean". row[j] is the distance of the first i letters of a and j of b.
static int distance(const char* a, const char* b) {
    int row[64], n = (int)strlen(b);
    if (n > 63) return 64;
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 0; a[i]; i++) {
        int corner = row[0];
        row[0] = i + 1;
        for (int j = 1; j <= n; j++) {
            int replaced = corner + (a[i] != b[j - 1]);
            corner = row[j];
            row[j] = (int)min_i64(replaced, 1 + min_i64(row[j], row[j - 1]));
        }
    }
    return row[n];
}

void options_parse(const Option* table, int count, void* values, char* given, int argc, char** argv) {
    for (int a = 1; a < argc; a++) {
        const char* word = strcmp(argv[a], "-h") == 0 ? "--help" : argv[a];
        if (strncmp(word, "--", 2) != 0)
            die(EXIT_USAGE, "'%s' is not an option; options look like --name value (--help lists them)", word);

        // The option of this name, or else the one with the nearest name.
        size_t length = strcspn(word + 2, "=");
        char* name = host_format("%.*s", (int)length, word + 2);
        int found = 0;
        for (int i = 0; i < count; i++)
            if (distance(table[i].name, name) < distance(table[found].name, name)) found = i;
        const Option* o = &table[found];
        if (strcmp(o->name, name) != 0)
            die(EXIT_USAGE, "unknown option --%s; did you mean --%s? (--help lists all)", name, o->name);
        free(name);
        given[found] = 1;

        // Its value: behind "=", or the next word. One that looks like an option is a value forgotten.
        const char* value = word[2 + length] ? word + 2 + length + 1 : NULL;
        if (o->type == OPTION_FLAG) {
            if (value) die(EXIT_USAGE, "--%s takes no value, and was given '%s'", o->name, value);
            value = "1";
        } else if (!value) {
            if (++a == argc) die(EXIT_USAGE, "--%s needs a value", o->name);
            value = argv[a];
            if (strncmp(value, "--", 2) == 0)
                die(EXIT_USAGE, "--%s needs a value, and %s looks like an option", o->name, value);
        }
        options_set(o, values, value, "");
    }
}

// In 9 digits where they are all that the number has, else in 17, which every number can be read back from.
static char* float_text(double value) {
    char* text = host_format("%.9g", value);
    if (strtod(text, NULL) == value) return text;
    free(text);
    return host_format("%.17g", value);
}

char* option_text(const Option* o, const void* values) {
    const void* v = (const char*)values + o->offset;
    switch (o->type) {
        case OPTION_FLOAT: return float_text(*(const double*)v);
        case OPTION_CHOICE: return choice_name(o->choices, *(const int64_t*)v);
        case OPTION_TEXT: return host_strdup(*(char* const*)v);
        default: return host_format("%ld", *(const int64_t*)v);
    }
}

// A group begins on a line of its own, and its lines have 120 columns at most.
void options_print(const Option* table, int count, const void* values) {
    int column = 0;
    for (int i = 0; i < count; i++) {
        if (i == 0 || strcmp(table[i].group, table[i - 1].group) != 0)
            column = printf("%s%-10s", i ? "\n" : "", table[i].group);
        char *value = option_text(&table[i], values), *text = host_printable(value, strlen(value), "");
        const char* shown = *text ? text : "''";
        if (column + strlen(table[i].name) + strlen(shown) + 3 > 120) column = printf("\n%-10s", "") - 1;
        column += printf("  %s %s", table[i].name, shown);
        free(value);
        free(text);
    }
    printf("\n");
}

void options_help(const Option* table, int count, const char* program) {
    static const char* const kinds[] = {"N", "X", "TEXT", "", ""};  // by OptionType
    printf("usage: %s --train GLOB [options]\n       %s --out FOLDER --resume [options]\n"
           "       %s --sample FOLDER | --evaluate FOLDER [options]\n",
           program, program, program);
    const Option* first = table;  // of the group
    for (int i = 0; i < count; i++) {
        const Option* o = &table[i];
        if (i == 0 || strcmp(o->group, first->group) != 0) {
            first = o;
            printf("\n%s\n", o->group);
        }
        char* usage = host_format("--%s %s", o->name, o->choices ? o->choices : kinds[o->type]);
        char* initial = o->type == OPTION_FLAG ? host_strdup("off")
                        : !o->initial          ? host_format("by --%s", first->name)
                                               : host_strdup(*o->initial ? o->initial : "none");
        printf("  %-34s %s [%s]\n", usage, o->help, initial);
        free(initial);
        free(usage);
    }
}
