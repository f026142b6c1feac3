#!/usr/bin/env python3
"""Makes a release of a checkpoint: a Hugging Face folder with weights in bfloat16, in files of at most 5 GB.

  export.py runs/x/step_00002000 my-model
  export.py runs/x my-model --dtype float32       the newest checkpoint of a run
  export.py runs/x my-model --experts mxfp4       after --precision mxfp4-weights: the experts' weights as its GEMMs read them

A checkpoint is already a Hugging Face folder. A release has no moments, and its weights are rounded (to nearest, ties
to even). The selection biases of the routers stay float32, as DeepSeek-V3's do. The CRC-32 of all files but the
moments is checked first. MTP modules get copies of the embedding and lm_head, as in DeepSeek-V3, because some readers
(vLLM) load a module by its own names alone. Needs numpy and safetensors.

README.md in the release is a model card for the Hugging Face Hub. It has the architecture, tokens, losses from the run's
log.jsonl, options without folders, and the way to load the model. Its license is to be filled in.
"""
import script
from script import Failure

import argparse
import json
import os
import pathlib
import re
import shlex
import shutil
import sys
import zlib

import model_card
from tokenizer_json import check_table, make_table

FORMAT = "train_moe checkpoint 2"
FILE_BYTES = 5 * 10**9
JSON_BYTES = 1 << 28
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
COPIED = ("generation_config.json", "tokenizer.bin", "tokenizer.json", "tokenizer_config.json")


def newest(folder):
    """The newest step of a run; any other folder as it is."""
    steps = [path for path in folder.glob("step_*") if re.fullmatch(r"step_(\d{8}|[1-9]\d{8,})", path.name)]
    return folder if (folder / "config.json").exists() or not steps else max(steps, key=lambda path: int(path.name[5:]))


def inside(folder, name):
    """The file of this name in a folder. Other places, pipes and devices are refused."""
    path = folder / name
    if pathlib.PurePath(name).name != name:
        raise Failure(f"{folder}: it names a file outside of the folder: {name}")
    if path.exists() and not path.is_file():
        raise Failure(f"{path}: not a file")
    return path


def read_json(path):
    inside(path.parent, path.name)
    try:
        if path.stat().st_size > JSON_BYTES:
            raise Failure(f"{path}: larger than {JSON_BYTES >> 20} MiB")
        record = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}; name the folder of a whole checkpoint") from error
    except (ValueError, RecursionError) as error:
        raise Failure(f"{path}: {error}") from error
    if not isinstance(record, dict):
        raise Failure(f"{path}: not a JSON object")
    return record


def want(record, path, keys, kind, fits):
    """Failure where one of the keys is not of this kind."""
    for key in keys.split():
        if not fits(record[key]):
            raise Failure(f"{path}: {key} is {json.dumps(record[key])[:60]}, not {kind}")


def weight_map(step):
    """The file of each tensor: model.safetensors, as transformers prefers it, or those that the index names."""
    from safetensors import safe_open
    if (step / SINGLE).exists():
        with safe_open(inside(step, SINGLE), "np") as opened:
            return dict.fromkeys(opened.keys(), SINGLE)
    index = read_json(step / INDEX)
    want(index, step / INDEX, "weight_map", "an object of file names",
         lambda files: type(files) is dict and all(type(file) is str for file in files.values()))
    for file in set(index["weight_map"].values()):
        inside(step, file)
    return index["weight_map"]


