#include "model/persist.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "device/files.h"
#include "model/hub.h"
#include "model/record.h"
#include "parallel/slices.h"

// Adds a tensor to a file's list, named `name` and `suffix`; its slice begins at element `at` of `data`, this rank's
// memory.
static void add(CheckpointFile* file, CheckpointTensor tensor, const char* name, const char* suffix, void* data,
                int64_t at) {
    snprintf(tensor.name, sizeof(tensor.name), "%s%s", name, suffix);
    tensor.data = (char*)data + at * (int64_t)(tensor.weight ? sizeof(Master) : st_dtype_bytes(tensor.dtype));
    file->tensors[file->count++] = tensor;
}

// The tensors of unit u, from the table of parameters: of each its slice here, and the part that this rank writes.
static void list_unit(Model* m, int u, CheckpointFile* masters, CheckpointFile* moments, int64_t optimizer) {
    int tensors;
    NamedTensor* list = params_tensors(&m->config, &m->layout, u, &tensors);
    snprintf(masters->name, sizeof(masters->name), "block_%03d.safetensors", u);
    snprintf(moments->name, sizeof(moments->name), "block_%03d.adam.safetensors", u);
    masters->tensors = (CheckpointTensor*)host_alloc((size_t)(tensors + 1) * sizeof(CheckpointTensor));
    moments->tensors = (CheckpointTensor*)host_alloc((size_t)(2 * tensors + 1) * sizeof(CheckpointTensor));

    for (int i = 0; i < tensors; i++) {
        const NamedTensor* named = &list[i];
        const ParamBuffer* p = &m->units[u].buffer[named->buffer];
        // owned: elements in this rank's memory. own: those that it writes, and no other rank does.
        Slice owned = tensor_slice(named, p->owned_from, p->owned), own = tensor_slice(named, p->first, p->part);
        CheckpointTensor tensor = {.dtype = CHECKPOINT_DTYPE,
                                   .rank = named->rank,
                                   .shape = {named->shape[0], named->rank == 2 ? named->shape[1] : 1},
                                   .first = owned.first,
                                   .count = owned.count,
                                   .save_first = own.first,
                                   .save_count = own.count};
        int64_t at = owned.count ? named->offset + owned.first - p->owned_from : 0;
        tensor.weight = p->owned_weight + at;
        add(masters, tensor, named->name, "", p->master, at);
        tensor.weight = NULL;
        if (m->layout.bf16_moments) tensor.dtype = ST_BF16;

        // The moments, or the momentum. The state of another optimizer is not loaded.
        const int by_muon = named->muon && optimizer == MUON;
        if (named->muon && optimizer != m->run.optimizer) tensor.count = tensor.save_count = 0;
        add(moments, tensor, named->name, by_muon ? ".momentum_buffer" : ".exp_avg", p->m, at);
        if (!by_muon) add(moments, tensor, named->name, ".exp_avg_sq", p->v, tensor.count ? at - muon_owned(p) : 0);
    }
    free(list);

    // Every rank holds the router's biases whole; rank 0 writes them.
    const int layer = m->units[u].layer;
    if (m->units[u].at[ROUTER] < 0) return;
    if (m->config.score == SCORE_SOFTMAX && m->run.balance == BALANCE_NONE && !m->config.selection_bias) return;
    int64_t E = m->config.E;
    CheckpointTensor bias = {
        .dtype = CHECKPOINT_DTYPE, .rank = 1, .shape = {E, 1}, .count = E, .save_count = m->layout.rank == 0 ? E : 0};
    char name[112];
    snprintf(name, sizeof(name), "model.layers.%d.mlp.gate.e_score_correction_bias", layer);
    add(masters, bias, name, "", m->bias, layer * E);
}

// Two files a unit: weights at 2 u, moments at 2 u + 1.
CheckpointFile* model_files(Model* m, int64_t optimizer, int* count) {
    int units = params_units(&m->config);
    CheckpointFile* files = (CheckpointFile*)host_alloc((size_t)(2 * units) * sizeof(CheckpointFile));
    for (int u = 0; u < units; u++) list_unit(m, u, &files[2 * u], &files[2 * u + 1], optimizer);
    *count = 2 * units;
    return files;
}

void model_files_free(CheckpointFile* files, int count) {
    for (int i = 0; i < count; i++) free(files[i].tensors);
    free(files);
}

// The window of the run with which the step after `step` begins. Unsigned: a folder may be named after any step.
static int64_t window_after(const Model* m, int64_t step) {
    return (int64_t)((uint64_t)step * (uint64_t)(m->run.tokens_per_step / m->run.seq_len));
}

void model_save(Model* m, const Settings* s, Saver* saver, int64_t step, DataHash data, const StepState* state) {
    CheckpointRecord record = {step, window_after(m, step), state->updates, data.shards,
                               *s->tokenizer ? data.tokenizer : 0};  // without a file bytes are a guess
    int count;
    CheckpointFile* files = model_files(m, m->run.optimizer, &count);
    char* options = record_json(s);
    checkpoint_save(saver, &record, options, files, count, m->ctx);
    free(options);
    model_files_free(files, count);
}

