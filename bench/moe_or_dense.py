#!/usr/bin/env python3
"""Is MoE worth it on one GPU? Whole runs of a dense model and of a MoE, of several lengths in seconds, each with its own schedule:

    python3 bench/moe_or_dense.py --train 'corpus/text_train_*.bin' --val 'corpus/text_val_*.bin' --out runs/worth --gpus 4 \\
        --dense 'OPTIONS' --moe 'OPTIONS'

The options are those that bench/search.py prints for each model. 60 steps show how many steps a run of some seconds has. The runs of
a model and a length have the seeds 1 to --seeds, for weights and for the order of the data. A finished run is not repeated. With
--stop-after, runs save and stop after that time, and the same command goes on. Seconds are those of a run's steps, without validations.

The table says after which seconds a whole MoE run has a dense run's loss. They are interpolated over the logarithm of seconds, between the
means of MoE's lengths. So are those of each seed alone. The picture OUT/moe_or_dense.svg has the mean of each length, and a band from
the lowest to the highest seed.
"""
import argparse
import concurrent.futures
import json
import math
import pathlib
import queue
import shutil
import statistics
import sys
import time

from search import ROOT, TIMED, read, step_ms, train

import least_python  # noqa: E402,F401
from chart import Curve, Panel, draw_svg


def place_of(loss, losses):
    """The first place where {place: loss} falls to this loss, interpolated over its logarithm; None if there is none."""
    points = sorted(losses.items())
    for (p0, l0), (p1, l1) in zip(points, points[1:]):
        if l0 > loss >= l1:
            return p0 * (p1 / p0) ** ((l0 - loss) / (l0 - l1))
    return None


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    for name in "train", "val", "out", "dense", "moe":
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--program", default=str(ROOT / "build/cuda/train_moe"))
    parser.add_argument("--model", default="small", help="preset of both models")
    parser.add_argument("--dense-seconds", type=float, nargs="+", default=[100, 250, 800], metavar="S", help="lengths of its runs")
    parser.add_argument("--moe-seconds", type=float, nargs="+", default=[60, 100, 175, 250, 400, 560], metavar="S")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each length")
    parser.add_argument("--gpus", type=int, default=1, help="runs at a time")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS")
    args = parser.parse_args()
    out, free, end = pathlib.Path(args.out), queue.Queue(), time.monotonic() + args.stop_after
    for gpu in range(args.gpus):
        free.put(gpu)
    cards, lengths = set(), {"dense": args.dense_seconds, "MoE": args.moe_seconds}
    common = ["--train", args.train, "--val", args.val, "--model", args.model, "--seq-len", "1024", "--optimizer", "muon", "--keep", "1",
              "--val-tokens", "4194304"]
    options = {"dense": common + args.dense.split(), "MoE": common + args.moe.split()}

    def run(name, options, steps, validate=True):
        """The seconds of a run, and its last loss."""
        folder = out / name

        def rows():
            """The steps so far: a run that was stopped may have none."""
            if not (folder / "log.jsonl").exists():
                return []
            steps, card = read(folder)
            cards.add(card)
            if len(cards) > 1:
                raise SystemExit(f"{folder}: this run is on {card}, and others are on {', '.join(cards - {card})}: their seconds do not compare")
            return steps

        def finished():
            return [row["step"] for row in rows()[-1:]] == [steps]

        if not finished():
            gpu = free.get()
            try:
                if time.monotonic() < end:
                    train(args.program, [*options, "--steps", str(steps), "--val-every", str(steps * validate), "--resume"], folder, gpu,
                          end - time.monotonic())
            finally:
                free.put(gpu)
        if not finished():
            raise SystemExit("moe_or_dense.py: --stop-after has passed; the same command goes on")
        for checkpoint in folder.glob("step_*"):
            shutil.rmtree(checkpoint)
        loss = rows()[-1].get("val_loss")
        if validate and loss is None:
            raise SystemExit(f"{folder}: the last loss is not finite; try a lower learning rate")
        return sum(row["ms"] for row in rows()) / 1000, loss

    with concurrent.futures.ThreadPoolExecutor() as pool:  # a run waits there for a GPU
        ms = {}
        for model in lengths:
            run(f"{model}-{TIMED}-steps", options[model], TIMED, validate=False)
            ms[model] = step_ms(read(out / f"{model}-{TIMED}-steps")[0])
        jobs = sorted(((seconds, model, seed) for model in lengths for seconds in lengths[model] for seed in range(1, args.seeds + 1)),
                      reverse=True)
        done = [pool.submit(run, f"{model}-{seconds:g}-s-seed-{seed}", [*options[model], "--seed", str(seed), "--data-seed", str(seed)],
                            round(1000 * seconds / ms[model])) for seconds, model, seed in jobs]
        ends = {job: future.result() for job, future in zip(jobs, done)}

    # Of each length: mean seconds, mean loss, lowest, highest.
    points = {model: [] for model in lengths}
    print("| model | seconds | loss of each seed |\n|---|---|---|")
    for model in lengths:
        for length in sorted(lengths[model]):
            seconds, losses = zip(*(ends[length, model, seed] for seed in range(1, args.seeds + 1)))
            points[model].append((statistics.fmean(seconds), statistics.fmean(losses), min(losses), max(losses)))
            print(f"| {model} | {statistics.fmean(seconds):.1f} | {', '.join(f'{loss:.4f}' for loss in losses)} |")

    def share(seconds, loss, moe):
        """The seconds in which MoE has a dense run's loss, by those of the dense run. `moe`: (seconds, loss) of each length."""
        place = place_of(loss, dict(moe))
        return f"{place / seconds:.2f}" if place else "none"

    print("\n| dense's seconds | its loss | a whole MoE run with that loss takes of them | with each seed |\n|---|---|---|---|")
    shares = [share(*point[:2], [p[:2] for p in points["MoE"]]) for point in points["dense"]]
    for length, point, of_mean in zip(sorted(lengths["dense"]), points["dense"], shares):
        of_seeds = [share(*ends[length, "dense", seed], [ends[s, "MoE", seed] for s in lengths["MoE"]]) for seed in range(1, args.seeds + 1)]
        print(f"| {point[0]:.1f} | {point[1]:.4f} | {of_mean} | {', '.join(of_seeds)} |")
    curves = [Curve([], means, means, [(p[0], *p[2:]) for p in points[model]])
              for model in ("MoE", "dense") for means in [[p[:2] for p in points[model]]]]
    title = f"A whole MoE run has dense's loss in {', '.join(shares)} of dense's seconds"
    picture = draw_svg([Panel("validation loss, nats a token", curves)], ["MoE", "dense"], "seconds of a whole run on one GPU", title)
    (out / "moe_or_dense.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
