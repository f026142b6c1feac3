// A value is a member of the caller's struct, at the offset in its row. The row's type selects the conversions from
// text (options_set) and to text (option_text).
#include "device/options.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/check.h"

static void* value_at(const Option* o, void* values) { return (char*)values + o->offset; }

// The index of `text` in "a|b|c", -1 if it is none of them.
static int64_t choice_index(const char* choices, const char* text) {
    int64_t index = 0;
    for (const char* c = choices; *c; index++) {
        size_t length = strcspn(c, "|");
        if (length == strlen(text) && strncmp(c, text, length) == 0) return index;
        c += length + (c[length] == '|');
    }
    return -1;
}

// Choice `index` of "a|b|c", newly allocated.
static char* choice_name(const char* choices, int64_t index) {
    while (index-- > 0) choices = strchr(choices, '|') + 1;
    return host_format("%.*s", (int)strcspn(choices, "|"), choices);
}

// Parses a number in the option's range. An integer may be written as 1e6, and is exact: no range goes beyond 2^53.
static double number(const Option* o, const char* text, const char* where) {
    int whole = o->type == OPTION_INT, digits = whole ? 15 : 6;
    const char* dashes = o->help ? "--" : "";  // a member of the record alone has none
    char* end = NULL;
    double v = strtod(text, &end);
    if (end == text || *end || !isfinite(v) || (whole && v != floor(v)))
        die(EXIT_USAGE, "%s%s%s takes a %s from %.*g to %.*g, not '%s'", where, dashes, o->name,
            whole ? "whole number" : "number", digits, o->min, digits, o->max, text);
    if (v < o->min || v > o->max)
        die(EXIT_USAGE, "%s%s%s %s is out of range: from %.*g to %.*g are allowed", where, dashes, o->name, text,
            digits, o->min, digits, o->max);
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
        // A flag that is given is 1. With "all", where the range goes up to 2, it is 2.
        case OPTION_FLAG: *(int64_t*)value = strcmp(text, "all") == 0 ? 2 : text[0] == '1'; return;
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

// Edit distance (Levenshtein), for "did you mean". row[j] is the distance between the first i letters of a and the
// first j of b.
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

// Names of nanoGPT, llm.c, transformers, Megatron-LM, torchtitan, LitGPT and train_moe 0.1.0, and what replaces them.
static const char* const others[][2] = {
    {"model", "config|model-name|preset"},
    {"layers", "num-layers|n-layer|num-hidden-layers|depth"},
    {"dim", "hidden-size|n-embd|d-model"},
    {"heads", "n-head|num-heads|num-attention-heads"},
    {"dense-ffn", "ffn-hidden-size|intermediate-size"},
    {"expert-ffn", "moe-intermediate-size|moe-ffn-hidden-size"},
    {"experts", "num-experts|n-routed-experts"},
    {"top-k", "moe-router-topk|num-experts-per-tok"},
    {"yarn", "rope-scaling|yarn-factor|yarn-mscale|yarn-original-len"},
    {"init", "init-from|pretrained|finetune|load"},
    {"init-moments", "load-optimizer|load-optim|keep-moments"},
    {"sample", "generate"},
    {"sample-tokens", "max-new-tokens"},
    {"vocab", "vocab-size"},
    {"optimizer", "optim"},
    {"train", "data|data-path|data-dir|dataset|train-data|input-bin"},
    {"val", "valid|valid-data|val-data|input-val-bin"},
    {"seq-len", "context|context-length|ctx-len|block-size|sequence-length|max-length"},
    {"batch", "batch-size|micro-batch-size|per-device-train-batch-size|local-batch-size"},
    {"tokens-per-step",
     "gradient-accumulation-steps|grad-accum|grad-accumulation-steps|global-batch-size|total-batch-size"},
    {"steps", "max-steps|max-iters|num-iterations|iters|train-iters|epochs|num-train-epochs"},
    {"out", "output|output-dir|out-dir|save|save-dir|checkpoint-dir"},
    {"resume", "resume-from-checkpoint|continue"},
    {"save-every", "save-steps|save-interval|checkpoint-interval"},
    {"val-every", "eval-interval|eval-steps|val-interval"},
    {"keep", "save-total-limit"},
    {"lr", "learning-rate|max-lr"},
    {"final-lr-frac", "min-lr"},
    {"warmup", "warmup-steps|warmup-iters|lr-warmup-steps|warmup-ratio"},
    {"schedule", "lr-scheduler-type|lr-decay-style"},
    {"weight-decay", "wd"},
    {"beta1", "adam-beta1"},
    {"beta2", "adam-beta2"},
    {"clip", "grad-clip|clip-grad|max-grad-norm|gradient-clipping"},
    {"mtp-weight", "mtp-weight-end|mtp-switch"},
    {"ep", "expert-parallel|expert-parallel-size|expert-model-parallel-size|expert-parallel-degree"},
    {"shard", "fsdp|zero-stage"},
    {"precision", "dtype|bf16|fp8|mixed-precision"},
    {"recompute", "gradient-checkpointing|activation-checkpointing|recompute-activations"},
};

// Ends the run. The hint is an option that replaces the name of another program's option. Else it is an option that
// differs in at most a third of its letters.
static NORETURN void unknown_option(const Option* table, int count, const char* name) {
    // Some programs write _ for -.
    char* dashed = host_strdup(name);
    for (char* c = dashed; *c; c++)
        if (*c == '_') *c = '-';
    // The nearest option, or what replaces this very name.
    const char* hint = NULL;
    int least = (int)strlen(name) / 3 + 1;
    for (int i = 0; i < count; i++) {
        const int apart = distance(table[i].name, dashed);
        if (apart >= least || !table[i].help) continue;
        least = apart;
        hint = table[i].name;
    }
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
        if (choice_index(others[i][1], dashed) >= 0) hint = others[i][0];
    free(dashed);
    if (hint) die(EXIT_USAGE, "unknown option --%s; did you mean --%s? (--help all lists all)", name, hint);
    die(EXIT_USAGE, "unknown option --%s (--help all lists all)", name);
}

void options_parse(const Option* table, int count, void* values, char* given, int argc, char** argv) {
    for (int a = 1; a < argc; a++) {
        const char* word = strcmp(argv[a], "-h") == 0 ? "--help" : argv[a];
        if (strncmp(word, "--", 2) != 0)
            die(EXIT_USAGE, "'%s' is not an option; options look like --name value (--help lists them)%s", word,
                access(word, F_OK) == 0 ? "; patterns of files are quoted: --train 'corpus/*_train_*.bin'" : "");

        // The option of this name.
        size_t length = strcspn(word + 2, "=");
        char* name = host_format("%.*s", (int)length, word + 2);
        int found = 0;
        while (found < count && (!table[found].help || strcmp(table[found].name, name) != 0)) found++;
        if (found == count) unknown_option(table, count, name);
        const Option* o = &table[found];
        free(name);
        given[found] = 1;

        // Its value: after "=", or the next word. A next word that looks like an option means a missing value.
        const char* value = word[2 + length] ? word + 2 + length + 1 : NULL;
        if (o->type == OPTION_FLAG) {
            if (value) die(EXIT_USAGE, "--%s takes no value, and was given '%s'", o->name, value);
            value = o->max == 2 && a + 1 < argc && strcmp(argv[a + 1], "all") == 0 ? argv[++a] : "1";
        } else if (!value) {
            if (++a == argc) die(EXIT_USAGE, "--%s needs a value", o->name);
            value = argv[a];
            if (strncmp(value, "--", 2) == 0)
                die(EXIT_USAGE, "--%s needs a value, and %s looks like an option", o->name, value);
        }
        options_set(o, values, value, "");
    }
}

// With 9 digits if these are exact, else with 17, which identify every number.
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

void option_copy(const Option* o, void* to, const void* from, const char* where) {
    char* text = option_text(o, from);
    options_set(o, to, text, where);
    free(text);
}

// Values other than texts have 8 bytes.
int option_same(const Option* o, const void* values, const void* others) {
    const void *a = (const char*)values + o->offset, *b = (const char*)others + o->offset;
    return o->type == OPTION_TEXT ? strcmp(*(char* const*)a, *(char* const*)b) == 0 : memcmp(a, b, 8) == 0;
}

// A group starts on its own line, and its lines have at most 120 columns.
void options_print(const Option* table, int count, const void* values, const void* defaults) {
    int column = 0;
    const char* group = "";
    for (int i = 0; i < count; i++) {
        if (defaults && option_same(&table[i], values, defaults)) continue;
        if (strcmp(table[i].group, group) != 0) column = printf("%s%-9s", *group ? "\n" : "", table[i].group);
        group = table[i].group;
        char *value = option_text(&table[i], values), *text = host_printable(value, strlen(value), "");
        const char* shown = *text ? text : "''";
        // A line that would be too long goes on below, behind the column of the group.
        if (column + strlen(table[i].name) + strlen(shown) + 3 > 120) column = printf("\n%-9s", "") - 1;
        column += printf("  %s %s", table[i].name, shown);
        free(value);
        free(text);
    }
    printf("\n");
}

void options_help(const Option* table, int count, bool all) {
    static const char* const kinds[] = {"N", "X", "TEXT", "", ""};  // by OptionType
    printf(
        "usage: train_moe --train GLOB [options]\n       train_moe --out FOLDER --resume [options]\n"
        "       train_moe --sample FOLDER | --evaluate FOLDER [options]\n");
    if (!all) printf("\nThe options that most runs need; --help all lists all.\n");
    const Option *first = table, *shown = NULL;  // first option of the group; last option printed
    for (int i = 0; i < count; i++) {
        const Option* o = &table[i];
        if (strcmp(o->group, first->group) != 0) first = o;
        if (!o->help || (!all && !o->common)) continue;
        if (!shown || strcmp(o->group, shown->group) != 0) printf("\n%s\n", o->group);
        shown = o;
        char* usage = host_format("--%s %s", o->name, o->choices ? o->choices : kinds[o->type]);
        char* initial = o->type == OPTION_FLAG ? host_strdup("off")
                        : !o->initial          ? host_format("by --%s", first->name)
                                               : host_strdup(*o->initial ? o->initial : "none");
        printf("  %-34s %s [%s]\n", usage, o->help, initial);
        free(initial);
        free(usage);
    }
}
