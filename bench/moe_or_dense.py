#!/usr/bin/env python3
"""Is MoE worth it on one GPU? A MoE and a dense model of the same active parameters, both with Muon, each on a GPU of its own:

    python3 bench/moe_or_dense.py --train 'corpus/x_train_*.bin' --val 'corpus/x_val_*.bin' \\
        --tokens 100e6 300e6 1e9 --seeds 3 3 1 --out runs/worth

Each model first runs with each of the learning rates on the first number of --tokens (seed 1). With the best of them it runs
on each number of tokens, with as many of the seeds 1, 2, ... as --seeds says. PyTorch's dense model (bench/torch_gpu.py)
runs with the dense model's best rate on the most tokens. Runs of different models are paired: the same seeds, data and
schedule. --gpus runs that many at a time. A finished run is not repeated.

The table has the validation loss at the end, and the seconds of all steps without validations. Its last columns have the
tokens and the seconds that MoE needs to the dense model's final loss. They are interpolated over the logarithm of tokens
between the ends of MoE's own runs, so that each point has a whole schedule of the learning rate. One more MoE run has as
many tokens as this gives for the longest dense run: it should end at the same loss. The picture OUT/moe_or_dense.svg has
the validation loss over seconds of that run, of the longest dense run and of PyTorch's. Its title says when MoE passes
dense's last loss, interpolated between validations. Options after `--` go to both models of this program.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import least_python  # noqa: E402,F401
from chart import Curve, Panel, draw_svg  # noqa: E402

MODELS = "MoE", "dense"
TORCH = "PyTorch dense"


class Run:
    """A run's validations: [(seconds, loss)]."""

    def __init__(self, folder):
        seconds, self.points = 0, []
        done = 0
        with open(folder / "log.jsonl", encoding="utf-8") as log:
            rows = list(map(json.loads, log))
        for row in rows:
            if "step" not in row:
                continue
            seconds += row["ms"] * (row["step"] - done) / 1000  # PyTorch's log has a line for ten steps
            done = row["step"]
            if row.get("val_loss") is not None:
                self.points.append((seconds, row["val_loss"]))
        self.steps = done


