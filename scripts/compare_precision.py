#!/usr/bin/env python3
"""Trains one model from the same weights on the same data in several precisions, and compares the losses.

    python3 scripts/compare_precision.py --out runs/compare -- --train 'corpus/*_train_*.bin' \\
        --val 'corpus/*_val_*.bin' --model small --steps 2000 --save-every 500

    # on 4 GPUs, with a set of your own options and a second seed of bf16, which shows the noise between seeds
    python3 scripts/compare_precision.py --out runs/compare --launch 'mpirun -np 4' --seeds 2 \\
        --set combine '--precision mxfp8 --combine-precision mxfp8' \\
        -- --train 'corpus/*_train_*.bin' --val 'corpus/*_val_*.bin' --model 16b --ep 4 --shard weights --steps 1000

    # what NVFP4 costs in each GEMM, from the weights of one model and with three orders of the data
    python3 scripts/compare_precision.py --out runs/gemms --precisions '' --gemms nvfp4 --from runs/small \\
        --seeds 3 --all-seeds -- --train ...

    # every set with four seeds, four runs at a time, each on a GPU of its own
    python3 scripts/compare_precision.py --out runs/compare --at-once 4 --seeds 4 --all-seeds -- --train ...

Options after `--` go to every run, together with the options of its set. Each run has a folder: OUT/NAME, or
OUT/NAME-seed-K for a seed K other than the first. All runs read the same data in the same order, that of --seed (or
of --data-seed among train_moe's options). Another seed changes the weights alone. With --from the weights are those of
the folder, and another seed changes the order of the data. Sets are compared in pairs of one seed.

The same command continues an interrupted comparison. A run with a complete log is not repeated, and its checkpoints
may be deleted. Other runs resume from their newest checkpoint. The table goes to standard output as Markdown. Output
of the runs goes to standard error, or with --at-once to OUT/NAME/output.txt. The picture is OUT/compare.svg.

A gap is the training loss minus that of bf16 with the same seed, as a mean over the last --window steps. Above 0 is
worse. "Above bf16" compares the validation loss with that of bf16 with the same seed, in percent. Without --all-seeds
every set has the first seed. A further seed of bf16 has a row and a curve of its own, "bf16, seed K", and
its gap is to the first seed. With --all-seeds a set shows mean ± standard error (number of seeds). Its curve is the
mean, in a band from the lowest to the highest seed. The picture begins where bf16's loss has made 80 % of its way, or
in the middle of the run if that is earlier. With --mx-stats after `--`, sets in which nothing is quantized do without.
Standard library only.
"""
import script
from script import Failure

import argparse
import math
import os
import pathlib
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import namedtuple

from chart import Curve, Panel, draw_svg
from runlog import NoLog, fail, read_log

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRECISIONS = "mxfp8,mxfp8-exact"
GEMMS = "expert", "linear", "wgrad"  # the options --expert-precision and so on
COLUMNS = ("loss", "val_loss", "tokens_per_s", "mem_gib")  # columns of a log
TITLE = "One model in several precisions"
LAST = 50  # the final training loss is the mean of these last steps
LEAST_GAP = 1e-3  # nats: the panel of gaps shows at least this range on both sides of 0
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP  # signals: the runs save and stop
SETTLED = 0.8  # the panels show the steps after this share of the loss's way down
Group = namedtuple("Group", "name runs")  # what has a row and a curve: one run, or those of a set, one for each seed


def mean(values):
    """The mean of the finite values; None if there is none."""
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def number(value, form):
    return "-" if value is None else "0" if value == 0 else format(value, form)


def estimate(values, form):
    """One seed: its number. Several: the mean of the finite ones ± its standard error (their number)."""
    known = [v for v in values if v is not None]
    text = number(mean(known), form)
    if len(known) > 1:
        text += " ± " + number(statistics.stdev(known) / math.sqrt(len(known)), form.lstrip("+"))
    return f"{text} ({len(known)})" if len(values) > 1 else text


