#!/usr/bin/env python3
"""Makes a model for llama.cpp from a checkpoint: one GGUF file of the architecture deepseek2.

  to_gguf.py runs/x/step_00002000 model.gguf
  to_gguf.py runs/x model.gguf --dtype f32        the newest checkpoint of a run

STEP is a checkpoint, a release by export.py, or what transformers saves, with a tokenizer.json. Names are those of llama.cpp's own converter.
Two things differ from a checkpoint. The experts of a block are one tensor of three dimensions. The up-projection of
keys and values is split into keys and values; the keys are transposed, because llama.cpp multiplies the queries by
them. Norms, routers and selection biases stay float32. A model that llama.cpp would compute differently is refused.
The CRC-32 of the checkpoint's files is checked first. Needs gguf, numpy, safetensors and ml_dtypes.
"""
import script
from script import Failure

import argparse
import contextlib
import functools
import pathlib
import re
import sys

from export import check, newest, read_json, refuse_existing, run, want, weight_map
from gguf_tokens import add_tokenizer

FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32}  # llama.cpp's numbers
BIAS = "e_score_correction_bias"


# --- The model ---

def is_count(value):
    return type(value) is int and 0 <= value < 2**32


def is_number(value):
    return type(value) in (int, float) and abs(value) < 1e38


def kind_of(config, path):
    """The model_type; where it is another's, as kimi_k2, the first class of architectures decides."""
    kind, names = config.get("model_type"), config.get("architectures")
    if kind in ("train_moe", "deepseek_v3", "deepseek_v2"):
        return kind
    for version in ("V3", "V2"):
        if type(names) is list and names[:1] == [f"Deepseek{version}ForCausalLM"]:
            return f"deepseek_{version.lower()}"
    raise Failure(f"{path}: model_type is {str(kind)[:60]!r}, neither deepseek_v3 nor deepseek_v2")


def read_rope(config, path):
    """Sets rope_theta, and rope_scaling: YaRN or None. Which key counts is as transformers has it."""
    name = "rope_scaling" if "rope_scaling" in config else "rope_parameters"
    given = config.get(name, {})
    want({name: given}, path, name, "an object", lambda value: type(value) is dict)
    rope = {"rope_theta": config.get("rope_theta", 10000), "beta_fast": 32, "beta_slow": 1}
    rope |= {key: value for key, value in given.items() if value is not None}
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return
    if kind != "yarn":
        raise Failure(f"{path}: {name} is of the type {str(kind)[:60]!r}, not of yarn")
    want(rope, f"{path}: {name}", "factor beta_fast beta_slow mscale mscale_all_dim", "a number of float32", is_number)
    want(rope, f"{path}: {name}", "original_max_position_embeddings", "a whole number of 32 bits", is_count)
    if rope["mscale"] != rope["mscale_all_dim"] or "attention_factor" in rope:
        raise Failure(f"{path}: {name} must have mscale = mscale_all_dim and no attention_factor")
    config["rope_scaling"] = rope


def read_config(path):
    """config.json, with what absent keys mean: they are read as by --init."""
    config = read_json(path)
    if config.get("eos_token_id", 0) is None:
        raise Failure(f"{path}: eos_token_id is null: the model was trained without a tokenizer, and a GGUF has one")
    config = {key: value for key, value in config.items() if value is not None}
    kind = config["model_type"] = kind_of(config, path)
    v3 = kind == "deepseek_v3" or config.get("scoring_func") == "sigmoid"
    config = {"q_lora_rank": None, "n_shared_experts": 0, "scoring_func": "sigmoid" if v3 else "softmax", "norm_topk_prob": v3,
              "routed_scaling_factor": 2.5 if v3 else 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096} | config
    if not v3 and config.get("topk_method") not in ("group_limited_greedy", "noaux_tc"):  # the plain selection
        config |= {"n_group": 1, "topk_group": 1}
    read_rope(config, path)
    want(config, path, "num_hidden_layers max_position_embeddings hidden_size intermediate_size vocab_size first_k_dense_replace "
         "num_attention_heads kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim n_routed_experts num_experts_per_tok "
         "n_shared_experts moe_intermediate_size n_group topk_group eos_token_id", "a whole number of 32 bits", is_count)
    want(config, path, "q_lora_rank", "a whole number of 32 bits or null", lambda value: value is None or is_count(value))
    want(config, path, "rms_norm_eps routed_scaling_factor rope_theta", "a number of float32", is_number)
    want(config, path, "norm_topk_prob", "true or false", lambda value: type(value) is bool)
    want(config, path, "scoring_func", "a text", lambda value: type(value) is str)
    return config


