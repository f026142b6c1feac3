#include "model/hub.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "device/files.h"
#include "moe/moe.h"

static const size_t CONFIG_LIMIT = (size_t)1 << 17, MANIFEST_LIMIT = (size_t)16 << 20;  // bytes

// Whole numbers that both sides have. A key that config.json may lack or have as null is then `absent`; -1: it may not.
static const struct {
    const char* key;
    size_t field;
    int64_t absent;
} sizes[] = {
    {"vocab_size", offsetof(ModelConfig, V), -1},
    {"hidden_size", offsetof(ModelConfig, C), -1},
    {"num_hidden_layers", offsetof(ModelConfig, L), -1},
    {"num_attention_heads", offsetof(ModelConfig, H), -1},
    {"q_lora_rank", offsetof(ModelConfig, q_lora), 0},
    {"kv_lora_rank", offsetof(ModelConfig, kv_lora), -1},
    {"qk_nope_head_dim", offsetof(ModelConfig, nope), -1},
    {"qk_rope_head_dim", offsetof(ModelConfig, rope), -1},
    {"v_head_dim", offsetof(ModelConfig, v), -1},
    {"intermediate_size", offsetof(ModelConfig, dense_ffn), -1},
    {"first_k_dense_replace", offsetof(ModelConfig, dense_layers), -1},
    {"n_routed_experts", offsetof(ModelConfig, E), -1},
    {"num_experts_per_tok", offsetof(ModelConfig, K), -1},
    {"n_shared_experts", offsetof(ModelConfig, shared), 0},
    {"moe_intermediate_size", offsetof(ModelConfig, F), -1},
    {"n_group", offsetof(ModelConfig, groups), 1},
    {"topk_group", offsetof(ModelConfig, top_groups), 1},
    {"num_nextn_predict_layers", offsetof(ModelConfig, mtp), 0},
};
enum { SIZES = sizeof(sizes) / sizeof(sizes[0]) };

// Properties of every model here, as JSON. A missing key means the same.
static const struct {
    const char *key, *value;
} always[] = {
    {"moe_layer_freq", "1"}, {"hidden_act", "\"silu\""},       {"attention_bias", "false"},
    {"mlp_bias", "false"},   {"tie_word_embeddings", "false"}, {"rope_interleave", "true"},
};
enum { ALWAYS = sizeof(always) / sizeof(always[0]) };

// The first reason that applies. A model of dense blocks alone has no routing that could differ.
const char* hub_misfit(const Settings* s) {
    const ModelConfig* c = &s->model;
    if (c->dense_layers == c->L) return NULL;
    if (c->shared == 0) return "its MoE blocks always have a shared expert";
    if (c->score == SCORE_SIGMOID && c->groups == c->E)
        return "DeepSeek-V3's groups have two experts or more (--groups)";
    if (c->score == SCORE_SIGMOID) return NULL;
    if (c->route_norm) return "DeepSeek-V2's does not normalise the gates (--route-norm 0)";
    if (s->run.balance != BALANCE_NONE) return "DeepSeek-V2's has no selection bias (--balance none)";
    return NULL;
}

// --- To config.json ---

// A number that readers take for a float, in `digits`: 1.0, not 1.
static const char* float_text(char digits[32], double value) {
    snprintf(digits, 32, "%.15g", value);
    return strpbrk(digits, ".e") ? digits : strcat(digits, ".0");
}

// Position: the base of the frequencies, YaRN, and how long a text may be.
static void add_rope(char** json, const Settings* s) {
    const ModelConfig* c = &s->model;
    char theta[32], factor[32], digits[32];
    const char* mscale = float_text(digits, c->yarn_mscale);
    host_append(json, "  \"rope_theta\": %s,\n", float_text(theta, c->rope_theta));
    if (c->yarn)
        host_append(json,
                    "  \"rope_scaling\": {\"type\": \"yarn\", \"factor\": %s, \"beta_fast\": 32.0, \"beta_slow\": 1.0, "
                    "\"mscale\": %s, \"mscale_all_dim\": %s, \"original_max_position_embeddings\": %ld},\n",
                    float_text(factor, c->yarn_factor), mscale, mscale, c->yarn_original_len);
    const int64_t longest = c->yarn ? (int64_t)(c->yarn_factor * (double)c->yarn_original_len) : s->run.seq_len;
    host_append(json, "  \"max_position_embeddings\": %ld,\n", longest);
}

char* hub_end_of_text(int32_t end_of_text) {
    if (end_of_text < 0) return host_strdup("  \"bos_token_id\": null,\n  \"eos_token_id\": null");
    return host_format("  \"bos_token_id\": %d,\n  \"eos_token_id\": %d", end_of_text, end_of_text);
}

