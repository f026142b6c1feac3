#!/usr/bin/env python3
"""Is MoE worth it on one GPU? Whole runs of a dense model and of a MoE, of several lengths in seconds, each with its own schedule:

    python3 bench/moe_or_dense.py --train 'corpus/text_train_*.bin' --val 'corpus/text_val_*.bin' --out runs/worth --gpus 4 \\
        --dense 'OPTIONS' --moe 'OPTIONS'
    python3 bench/moe_or_dense.py --out bench --runs bench/worth.jsonl

The options are those that bench/search.py prints for each model. 60 steps show how many steps a run of some seconds has. The runs of
a model and a length have the seeds 1 to --seeds, for weights and for the order of the data. With --stop-after, runs save and stop after
that time, and the same command goes on. Seconds are those of a run's steps, without validations.

--runs has a line for each finished run, which is not repeated. Commands with other options add lines. The text and --model must stay the
same. A model's frontier has, for each length, the options with the lowest mean loss.

The table says after which seconds a whole MoE run has a dense run's loss. They are interpolated over the logarithm of seconds, between the
lengths on MoE's frontier. The least has dense's highest seed and MoE's lowest, the most the reverse. The picture OUT/moe_or_dense.svg
has both frontiers, also interpolated, with a band from the lowest to the highest seed. The second command only draws.
"""
import argparse
import concurrent.futures
import json
import math
import pathlib
import shutil
import statistics
import sys
import time
import zlib
from collections import namedtuple

from search import ROOT, TIMED, Record, read, step_ms, train

import least_python  # noqa: E402,F401
from chart import Curve, Panel, draw_svg

# The runs of a length: mean seconds, and the mean, the lowest and the highest of the seeds' losses.
Point = namedtuple("Point", "seconds loss low high")


def place_of(loss, losses):
    """The first place where {place: loss} falls to this loss, interpolated over its logarithm; None if there is none."""
    points = sorted(losses.items())
    for (p0, l0), (p1, l1) in zip(points, points[1:]):
        if l0 > loss >= l1:
            return p0 * (p1 / p0) ** ((l0 - loss) / (l0 - l1))
    return None


def between(points):
    """The points, and others on the way from one to the next: straight over the logarithm of seconds."""
    parts = [Point(p.seconds * (q.seconds / p.seconds) ** (part / 20), *(a + (b - a) * part / 20 for a, b in zip(p[1:], q[1:])))
             for p, q in zip(points, points[1:]) for part in range(20)]
    return parts + points[-1:]


def frontier(runs, model):
    """Of each length, the options with the lowest mean loss."""
    groups, best = {}, {}
    for run in runs:
        if run["model"] == model:
            groups.setdefault((run["length"], run["options"]), []).append(run)
    for (length, _), same in groups.items():
        losses = [run["loss"] for run in same]
        point = Point(statistics.fmean(run["seconds"] for run in same), statistics.fmean(losses), min(losses), max(losses))
        best[length] = min(best.get(length, point), point, key=lambda p: p.loss)
    return [best[length] for length in sorted(best)]


