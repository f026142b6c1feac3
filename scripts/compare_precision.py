#!/usr/bin/env python3
"""Train one model from one seed on the same data in several precisions and compare their losses.

    python3 scripts/compare_precision.py --out runs/compare -- --train 'corpus/*_train_*.bin' \\
        --val 'corpus/*_val_*.bin' --model small --steps 2000 --save-every 500

    # on 4 GPUs, with a set of options of one's own and a second seed of bf16, which shows the noise between seeds
    python3 scripts/compare_precision.py --out runs/compare --launch 'mpirun -np 4' --seeds 2 \\
        --set combine '--precision mxfp8 --combine-precision mxfp8' \\
        -- --train 'corpus/*_train_*.bin' --val 'corpus/*_val_*.bin' --model 16b --ep 4 --shard weights --steps 1000

    # four runs at a time, each on a GPU of its own
    python3 scripts/compare_precision.py --out runs/compare --at-once 4 --seeds 2 -- --train ... --model small

What follows `--` goes to every run; a set's own options are added to it. Each run has its folder OUT/NAME. The same
command again goes on where it stopped: a run whose log is complete is not repeated (its checkpoints may be deleted),
another resumes from its newest checkpoint. The table goes to standard output as Markdown, what the runs print to
standard error (with --at-once to OUT/NAME/output.txt), the picture to OUT/compare.svg.

A gap is the training loss minus that of bf16 at the same step, as a mean over the last --window steps: above 0 is
worse. Standard library only.
"""
import argparse
import os
import pathlib
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time

from chart import Curve, Panel, draw_svg
from runlog import NoLog, fail, read_log

ROOT = pathlib.Path(__file__).resolve().parent.parent
SETS = {"bf16": "", "mxfp8": "--precision mxfp8", "mxfp8-exact": "--precision mxfp8-exact"}
COLUMNS = ("loss", "val_loss", "tokens_per_s", "mem_gib")  # what is read of a log
LAST = 50  # steps that the final training loss is the mean of
LEAST_GAP = 1e-3  # nats: the lower panel shows at least so much to both sides of 0


def mean(values):
    """Of those that are finite; None if none is."""
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def number(value, form):
    return "-" if value is None else "0" if value == 0 else format(value, form)