char* hub_config(const Settings* s, int32_t end_of_text) {
    const ModelConfig* c = &s->model;
    const int v3 = c->score == SCORE_SIGMOID;
    const int has_router = c->dense_layers < config_blocks(c);  // of a block or of the MTP module
    const int selects_with_bias = v3 || (has_router && s->run.balance != BALANCE_NONE);
    const char* why = hub_misfit(s);
    // The model type, which decides who can read the file.
    char* json = why ? host_format("{\n  \"model_type\": \"train_moe\",\n  \"train_moe_note\": \"%s\",\n", why)
                     : host_format(
                           "{\n  \"architectures\": [\"Deepseek%sForCausalLM\"],\n"
                           "  \"model_type\": \"deepseek_%s\",\n",
                           v3 ? "V3" : "V2", v3 ? "v3" : "v2");

    // Sizes. No latent for queries is null.
    for (int i = 0; i < SIZES; i++) {
        const int64_t value = *(const int64_t*)((const char*)c + sizes[i].field);
        if (value || strcmp(sizes[i].key, "q_lora_rank") != 0)
            host_append(&json, "  \"%s\": %ld,\n", sizes[i].key, value);
        else
            host_append(&json, "  \"q_lora_rank\": null,\n");
    }
    host_append(&json, "  \"num_key_value_heads\": %ld,\n", c->H);

    // Routing.
    char scale[32];
    const char* method = selects_with_bias ? "noaux_tc" : c->groups > 1 ? "group_limited_greedy" : "greedy";
    host_append(&json,
                "  \"topk_method\": \"%s\",\n  \"scoring_func\": \"%s\",\n  \"norm_topk_prob\": %s,\n"
                "  \"routed_scaling_factor\": %s,\n",
                method, v3 ? "sigmoid" : "softmax", c->route_norm ? "true" : "false",
                float_text(scale, c->route_scale));

    // eps, position, what never differs, and the rest that readers want.
    char eps[32];
    host_append(&json, "  \"rms_norm_eps\": %s,\n", float_text(eps, c->norm_eps));
    add_rope(&json, s);
    for (int i = 0; i < ALWAYS; i++) host_append(&json, "  \"%s\": %s,\n", always[i].key, always[i].value);
    char* ends = hub_end_of_text(end_of_text);
    host_append(&json,
                "%s,\n  \"initializer_range\": 0.02,\n"
                "  \"attention_dropout\": 0.0,\n  \"torch_dtype\": \"float32\",\n  \"use_cache\": true\n}\n",
                ends);
    free(ends);
    return json;
}

// --- From config.json ---

// A JSON file of a model's folder, or NULL with the reason in `error`.
static Json* read_json(const char* folder, const char* name, size_t limit, char* error, size_t error_size) {
    size_t size;
    char* text = read_file(path_of("%s/%s", folder, name).text, limit, &size);
    if (!text)
        snprintf(error, error_size,
                 "%s: name a folder with a Hugging Face model, such as a step of a run: runs/x/step_00001000",
                 file_error(errno));
    Json* json = text ? json_parse(text, size, error, error_size) : NULL;
    free(text);
    return json;
}

// The file being read, and the beginning of its error messages.
typedef struct ConfigFile {
    const Json* json;
    char* where;  // "--init FOLDER/config.json"
} ConfigFile;

// Ends the run with the file, the key and the reason.
static NORETURN void refuse(const ConfigFile* file, const char* key, const char* what) {
    die(EXIT_USAGE, "%s: \"%s\" %s", file->where, key, what);
}

// JSON does not say which of two members of one name counts.
static void check_names(const ConfigFile* file, const Json* object) {
    for (const Json* found = object->child; found; found = found->next) {
        if (found->key && json_get(object, found->key) != found) refuse(file, found->key, "is there twice");
        check_names(file, found);
    }
}

// A member that is there and not null.
static const Json* member(const Json* object, const char* key) {
    const Json* found = json_get(object, key);
    return found && found->type != JSON_NULL ? found : NULL;
}

// A text that the file may lack. Another type ends the run.
static const char* text_or_null(const ConfigFile* file, const Json* object, const char* key) {
    const Json* found = member(object, key);
    if (found && found->type != JSON_STRING) refuse(file, key, "is no string");
    return found ? found->text : NULL;
}

// A number, or `absent` where the file lacks it. Another type ends the run.
static double number_or(const ConfigFile* file, const Json* object, const char* key, double absent) {
    const Json* found = member(object, key);
    if (found && found->type != JSON_NUMBER) refuse(file, key, "is no number");
    return found ? found->number : absent;
}

