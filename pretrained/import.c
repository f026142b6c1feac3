// Each tensor of the model's checkpoint is looked up in all files of the folder. Tensors that no parameter asked for
// are refused at the end.
#include "pretrained/import.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/safetensors.h"
#include "device/check.h"
#include "device/files.h"
#include "model/persist.h"
#include "parallel/checkpoint.h"

static const int64_t READ_ELEMENTS = (int64_t)1 << 20;  // elements read at a time
static const size_t INDEX_LIMIT = (size_t)256 << 20;    // bytes

// The files of the folder. It lives during import_weights.
typedef struct Import {
    const char *option, *folder;
    SafeTensors** files;  // used: a parameter has asked for the tensor
    int count;
    int last;  // file of the last tensor found; the next is mostly in it too
} Import;

// Opens a file, unless it is open already. A bad file ends the run.
static void open_source(Import* in, const char* name) {
    char error[512];
    // From the last one on: neighbours in the index are mostly in the same file.
    for (int i = in->count - 1; i >= 0; i--)
        if (strcmp(strrchr(in->files[i]->path, '/') + 1, name) == 0) return;
    if (strchr(name, '/')) die(EXIT_USAGE, "--%s %s: the index names a file outside: %s", in->option, in->folder, name);
    SafeTensors* st = st_open(path_of("%s/%s", in->folder, name).text, error, sizeof(error));
    if (!st) die(EXIT_USAGE, "--%s %s: %s", in->option, in->folder, error);
    in->files = (SafeTensors**)realloc(in->files, (size_t)(in->count + 1) * sizeof(SafeTensors*));
    if (!in->files) die(EXIT_FAILED, "out of host memory for the list of files");
    in->files[in->count++] = st;
}

// model.safetensors, as transformers prefers it, or the files that the index names.
static void open_sources(Import* in) {
    char error[256];
    size_t size;
    Path path = path_of("%s/model.safetensors.index.json", in->folder);
    char* text = NULL;
    if (access(path_of("%s/model.safetensors", in->folder).text, F_OK) != 0 &&
        !(text = read_file(path.text, INDEX_LIMIT, &size)) && errno != ENOENT)
        die(EXIT_USAGE, "--%s: %s: %s", in->option, path.text, file_error(errno));
    if (!text) {
        open_source(in, "model.safetensors");
        return;
    }
    Json* json = json_parse(text, size, error, sizeof(error));
    const Json* map = json ? json_get(json, "weight_map") : NULL;
    if (!map) die(EXIT_USAGE, "--%s: %s: %s", in->option, path.text, json ? "it has no weight_map" : error);
    for (const Json* entry = map->child; entry; entry = entry->next) {
        if (entry->type != JSON_STRING)
            die(EXIT_USAGE, "--%s: %s: %s names no file", in->option, path.text, entry->key);
        open_source(in, entry->text);
    }
    json_free(json);
    free(text);
}

// That a checkpoint's files are as they were written.
static void check_sources(const Import* in, Ranks* world) {
    const char** names = (const char**)host_alloc((size_t)(in->count + 1) * sizeof(char*));
    for (int i = 0; i < in->count; i++) names[i] = strrchr(in->files[i]->path, '/') + 1;
    names[in->count] = "config.json";
    char* why = checkpoint_check(world, in->folder, names, in->count + 1);
    if (why) die(EXIT_FAILED, "--%s: %s", in->option, why);
    free((void*)names);
}

// The tensor of this name and the source that holds it, or NULL.
static const StTensor* find(Import* in, const char* name, const SafeTensors** st) {
    for (int i = 0; i < in->count; i++) {
        const int at = (in->last + i) % in->count;
        const StTensor* found = st_find(in->files[at], name);
        if (!found) continue;
        in->files[at]->tensors[found - in->files[at]->tensors].used = true;
        *st = in->files[at];
        in->last = at;
        return found;
    }
    return NULL;
}

// n elements from `first` on, in the file's type. An error of the file ends the run.
static void read_raw(const SafeTensors* st, const StTensor* t, int64_t first, int64_t n, void* out) {
    if (st_read(st, t, first, n, out) != 0)
        die(EXIT_FAILED, "%s: cannot read %s: %s", st->path, t->name, strerror(errno));
}

// The factors of a tensor in fp8, in fresh memory.
static float* read_scales(Import* in, const SafeTensors* st, const StTensor* t) {
    const SafeTensors* of;
    char* name = host_format("%s_scale_inv", t->name);
    const StTensor* s = find(in, name, &of);
    const int64_t rows = ceil_div(t->shape[0], FP8_BLOCK), columns = ceil_div(t->shape[1], FP8_BLOCK);
    if (!s || s->dtype != ST_F32 || s->rank != 2 || s->shape[0] != rows || s->shape[1] != columns)
        die(EXIT_USAGE, "%s: %s is F8_E4M3, so %s must be F32, %ld x %ld", st->path, t->name, name, rows, columns);
    float* scales = (float*)host_alloc((size_t)(rows * columns) * sizeof(float));
    read_raw(of, s, 0, rows * columns, scales);
    free(name);
    return scales;
}

