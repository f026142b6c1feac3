"""The model card of a release: README.md, as the Hugging Face Hub reads it. Standard library only.

The front matter has fixed words alone. Markdown has no meaning in the values of a checkpoint. A number that the
manifest or the log lacks is not recorded, and folders of this machine are left out.
"""
import re
import shlex

from runlog import NoLog, read_log, warn

UNKNOWN = "not recorded"
# Recorded options that change neither the weights nor the losses of a step, and members of the record that are no options.
PLACE = set("sample evaluate eval out resume save-every keep val-every eval-every sample-every sample-tokens prompt temperature "
            "sample-top-k graph dry-run ranks gpu-memory version help ep shard dispatch timeout mx-stats recompute capacity".split())
# Options that may change when a run goes on: they do not change the losses of earlier steps.
LATER = set("steps val val-tokens batch optimizer".split())
RECORD = set("warmup-steps updates-before tokens-before fp4-rounding mixture-order rms-norm-eps yarn-factor yarn-mscale "
             "yarn-original-len".split())
CONSTANTS = {"eps": 1e-8, "muon-momentum": 0.95, "mtp-weight-end": 0.1, "mtp-switch": 0.67}  # options of train_moe 0.1.0 alone
LOSSES = dict(loss="training loss of this step in nats a token: {}", val_loss="validation loss in nats a token: {}",
              val_bits_per_byte="validation loss in bits a byte: {}")
FLAGS = "init-moments", "force-balance", "overfit"


def plain(text):
    """One line without backticks."""
    return "".join(c if c.isprintable() and c != "`" else f"\\x{ord(c):02x}" for c in text)


def code(text):
    return f"`{plain(text)}`" if type(text) is str and text.strip() else UNKNOWN


def bare(text):
    """A path, or GLOB:WEIGHT,GLOB:WEIGHT, without folders."""
    return "".join(part.rstrip("/").rpartition("/")[2] for part in re.split(r"(:[\d.eE+-]+(?:,|$))", str(text)))


def hub_name(text):
    """A name that the Hub accepts."""
    return re.sub(r"\W*[^\w.-]\W*|[.-]{2,}", "-", text, flags=re.ASCII).strip("-.")[:96] or "NAME"


def command(options):
    """Options that have no effect are left out, because the program refuses some of them."""
    off = PLACE | RECORD | ({"bias-rate"} if options.get("balance") != "deepseek" else set())
    words = [f"--{name}" if name in FLAGS else f"--{name} {shlex.quote(bare(value))}" for name, value in options.items()
             if name not in off and value not in ("", CONSTANTS.get(name)) and (value or name not in FLAGS)
             and (options.get("optimizer") == "muon" or not name.startswith("muon-"))]
    return re.sub("(.{90,}?) (?=--)", r"\1 \\" + "\n    ", plain(" ".join(["train_moe", *words])))


def tokens(manifest, options):
    step, size, before = manifest.get("step"), options.get("tokens-per-step"), options.get("tokens-before", 0)
    if {type(step), type(size), type(before)} != {int}:
        return UNKNOWN
    start = code(bare(options.get("init", "")))
    if not options.get("init-moments") and not options.get("updates-before"):
        return f"{step * size:,}" + (f" after the start from the weights of {start}" if options.get("init") else "")
    here = f"{step * size:,} in the last stage, which began with {start}"
    return f"{before + step * size:,}: {before:,} in earlier stages, {here}" if before else f"{here}; of earlier stages {UNKNOWN}"


def measured(step, manifest, options):
    """The program and the columns of a step, if log.jsonl beside it is that of its run."""
    step = step.resolve()
    path, number = step.parent / "log.jsonl", manifest.get("step")
    try:
        if options and path.is_file() and step.name == f"step_{str(number).zfill(8)}":
            config, rows = read_log(path, LOSSES)
            if all(config.get(name) == value for name, value in options.items() if name not in PLACE | LATER):
                return config.get("build"), rows.get(number, {})
    except NoLog as error:
        warn(f"{error}; the model card has no losses")
    return None, {}