def check(step):
    """All that was saved is as it was, and is all that is read; the moments are not looked at. Returns the manifest."""
    path = step / "manifest.json"
    manifest, (body, _, end) = read_json(path), path.read_text("utf-8").rpartition(',\n"manifest_crc32": ')
    if end != f"{zlib.crc32(body.encode())}}}\n":
        raise Failure(f"{path}: altered (its CRC-32 differs)")
    if manifest.get("format") != FORMAT:
        raise Failure(f"{path}: its format is {manifest.get('format')!r}, not {FORMAT!r}: another version made it; "
                      "train_moe --init can read its weights")
    want(manifest, path, "files", "a list of files", lambda files: type(files) is list and all(
        type(file) is dict and type(file["name"]) is str and type(file["crc32"]) is int for file in files))
    unlisted = set(weight_map(step).values()) - {file["name"] for file in manifest["files"]}
    if unlisted:
        raise Failure(f"{path} does not list {min(unlisted)}")
    for file in manifest["files"]:
        if ".adam." in file["name"]:
            continue
        crc = 0
        try:
            with open(inside(step, file["name"]), "rb") as opened:
                for piece in iter(lambda: opened.read(1 << 24), b""):
                    crc = zlib.crc32(piece, crc)
        except OSError as error:
            raise Failure(f"{step / file['name']}: {error.strerror}") from error
        if crc != file["crc32"]:
            raise Failure(f"{step / file['name']}: altered (its CRC-32 is {crc}, the manifest says {file['crc32']})")
    return manifest


def dtype_of(name, dtype):
    return "float32" if name.endswith("e_score_correction_bias") else dtype


def copies_of(config):
    """The names under which modules have a tensor of the main model."""
    modules = [config["num_hidden_layers"] + k for k in range(config["num_nextn_predict_layers"])]
    return {"model.embed_tokens.weight": [f"model.layers.{layer}.embed_tokens.weight" for layer in modules],
            "lm_head.weight": [f"model.layers.{layer}.shared_head.head.weight" for layer in modules]}


def plan(step, dtype, copies):
    """Files of at most 5 GB, in the order of the model. Each is a list of (name, tensor, source file, bytes)."""
    from safetensors import safe_open
    files, room = [[]], FILE_BYTES
    for source in dict.fromkeys(weight_map(step).values()):
        with safe_open(step / source, "np") as opened:
            for tensor in opened.keys():
                shape = opened.get_slice(tensor).get_shape()
                size = (4 if dtype_of(tensor, dtype) == "float32" else 2) * int.__mul__(*(shape + [1])[:2])
                for name in (tensor, *copies.get(tensor, ())):
                    if size > room and files[-1]:
                        files.append([])
                        room = FILE_BYTES
                    files[-1].append((name, tensor, source, shape, size))
                    room -= size
    return files


def bfloat16(values):
    """The bits of float32 values, rounded to the nearest, ties to even."""
    bits = values.view("uint32")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("uint16")


def mxfp4(values):
    """float32 weights after MXFP4 in blocks of 32 along the rows, as mx/fp4.h has it with --mx-scale rceil. bf16 holds them."""
    import numpy as np
    blocks = (bfloat16(values).astype("uint32") << 16).view("float32").reshape(-1, 32).astype("float64")
    mantissa, exponent = np.frexp(np.abs(blocks).max(1, keepdims=True))
    scale = np.ldexp(1.0, np.maximum(exponent - 3 + (mantissa > 0.75), -127))  # 6 = 0.75 2^3
    x = np.minimum(np.abs(blocks) / scale, 6)
    step = np.where(x < 2, 0.5, np.where(x < 4, 1, 2))
    return np.copysign(np.rint(x / step) * step * scale, blocks).astype("float32").reshape(values.shape)


def write_file(path, step, tensors, dtype, experts):
    """One safetensors file, with one tensor in memory at a time; float32 first, because readers want it aligned."""
    from safetensors import safe_open
    header, at = {"__metadata__": {"format": "pt"}}, 0
    tensors = sorted(tensors, key=lambda tensor: dtype_of(tensor[0], dtype) != "float32")
    for name, _, _, shape, size in tensors:
        kind = "F32" if dtype_of(name, dtype) == "float32" else "BF16"
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor, source, _, _ in tensors:
            with safe_open(step / source, "np") as opened:
                values = opened.get_tensor(tensor)
            if experts == "mxfp4" and ".mlp.experts." in tensor:
                values = mxfp4(values)
            file.write(values if header[name]["dtype"] == "F32" else bfloat16(values))


