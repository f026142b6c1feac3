"""Compares the bits of short runs under many combinations of options, before and after a change of the code.

    python3 tests/same_bits.py record before.json [--program build/cuda/train_moe] [--ranks 4]
    python3 tests/same_bits.py compare before.json after.json

`record` makes runs of 6 steps. It writes the losses, gradient norms and loads of their steps and validations from the log
(9 digits: a float32 to its last bit), and the statistics of the casts. It also writes the CRC-32 of every file of the last
checkpoint: masters, moments and router biases. `compare` names each combination that differs, with the difference.
Bits depend on the machine (BLAS, GPU) and on the compiler, so record before and after a change on the same machine.
"""
import argparse
import array
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAUNCH = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]

CPU_MODEL = ("--layers 3 --dim 64 --heads 2 --kv-lora 32 --nope-dim 32 --rope-dim 16 --v-dim 32 --dense-ffn 96 --experts 8 "
             "--top-k 2 --expert-ffn 64 --vocab 250 --seq-len 16 --batch 2 --val-tokens 256")
CUDA_MODEL = "--model small --layers 3 --vocab 500 --seq-len 200 --batch 4 --val-tokens 3200"
SAME = "--steps 6 --warmup 2 --lr 3e-3 --val-every 3"  # --tokens-per-step follows from the batch and STEP_BATCHES
STEP_BATCHES = 4

EXPERT, DISPATCH, COMBINE, WGRAD, LINEAR = (f"--{name}-precision mxfp8" for name in
                                            ("expert", "dispatch", "combine", "wgrad", "linear"))
EXPERT_EXACT, LINEAR_EXACT = f"{EXPERT}-exact", f"{LINEAR}-exact"
FAST, EXACT = "--precision mxfp8", "--precision mxfp8-exact"
ADAMW, MTP, NVFP4, MXFP4 = "--optimizer adamw", "--mtp 1", "--precision nvfp4", "--precision mxfp4"
DEEPSEEK_V3 = "--q-lora 32 --groups 4 --top-groups 2 --route-scale 2.5"
DEEPSEEK_V2 = "--q-lora 32 --groups 4 --top-groups 2 --score softmax --route-norm 0 --route-scale 16 --shared-experts 2"

# name: (ranks, options)
CPU_RUNS = {
    "plain": (1, ""),
    "softmax": (1, "--score softmax --route-norm 0 --shared-experts 2"),
    "v3": (1, DEEPSEEK_V3 + " --yarn 1"),
    "v2": (1, DEEPSEEK_V2 + " --aux-loss 0.02"),
    "no shared expert": (1, "--shared-experts 0 --dense-layers 0"),
    "only dense": (1, "--dense-layers 3"),
    "recompute moe": (1, "--recompute moe"),
    "recompute block": (1, "--recompute block --q-lora 32"),
    "balanced": (1, "--force-balance --aux-loss 0.02"),
    "dispatch": (1, DISPATCH),
    "combine": (1, COMBINE),
    "wgrad": (1, WGRAD),
    "expert exact": (1, f"{EXPERT_EXACT} --mx-stats 2"),
    "expert fast": (1, f"{EXPERT} --mx-stats 2"),
    "linear exact": (1, f"{LINEAR_EXACT} --q-lora 32 --mx-stats 2"),
    "linear fast": (1, f"{LINEAR} --q-lora 32 --mx-stats 2"),
    "all exact": (1, f"{EXACT} --mx-scale floor"),
    "all fast": (1, f"{FAST} --recompute moe"),
    "all fast, no shared expert": (1, f"{FAST} --shared-experts 0"),
    "adamw": (1, ADAMW),
    "mtp": (1, MTP),
    "nvfp4": (1, f"{NVFP4} --mx-stats 2"),
    "mxfp4": (1, f"{MXFP4} --recompute moe --mx-stats 2"),
    "mxfp4 weights": (1, f"{MXFP4}-weights"),
    "2 ranks": (2, "--shard optimizer"),
    "4 ranks": (4, "--shard grads --aux-loss 0.02"),
    "4 ranks, weights": (4, "--shard weights --recompute block"),
    "ep 2": (2, "--ep 2"),
    "ep 2 of 4": (4, "--ep 2 --shard weights " + DEEPSEEK_V3),
    "ep 4": (4, "--ep 4 --shard grads --capacity 1 " + DEEPSEEK_V2),
    "ep 4, recompute": (4, "--ep 4 --recompute moe --shared-experts 0"),
    "ep 2, dispatch": (2, f"--ep 2 {DISPATCH} --mx-stats 3"),
    "ep 2, combine": (2, f"--ep 2 {COMBINE}"),
    "ep 2, expert exact": (2, f"--ep 2 {EXPERT_EXACT} --recompute block"),
    "ep 2, expert fast": (2, f"--ep 2 {EXPERT}"),
    "ep 2, nvfp4": (2, f"--ep 2 {NVFP4}"),
    "ep 4, usual fast": (4, f"--ep 4 {EXPERT} {DISPATCH} --shard optimizer"),
    "ep 4, all exact": (4, f"--ep 4 {EXACT} --recompute moe"),
    "ep 4, all fast": (4, f"--ep 4 {FAST} --recompute moe --mx-stats 2 --shard weights"),
    "ep 2 of 4, all fast": (4, f"--ep 2 {FAST} --mx-scale floor"),
}
CUDA_RUNS = {  # {ep} is the number of ranks
    "plain": "--ep {ep} --mx-stats 0",
    "v3": "--ep {ep} --shard grads " + DEEPSEEK_V3.replace("32", "256"),
    "v2, recompute": "--ep {ep} --recompute moe --aux-loss 0.02 --shard weights " + DEEPSEEK_V2.replace("32", "256"),
    "usual fast": f"--ep {{ep}} {EXPERT} {DISPATCH} --mx-stats 2",
    "all fast": f"--ep {{ep}} {FAST} --recompute block --shard weights",
    "all exact": f"--ep {{ep}} {EXACT} --mx-stats 3",
    "adamw": f"--ep {{ep}} {ADAMW}",
    "mtp": f"--ep {{ep}} {MTP}",
    "nvfp4": f"--ep {{ep}} {NVFP4} --mx-stats 2",
    "mxfp4": f"--ep {{ep}} {MXFP4}",
    "mxfp4 weights": f"--ep {{ep}} {MXFP4}-weights",
}