class Run:
    def __init__(self, name, options, seed, data_seed, out):
        self.name, self.folder, self.seed = script.text(name), out / name, seed
        self.options = [*options, "--seed", str(seed)]
        if not any(option.split("=")[0] == "--data-seed" for option in options):
            self.options += ["--data-seed", str(data_seed)]
        # Its steps: the last --steps of the options, or those of its log.
        given = re.findall(r"^--steps[=\n]([1-9]\d*)$", "\n".join(options), re.M)
        self.rows, self.config, self.steps = {}, {}, int(given[-1]) if given else None

    def read(self):
        """Reads the log so far: self.rows by step, and self.steps, the steps of the whole run."""
        path = self.folder / "log.jsonl"
        if path.exists():
            try:
                self.config, self.rows = read_log(path, COLUMNS)
            except NoLog as error:
                fail(error)
            self.steps = self.config.get("steps")
            if type(self.steps) is not int:
                fail(f"{path} is not a log of train_moe: line 1: no number of steps")

    def finished(self):
        return self.steps is not None and self.steps in self.rows

    def check(self):
        """Reads what there is of it; it must be of the same options."""
        self.read()
        record = self.folder / "options.txt"
        before = os.fsdecode(record.read_bytes()) if record.exists() else ""
        if self.options[-2:] == ["--data-seed", str(self.seed)] and before == shlex.join(self.options[:-2]) + "\n":
            del self.options[-2:]  # of a time when the data always had the order of --seed
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
            gpus = environment.get("CUDA_VISIBLE_DEVICES", str(slot)).split(",")
            environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]  # where it is empty, none
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
        """The error at the end of the run, or None."""
        if code not in (0, -signal.SIGUSR1):  # asked to stop before it could know
            return f"{self.name} failed with exit code {code}, its message is {where}; the same command tries again"
        self.read()
        if not self.finished():
            reached = f"at step {max(self.rows)} of {self.steps}" if self.rows else "before its first step"
            if self.steps is not None and (self.folder / f"step_{self.steps:08d}").exists():
                return (f"{self.name} ended {reached}, as its log says, but its last checkpoint is there, from which "
                        f"nothing goes on; remove {self.folder}, and the same command trains it again")
            return f"{self.name} ended {reached}; the same command goes on"
        return None

    def column(self, key):
        return [row.get(key) for _, row in sorted(self.rows.items())]


def ask_to_stop(process, program):
    """The run, and behind a launcher its ranks on this machine: not every mpirun passes the signal on."""
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_bytes().partition(b"(")[2].rpartition(b")")
            if name == os.fsencode(program.name)[:15] and int(rest.split()[1]) == process.pid:
                os.kill(int(stat.parent.name), signal.SIGUSR1)
        except OSError:  # it ended meanwhile
            pass
    process.send_signal(signal.SIGUSR1)