// Whether a member is this text.
static bool is(const Json* found, const char* text) {
    return found && found->type == JSON_STRING && strcmp(found->text, text) == 0;
}

// Whether a member equals a JSON text; numbers by value.
static int says(const Json* found, const char* text) {
    const size_t length = strlen(text) - 2;  // without quotes
    if (found->type == JSON_STRING)
        return *text == '"' && strlen(found->text) == length && memcmp(found->text, text + 1, length) == 0;
    if (found->type == JSON_BOOL) return found->number == (strcmp(text, "true") == 0);
    return found->type == JSON_NUMBER && found->number == strtod(text, NULL);
}

// YaRN, whose two mscale cancel in the rotation and leave their square on the softmax. Which key counts is as
// transformers has it.
static void read_rope(const ConfigFile* file, ModelConfig* c) {
    const Json *older = member(file->json, "rope_scaling"),
               *scaling = older ? older : member(file->json, "rope_parameters");
    if (scaling && scaling->type != JSON_OBJECT)
        refuse(file, older ? "rope_scaling" : "rope_parameters", "is neither an object nor null");
    c->rope_theta = number_or(file, scaling, "rope_theta", number_or(file, file->json, "rope_theta", 10000));
    const char *type = text_or_null(file, scaling, "rope_type"),
               *kind = type ? type : text_or_null(file, scaling, "type");
    if (!kind || strcmp(kind, "default") == 0) return;

    // YaRN. Constants that are fixed here are refused with any other value.
    if (strcmp(kind, "yarn") != 0) refuse(file, "rope_scaling", "has a type other than yarn");
    c->yarn = 1;
    c->yarn_factor = number_or(file, scaling, "factor", 0);
    c->yarn_mscale = number_or(file, scaling, "mscale_all_dim", 0);
    c->yarn_original_len = json_int(scaling, "original_max_position_embeddings", 0);
    if (c->yarn_factor < 1 || c->yarn_original_len < 1 || c->yarn_mscale <= 0 ||
        number_or(file, scaling, "original_max_position_embeddings", 0) != (double)c->yarn_original_len ||
        number_or(file, scaling, "mscale", 0) != c->yarn_mscale || number_or(file, scaling, "beta_fast", 32) != 32 ||
        number_or(file, scaling, "beta_slow", 1) != 1 || member(scaling, "attention_factor"))
        refuse(file, "rope_scaling",
               "must have factor, original_max_position_embeddings, mscale = mscale_all_dim, beta_fast "
               "32 and beta_slow 1");
}

// How tokens select experts. `own`: the type is train_moe, where both scores may have a selection bias. Where all
// blocks are dense, the MTP module alone may have one.
static void read_routing(const ConfigFile* file, ModelConfig* c, int v3, int own) {
    const char *scoring = text_or_null(file, file->json, "scoring_func"),
               *method = text_or_null(file, file->json, "topk_method");
    // The score and the method of selection must be those of the model type.
    if (scoring && strcmp(scoring, v3 ? "sigmoid" : "softmax") != 0)
        refuse(file, "scoring_func", v3 ? "is not sigmoid" : "is not softmax");
    const bool limited = method && strcmp(method, "group_limited_greedy") == 0;
    const bool biased = method && strcmp(method, "noaux_tc") == 0;
    if (v3 && method && !biased) refuse(file, "topk_method", "is not noaux_tc");
    if (!v3 && method && !limited && strcmp(method, "greedy") != 0 && !(biased && (own || c->dense_layers == c->L)))
        refuse(file, "topk_method", "is neither group_limited_greedy nor greedy");
    // Groups of experts. Plain greedy selection has one group.
    c->selection_bias = v3 || biased;
    if (!v3 && !limited && !biased)
        c->groups = c->top_groups = 1;
    else if (!member(file->json, "n_group") || !member(file->json, "topk_group"))
        refuse(file, member(file->json, "n_group") ? "topk_group" : "n_group", "is missing");
    c->score = v3 ? SCORE_SIGMOID : SCORE_SOFTMAX;

    // transformers' DeepSeek-V2 never normalises; the authors' own code obeys the key, and no published model sets it.
    const Json* norm = json_get(file->json, "norm_topk_prob");
    if (norm && norm->type != JSON_BOOL) refuse(file, "norm_topk_prob", "is neither true nor false");
    c->route_norm = norm ? norm->number != 0 : v3;
    const Json* scale = json_get(file->json, "routed_scaling_factor");
    if (scale && scale->type != JSON_NUMBER) refuse(file, "routed_scaling_factor", "is no number");
    c->route_scale = scale ? scale->number : v3 ? 2.5 : 1;
}