// Loads this rank's slice of a tensor. Every rank looks up all tensors, so all see a missing one.
static void load(Import* in, const CheckpointTensor* t, Ctx* ctx) {
    const SafeTensors* st;
    const StTensor* found = find(in, t->name, &st);
    if (!found) die(EXIT_USAGE, "--%s %s: tensor %s is missing", in->option, in->folder, t->name);
    float* scales = found->dtype == ST_F8_E4M3 && found->rank == 2 ? read_scales(in, st, found) : NULL;
    char* why = checkpoint_read(t, st, found, scales, ctx);
    if (why) die(EXIT_USAGE, "%s", why);
    free(scales);
}

// Whether the folder has an MTP module as this layer: one with an eh_proj.
static bool has_module(Import* in, int64_t layer) {
    const SafeTensors* st;
    char* mark = host_format("model.layers.%ld.eh_proj.weight", layer);
    const bool found = find(in, mark, &st) != NULL;
    free(mark);
    return found;
}

// A module's copy of a tensor of the main model, where there is one: it must be the same. Each rank compares a share.
static void check_copy(Import* in, const Layout* l, int layer, const char* copy, const char* of) {
    const SafeTensors *st = NULL, *main = NULL;
    char *name = host_format("model.layers.%d.%s", layer, copy),
         *bytes = (char*)host_alloc((size_t)READ_ELEMENTS * sizeof(double)),
         *other = (char*)host_alloc((size_t)READ_ELEMENTS * sizeof(double));
    const StTensor *t = find(in, name, &st), *original = find(in, of, &main);
    const int64_t n = t && original ? original->shape[0] * original->shape[1] : 0, end = n * (l->rank + 1) / l->ranks;
    bool same = !n || (t->dtype == original->dtype && t->bytes == original->bytes);
    for (int64_t at = n * l->rank / l->ranks; same && at < end; at += READ_ELEMENTS) {
        const int64_t count = min_i64(end - at, READ_ELEMENTS);
        read_raw(st, t, at, count, bytes);
        read_raw(main, original, at, count, other);
        same = memcmp(bytes, other, (size_t)count * st_dtype_bytes(t->dtype)) == 0;
    }
    if (!same)
        die(EXIT_USAGE, "%s: tensor %s is not the same as %s, which the module of --mtp shares", st->path, name, of);
    free(name);
    free(bytes);
    free(other);
}

// Loads the tensors of a unit. A model without selection bias has no such tensor, and its biases stay 0.
static void load_unit(Import* in, Model* m, const Unit* u, const CheckpointFile* file) {
    for (int i = 0; i < file->count; i++)
        if (m->config.selection_bias || !strstr(file->tensors[i].name, ".e_score_correction_bias"))
            load(in, &file->tensors[i], m->ctx);
    if (u->kind != UNIT_MODULE) return;
    check_copy(in, &m->layout, u->layer, "embed_tokens.weight", "model.embed_tokens.weight");
    check_copy(in, &m->layout, u->layer, "shared_head.head.weight", "lm_head.weight");
}

void import_weights(Model* m, Ranks* world, const char* option, const char* folder) {
    Import in = {.option = option, .folder = folder};
    open_sources(&in);
    check_sources(&in, world);
    const int64_t layers = m->config.L;
    if (m->config.mtp && has_module(&in, layers + 1))
        die(EXIT_USAGE,
            "--%s %s: it has more than one MTP module, and --mtp 1 takes one: leave out --mtp, and no module is read",
            option, folder);

    // All units: read, or initialized where the folder lacks the MTP module.
    int count;
    CheckpointFile* files = model_files(m, m->run.optimizer, &count);  // of unit u: weights, then moments
    for (int u = 0; u < params_units(&m->config); u++) {
        const int layer = m->units[u].layer;
        if (m->units[u].kind != UNIT_MODULE || has_module(&in, layer)) {
            load_unit(&in, m, &m->units[u], &files[2 * u]);
        } else {
            params_init_unit(m->units, u, &m->config, &m->layout, (uint64_t)m->run.seed, m->ctx);
            printf("weights    layer %d, the module of --mtp, is not in the folder and is new\n", layer);
        }
    }

    model_files_free(files, count);

    // Tensors of the folder that no parameter asked for. Those of MTP modules are left out without --mtp. A block
    // behind the model's layers would be lost.
    int64_t layer;
    bool predicts_more = false;
    for (int i = 0; i < in.count; i++)
        for (int t = 0; t < in.files[i]->count; t++) {
            const StTensor* tensor = &in.files[i]->tensors[t];
            if (tensor->used || strstr(tensor->name, ".rotary_emb.inv_freq")) continue;
            predicts_more = !m->config.mtp && sscanf(tensor->name, "model.layers.%ld.", &layer) == 1 &&
                            layer >= layers && has_module(&in, layer);
            if (!predicts_more)
                die(EXIT_USAGE, "%s: tensor %s does not belong to this model", in.files[i]->path, tensor->name);
        }
    if (predicts_more) printf("weights    layers from %ld on are left out: they are MTP modules (--mtp)\n", layers);

    weights_changed(m->sharding, 1, m->ctx);

    for (int i = 0; i < in.count; i++) st_close(in.files[i]);
    free((void*)in.files);
}
