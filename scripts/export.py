#!/usr/bin/env python3
"""Makes a release of a checkpoint: a Hugging Face folder with weights in bfloat16, in files of at most 5 GB.

  export.py runs/x/step_00002000 my-model
  export.py runs/x/step_00002000 my-model --dtype float32

A checkpoint is a Hugging Face folder already; this leaves the optimizer's moments out and rounds the weights (to the
nearest, ties to even). The routers' selection biases stay float32, as DeepSeek-V3's do. All files but the moments are
checked against the manifest's CRC-32 first. Modules that predict further tokens get copies of the embedding and lm_head, as DeepSeek-V3's
have, because some readers (vLLM) load a module by its own names alone. Needs numpy, safetensors and ml_dtypes.
"""
import argparse
import json
import os
import pathlib
import shutil
import sys
import zlib

FORMAT = "train_moe checkpoint 1"
FILE_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


class Failure(Exception):
    """Something the user can put right; the message says what."""


def read_json(path):
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}; the folder of a whole checkpoint is wanted") from error
    except ValueError as error:
        raise Failure(f"{path}: {error}") from error
    if not isinstance(record, dict):
        raise Failure(f"{path}: not a JSON object")
    return record


def check(step):
    """All that was saved is as it was; the moments are not looked at."""
    path = step / "manifest.json"
    manifest, (body, _, end) = read_json(path), path.read_text().rpartition(',\n"manifest_crc32": ')
    if manifest.get("format") != FORMAT or end != f"{zlib.crc32(body.encode())}}}\n":
        raise Failure(f"{path}: altered, or not of this version")
    for file in manifest["files"]:
        if ".adam." in file["name"]:
            continue
        crc = 0
        with open(step / file["name"], "rb") as opened:
            while piece := opened.read(1 << 24):
                crc = zlib.crc32(piece, crc)
        if crc != file["crc32"]:
            raise Failure(f"{step / file['name']}: altered (its CRC-32 is {crc}, the manifest says {file['crc32']})")


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


def unfinished(out):
    """What out is called until it is complete. Nothing that is there is touched."""
    part = out.with_name(out.name + ".tmp")
    for path, advice in (out, "choose another name"), (part, "remove it, if a killed run left it"):
        if os.path.lexists(path):
            raise Failure(f"{path} is there already; {advice}")
    return part


def export(step, out, dtype):
    part = unfinished(out)
    check(step)
    config = read_json(step / "config.json")
    config["torch_dtype"] = dtype
    part.mkdir(parents=True)
    try:
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write(step, part, dtype, copies_of(config))
        for name in COPIED:
            if (step / name).exists():
                shutil.copyfile(step / name, part / name)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if "train_moe_note" in config:
        print(f"export.py: warning: {config['train_moe_note']}", file=sys.stderr)


def run(script, packages, work):
    """Does the work; what goes wrong is one line. The exit code."""
    try:
        from safetensors import SafetensorError
        try:
            work()
        except (Failure, OSError, SafetensorError) as error:
            print(f"{script}: error: {error}", file=sys.stderr)
        except KeyError as error:
            print(f"{script}: error: config.json, manifest.json or tokenizer.json has no {error}", file=sys.stderr)
        else:
            return 0
    except ImportError as error:
        print(f"{script}: error: {error}: pip install {packages}", file=sys.stderr)
    return 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", type=pathlib.Path, metavar="STEP", help="a checkpoint's folder")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT", help="a folder that is not there yet")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights (bfloat16)")
    args = parser.parse_args()
    return run("export.py", "numpy safetensors ml_dtypes", lambda: export(args.step, args.out, args.dtype))


if __name__ == "__main__":
    sys.exit(main())
