#!/usr/bin/env python3
"""Makes a release of a checkpoint: a Hugging Face folder with weights in bfloat16, in files of at most 5 GB.

  export.py runs/x/step_00002000 my-model
  export.py runs/x/step_00002000 my-model --dtype float32

A checkpoint is a Hugging Face folder already; this leaves the optimizer's moments out and rounds the weights (to the
nearest, ties to even). The routers' selection biases stay float32, as DeepSeek-V3's do. Files are checked against the
manifest's CRC-32 first. Modules that predict further tokens get copies of the embedding and lm_head, as DeepSeek-V3's
have, because some readers (vLLM) load a module by its own names alone. Needs numpy, safetensors and ml_dtypes.
"""
import argparse
import json
import pathlib
import shutil
import sys
import zlib

FILE_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


class Failure(Exception):
    """Something the user can put right; the message says what."""


def read_json(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Failure(f"{path}: {error}; a checkpoint with a config.json is wanted") from error


def check(step):
    """Every file of the model is as it was saved."""
    sums = {file["name"]: file["crc32"] for file in read_json(step / "manifest.json")["files"]}
    for name in sorted({*read_json(step / INDEX)["weight_map"].values(), "config.json", INDEX}):
        crc = 0
        with open(step / name, "rb") as file:
            while piece := file.read(1 << 24):
                crc = zlib.crc32(piece, crc)
        if crc != sums.get(name):
            raise Failure(f"{step / name}: altered (its CRC-32 is {crc}, the manifest says {sums.get(name)})")


def dtype_of(name, dtype):
    return "float32" if name.endswith("e_score_correction_bias") else dtype


def copies_of(config):
    """The names under which modules have a tensor of the main model."""
    modules = [config["num_hidden_layers"] + k for k in range(config["num_nextn_predict_layers"])]
    return {"model.embed_tokens.weight": [f"model.layers.{layer}.embed_tokens.weight" for layer in modules],
            "lm_head.weight": [f"model.layers.{layer}.shared_head.head.weight" for layer in modules]}


def plan(step, dtype, copies):
    """Files, each a list of (name, tensor, where it lies, bytes): as many as go into 5 GB, in the order of the model."""
    from safetensors import safe_open
    files, room = [[]], FILE_BYTES
    weight_map = read_json(step / INDEX)["weight_map"]
    for source in dict.fromkeys(weight_map.values()):
        with safe_open(step / source, "np") as opened:
            for tensor in opened.keys():
                shape = opened.get_slice(tensor).get_shape()
                size = (4 if dtype_of(tensor, dtype) == "float32" else 2) * int.__mul__(*(shape + [1])[:2])
                for name in (tensor, *copies.get(tensor, ())):
                    if size > room and files[-1]:
                        files.append([])
                        room = FILE_BYTES
                    files[-1].append((name, tensor, source, size))
                    room -= size
    return files


def write(step, out, dtype, copies):
    import ml_dtypes
    from safetensors import safe_open
    from safetensors.numpy import save_file
    files = plan(step, dtype, copies)
    weight_map, done, total = {}, 0, sum(size for file in files for *_, size in file)
    for i, tensors in enumerate(files):
        target = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        data = {}
        for name, tensor, source, size in tensors:
            with safe_open(step / source, "np") as opened:
                values = opened.get_tensor(tensor)
            data[name] = values if dtype_of(name, dtype) == "float32" else values.astype(ml_dtypes.bfloat16)
            weight_map[name], done = target, done + size
        save_file(data, out / target, {"format": "pt"})
        shutil.copymode(out / "config.json", out / target)  # safetensors makes files for their owner alone
        print(f"{target}: {100 * done / total:.0f} % of {total / 1e9:.2f} GB", file=sys.stderr)
    if len(files) > 1:
        (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n")


def export(step, out, dtype):
    if out.exists():
        raise Failure(f"{out} is there already; choose another folder")
    check(step)
    config = read_json(step / "config.json")
    config["torch_dtype"] = dtype
    part = out.with_name(out.name + ".tmp")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write(step, part, dtype, copies_of(config))
    for name in COPIED:
        if (step / name).exists():
            shutil.copyfile(step / name, part / name)
    part.rename(out)
    if "train_moe_note" in config:
        print(f"export.py: warning: {config['train_moe_note']}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", type=pathlib.Path, metavar="STEP", help="a checkpoint's folder")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT", help="a folder that is not there yet")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights (bfloat16)")
    args = parser.parse_args()
    try:
        export(args.step, args.out, args.dtype)
    except ImportError as error:
        print(f"export.py: error: {error}: pip install numpy safetensors ml_dtypes", file=sys.stderr)
    except (Failure, OSError, KeyError) as error:
        print(f"export.py: error: {error}", file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