// Weights in fp8 have a scale for each 128 x 128 of them.
static void check_quantization(const ConfigFile* file) {
    const Json* q = member(file->json, "quantization_config");
    if (!q) return;
    const char* method = json_text(q, "quant_method");
    const Json *size = member(q, "weight_block_size"), *first = size ? size->child : NULL;
    if (!method || strcmp(method, "fp8") != 0 || !first || !first->next || first->integer != 128 ||
        first->next->integer != 128)
        refuse(file, "quantization_config", "must be fp8 with weight_block_size [128, 128]");
}

ModelConfig hub_read_config(const char* option, const char* folder) {
    ConfigFile file = {.where = host_format("--%s %s/config.json", option, folder)};
    char error[256];
    // The file. No name may occur twice in an object.
    Json* json = read_json(folder, "config.json", CONFIG_LIMIT, error, sizeof(error));
    if (!json) die(EXIT_USAGE, "%s: %s", file.where, error);
    file.json = json;
    check_names(&file, json);

    // Which model it is.
    const Json *type = member(json, "model_type"), *list = member(json, "architectures");
    const Json* name = list ? list->child : NULL;  // it decides where the type is another's, as kimi_k2
    const int own = is(type, "train_moe"), known = own || is(type, "deepseek_v3") || is(type, "deepseek_v2");
    const int v2 = known ? is(type, "deepseek_v2") : is(name, "DeepseekV2ForCausalLM");
    const int v3 = own ? is(member(json, "scoring_func"), "sigmoid")
                       : is(known ? type : name, known ? "deepseek_v3" : "DeepseekV3ForCausalLM");
    if (!own && !v2 && !v3)
        refuse(&file, "model_type",
               "is neither deepseek_v3 nor deepseek_v2, and \"architectures\" begins with no DeepseekV3/V2ForCausalLM");

    // Sizes.
    ModelConfig c = settings_presets[0].model;  // with the values of --yarn 1, which the file may lack
    for (int i = 0; i < SIZES; i++) {
        const Json* found = member(json, sizes[i].key);
        if (!found && sizes[i].absent < 0) refuse(&file, sizes[i].key, "is missing");
        const int64_t value = found ? found->integer : sizes[i].absent;
        if (found && (found->type != JSON_NUMBER || value < 0 || value > 1 << 24 || (double)value != found->number))
            refuse(&file, sizes[i].key, "is no whole number from 0 to 16777216");
        *(int64_t*)((char*)&c + sizes[i].field) = value;
    }
    if (number_or(&file, json, "num_key_value_heads", (double)c.H) != (double)c.H)
        refuse(&file, "num_key_value_heads", "is not num_attention_heads");

    // Properties of every model.
    for (int i = 0; i < ALWAYS; i++) {
        const Json* found = member(json, always[i].key);
        if (!found || says(found, always[i].value)) continue;
        die(EXIT_USAGE, "%s: \"%s\" must be %s for train_moe", file.where, always[i].key, always[i].value);
    }

    c.norm_eps = number_or(&file, json, "rms_norm_eps", 1e-6);
    read_routing(&file, &c, v3, own);
    read_rope(&file, &c);
    check_quantization(&file);
    json_free(json);
    free(file.where);
    return c;
}

int64_t hub_length(const char* folder) {
    Json* manifest = read_json(folder, "manifest.json", MANIFEST_LIMIT, NULL, 0);
    Json* config = read_json(folder, "config.json", CONFIG_LIMIT, NULL, 0);
    int64_t length = json_int(json_get(manifest, "options"), "seq-len", 0);
    const Json* longest = json_get(config, "max_position_embeddings");
    if (longest &&
        (longest->type != JSON_NUMBER || longest->integer < 1 || (double)longest->integer != longest->number))
        die(EXIT_USAGE, "%s/config.json: \"max_position_embeddings\" is no number of tokens", folder);
    // A model without a manifest may have a limit that is too long for memory.
    if (length <= 0) length = min_i64(longest ? longest->integer : 4096, 4096);
    json_free(manifest);
    json_free(config);
    return length;
}

// A whole number of a file, or `absent`.
static int64_t number_in(const char* folder, const char* file, size_t limit, const char* key, int64_t absent) {
    Json* json = read_json(folder, file, limit, NULL, 0);
    const int64_t number = json_int(json, key, absent);
    json_free(json);
    return number;
}

int64_t hub_end_of_text_id(const char* folder) {
    return number_in(folder, "config.json", CONFIG_LIMIT, "eos_token_id", -1);
}
int64_t hub_tokenizer(const char* folder) {
    return number_in(folder, "manifest.json", MANIFEST_LIMIT, "tokenizer_hash", 0);
}
