#!/usr/bin/env python3
"""Is MoE worth it on one GPU? A MoE and a dense model of the same active parameters, both with Muon, each on a GPU of its own:

    python3 bench/moe_or_dense.py --train 'corpus/x_train_*.bin' --val 'corpus/x_val_*.bin' --tokens 100e6 --out runs/worth

Each model first runs with three learning rates (seed 1), then with the best of them for the other --seeds. PyTorch's
dense model (bench/torch_gpu.py) runs with the dense model's best rate. Runs of different models are paired: the same
seeds, data and schedule. --gpus runs that many at a time. A finished run is not repeated.

The table has the validation loss at the end, the seconds of all steps without validations, and what each model needs to
the dense model's final loss: seconds and tokens, interpolated between validations. The picture OUT/moe_or_dense.svg has
the validation loss over seconds, of the best rates and seed 1. Options after `--` go to both models of this program.
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

from chart import Curve, Panel, draw_svg  # noqa: E402

MODELS = "MoE", "dense"
TORCH = "PyTorch dense"


class Run:
    """A run's validations: [(seconds, tokens, loss)]."""

    def __init__(self, folder, tokens_per_step):
        seconds, self.points = 0, []
        done = 0
        for line in open(folder / "log.jsonl", encoding="utf-8"):
            row = json.loads(line)
            if "step" not in row:
                continue
            seconds += row["ms"] * (row["step"] - done) / 1000  # PyTorch's log has a line for ten steps
            done = row["step"]
            if row.get("val_loss") is not None:
                self.points.append((seconds, done * tokens_per_step, row["val_loss"]))
        self.steps = done

    def to(self, loss):
        """(seconds, tokens) where the loss is reached; (None, None) if it is not."""
        for (s0, t0, l0), (s1, t1, l1) in zip(self.points, self.points[1:]):
            if l0 > loss >= l1:
                part = (l0 - loss) / (l0 - l1)
                return s0 + part * (s1 - s0), t0 + part * (t1 - t0)
        return None, None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in "train", "val", "out":
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--program", default=str(ROOT / "build/cuda/train_moe"))
    parser.add_argument("--model", default="small", help="preset of both models")
    parser.add_argument("--dense", default="--dense-layers 8 --dense-ffn 1944", help="what makes the dense model of it")
    parser.add_argument("--tokens", type=float, default=100e6)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="peak learning rates of Muon")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=1, help="runs at a time")
    parser.add_argument("--torch", type=int, choices=(0, 1), default=1, help="1: PyTorch's dense model too")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--validations", type=int, default=20)
    own, more = (sys.argv[1:], []) if "--" not in sys.argv else (
        sys.argv[1:sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1:])
    args = parser.parse_args(own)

    # What all runs have in common.
    out = pathlib.Path(args.out)
    tokens_per_step = args.batch * args.seq_len
    steps = round(args.tokens / tokens_per_step)
    common = ["--train", args.train, "--val", args.val, "--model", args.model, "--batch", str(args.batch), "--seq-len",
              str(args.seq_len), "--steps", str(steps), "--lr", "1e-3", "--warmup", str(min(300, steps // 10)),
              "--optimizer", "muon", "--val-every", str(max(1, steps // args.validations)), "--val-tokens", "1048576"]
    free = queue.Queue()
    for gpu in range(args.gpus):
        free.put(gpu)

    def folder_of(model, rate, seed):
        return out / f"{model.replace(' ', '-')}-{rate:g}-seed-{seed}"

    def train(job):
        model, rate, seed = job
        folder = folder_of(model, rate, seed)
        if (folder / "log.jsonl").exists() and Run(folder, tokens_per_step).steps == steps:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if model == TORCH:
            vocab = json.loads(next(open(folder_of("dense", rate, 1) / "log.jsonl", encoding="utf-8")))["vocab"]
            command = [sys.executable, str(ROOT / "bench/torch_gpu.py"), *common, *args.dense.split(), "--vocab", str(vocab),
                       "--seed", str(seed), "--muon-lr", str(rate), "--log", str(folder / "log.jsonl")]
        else:
            command = [args.program, *common, *(args.dense.split() if model == "dense" else []), *more, "--data-seed", "1",
                       "--seed", str(seed), "--muon-lr", str(rate), "--keep", "1", "--out", str(folder), "--resume"]
        gpu = free.get()
        print(f"gpu {gpu}: {' '.join(command)}", file=sys.stderr, flush=True)
        with open(folder / "output.txt", "w", encoding="utf-8") as output:
            code = subprocess.run(command, env=dict(os.environ, CUDA_VISIBLE_DEVICES=str(gpu)), stdout=output,
                                  stderr=subprocess.STDOUT).returncode
        free.put(gpu)
        if code:
            raise SystemExit(f"{folder}/output.txt: exit code {code}")

    def loss(model, rate, seed):
        return Run(folder_of(model, rate, seed), tokens_per_step).points[-1][2]

    # Learning rates, then the other seeds, and PyTorch.
    with concurrent.futures.ThreadPoolExecutor(args.gpus) as pool:
        list(pool.map(train, [(model, rate, 1) for rate in args.rates for model in MODELS]))
        best = {model: min(args.rates, key=lambda rate: loss(model, rate, 1)) for model in MODELS}
        jobs = [(model, best[model], seed) for seed in range(2, args.seeds + 1) for model in MODELS]
        if args.torch:
            jobs.append((TORCH, best["dense"], 1))
            best[TORCH] = best["dense"]
        list(pool.map(train, jobs))

    # The table.
    print("| model | Muon's rate: validation loss, seed 1 | seeds | validation loss | seconds | to dense's loss: seconds | tokens |\n"
          "|---|---|---|---|---|---|---|")
    runs = {model: [Run(folder_of(model, rate, seed), tokens_per_step)
                    for seed in range(1, 2 if model == TORCH else args.seeds + 1)] for model, rate in best.items()}
    goal = [run.points[-1][2] for run in runs["dense"]]
    for model, of_model in runs.items():
        reached = [run.to(loss) for run, loss in zip(of_model, goal)]
        rates = "; ".join(f"{r:g}: {loss(model, r, 1):.4f}" for r in ([best[model]] if model == TORCH else args.rates))
        cells = [", ".join("never" if r[i] is None else form.format(r[i] * unit) for r in reached)
                 for i, form, unit in ((0, "{:.1f}", 1), (1, "{:.1f}M", 1e-6))]
        print(f"| {model} | {rates} | {len(of_model)} | {', '.join(f'{run.points[-1][2]:.4f}' for run in of_model)} | "
              f"{', '.join(f'{run.points[-1][0]:.1f}' for run in of_model)} | {cells[0]} | {cells[1]} |")
    share = [run.to(loss)[0] for run, loss in zip(runs["MoE"], goal)]
    if None in share:
        verdict = "MoE does not reach the dense model's loss"
    else:
        part = statistics.fmean(s / run.points[-1][0] for s, run in zip(share, runs["dense"]))
        verdict = f"MoE reaches the dense model's loss in {part:.2f} of its time"
    print(f"\n{verdict}.")

    # The picture, without the first fifth of each curve.
    lines = [[(seconds, loss) for seconds, _, loss in of_model[0].points] for of_model in runs.values()]
    panel = Panel("validation loss, nats a token", [Curve([], line, line) for line in lines],
                  shown=[loss for line in lines for _, loss in line[len(line) // 5:]])
    picture = draw_svg([panel], list(runs), "seconds of training on one GPU", f"{args.tokens / 1e6:g}M tokens: {verdict}")
    (out / "moe_or_dense.svg").write_text(picture, encoding="utf-8")

if __name__ == "__main__":
    main()