def hyperparameters(c):
    """Keys and values of the section deepseek2, from config.json."""
    blocks, latent, softmax = c["num_hidden_layers"], c["q_lora_rank"] or 0, c["scoring_func"] == "softmax"
    keys = {
        "block_count": blocks,
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "vocab_size": c["vocab_size"],
        "leading_dense_block_count": c["first_k_dense_replace"],
        # Attention runs in the latent: one head of keys and values for all. Keys with `_mla` describe the original heads.
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": float(c["rms_norm_eps"]),
        "attention.q_lora_rank": latent,
        "attention.kv_lora_rank": c["kv_lora_rank"],
        "attention.key_length": c["kv_lora_rank"] + c["qk_rope_head_dim"],
        "attention.value_length": c["kv_lora_rank"],
        "attention.key_length_mla": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        "attention.value_length_mla": c["v_head_dim"],
        "expert_count": c["n_routed_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_gating_func": 1 if softmax else 2,
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_weights_scale": float(c["routed_scaling_factor"]),
        "rope.dimension_count": c["qk_rope_head_dim"],
        "rope.freq_base": float(c["rope_theta"]),
    }

    # Models that llama.cpp cannot read.
    if latent and (blocks in (26, 27) or (blocks, c["vocab_size"]) == (48, 128256)):
        raise Failure(f"llama.cpp takes a model of {blocks} blocks for one without q_lora_rank; this one has {latent}")
    if c["first_k_dense_replace"] < blocks and not c["n_shared_experts"]:
        raise Failure("llama.cpp's MoE blocks have a shared expert; this model has n_shared_experts 0")

    if c["rms_norm_eps"] != 1e-6:
        print(f"to_gguf.py: warning: llama.cpp has rms_norm_eps {c['rms_norm_eps']:g} in the norms of the latents too, where this "
              "model has 1e-6", file=sys.stderr)

    # Groups, unless they leave every choice open.
    groups, taken = c["n_group"], c["topk_group"]
    if taken < groups < c["n_routed_experts"]:
        if softmax:
            raise Failure("llama.cpp chooses groups by their best two experts, this model by the best one: n_group "
                          f"{groups} with scoring_func softmax")
        keys |= {"expert_group_count": groups, "expert_group_used_count": taken}

    # YaRN. llama.cpp has mscale divided by ten, and makes of it what multiplies the softmax.
    yarn = c["rope_scaling"]
    if yarn:
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(yarn["factor"]),
            "rope.scaling.original_context_length": yarn["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(yarn["beta_fast"]),
            "rope.scaling.yarn_beta_slow": float(yarn["beta_slow"]),
            "rope.scaling.yarn_log_multiplier": 0.1 * yarn["mscale_all_dim"],
        }
    return keys


# --- Weights ---

class Weights:
    """The tensors of a folder; `files` has the file of each."""

    def __init__(self, step, config):
        self.step = step
        self.files = weight_map(step)
        # MTP modules, after the last layer: llama.cpp's model has none.
        layers = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in self.files}
        beyond = [name for name, layer in layers.items() if layer and int(layer[1]) >= config["num_hidden_layers"]]
        for name in beyond:
            del self.files[name]
        if beyond:
            print(f"to_gguf.py: warning: layers from {config['num_hidden_layers']} on are left out: they are MTP modules",
                  file=sys.stderr)
        # Sizes in config.json are those of the weights.
        rows, last = self.shape("model.embed_tokens.weight")[0], config["num_hidden_layers"] - 1
        if rows != config["vocab_size"]:
            raise Failure(f"{step}: vocab_size is {config['vocab_size']}, but the embedding has {rows} rows")
        if f"model.layers.{last}.input_layernorm.weight" not in self.files:
            raise Failure(f"{step}: num_hidden_layers is {last + 1}, but layer {last} has no weights")

    @functools.lru_cache(maxsize=4)
    def open(self, file):
        import ml_dtypes  # noqa: F401  adds bfloat16 to numpy
        from safetensors import safe_open
        return safe_open(self.step / file, "np")

    def shape(self, name):
        return self.open(self.files[name]).get_slice(name).get_shape()

    def read(self, name):
        return self.open(self.files[name]).get_tensor(name).astype("float32")