def place_of(loss, losses):
    """The first place where {place: loss} falls to this loss, interpolated over its logarithm; None if there is none. A place
    is the tokens of a whole run, or the seconds of a validation."""
    points = sorted(losses.items())
    for (p0, l0), (p1, l1) in zip(points, points[1:]):
        if l0 > loss >= l1:
            return p0 * (p1 / p0) ** ((l0 - loss) / (l0 - l1))
    return None


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    for name in "train", "val", "out":
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--program", default=str(ROOT / "build/cuda/train_moe"))
    parser.add_argument("--model", default="small", help="preset of both models")
    parser.add_argument("--moe", default="--experts 64 --muon-expert-steps 4", help="what makes the MoE of it")
    parser.add_argument("--dense", default="--dense-layers 8 --dense-ffn 1944", help="what makes the dense model of it")
    parser.add_argument("--tokens", type=float, nargs="+", default=[100e6, 300e6], help="of a run; the first for the rates")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 1.4e-3, 2e-3, 2.8e-3], help="peak learning rates of Muon")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3], help="runs for each number of tokens, or for all")
    parser.add_argument("--gpus", type=int, default=1, help="runs at a time")
    parser.add_argument("--torch", type=int, choices=(0, 1), default=1, help="1: PyTorch's dense model too")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--validations", type=int, default=20)
    own, more = (sys.argv[1:], []) if "--" not in sys.argv else (
        sys.argv[1:sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1:])
    args = parser.parse_args(own)

    # What all runs have in common.
    out = pathlib.Path(args.out)
    seeds = dict(zip(args.tokens, args.seeds * len(args.tokens) if len(args.seeds) == 1 else args.seeds))
    if len(seeds) != len(args.tokens):
        parser.error("--seeds: one number, or one for each of --tokens")
    longest = max(seeds)
    free = queue.Queue()
    for gpu in range(args.gpus):
        free.put(gpu)

    def steps_of(tokens):
        return round(tokens / (args.batch * args.seq_len))

    def folder_of(model, tokens, rate, seed):
        return out / f"{model.replace(' ', '-')}-{tokens / 1e6:g}M-{rate:g}-seed-{seed}"

    def train(job):
        model, tokens, rate, seed = job
        folder, steps = folder_of(*job), steps_of(tokens)
        if (folder / "log.jsonl").exists() and Run(folder).steps == steps:
            return
        folder.mkdir(parents=True, exist_ok=True)
        common = ["--train", args.train, "--val", args.val, "--model", args.model, "--batch", str(args.batch), "--seq-len",
                  str(args.seq_len), "--steps", str(steps), "--lr", "1e-3", "--warmup", str(max(1, steps // 20)),
                  "--optimizer", "muon", "--val-every", str(max(1, steps // args.validations)), "--val-tokens", "1048576"]
        if model == TORCH:
            vocab = json.loads(next(open(folder_of("dense", args.tokens[0], rate, 1) / "log.jsonl", encoding="utf-8")))["vocab"]
            command = [sys.executable, str(ROOT / "bench/torch_gpu.py"), *common, *args.dense.split(), "--vocab", str(vocab),
                       "--seed", str(seed), "--muon-lr", str(rate), "--log", str(folder / "log.jsonl")]
        else:
            command = [args.program, *common, *(args.dense if model == "dense" else args.moe).split(), *more, "--data-seed", "1",
                       "--seed", str(seed), "--muon-lr", str(rate), "--keep", "1", "--out", str(folder), "--resume"]
        gpu = free.get()
        print(f"gpu {gpu}: {' '.join(command)}", file=sys.stderr, flush=True)
        with open(folder / "output.txt", "w", encoding="utf-8") as output:
            code = subprocess.run(command, env=dict(os.environ, CUDA_VISIBLE_DEVICES=str(gpu)), stdout=output,
                                  stderr=subprocess.STDOUT).returncode
        free.put(gpu)
        if code:
            raise SystemExit(f"{folder}/output.txt: exit code {code}")

    def loss(model, rate):
        return Run(folder_of(model, args.tokens[0], rate, 1)).points[-1][1]

    # Learning rates, then the other runs, and PyTorch. Long runs start first.
    with concurrent.futures.ThreadPoolExecutor(args.gpus) as pool:
        list(pool.map(train, [(model, args.tokens[0], rate, 1) for rate in args.rates for model in MODELS]))
        best = {model: min(args.rates, key=lambda rate: loss(model, rate)) for model in MODELS}
        jobs = [(model, tokens, best[model], seed + 1) for tokens in sorted(seeds, reverse=True)
                for seed in range(seeds[tokens]) for model in MODELS]
        if args.torch:
            jobs.insert(2, (TORCH, longest, best["dense"], 1))
        list(pool.map(train, jobs))
    runs = {}
    for model, tokens, rate, seed in jobs:
        runs.setdefault((model, tokens), []).append(Run(folder_of(model, tokens, rate, seed)))

    def mean(*key, place=1):  # of the ends of runs: 0 seconds, 1 loss
        return statistics.fmean(run.points[-1][place] for run in runs[key])

    # A MoE run that should end where the longest dense run does.
    def needed(tokens):
        return place_of(mean("dense", tokens), {t: mean("MoE", t) for model, t in runs if model == "MoE"})

    same = needed(longest)
    if same:
        train(("MoE", same, best["MoE"], 1))
        runs["MoE", same] = [Run(folder_of("MoE", same, best["MoE"], 1))]

    # The table.
    for model in MODELS:
        print(f"{model}, {args.tokens[0] / 1e6:g}M tokens, Muon's rate: " + ", ".join(f"{rate:g}: {loss(model, rate):.4f}" for rate in args.rates))
    print("\n| model | tokens | validation loss | seconds | MoE to dense's loss: tokens | seconds | of dense's seconds |\n"
          "|---|---|---|---|---|---|---|")
    for key in sorted(runs, key=lambda key: (key[1], key[0])):
        model, tokens = key
        cells = [model, f"{tokens / 1e6:.4g}M", ", ".join(f"{run.points[-1][1]:.4f}" for run in runs[key]),
                 ", ".join(f"{run.points[-1][0]:.1f}" for run in runs[key]), "", "", ""]
        met = needed(tokens) if model == "dense" else None
        if met:
            took = met / tokens * mean("MoE", tokens, place=0)
            cells[4:] = f"{met / 1e6:.1f}M", f"{took:.1f}", f"{took / mean(*key, place=0):.2f}"
        print(f"| {' | '.join(cells)} |")

    # The picture, without the first fifth of each curve.
    shown = {"MoE": ("MoE", same or longest), "dense": ("dense", longest), TORCH: (TORCH, longest)}
    names = [name for name, key in shown.items() if key in runs]
    lines = [runs[shown[name]][0].points for name in names]
    panel = Panel("validation loss, nats a token", [Curve([], line, line) for line in lines],
                  shown=[loss for line in lines for _, loss in line[len(line) // 5:]])
    moe, dense = lines[:2]
    passes = place_of(dense[-1][1], dict(moe)) if moe[-1][1] <= dense[-1][1] else None
    title = (f"MoE passes dense's last loss after {passes:.0f} s; dense needs {dense[-1][0]:.0f} s" if passes else
             ", ".join(f"{name} {line[-1][1]:.3f} after {line[-1][0]:.0f} s" for name, line in zip(names, lines)))
    legend = [f"{name}, {shown[name][1] / 1e6:.3g}M tokens" for name in names]
    picture = draw_svg([panel], legend, "seconds of training on one GPU", title)
    (out / "moe_or_dense.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
