#!/usr/bin/env python3
"""Searches the best options of a dense model and of a MoE of as many active parameters, for equal seconds of one GPU:

    python3 bench/search.py --train 'corpus/text_train_*.bin' --val 'corpus/text_val_*.bin' --out runs/search --gpus 4

Each run of `small` trains for --seconds (200), whatever its options: 60 steps before it show how many steps that is. Its loss is the
validation's at its end. Options are searched one after another, in the order of AXES, each from the best of those before. A
search goes to the neighbour with the lower loss, until both neighbours of the best value are worse. For the batch size,
each neighbour has a search of Muon's learning rate of its own. AXES was written before the first run. A dense model and a
MoE take some 30 runs each, so with 200 seconds two hours of a GPU at most.

A run of the same options is made once, also by a second start of the command, which needs the same card. runs.jsonl in OUT has every
run. The table at the end has every value of an axis with its loss, next to the best options of the others.
"""
import argparse
import concurrent.futures
import json
import math
import os
import pathlib
import queue
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import least_python  # noqa: E402,F401
from runlog import read_log  # noqa: E402

START = {"batch": 128, "rate": 2.8e-3, "schedule": "cosine", "lr": 1e-3, "width": 512, "layers": 8}
# An axis is the list of its values in their order, or the factor from one to the next.
AXES = {"batch": 2, "rate": math.sqrt(2), "schedule": ["linear", "cosine", "wsd"], "lr": 2, "width": [256, 384, 512, 640, 768, 1024],
        "layers": [4, 6, 8, 12, 16, 24]}
DIGITS = {"rate": 2, "lr": 3}  # that a value keeps
TIMED = 60  # steps; 20 warm the card up, and the 40 others are whole periods of --muon-expert-steps 4