def made_of(weights, blocks):
    """For each tensor of the GGUF file those of the folder that it is made of, experts in their order."""
    import gguf
    names, tensors = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, blocks), {}
    for name in weights.files:
        general = re.sub(r"\.experts\.\d+\.", ".experts.", name).replace(BIAS, "e_score_correction.bias")
        for part in ("k_b_proj", "v_b_proj")[:2 if "kv_b_proj" in name else 1]:
            target = names.get_name(general.replace("kv_b_proj", part), (".weight", ".bias"))
            if not target:
                raise Failure(f"{weights.step}: llama.cpp has no tensor like {name}")
            tensors.setdefault(target, []).append(name)
    for sources in tensors.values():
        sources.sort(key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])
    return tensors


def cut(values, key, config):
    """The part `key` of the up-projection of keys and values, [heads x (nope + v), latent]."""
    heads = values.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
    nope = config["qk_nope_head_dim"]
    return heads[:, :nope].transpose(0, 2, 1) if "attn_k_b" in key else heads[:, nope:]


def write_tensors(writer, weights, config, dtype):
    import gguf
    import numpy as np
    tensors, kinds = made_of(weights, config["num_hidden_layers"]), {}

    # Their table: shapes and types.
    for key, sources in tensors.items():
        shape = weights.shape(sources[0])
        if "_exps" in key:
            shape = [len(sources), *shape]
        if key.endswith(("attn_k_b.weight", "attn_v_b.weight")):
            shape = cut(np.empty(shape, np.bool_), key, config).shape
        kinds[key] = gguf.GGMLQuantizationType["F32" if len(shape) == 1 or "ffn_gate_inp" in key else dtype.upper()]
        size = int(np.prod(shape)) * (4 if kinds[key].name == "F32" else 2)
        writer.add_tensor_info(key, shape, np.dtype("float32"), size, raw_dtype=kinds[key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()

    # Their values, with one tensor in memory at a time.
    for done, (key, sources) in enumerate(tensors.items()):
        parts = []
        for name in sources:
            values = weights.read(name)
            if kinds[key].name == "F16" and np.abs(values).max() > 65504:
                raise Failure(f"{name}: {np.abs(values).max():g} is more than f16 can hold; take --dtype bf16")
            values = cut(values, key, config) if "kv_b_proj" in name else values
            parts.append(gguf.quants.quantize(np.ascontiguousarray(values), kinds[key]))
        writer.write_tensor_data(np.stack(parts) if "_exps" in key else parts[0])
        if sys.stderr.isatty():
            print(f"{key}: {100 * (done + 1) / len(tensors):.0f} %", end="\n" if done + 1 == len(tensors) else "\r", file=sys.stderr)


def convert(step, out, dtype):
    import gguf
    with script.in_place(out) as part:
        refuse_existing(out)
        config = read_config(step / "config.json")
        keys = hyperparameters(config)
        if any(step.glob("block_*.safetensors")):
            check(step)
        weights = Weights(step, config)
        with contextlib.closing(gguf.GGUFWriter(part, "deepseek2")) as writer:
            writer.add_name(script.text(out.stem, "replace"))
            writer.add_file_type(FILE_TYPES[dtype])
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            for key, value in keys.items():
                add[type(value)](f"deepseek2.{key}", value)
            add_tokenizer(writer, step, config)
            try:
                write_tensors(writer, weights, config, dtype)
            except ValueError as error:
                raise Failure(f"{step}: its files do not fit together: {error}") from error
            except OSError as error:
                if error.errno:
                    raise
                raise Failure(f"{out}: cannot write all of it ({error}); is the disk full?") from error  # numpy gives no reason
    print(f"wrote {out}")


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", type=pathlib.Path, metavar="STEP", help="a checkpoint's folder, a run's or a release's")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT.gguf", help="a new file")
    parser.add_argument("--dtype", choices=FILE_TYPES, default="bf16", help="type of the weights (bf16)")
    args = parser.parse_args()
    return run("to_gguf.py", "gguf numpy safetensors ml_dtypes", lambda: convert(newest(args.step), args.out, args.dtype))


if __name__ == "__main__":
    sys.exit(main())
