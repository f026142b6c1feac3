#include "pretrained/export.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "device/files.h"
#include "model/hub.h"
#include "model/persist.h"

// Which file holds which tensor.
static char* index_json(Model* m) {
    int count;
    int64_t bytes = 0;
    CheckpointFile* files = model_files(m, m->run.optimizer, &count);
    // A stream in memory: appending to a string would copy it for each of the 45,000 tensors of 671b.
    char* map = NULL;
    const char* comma = "";
    size_t size;
    FILE* stream = open_memstream(&map, &size);
    for (int i = 0; i < count && stream; i++) {
        // Moments are no part of the model for other programs.
        if (strstr(files[i].name, ".adam.")) continue;
        for (int t = 0; t < files[i].count; t++) {
            const CheckpointTensor* tensor = &files[i].tensors[t];
            fprintf(stream, "%s\n    \"%s\": \"%s\"", comma, tensor->name, files[i].name);
            comma = ",";
            bytes += tensor->shape[0] * tensor->shape[1] * (int64_t)sizeof(real);
        }
    }
    if (!stream || fclose(stream) != 0) die(EXIT_FAILED, "out of host memory for the list of tensors");
    char* json = host_format("{\n  \"metadata\": {\"total_size\": %ld},\n  \"weight_map\": {%s\n  }\n}\n", bytes, map);
    free(map);
    model_files_free(files, count);
    return json;
}

// Copies the file of --tokenizer, and the JSON files of its name, into the model's folder, under their usual names.
static void add_tokenizer(Saver* saver, const char* tokenizer) {
    const char *slash = strrchr(tokenizer, '/'), *dot = strrchr(slash ? slash : tokenizer, '.');
    const int stem = (int)(dot ? (size_t)(dot - tokenizer) : strlen(tokenizer));
    const Path paths[] = {path_of("%s", tokenizer), path_of("%.*s.json", stem, tokenizer),
                          path_of("%.*s_config.json", stem, tokenizer)};
    static const char* const names[] = {"tokenizer.bin", "tokenizer.json", "tokenizer_config.json"};
    for (int i = 0; i < 3; i++) {
        size_t size;
        char* data = read_file(paths[i].text, TOKENIZER_LIMIT, &size);
        // A missing JSON file is reported and is no error.
        if (!data && (errno != ENOENT || i == 0))
            die(EXIT_FAILED, "cannot read %s: %s", paths[i].text, file_error(errno));
        if (data && !size) die(EXIT_USAGE, "--tokenizer: %s beside it is empty", paths[i].text);
        if (data)
            saver_add_file(saver, names[i], data, size);
        else
            printf("export     there is no file %s: %s\n", paths[i].text,
                   i == 2 ? "transformers will not know the end of text"
                          : "checkpoints have no tokenizer for transformers");
        free(data);
        if (!data) break;
    }
}

void export_files(Saver* saver, const Settings* s, Model* m, const Tokenizer* tokenizer) {
    const int32_t eot = tokenizer->eot;
    char *config = hub_config(s, eot), *index = index_json(m);
    char *ends = hub_end_of_text(eot), *generation = host_format("{\n%s\n}\n", ends);
    // The files of the model, then those of its tokenizer.
    saver_add_file(saver, "config.json", config, strlen(config));
    saver_add_file(saver, "generation_config.json", generation, strlen(generation));
    saver_add_file(saver, "model.safetensors.index.json", index, strlen(index));
    if (*s->tokenizer) add_tokenizer(saver, s->tokenizer);
    const char* why = hub_misfit(s);
    if (why)
        printf("export     transformers cannot compute this model, so its config.json has model_type train_moe: %s\n",
               why);
    free(config);
    free(generation);
    free(ends);
    free(index);
}