def check_precisions(program, runs):
    """The program has the precisions of all runs. So a wrong name does not wait until the runs before it have ended."""
    told = subprocess.run([program, "--help", "all"], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace")
    choices = dict(re.findall(r"^ *(--(?:\w+-)?precision) (\S+)", told.stdout, re.M))
    for run in runs:
        for option, value in zip(run.options, run.options[1:]):
            if value not in choices.get(option, value).split("|"):
                fail(f"{run.name}: {option} takes one of {choices[option]}, not '{value}'")


def train(runs, launch, program, at_once):
    """All runs, at_once at a time. The first that fails, or a signal to this script, makes the others save and stop."""
    for run in runs:
        run.check()
        if run.finished():
            print(f"{run.name}: finished already", file=sys.stderr)
    waiting, slots, wrong = [run for run in runs if not run.finished()], [None] * min(at_once, len(runs)), []
    if waiting:
        check_precisions(program, waiting)
    asked, came = [], []  # signals to stop; those from outside

    def ask(number, _):
        asked.append(number)
        came.append(number)

    before = {number: signal.signal(number, ask) for number in STOPS}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
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
    finally:
        for _, process in filter(None, slots):  # after an error here, such as a log that cannot be read
            ask_to_stop(process, program)
    for number, handler in before.items():
        signal.signal(number, handler)
    if came and not wrong:  # it came between two runs, or in the last step of one
        wrong = [f"ended by {signal.Signals(came[0]).name}; the same command goes on"]
    if wrong:
        fail("\n".join(wrong))


def check_window(length, runs):
    """No run has fewer steps, of those that are known."""
    steps = min((run.steps for run in runs if run.steps is not None), default=length)
    if length > steps:
        fail(f"--window {length} is more than the {steps} steps")


def windows(points, length):
    """(step, mean over that step and those before it), from the first step that has `length` of them."""
    return [(points[i][0], mean([v for _, v in points[i - length + 1:i + 1]])) for i in range(length - 1, len(points))]


def loss_curve(run, length):
    return windows([(step, run.rows[step].get("loss")) for step in sorted(run.rows)], length)


def val_points(run):
    values = [(step, run.rows[step].get("val_loss")) for step in sorted(run.rows)]
    return [(step, v) for step, v in values if v is not None]


def gap_curve(run, base, length):
    steps = [step for step in sorted(run.rows) if step in base.rows]
    pairs = [(step, run.rows[step].get("loss"), base.rows[step].get("loss")) for step in steps]
    return windows([(step, None if None in (a, b) else a - b) for step, a, b in pairs], length)


def above(run, base):
    """How far its last validation loss is above that of the other run, in percent."""
    own, other = (one.rows[one.steps].get("val_loss") for one in (run, base))
    return None if None in (own, other) else 100 * (own / other - 1)


def gap_curves(group, base, length):
    return [gap_curve(run, other, length) for run, other in zip(group.runs, base.runs)]


def over_seeds(curves):
    """The curve of a group: the mean at each step that all have, None unless it is finite in all; and the band."""
    seeds = [dict(curve) for curve in curves]
    steps = [step for step, _ in curves[0] if all(step in seed for seed in seeds)]
    at = [(step, [seed[step] for seed in seeds]) for step in steps]
    at = [(step, [None] if None in values else values) for step, values in at]
    band = [(step, min(values), max(values)) if None not in values else (step, None, None) for step, values in at]
    return Curve([], [(step, mean(values)) for step, values in at], [], band if len(curves) > 1 else [])


def table(groups, length):
    """A row for each group; the first is the one that the others are compared with."""
    base = groups[0]
    last = min(LAST, len(base.runs[0].rows))
    yield (f"| set | validation loss | above {base.name}, % | training loss, last {last} steps "
           f"| largest gap to {base.name} | mean gap | tokens/s | memory, GiB |")
    yield "|---|---|---|---|---|---|---|---|"
    for group in groups:
        # How far it is from the first: the step of the mean curve that is farthest, and the mean of each seed's curve.
        gaps = gap_curves(group, base, length) if group is not base else [[]]
        known = [(step, v) for step, v in over_seeds(gaps).average if v is not None]
        largest = "-"
        if known:
            step, value = max(known, key=lambda p: abs(p[1]))
            largest = number(value, "+.5f") + (f" (step {step})" if value else "")
        mean_gaps = [mean([v for _, v in curve]) for curve in gaps]

        runs = group.runs
        far = "-" if group is base else estimate([above(*pair) for pair in zip(runs, base.runs)], "+.3f")
        speeds = [v for run in runs for v in run.column("tokens_per_s") if v is not None]
        memory = [v for run in runs for v in run.column("mem_gib") if v is not None]
        yield (f"| {group.name} | {estimate([run.rows[run.steps].get('val_loss') for run in runs], '.5f')} | {far} "
               f"| {estimate([mean(run.column('loss')[-LAST:]) for run in runs], '.5f')} | {largest} "
               f"| {estimate(mean_gaps, '+.5f')} "
               f"| {number(statistics.median(speeds) if speeds else None, ',.0f')} "
               f"| {number(max(memory, default=None), '.2f')} |")


def drawn(curves, start):
    """The values of these curves from a step on."""
    return [v for curve in curves for line in curve for step, *values in line if step >= start
            for v in values if v is not None]


def settled(curve):
    """The first step where the curve has made SETTLED of its way."""
    known = [(step, v) for step, v in curve if v is not None] or [(0, 0)]
    first, way = known[0][1], known[-1][1] - known[0][1]
    return next(step for step, v in known if (v - first) * way >= SETTLED * way * way)


def svg(sets, seeds, length, title=TITLE, each=1):
    """The sets, and other seeds of the first. Where their gaps would flatten those of the sets, the sets' have a panel alone.
    A row of the logs is a mean of `each` steps."""
    base, groups, nothing = sets[0], sets + seeds, [Curve([], [], []) for _ in seeds]
    loss = [over_seeds([loss_curve(run, length) for run in group.runs]) for group in groups]
    gaps = [over_seeds(gap_curves(group, base, length)) for group in groups]
    marks = [over_seeds([val_points(run) for run in group.runs]) for group in groups]
    marks = [Curve([], [], curve.average, curve.band) for curve in marks]
    if not any(v is not None for curve in loss for _, v in curve.average):
        fail("no finite loss in these runs")

    start = min(settled(loss[0].average), loss[0].average[-1][0] // 2)
    near, far = ([*drawn(curves, start), -LEAST_GAP, LEAST_GAP] for curves in (gaps[:len(sets)], gaps))
    apart = len(sets) > 1 and max(far) - min(far) > 3 * (max(near) - min(near))

    panels = [Panel("training loss, nats a token", loss, shown=drawn(loss, start)),
              Panel(f"gap to {base.name}, nats a token", gaps[:len(sets)] + nothing if apart else gaps, shown=near if apart else far)]
    if apart:
        panels.append(Panel("gap with other seeds, nats a token", gaps, shown=far))
    if any(curve.marks for curve in marks):
        panels.append(Panel("validation loss, nats a token", marks, shown=drawn(marks, start)))
    key = f"training loss and gap: mean of the last {length * each} steps"
    if len(base.runs) > 1:
        key += f"; bands: from the lowest to the highest of {len(base.runs)} seeds"
    return draw_svg(panels, [group.name for group in groups], "step", title, key, start)


def arguments():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="compare_precision.py --out FOLDER [options] -- TRAIN_MOE_OPTIONS")
    program = ROOT / "build/cuda/train_moe"
    if not program.exists() or b"GPU" not in subprocess.run("timeout 10 nvidia-smi -L", shell=True, capture_output=True).stdout:
        program = ROOT / "build/cpu/train_moe"
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FOLDER", help="folder for the runs and the picture")
    parser.add_argument("--precisions", default=PRECISIONS, metavar="NAMES",
                        help=f"precisions to compare with bf16, with commas between (default: {PRECISIONS})")
    parser.add_argument("--gemms", action="append", default=[], metavar="NAME",
                        help=f"a table by GEMM: this precision of {', '.join(GEMMS)} alone, and of all; may be repeated")
    parser.add_argument("--from", type=pathlib.Path, metavar="FOLDER", dest="weights",
                        help="begin every run with the weights in this folder of a model")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("NAME", "OPTIONS"), dest="sets",
                        help="one more set of train_moe's options; may be repeated")
    parser.add_argument("--only", action="append", metavar="NAME",
                        help="run only bf16 and this set; may be repeated (default: all sets)")
    parser.add_argument("--seed", type=int, default=1, help="the first seed, of the weights and the order of the data (default: 1)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N",
                        help="seeds of bf16; those after the first have rows of their own (default: 1)")
    parser.add_argument("--all-seeds", action="store_true", help="run every set with the seeds of --seeds; rows are means")
    parser.add_argument("--window", type=int, metavar="STEPS",
                        help="steps of the smoothing (default: 50, or a tenth of the steps if that is less)")
    parser.add_argument("--launch", type=shlex.split, default=[], metavar="COMMAND",
                        help="command that starts the ranks, such as 'mpirun -np 4'")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs at a time, each on one GPU (default: 1)")
    parser.add_argument("--program", type=pathlib.Path, default=program, metavar="PATH", help=f"(default: {program})")
    ours, common = sys.argv[1:], []
    if "--" in ours:
        ours, common = ours[:ours.index("--")], ours[ours.index("--") + 1:]
    args = parser.parse_args(ours)
    args.common = common + (["--init", str(args.weights)] if args.weights else [])
    args.options = {"bf16": []}
    for name in args.gemms:
        args.options |= {f"{name}-{gemm}": [f"--{gemm}-precision", name] for gemm in GEMMS}
    for name in filter(None, [*args.precisions.split(","), *args.gemms]):
        args.options |= {name: ["--precision", name] if name != "bf16" else []}
    for name, options in args.sets:
        if name in args.options:
            parser.error(f"--set {name}: there is a set of this name")
        if not re.fullmatch(r"\w[\w.+-]*", script.text(name)) or re.search(r"-seed-\d+$", name):
            parser.error(f"--set '{name}': a name has letters, digits and . _ + -, and does not end in -seed-NUMBER")
        try:
            args.options[name] = shlex.split(options)
        except ValueError as error:
            parser.error(f"--set {name}: {error}")
    for name in args.only or []:
        if name not in args.options:
            parser.error(f"--only {name}: the sets are {', '.join(args.options)}")
    if any(option.split("=")[0] == "--mx-stats" for option in common):
        for options in args.options.values():
            if not any(re.match("--((expert|linear|dispatch)-)?precision", option) for option in options):
                options += ["--mx-stats", "0"]  # nothing that it measures is quantized
    for option in common + [option for options in args.options.values() for option in options]:
        name = option.split("=")[0]
        if name in ("--out", "--resume", "--seed", "--help", "-h", "--version", "--dry-run"):
            parser.error(f"{name} among train_moe's options: leave it out, the script sets it for each run")
    for name in (option.split("=")[0] for option in common):
        if re.fullmatch(r"--(\w+-)?precision", name):
            parser.error(f"{name} behind --: each set has its own; write --set NAME 'OPTIONS'")
        if name == "--init" and args.weights:
            parser.error("--init behind --: --from names the weights")
    if not common:
        parser.error("train_moe's options are missing: they follow --")
    if args.seed < 1:
        parser.error("--seed is at least 1: a --data-seed of 0 would be each run's own seed")
    if args.all_seeds and args.seeds < 2:
        parser.error("--all-seeds goes with --seeds of at least 2")
    if args.seeds < 1 or args.window is not None and args.window < 1:
        parser.error("--seeds and --window are at least 1")
    if args.at_once < 1 or args.at_once > 1 and args.launch:
        parser.error("--at-once is at least 1, and goes without --launch: each of its runs has one GPU")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if gpus != [""] and len(gpus) < args.at_once:
        parser.error(f"--at-once {args.at_once}: CUDA_VISIBLE_DEVICES names {len(gpus)} GPUs, and each run has its own")
    return args