// Options and data must be the same as in the run that saved.
static void check_record(const Settings* s, const Json* manifest, DataHash data) {
    record_check(json_get(manifest, "options"), false, s);
    if (json_int(manifest, "data_hash", -1) != (int64_t)data.shards)
        die(EXIT_USAGE, "--train must name the shards of the run in %s: names, sizes, headers or weights differ",
            s->out);
    const int64_t tokenizer = json_int(manifest, "tokenizer_hash", 0);
    if (tokenizer && tokenizer != data.tokenizer)
        die(EXIT_USAGE,
            "--tokenizer %s is not %s, that of the run in %s: its tokens or end of text differ; a run keeps its "
            "tokenizer",
            *s->tokenizer ? s->tokenizer : "(bytes)", json_text(json_get(manifest, "options"), "tokenizer"), s->out);
    // A record of 0.1.0 has no hash. The end of text is in the config.json of its step.
    const int64_t eot = hub_end_of_text_id(step_path(s->out, json_int(manifest, "step", 0), "").text);
    if (!tokenizer && eot >= 0 && eot != data.end_of_text)
        die(EXIT_USAGE,
            "--tokenizer %s ends a text with token %d, and the run in %s with %ld; a run keeps its tokenizer: make it "
            "with scripts/tokenizer_json.py from the tokenizer.json in the newest step",
            *s->tokenizer ? s->tokenizer : "(bytes)", data.end_of_text, s->out, eot);
}

// The checkpoints that rank 0 finds. Every rank tries the same ones.
static int64_t* all_ranks_list(Ranks* world, const char* out, int* count) {
    // Ranks may see different folders on a network file system.
    bool leads = ranks_index(world) == 0;
    int64_t* steps = leads ? checkpoint_list(out, count) : NULL;
    ranks_broadcast(world, count, sizeof(*count), 0);
    if (!leads) steps = (int64_t*)host_alloc((size_t)*count * sizeof(int64_t));
    ranks_broadcast(world, steps, (size_t)*count * sizeof(int64_t), 0);
    return steps;
}

// Loads a checkpoint, if it is good. Else returns the reason, as checkpoint_load does.
static char* load_step(Model* m, Ranks* world, const char* out, int64_t step, const Json* manifest, char* why) {
    int count;
    // A record that names no optimizer is one of AdamW.
    const char* name = json_text(json_get(manifest, "options"), "optimizer");
    const int64_t optimizer = name && strcmp(name, "muon") == 0 ? MUON : ADAMW;
    CheckpointFile* files = model_files(m, optimizer, &count);
    why = checkpoint_load(world, out, step, manifest, files, count, m->ctx, why);
    model_files_free(files, count);
    if (why) return why;
    StepState state = {.updates = json_int(manifest, "updates", -1)};
    device_upload(m->step.state, &state, sizeof(state), m->ctx);
    weights_changed(m->sharding, 1, m->ctx);
    if (optimizer != m->run.optimizer)
        printf("optimizer  was %s: the %s of the matrices that Muon trains start at zero\n",
               optimizer == MUON ? "muon" : "adamw", optimizer == MUON ? "AdamW moments" : "momenta");
    return NULL;
}

void model_stage(Model* m, const Settings* s, Ranks* world) {
    char* why;
    Path run;
    Json* manifest = checkpoint_manifest_in(s->init, &run, &why);
    why = load_step(m, world, run.text, json_int(manifest, "step", -1), manifest, why);
    if (why) die(EXIT_FAILED, "--init %s: %s", s->init, why);
    json_free(manifest);
}

int64_t model_resume(Model* m, const Settings* s, Ranks* world, DataHash data) {
    const char* out = s->out;
    int count;
    int64_t *steps = all_ranks_list(world, out, &count), resumed = 0;

    // From the newest on, until one is good.
    for (int i = 0; i < count && resumed == 0; i++) {
        Path path = step_path(out, steps[i], "");
        char* why;
        Json* manifest = checkpoint_manifest(out, steps[i], &why);
        if (manifest) check_record(s, manifest, data);
        // The position in the data must be that of the step.
        const int64_t window = json_int(manifest, "window", -1), expected = window_after(m, steps[i]);
        if (manifest && window != expected)
            why = host_format("%s/manifest.json: \"window\" is %ld, but step and options make it %ld", path.text,
                              window, expected);

        why = load_step(m, world, out, steps[i], manifest, why);
        json_free(manifest);
        if (!why) resumed = steps[i];
        // A link would have to be replaced when the run comes to this step.
        if (why && is_link(path.text))
            die(EXIT_FAILED, "checkpoint %s is refused (%s), and %s", path.text, why, file_error(ELOOP));
        if (why) warn("checkpoint step_%08ld is refused: %s", steps[i], why);
        free(why);
    }

    if (count && !resumed) die(EXIT_FAILED, "no checkpoint in %s is good; nothing was changed", out);
    if (resumed && resumed != steps[0]) warn("resuming from step_%08ld, the newest good checkpoint", resumed);
    free(steps);
    return resumed;
}