class Race:
    def __init__(self, args, record):
        self.args, self.record, self.out = args, record, pathlib.Path(args.out)
        self.end = time.monotonic() + args.stop_after
        self.common = ["--model", args.model, "--seq-len", "1024", "--optimizer", "muon", "--keep", "1", "--val-tokens", "4194304", "--train",
                       str(args.train), "--val", str(args.val)]

    def train(self, folder, options, steps, validate):
        """The steps of a run, which may have been stopped before, and its card."""

        def log():
            return read(folder) if (folder / "log.jsonl").exists() else ([], None)

        def ended(rows):
            return rows and rows[-1]["step"] == steps

        if not ended(log()[0]):
            gpu = self.record.free.get()
            try:
                if time.monotonic() < self.end:
                    train(self.args.program, [*self.common, *options, "--steps", str(steps), "--val-every", str(steps * validate), "--resume"],
                          folder, gpu, self.end - time.monotonic())
            finally:
                self.record.free.put(gpu)
        rows, card = log()
        if not ended(rows):
            raise SystemExit("moe_or_dense.py: --stop-after has passed; the same command goes on")
        self.record.check_card(card, folder)
        for checkpoint in folder.glob("step_*"):
            shutil.rmtree(checkpoint)
        return rows, card

    def folder(self, model, options):
        """Other options have another folder, so that none of its runs is taken for theirs."""
        return self.out / f"{model}-{zlib.crc32(options.encode()):08x}"

    def run(self, model, options, length, seed, steps):
        folder = self.folder(model, options) / f"{length:g}-s-seed-{seed}"
        rows, card = self.train(folder, [*options.split(), "--seed", str(seed), "--data-seed", str(seed)], steps, True)
        loss = rows[-1]["val_loss"]
        if loss is None:
            raise SystemExit(f"{folder}: the last loss is not finite; try a lower learning rate")
        self.record.add({"model": model, "options": options, "card": card, "length": length, "seed": seed, "steps": steps,
                         "seconds": round(sum(row["ms"] for row in rows) / 1000, 1), "loss": loss})

    def race(self):
        done = {(run["model"], run["options"], run["length"], run["seed"]) for run in self.record.runs}
        jobs = []
        for model, options, lengths in ("dense", self.args.dense, self.args.dense_seconds), ("MoE", self.args.moe, self.args.moe_seconds):
            new = {(model, options, length, seed) for length in lengths for seed in range(1, self.args.seeds + 1)} - done
            if options is not None and new:
                ms = step_ms(self.train(self.folder(model, options) / f"{TIMED}-steps", options.split(), TIMED, False)[0])
                jobs += [(*job, round(1000 * job[2] / ms)) for job in new]
        with concurrent.futures.ThreadPoolExecutor() as pool:  # a run waits there for a GPU
            for ended in [pool.submit(self.run, *job) for job in sorted(jobs, key=lambda job: (-job[2], *job))]:
                ended.result()


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    for name in "train", "val", "dense", "moe":
        parser.add_argument(f"--{name}")
    parser.add_argument("--runs", type=pathlib.Path, metavar="FILE", help="OUT/runs.jsonl if absent")
    parser.add_argument("--program", default=str(ROOT / "build/cuda/train_moe"))
    parser.add_argument("--model", default="small", help="preset of both models")
    parser.add_argument("--dense-seconds", type=float, nargs="+", default=[100, 250, 800], metavar="S", help="lengths of its runs")
    parser.add_argument("--moe-seconds", type=float, nargs="+", default=[60, 100, 175, 250, 400, 560], metavar="S")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each length")
    parser.add_argument("--gpus", type=int, default=1, help="runs at a time")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS")
    args = parser.parse_args()
    if not (args.train and args.val) and (args.dense, args.moe) != (None, None):
        parser.error("--dense and --moe need --train and --val")
    record = Record(args.runs or pathlib.Path(args.out, "runs.jsonl"), args.gpus)
    Race(args, record).race()
    if not record.runs:
        parser.error(f"{record.path}: no runs; give --dense and --moe")

    lines = {model: frontier(record.runs, model) for model in ("MoE", "dense")}
    print("| model | seconds | loss | lowest and highest seed |\n|---|---|---|---|")
    for model, points in lines.items():
        for p in points:
            print(f"| {model} | {p.seconds:.1f} | {p.loss:.4f} | {p.low:.4f}, {p.high:.4f} |")

    def share(seconds, loss, moe):
        """The seconds in which MoE has a dense run's loss, by those of the dense run. `moe`: loss by seconds."""
        place = place_of(loss, moe)
        return f"{place / seconds:.2f}" if place else "none"

    print("\n| dense's seconds | its loss | a whole MoE run with that loss takes of them | least and most by seed |\n|---|---|---|---|")
    mean, low, high = ({p.seconds: p[column] for p in lines["MoE"]} for column in (1, 2, 3))
    for p in lines["dense"]:
        print(f"| {p.seconds:.1f} | {p.loss:.4f} | {share(*p[:2], mean)} | {share(p.seconds, p.high, low)}, {share(p.seconds, p.low, high)} |")
    curves = [Curve([], [p[:2] for p in between(points)], [mark for p in points for mark in (p[:2], (p.seconds, None))],  # gaps: circles alone
                    [(p.seconds, p.low, p.high) for p in between(points)]) for points in lines.values()]
    picture = draw_svg([Panel("validation loss, nats a token", curves)], list(lines), "seconds of a whole run on one GPU",
                       "The last loss of whole runs, each with its own schedule")
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    pathlib.Path(args.out, "moe_or_dense.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