def write(step, out, files, dtype, experts):
    places, done, total = {}, 0, sum(size for file in files for *_, size in file)
    for i, tensors in enumerate(files):
        target = SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        write_file(out / target, step, tensors, dtype, experts)
        places |= dict.fromkeys([name for name, *_ in tensors], target)
        done += sum(size for *_, size in tensors)
        print(f"{target}: {100 * done / total:.0f} % of {total / 1e9:.2f} GB", file=sys.stderr)
    if len(files) > 1:
        (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1) + "\n", "utf-8")


def warn_untrained(options):
    """The experts of a run with other options than these were trained with other values than a release in MXFP4 has."""
    trained = {"expert-precision": "mxfp4-weights", "mx-scale": "rceil"}
    others = " ".join(f"--{name} {options.get(name)}" for name, value in trained.items() if options.get(name) != value)
    if others:
        print(f"export.py: warning: the experts were trained with {others}, and --experts mxfp4 rounds them to other values; "
              "train_moe --evaluate has the loss of the release", file=sys.stderr)


def refuse_existing(out):
    if os.path.lexists(out):
        raise Failure(f"{out} is there already; choose another name")


def export(step, out, dtype, experts):
    refuse_existing(out)
    manifest = check(step)
    config = read_json(step / "config.json")
    config["torch_dtype"] = dtype
    if experts == "mxfp4":
        warn_untrained(manifest.get("options", {}))
    files = plan(step, dtype, copies_of(config))
    name = model_card.hub_name(script.text(out.name, "replace"))
    sizes = {tensor: int.__mul__(*(shape + [1])[:2]) for file in files for _, tensor, _, shape, _ in file
             if not tensor.endswith("e_score_correction_bias")}
    weights = dtype + ", the experts' rounded to MXFP4 in blocks of 32" * (experts == "mxfp4") + "; selection biases in float32"
    card = model_card.card(name, step, manifest, config, sizes, weights)
    out.parent.mkdir(parents=True, exist_ok=True)
    with script.in_place(out, create=pathlib.Path.mkdir) as part:
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        (part / "README.md").write_text(card, "utf-8")
        for file in COPIED:
            if (step / file).exists():
                shutil.copyfile(inside(step, file), part / file)
        if (part / "tokenizer.json").exists():
            (check_table if (part / "tokenizer.bin").exists() else make_table)(part / "tokenizer.json", part / "tokenizer.bin")
        write(step, part, files, dtype, experts)
    print(f"wrote {out}\nfill in the license in its README.md, then: hf upload USER/{name} {shlex.quote(str(out))}")
    if "train_moe_note" in config:
        print(f"export.py: warning: {config['train_moe_note']}", file=sys.stderr)


def run(name, packages, work):
    """Does the work; what goes wrong is one line. The exit code."""
    try:
        from safetensors import SafetensorError
        try:
            work()
        except (Failure, SafetensorError) as error:
            print(f"{name}: error: {error}", file=sys.stderr)
        except OSError as error:
            print(f"{name}: error: {error.filename}: {error.strerror or error}", file=sys.stderr)
        except KeyError as error:
            print(f"{name}: error: config.json, manifest.json or tokenizer.json has no {error}", file=sys.stderr)
        else:
            return 0
    except ImportError as error:
        print(f"{name}: error: {error}: pip install {packages}", file=sys.stderr)
    return 1


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", type=pathlib.Path, metavar="STEP", help="a checkpoint's folder, or a run's")
    parser.add_argument("out", type=pathlib.Path, metavar="OUT", help="a new folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="type of the weights (bfloat16)")
    parser.add_argument("--experts", choices=("as-trained", "mxfp4"), default="as-trained", help="values of the experts (as-trained)")
    args = parser.parse_args()
    return run("export.py", "numpy safetensors", lambda: export(newest(args.step), args.out, args.dtype, args.experts))


if __name__ == "__main__":
    sys.exit(main())