class Run:
    def __init__(self, name, options, seed, out):
        self.name, self.folder = name, out / name
        self.options = [*options, "--seed", str(seed)]
        self.rows, self.steps = {}, None

    def read(self):
        """The log as far as there is one: self.rows, by step, and self.steps, how many it shall have."""
        path = self.folder / "log.jsonl"
        if path.exists():
            try:
                config, self.rows = read_log(path, COLUMNS)
            except NoLog as error:
                fail(error)
            self.steps = config.get("steps")
            if type(self.steps) is not int:
                fail(f"{path} is not a log of train_moe: line 1: no number of steps")

    def finished(self):
        return self.steps is not None and self.steps in self.rows

    def check(self):
        """Reads what there is of it; it must be of the same options."""
        self.read()
        record = self.folder / "options.txt"
        before = os.fsdecode(record.read_bytes()) if record.exists() else ""
        if self.rows and before != shlex.join(self.options) + "\n":
            fail(f"{self.folder} holds a run with other options; delete it or choose another --out\n"
                 f"  then: {before.strip() or 'unknown'}\n  now:  {shlex.join(self.options)}")

    def start(self, launch, program, slot=None):
        """In a slot on the GPU of that number, else on all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "options.txt").write_bytes(os.fsencode(shlex.join(self.options) + "\n"))
        command = [*launch, str(program), *self.options, "--out", str(self.folder), "--resume"]
        print(f"\n{self.name}: {shlex.join(command)}", file=sys.stderr, flush=True)
        environment, output = dict(os.environ), sys.stderr
        if slot is not None:
            gpus = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
            environment["CUDA_VISIBLE_DEVICES"] = gpus[slot] if slot < len(gpus) and gpus[slot] else str(slot)
            output = open(self.folder / "output.txt", "a", encoding="utf-8")
        try:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, env=environment,
                                    stderr=None if slot is None else output)
        except OSError as error:
            return fail(f"cannot start {command[0]}: {error.strerror}")
        finally:
            if slot is not None:
                output.close()

    def ended(self, code, where):
        """What is wrong with how it ended, None if nothing is."""
        if code not in (0, -signal.SIGUSR1):  # asked to stop before it could know
            return f"{self.name} failed with exit code {code}, its message is {where}; the same command tries again"
        self.read()
        if not self.finished():
            reached = f"at step {max(self.rows)} of {self.steps}" if self.rows else "before its first step"
            return f"{self.name} ended {reached}; the same command goes on"
        return None

    def column(self, key):
        return [row.get(key) for _, row in sorted(self.rows.items())]


def ask_to_stop(process, program):
    """The run, and behind a launcher its ranks on this machine: not every mpirun passes the signal on."""
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text(errors="replace").partition("(")[2].rpartition(")")
            if name == program.name[:15] and int(rest.split()[1]) == process.pid:
                os.kill(int(stat.parent.name), signal.SIGUSR1)
        except OSError:  # it ended meanwhile
            pass
    process.send_signal(signal.SIGUSR1)


def train(runs, launch, program, at_once):
    """All runs, so many at a time. The first that fails, or a signal to this script, makes the others save and stop."""
    for run in runs:
        run.check()
        if run.finished():
            print(f"{run.name}: finished already", file=sys.stderr)
    waiting, slots, wrong = [run for run in runs if not run.finished()], [None] * min(at_once, len(runs)), []
    asked = []  # signals to stop

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: asked.append(number))
    while waiting or any(slots):
        if asked:
            number = asked.pop()
            waiting.clear()
            for _, process in filter(None, slots):
                if number != signal.SIGINT:  # Ctrl-C has reached them already
                    ask_to_stop(process, program)
        for i, slot in enumerate(slots):
            if slot is None and waiting:
                run = waiting.pop(0)
                slots[i] = run, run.start(launch, program, i if at_once > 1 else None)
            elif slot and slot[1].poll() is not None:
                run, process = slot
                where = f"in {run.folder / 'output.txt'}" if at_once > 1 else "above"
                problem = run.ended(process.returncode, where)
                slots[i] = None
                if problem and not wrong:
                    asked.append(signal.SIGUSR1)
                wrong += [problem] if problem else []
        time.sleep(0.02)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if wrong:
        fail("\n".join(wrong))


def windows(points, length):
    """(step, mean over that step and those before it), from the first step that has `length` of them."""
    return [(points[i][0], mean([v for _, v in points[i - length + 1:i + 1]])) for i in range(length - 1, len(points))]


def loss_curve(run, length):
    return windows([(step, run.rows[step].get("loss")) for step in sorted(run.rows)], length)


def gap_curve(run, base, length):
    steps = [step for step in sorted(run.rows) if step in base.rows]
    pairs = [(step, run.rows[step].get("loss"), base.rows[step].get("loss")) for step in steps]
    return windows([(step, None if None in (a, b) else a - b) for step, a, b in pairs], length)


def table(runs, length):
    """A row for each run; the first is the one that the others are compared with."""
    base = runs[0]
    last = min(LAST, len(base.rows))
    yield (f"| set | validation loss | training loss, last {last} steps | largest gap to {base.name} | mean gap "
           "| tokens/s | memory, GiB |")
    yield "|---|---|---|---|---|---|---|"
    for run in runs:
        known = [(step, v) for step, v in gap_curve(run, base, length) if v is not None] if run is not base else []
        largest = "-"
        if known:
            step, value = max(known, key=lambda p: abs(p[1]))
            largest = number(value, "+.5f") + (f" (step {step})" if value else "")
        speeds = [v for v in run.column("tokens_per_s") if v is not None]
        memory = [v for v in run.column("mem_gib") if v is not None]
        yield (f"| {run.name} | {number(run.rows[run.steps].get('val_loss'), '.5f')} "
               f"| {number(mean(run.column('loss')[-LAST:]), '.5f')} | {largest} "
               f"| {number(mean([v for _, v in known]), '+.5f')} "
               f"| {number(statistics.median(speeds) if speeds else None, ',.0f')} "
               f"| {number(max(memory, default=None), '.2f')} |")


def svg(runs, length):
    loss = [Curve([], loss_curve(run, length), []) for run in runs]
    gaps = [Curve([], gap_curve(run, runs[0], length), []) for run in runs]
    if not any(v is not None for curve in loss for _, v in curve.average):
        fail("no finite loss in these runs")
    smoothed = f"mean of {length} steps"
    panels = [Panel(f"training loss, {smoothed}", loss),
              Panel(f"minus that of {runs[0].name}, {smoothed}", gaps, shown=(-LEAST_GAP, LEAST_GAP))]
    return draw_svg(panels, [run.name for run in runs], "step")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="compare_precision.py --out FOLDER [options] -- TRAIN_MOE_OPTIONS")
    program = ROOT / "build/cuda/train_moe"
    program = program if program.exists() else ROOT / "build/cpu/train_moe"
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FOLDER", help="of the runs and the picture")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("NAME", "OPTIONS"), dest="sets",
                        help="one more set of train_moe's options; may be repeated")
    parser.add_argument("--only", action="append", metavar="NAME",
                        help=f"run only bf16 and this set; may be repeated (default: {', '.join(SETS)}, every --set)")
    parser.add_argument("--seed", type=int, default=1, help="of every set (default: 1)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds that bf16 is run with (default: 1)")
    parser.add_argument("--window", type=int, metavar="STEPS",
                        help="of the smoothing (default: 50, or a tenth of the steps if that is less)")
    parser.add_argument("--launch", type=shlex.split, default=[], metavar="COMMAND",
                        help="what starts the ranks, such as 'mpirun -np 4'")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs at a time, each on one GPU (default: 1)")
    parser.add_argument("--program", type=pathlib.Path, default=program, metavar="PATH", help=f"(default: {program})")
    ours, common = sys.argv[1:], []
    if "--" in ours:
        ours, common = ours[:ours.index("--")], ours[ours.index("--") + 1:]
    args = parser.parse_args(ours)
    args.common, args.options = common, {name: shlex.split(options) for name, options in SETS.items()}
    for name, options in args.sets:
        if name in args.options:
            parser.error(f"--set {name}: there is a set of this name")
        if not re.fullmatch(r"\w[\w.+-]*", name) or name.startswith("bf16-seed-"):
            parser.error(f"--set '{name}': a name has letters, digits and . _ + -, and does not begin with bf16-seed-")
        try:
            args.options[name] = shlex.split(options)
        except ValueError as error:
            parser.error(f"--set {name}: {error}")
    for name in args.only or []:
        if name not in args.options:
            parser.error(f"--only {name}: the sets are {', '.join(args.options)}")
    for option in common + [option for options in args.options.values() for option in options]:
        name = option.split("=")[0]
        if name in ("--out", "--resume", "--seed", "--help", "-h", "--version", "--dry-run"):
            parser.error(f"{name} among train_moe's options: it is chosen here for each run")
    if not common:
        parser.error("train_moe's options are missing: they follow --")
    if args.seeds < 1 or args.window is not None and args.window < 1:
        parser.error("--seeds and --window are at least 1")
    if args.at_once < 1 or args.at_once > 1 and args.launch:
        parser.error("--at-once is at least 1, and goes without --launch: each of its runs has one GPU")
    return args


def main():
    args = arguments()
    program = pathlib.Path(os.path.realpath(args.program))
    if not program.exists():
        fail(f"{args.program} is not there; `make` builds it, or name another with --program")
    runs = [Run(name, args.common + options, args.seed, args.out) for name, options in args.options.items()
            if not args.only or name == "bf16" or name in args.only]
    for seed in range(args.seed + 1, args.seed + args.seeds):
        runs.append(Run(f"bf16-seed-{seed}", args.common, seed, args.out))
    try:
        train(runs, args.launch, program, args.at_once)
        length = args.window or max(1, min(50, runs[0].steps // 10))
        if length > min(run.steps for run in runs):
            fail(f"--window {length} is more than the {min(run.steps for run in runs)} steps")
        (args.out / "compare.svg").write_text(svg(runs, length), encoding="utf-8")
    except OSError as error:
        fail(f"{error.filename or args.out}: {error.strerror}")
    print(*table(runs, length), sep="\n")
    for run in runs:
        odd = run.column("loss").count(None)
        if odd:
            print(f"\n{run.name}: the loss of {odd} steps was not finite; they are left out.")
    print(f"\nNats a token; gaps in the training loss as a mean of {length} steps. Curves: {args.out / 'compare.svg'}")


if __name__ == "__main__":
    if sys.stdout:
        sys.stdout.reconfigure(errors="surrogateescape")  # file names may hold any bytes
    main()