def usage(name, config, has_tokenizer, is_bytes):
    if config["model_type"] not in ("deepseek_v2", "deepseek_v3"):
        return (f"transformers cannot compute this model: {code(config.get('train_moe_note'))}. train_moe reads the folder with `--init`, "
                "`--evaluate` and `--sample`.")
    if config["eos_token_id"] is None or not (has_tokenizer or is_bytes):
        return f'`AutoModelForCausalLM.from_pretrained("USER/{name}")` of transformers loads the model. Its tokenizer is not in the folder.'
    version = " YaRN with softmax scores needs transformers 5.15." * (config["model_type"] == "deepseek_v2" and "rope_scaling" in config)
    return f"""The end-of-text token comes before the prompt, as in training; transformers does not add it.{version}

```python
import torch
from transformers import AutoModelForCausalLM{", AutoTokenizer" * has_tokenizer}

name = "USER/{name}"  # or the folder
model = AutoModelForCausalLM.from_pretrained(name)
{"tokenizer = AutoTokenizer.from_pretrained(name)" if has_tokenizer else "# a token is a byte"}
prompt = [model.config.eos_token_id, *{'tokenizer.encode("It was", add_special_tokens=False)' if has_tokenizer else 'b"It was"'}]
room = model.config.max_position_embeddings - len(prompt)
text = model.generate(torch.tensor([prompt]), max_new_tokens=min(200, room), do_sample=True, temperature=0.8)[0, len(prompt):]
print("It was" + {'tokenizer.decode(text, skip_special_tokens=True)' if has_tokenizer else
                  'bytes(i for i in text.tolist() if i < 256).decode(errors="replace")'})
```"""


def card(name, step, manifest, config, sizes, weights):
    """sizes: the elements of each tensor; weights: words on their type."""
    options = manifest.get("options")
    options = options if type(options) is dict else {}
    build, row = measured(step, manifest, options)
    losses = "\n".join("- " + words.format(UNKNOWN if row.get(key) is None else f"{row[key]:.4f}") for key, words in LOSSES.items())
    c, total = config, sum(sizes.values())
    routed = sum(size for tensor, size in sizes.items() if ".mlp.experts." in tensor)
    active = total - routed + routed * c["num_experts_per_tok"] // c["n_routed_experts"]
    transformers, yarn = c["model_type"] != "train_moe", c.get("rope_scaling")
    is_bytes = manifest.get("tokenizer_hash") == 0 and c["eos_token_id"] == 256
    return f"""---
license: other  # fill in: https://huggingface.co/docs/hub/repositories-licenses
license_name: to-be-filled-in
library_name: {"transformers" if transformers else "train_moe"}
pipeline_tag: text-generation
tags:
- train_moe
- {"moe" if routed else "dense"}
---

# {name}

A base model, not tuned to follow instructions. Text, language and limits: to be filled in.

## Architecture

- model type: {code(c["model_type"])}
- parameters: {total:,}; active for a token: {active:,}
- layers: {c["num_hidden_layers"]}; dense ones among them, at the start: {c["first_k_dense_replace"]}; MTP modules: {c["num_nextn_predict_layers"]}
- width: {c["hidden_size"]}; heads: {c["num_attention_heads"]}
- MLA: a latent of {c["kv_lora_rank"]} for keys and values, {f'of {c["q_lora_rank"]} for queries' if c["q_lora_rank"] else "none for queries"}
- experts: {f'{c["n_routed_experts"]}, {c["num_experts_per_tok"]} chosen for a token, {c["n_shared_experts"]} shared' if routed else "none"}
- vocabulary: {c["vocab_size"]:,}; context: {c["max_position_embeddings"]:,} tokens{f'; YaRN of {yarn["factor"]:g} times {yarn["original_max_position_embeddings"]:,}' if yarn else ""}
- weights: {weights}

## Training

- step: {manifest.get("step") if type(manifest.get("step")) is int else UNKNOWN}
- tokens: {tokens(manifest, options)}
- text: {code(bare(options.get("train", "")))}; for validation: {code(bare(options.get("val", "")))}
{losses}
- program, at the run's newest start: {code(build)}

The losses are of the run's own weights, before any rounding for this release. In the CPU build bf16 is float32. Options of the run:

```text
{command(options) if options else UNKNOWN}
```

## Use

{usage(name, c, (step / "tokenizer.json").exists(), is_bytes)}

## License

To be filled in, here and in the first lines of README.md.
"""