def main():
    args = arguments()
    program = pathlib.Path(os.path.realpath(args.program))
    if not program.exists():
        fail(f"{args.program} is not there; `make` builds it, or name another with --program")
    sets, seeds = [], []
    for name, options in args.options.items():
        if args.only and name != "bf16" and name not in args.only:
            continue
        many = args.seeds if args.all_seeds or name == "bf16" else 1
        folders = {seed: name if seed == args.seed else f"{name}-seed-{seed}" for seed in range(args.seed, args.seed + many)}
        runs = [Run(folder, args.common + options, seed, seed if args.weights else args.seed, args.out) for seed, folder in folders.items()]
        sets.append(Group(script.text(name), runs if args.all_seeds else runs[:1]))
        seeds += [] if args.all_seeds else [Group(f"{script.text(name)}, seed {run.seed}", [run]) for run in runs[1:]]
    groups = sets + seeds
    runs = [run for group in groups for run in group.runs]
    try:
        check_window(args.window or 1, runs)  # before anything is trained, if the options tell
        train(runs, args.launch, program, args.at_once)
        length = args.window or max(1, min(50, runs[0].steps // 10))
        check_window(length, runs)
        with script.in_place(args.out / "compare.svg") as part:
            part.write_text(svg(sets, seeds, length), encoding="utf-8")
    except Failure as error:
        fail(error)
    except OSError as error:
        fail(f"{error.filename or args.out}: {error.strerror}")
    print(*table(groups, length), sep="\n")
    for run in runs:
        odd = run.column("loss").count(None)
        if odd:
            print(f"\n{run.name}: the loss of {odd} steps was not finite; they are left out.")
    print(f"\nNats a token; gaps in the training loss as a mean of {length} step{'s' * (length > 1)}.")
    if args.all_seeds:
        print("Of several seeds: the mean ± its standard error (seeds). Seeds are compared in pairs.")
    config = runs[0].config
    print(f"{runs[0].steps} steps of {config.get('tokens-per-step', '?')} tokens; {config.get('build', '?')}; {config.get('device', '?')}.")
    print(f"wrote {script.text(args.out / 'compare.svg')}")


if __name__ == "__main__":
    if sys.stdout:
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # file names may hold any bytes
    main()