def neighbours(axis, value):
    """The values on both sides, as far as there are some."""
    steps = AXES[axis]
    if isinstance(steps, list):
        at = steps.index(value)
        return steps[max(at - 1, 0):at] + steps[at + 1:at + 2]
    if isinstance(value, int):
        return [value // steps, value * steps]
    return [float(f"{v:.{DIGITS[axis]}g}") for v in (value / steps, value * steps)]


def options_of(model, o):
    """The command's options. Widths grow together, so that heads keep their size."""
    width, scale = o["width"], o["width"] / 512
    shape = {"dim": width, "heads": width // 64, "kv-lora": width // 2, "layers": o["layers"]}
    if model == "dense":
        shape |= {"dense-layers": o["layers"], "dense-ffn": round(1944 * scale / 8) * 8}
    else:
        shape |= {"experts": 64, "muon-expert-steps": 4, "dense-ffn": round(2048 * scale), "expert-ffn": round(384 * scale)}
    shape |= {"batch": min(o["batch"], 64), "tokens-per-step": 1024 * o["batch"], "muon-lr": o["rate"], "schedule": o["schedule"], "lr": o["lr"]}
    return [text for name, value in shape.items() for text in (f"--{name}", str(value))]


def line_search(axis, o, loss):
    """{value: loss} of an axis, until the best value has a worse one on each side."""
    tried, best = {}, o[axis]
    while True:
        new = [v for v in [best, *neighbours(axis, best)] if v not in tried]
        if not new:
            return tried
        with concurrent.futures.ThreadPoolExecutor() as pool:  # a run waits there for a GPU
            tried |= zip(new, pool.map(lambda value: loss(o | {axis: value}), new))
        best = min(tried, key=tried.get)


def train(program, options, folder, gpu, seconds=math.inf):
    """Trains in a folder. After so many seconds the run saves and stops."""
    if not shutil.which(program):
        raise SystemExit(f"{pathlib.Path(sys.argv[0]).name}: error: no {program}: make cuda, or give --program")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "output.txt", "a", encoding="utf-8") as output:
        run = subprocess.Popen([program, *options, "--out", str(folder)], stdout=output, stderr=subprocess.STDOUT,
                               env=dict(os.environ, CUDA_VISIBLE_DEVICES=str(gpu)))
        try:
            run.wait(seconds)
        except subprocess.TimeoutExpired:
            run.terminate()
    if run.wait():
        raise SystemExit(f"{folder}/output.txt: exit code {run.returncode}")


def read(folder):
    """The steps of a run's log, and the card that it ran on."""
    config, rows = read_log(folder / "log.jsonl")
    return [dict(row, step=step) for step, row in sorted(rows.items())], config["device"].split(",")[0]


def step_ms(rows):
    """The mean time of a step, from the log of TIMED steps. The median would leave out the longer steps of --muon-expert-steps."""
    return statistics.mean(row["ms"] for row in rows[20:])


class Record:
    """The finished runs, each a line of a file, all on one kind of card; and the GPUs that are free."""

    def __init__(self, path, gpus):
        self.path, self.cards, self.free = path, set(), queue.Queue()
        for gpu in range(gpus):
            self.free.put(gpu)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.runs = list(map(json.loads, path.read_text("utf-8").splitlines())) if path.exists() else []
        for run in self.runs:
            self.check_card(run["card"], path)

    def check_card(self, card, where):
        self.cards.add(card)
        if len(self.cards) > 1:
            raise SystemExit(f"{where}: a run is on {card}, and others are on {', '.join(self.cards - {card})}: their seconds do not compare")

    def add(self, run):
        self.runs.append(run)
        with open(self.path, "a", encoding="utf-8") as record:
            print(json.dumps(run), file=record)


class Search:
    def __init__(self, args, common):
        self.args, self.common, self.out, self.began = args, common, pathlib.Path(args.out), time.monotonic()
        self.record = Record(self.out / "runs.jsonl", args.gpus)
        self.losses = {(run["model"], *run["options"].values()): run["loss"] for run in self.record.runs}

    def run(self, model, o):
        key = model, *o.values()
        if key in self.losses:
            return self.losses[key]
        name = "-".join(map(str, key))
        options, gpu = [*self.common, *options_of(model, o)], self.record.free.get()
        folder = self.out / name

        def last(*more):
            """The steps of a run from its beginning on, and the card."""
            shutil.rmtree(folder, ignore_errors=True)
            train(self.args.program, [*options, *more], folder, gpu)
            return read(folder)

        try:
            if time.monotonic() - self.began > self.args.begin_until:
                raise SystemExit("search.py: --begin-until has passed; the same command goes on")
            rows, card = last("--steps", str(TIMED), "--val-every", "0")
            self.record.check_card(card, folder)
            steps = round(1000 * self.args.seconds / step_ms(rows))
            rows, _ = last("--steps", str(steps), "--val-every", str(steps))
            for checkpoint in folder.glob("step_*"):
                shutil.rmtree(checkpoint)
        finally:
            self.record.free.put(gpu)
        seconds, loss = sum(row["ms"] for row in rows) / 1000, rows[-1]["val_loss"] or math.inf  # null: it is not finite
        self.losses[key] = loss
        self.record.add({"model": model, "options": o, "card": card, "steps": steps, "seconds": round(seconds, 1), "loss": loss})
        print(f"{name}: {steps} steps, {seconds:.1f} s, {loss:.4f}", file=sys.stderr, flush=True)
        return loss

    def best(self, model):
        """The best options, and a line of the table for each axis."""
        o, table = dict(START), []

        def loss(options):
            return self.run(model, options)

        def loss_at_best_rate(options):
            return min(line_search("rate", options, loss).values())

        for axis in [*AXES, "rate"]:  # again, since it may depend on the width
            tried = line_search(axis, o, loss_at_best_rate if axis == "batch" else loss)
            o[axis] = min(tried, key=tried.get)
            table.append(f"| {axis} | " + " | ".join(f"{value}: {loss:.4f}" for value, loss in tried.items()) + " |")
        return o, table


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    for name in "train", "val", "out":
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--program", default=str(ROOT / "build/cuda/train_moe"))
    parser.add_argument("--seconds", type=float, default=200, help="of a run")
    parser.add_argument("--begin-until", type=float, default=math.inf, metavar="SECONDS", help="no run begins after this time")
    parser.add_argument("--gpus", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    common = ["--train", args.train, "--val", args.val, "--model", "small", "--seq-len", "1024", "--optimizer", "muon", "--keep", "1",
              "--val-tokens", "1048576"]
    search = Search(args, common)
    with concurrent.futures.ThreadPoolExecutor(2) as both:
        found = dict(zip(("dense", "MoE"), both.map(search.best, ("dense", "MoE"))))
    for model, (o, table) in found.items():
        seconds = [run["seconds"] for run in search.record.runs if run["model"] == model]
        print(f"{model}: {' '.join(options_of(model, o))}\n{len(seconds)} runs, {sum(seconds):.0f} s")
        print(*table, sep="\n")


if __name__ == "__main__":
    main()