def write_shards(folder, tokens):
    """Writes ids from a Markov chain, which a model can learn, so that experts differ."""
    draw = random.Random(1)
    for name, count in (("train", tokens), ("val", tokens // 4)):
        header, ids, at = array.array("i", [20240520, 1, count] + [0] * 253), array.array("H"), 0
        for _ in range(count):
            at = (at * 7 + draw.choice((1, 1, 1, 2, 3, 100))) % 250
            ids.append(at)
        (folder / f"text_{name}_000000.bin").write_bytes(header.tobytes() + ids.tobytes())


def run(program, model, data, out, ranks, options):
    words = model.split()
    batch, length = (int(words[words.index(name) + 1]) for name in ("--batch", "--seq-len"))
    command = [program, "--train", data / "text_train*.bin", "--val", data / "text_val*.bin", "--out", out, *words,
               *SAME.split(), "--tokens-per-step", batch * length * STEP_BATCHES, *options.split()]
    if ranks > 1:
        command = [*LAUNCH, "-np", ranks, *command]
    done = subprocess.run([*map(str, command)], capture_output=True, encoding="utf-8", env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr}")
    untimed = [{key: value for key, value in json.loads(line).items() if key not in ("time", "ms", "tokens_per_s", "mfu", "mem_gib")}
               for line in (out / "log.jsonl").read_text("utf-8").splitlines()[1:]]
    manifest = json.loads((out / "step_00000006/manifest.json").read_text("utf-8"))
    shutil.rmtree(out)
    return {"log": untimed, "files": {file["name"]: file["crc32"] for file in manifest["files"]}}


def record(args):
    cuda = "cuda" in args.program.parts
    runs = {name: (args.ranks, options.format(ep=args.ranks)) for name, options in CUDA_RUNS.items()} if cuda else CPU_RUNS
    recorded = {}
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        write_shards(scratch, 60000)
        for name, (ranks, options) in runs.items():
            recorded[name] = run(args.program.resolve(), CUDA_MODEL if cuda else CPU_MODEL, scratch, scratch / "out", ranks, options)
            print(f"{name:30} loss {recorded[name]['log'][-1]['loss']:.9g}", flush=True)
    args.file.write_text(json.dumps(recorded, indent=1), "utf-8")


def differences(before, after):
    """The lines for a run that differs."""
    for a, b in zip(before["log"], after["log"]):
        for record in (a, b):  # their order may differ
            record.get("mx_stats", []).sort(key=lambda cast: (cast["layer"], cast["tensor"]))
        for key in sorted(a.keys() | b.keys()):
            x, y = a.get(key), b.get(key)
            if x != y:
                by = f" (by {abs(y / x - 1):.1e})" if isinstance(x, float) and isinstance(y, float) and x else ""
                yield f"step {a['step']}: {key} {json.dumps(x)[:200]} -> {json.dumps(y)[:200]}{by}"
    if len(before["log"]) != len(after["log"]):
        yield f"{len(before['log'])} steps -> {len(after['log'])}"
    files = [name for name in sorted(before["files"].keys() | after["files"].keys())
             if before["files"].get(name) != after["files"].get(name)]
    if files:
        yield f"{len(files)} of {len(before['files'])} files of the checkpoint, the first {files[0]}"


def compare(args):
    before, after = (json.loads(file.read_text("utf-8")) for file in (args.before, args.after))
    differ = 0
    for name in sorted(before.keys() | after.keys()):
        lines = list(differences(before[name], after[name])) if name in before and name in after else ["only in one file"]
        differ += bool(lines)
        if lines:
            print(f"{name}: {lines[0]}" + (f"; {len(lines) - 1} more, the last: {lines[-1]}" if len(lines) > 1 else ""))
    print(f"{len(before)} runs, {differ} differ")
    return differ > 0


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", allow_abbrev=False)
    recording.add_argument("file", type=pathlib.Path)
    recording.add_argument("--program", type=pathlib.Path, default=ROOT / "build/cpu/train_moe")
    recording.add_argument("--ranks", type=int, default=1, help="GPUs, of the CUDA build")
    recording.set_defaults(do=record)
    comparing = commands.add_parser("compare", allow_abbrev=False)
    comparing.add_argument("before", type=pathlib.Path)
    comparing.add_argument("after", type=pathlib.Path)
    comparing.set_defaults(do=compare)
    args = parser.parse_args()
    return args.do(args)


if __name__ == "__main__":
    sys.exit(main())
