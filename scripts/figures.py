#!/usr/bin/env python3
"""Makes the figures of docs/, and those of bench/ whose data are there: `make docs`, or python3 scripts/figures.py
[--program TRAIN_MOE] [--out FOLDER] [NAME ...].

Figures of structure are drawn here. Figures of data come from runs of `tiny` made for them (three minutes on two
cores), from bench/results.jsonl and from bench/logs. All are SVG. Those of docs/ are 480 wide, with letters of at
least 13, so that they can be read on a phone. Standard library only.
"""
import script  # noqa: F401  signals end it with one line

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from xml.sax.saxutils import escape

import compare_precision
from chart import COLOURS, text_width
from plot_loss import smooth
from runlog import fail, read_log

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH, LETTER = 480, 13
BLUE, ORANGE, GREEN = COLOURS[:3]


class Figure:
    """Shapes in the order in which they are drawn; `height` grows with them."""

    def __init__(self, title):
        self.title, self.parts, self.height = title, [], 0

    def add(self, part, bottom):
        self.parts.append(part)
        self.height = max(self.height, bottom)

    def text(self, x, y, words, anchor="start", colour="#222", size=LETTER, weight="normal"):
        self.add(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" font-size="{size}" font-weight="{weight}">'
                 f'{escape(words)}</text>', y + 4)

    def box(self, x, y, width, height, words="", fill="#fff", line="#555", colour="#222"):
        self.add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{line}"/>', y + height)
        if words:
            self.text(x + width / 2, y + height / 2 + 4.5, words, "middle", colour)

    def circle(self, x, y, colour):
        self.add(f'<circle cx="{x:g}" cy="{y:g}" r="3.5" fill="#fff" stroke="{colour}" stroke-width="1.6"/>', y)

    def line(self, points, colour="#555", arrow=False, width=1.5):
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.add(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"'
                 f'{" marker-end=" + chr(34) + "url(#arrow)" + chr(34) if arrow else ""}/>', max(y for _, y in points))

    def __str__(self):
        height = self.height + 10
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
            f'font-family="Helvetica, Arial, sans-serif"><title>{escape(self.title)}</title>'
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>'
            f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>\n' + "\n".join(self.parts) + "\n</svg>\n")


# --- Structure ---

def ragged():
    """The example of grouped/permute.h: five tokens, two of four experts each."""
    f = Figure("Tokens sorted by expert")
    choices = {"a": (0, 2), "b": (2, 3), "c": (0, 3), "d": (3, 0), "e": (2, 3)}
    colours = ["#cfe3f3", "#fff", "#fbdcc4", "#cdeadf"]
    rows = {}
    y = 52
    f.text(10, 20, "Five tokens, two experts each: rows sorted by expert", weight="bold")
    f.text(150, 42, "rows", colour="#555")
    for expert in range(4):
        mine = [token for token, chosen in choices.items() if expert in chosen]
        f.text(230, y + 16, f"expert {expert}: {len(mine)} rows")
        for token in mine + ["0"] * (-len(mine) % 4):
            f.box(150, y, 64, 22, token if token != "0" else "zeros", colours[expert] if token != "0" else "#eee")
            rows[token, expert] = y + 11
            y += 22
        y += 8 if mine else 30
    f.text(20, 42, "tokens", colour="#555")
    for i, token in enumerate(choices):
        at = 70 + 56 * i
        f.box(20, at, 40, 26, token)
        for expert in choices[token]:
            f.line([(60, at + 13), (149, rows[token, expert])], arrow=True, width=1)
    f.text(230, y + 4, "the rows in use end here", colour="#555")
    return f


def dispatch():
    """One token, ranks of two experts each."""
    f = Figure("A token goes once to each rank that holds one of its experts")
    f.text(10, 20, "Token n on rank 0 chose experts 1, 4 and 5", weight="bold")
    for rank in range(4):
        y = 40 + 62 * rank
        used = {0: "expert 1", 2: "experts 4 and 5"}.get(rank)
        f.box(190, y, 130, 46, fill="#cfe3f3" if used else "#f4f4f4")
        f.text(198, y + 19, f"rank {rank}", weight="bold")
        f.text(198, y + 37, f"experts {2 * rank} and {2 * rank + 1}")
        if used:
            f.line([(92, 74 if rank == 0 else 80), (189, y + 22)], arrow=True)
            f.line([(320, y + 22), (397, 74 if rank == 0 else 82)], arrow=True)
    f.box(20, 54, 72, 40, "x of n", "#fbdcc4")
    f.box(398, 54, 72, 40, "y of n", "#fbdcc4")
    f.text(20, 182, "x, two ids,", colour="#555")
    f.text(20, 199, "two gates:", colour="#555")
    f.text(20, 216, "once, not twice", colour="#555")
    f.text(335, 182, "one sum,", colour="#555")
    f.text(335, 199, "g4 E4(x) + g5 E5(x)", colour="#555")
    return f


def slots():
    """Forward with --shard weights."""
    f = Figure("Weights pass through two slots")
    f.text(10, 20, "Weights of three units pass through two slots", weight="bold")
    lanes, top = ["stream", "side stream", "slot 0", "slot 1"], 36
    for i, lane in enumerate(lanes):
        f.text(10, top + 20 + 40 * i, lane)
    fills = ["#cfe3f3", "#fbdcc4", "#cdeadf", "#f3dcea"]
    for u in range(3):
        x = 110 + 120 * u
        f.box(x, top, 116, 30, f"unit {u + 1} computes", fills[u])
        f.box(x, top + 40, 70, 30, f"gather {u + 2}", fills[u + 1])
        f.box(x, top + (80 if u % 2 else 120), 116, 30, f"{u + 1} in use", fills[u])
        f.box(x, top + (120 if u % 2 else 80), 116, 30, f"{u + 2} arrives", fills[u + 1], line="#bbb")
    f.line([(110, top + 166), (466, top + 166)], arrow=True)
    f.text(288, top + 182, "time", "middle", "#555")
    f.text(10, top + 204, "Unit u lies in slot u % 2.", colour="#555")
    f.text(10, top + 221, "It is read there while u + 1 arrives in the other.", colour="#555")
    return f


def mx_block():
    """A chunk of 128 elements along the contraction."""
    f = Figure("MX blocks")
    f.text(10, 20, "128 numbers in MXFP8", weight="bold")
    for y, head, scales in ((46, "align 1: a scale for each block of 32", ["s0", "s1", "s2", "s3"]),
                            (166, "align 128: four blocks share the largest one's scale", ["s", "s", "s", "s"])):
        f.text(10, y, head)
        for i, scale in enumerate(scales):
            x = 10 + 116 * i
            f.box(x, y + 12, 112, 30, "32 bytes, e4m3", "#cfe3f3" if y == 46 else "#cdeadf")
            f.box(x + 36, y + 48, 40, 24, scale, "#fbdcc4")
        f.text(10, y + 94, "value = q 2^(s - 127)", colour="#555")
    f.text(10, 282, "A product may then run over 128 elements before it needs a scale:", colour="#555")
    f.text(10, 300, "one multiplication for 128 in the place of four.", colour="#555")
    return f


# --- Data ---

def axes(f, x0, y0, x1, y1, xs, ys, label):
    """Lines and numbers of both axes; returns how a point is placed."""
    place = lambda x, y: (x0 + (x - xs[0]) / (xs[-1] - xs[0]) * (x1 - x0), y1 - (y - ys[0]) / (ys[-1] - ys[0]) * (y1 - y0))
    for y in ys:
        at = place(xs[0], y)[1]
        f.line([(x0, at), (x1, at)], "#ddd", width=1)
        f.text(x0 - 6, at + 4.5, f"{y:g}", "end", "#555")
    for x in xs:
        f.text(place(x, ys[0])[0], y1 + 18, f"{x:g}", "middle", "#555")
    f.text((x0 + x1) / 2, y1 + 38, label, "middle", "#555")
    return place


def results(key, value):
    """The lines of bench/results.jsonl in which a field has this value."""
    lines = [json.loads(line) for line in (ROOT / "bench/results.jsonl").read_text("utf-8").splitlines()]
    found = [line for line in lines if line[key] == value]
    return found or fail(f"bench/results.jsonl has no {key} {value}")


def loss(log_of):
    """The run of `make train`: each step and their moving average, validation, and the bigram's loss."""
    f = Figure("Loss of the run that make train makes")
    f.text(10, 20, "make train: loss in nats a byte", weight="bold")
    place = axes(f, 30, 40, 455, 300, [0, 250, 500, 750], [0, 1, 2, 3, 4, 5, 6], "step")
    bigram = results("id", "loss/make-train-tiny-with-muon-bytes-seeds-1-2-3/validation-loss")[0]["yardstick"]["value"]
    f.line([place(0, bigram), place(750, bigram)], GREEN)
    f.text(450, place(0, bigram)[1] - 8, f"byte bigram {bigram:.2f}", "end", GREEN)

    steps = log_of("--steps 750 --warmup 50 --val-every 250 --val-tokens 1000000")
    each = [s["loss"] for s in steps]
    for values, colour, width in (each, "#a9cde6", 1), (smooth(each, 10), BLUE, 2):
        points = [place(step["step"], value) for step, value in zip(steps, values)]
        f.line([(round(x, 1), round(y, 1)) for x, y in points], colour, width=width)
    measured = [(s["step"], s["val_loss"]) for s in steps if s.get("val_loss")]
    f.line([place(*point) for point in measured], ORANGE, width=1)
    for x, y in [place(*point) for point in measured]:
        f.circle(x, y, ORANGE)
    f.text(450, place(0, measured[-1][1])[1] - 18, f"validation loss {measured[-1][1]:.2f}", "end", ORANGE)
    f.text(450, 288, f"training loss {smooth(each, 10)[-1]:.2f}", "end", BLUE)
    return f


def loads(log_of):
    """The fullest expert with each kind of load balancing."""
    f = Figure("Load of the fullest expert over the steps")
    f.text(10, 20, "Load of the fullest expert: its tokens over the mean", weight="bold")
    f.text(10, 38, "worst block of tiny; 1: all experts alike, 4: the most", colour="#555")
    place = axes(f, 40, 56, 450, 266, [0, 100, 200, 300], [1, 2, 3, 4], "step")
    for i, (name, options) in enumerate({
            "none": "--balance none", "DeepSeek's bias": "--balance deepseek", "quantiles (default)": ""}.items()):
        steps = log_of(f"--steps 300 --warmup 50 --optimizer adamw {options}")
        mean = smooth([s["load_max_over_mean"] for s in steps], 2)
        f.line([place(j + 1, min(y, 4)) for j, y in enumerate(mean)], [ORANGE, BLUE, GREEN][i], width=2)
        f.box([40, 130, 290][i], 316, 14, 14, fill=[ORANGE, BLUE, GREEN][i])
        f.text([60, 150, 310][i], 328, name)
    return f


def bars(f, rows, top, kinds):
    """rows of (name, values), a bar for each value; below them the legend of the kinds of values."""
    left = 18 + max(text_width(name, LETTER) for name, _ in rows)
    scale = (WIDTH - left - 45) / max(v for _, values in rows for v in values)
    for name, values in rows:
        f.text(left - 8, top + 10 + 6 * len(values), name, "end")
        for i, value in enumerate(values):
            if value:
                f.box(left, top + 4 + 16 * i, value * scale, 13, fill=[BLUE, ORANGE][i], line="none")
            f.text(left + 6 + value * scale, top + 15 + 16 * i, f"{value:.1f}" if value else "none", colour="#555")
        top += 10 + 16 * len(values)
    for i, kind in enumerate(kinds):
        f.box(left + 120 * i, top + 6, 14, 14, fill=[BLUE, ORANGE][i])
        f.text(left + 20 + 120 * i, top + 18, kind)


def step_time():
    """The classes of a step of 16b, which bench/h200.md has in two rows. Those below 2 ms in both are together."""
    f = Figure("Where a step's time goes")
    f.text(10, 20, "16b with 4 layers, one H200: milliseconds of a step", weight="bold")
    lines = results("section", "Where the time of a step goes")
    bf16, mxfp8 = ({line["metric"].removesuffix(", ms"): line["value"] for line in lines if line["label"] == f"16b with 4 layers, {name}"}
                   for name in ("bf16", "all MXFP8"))
    totals, rows, rest = [bf16.pop("step"), mxfp8.pop("step")], [], [0, 0]
    for name, ms in mxfp8.items():
        values = [bf16.get(name, 0), ms]
        if max(values) >= 2:
            rows.append((name, values))
        else:
            rest = [sum(both) for both in zip(rest, values)]
    rows.append(("norms, softmax, the rest", rest))
    bars(f, rows, 30, [f"{name}: {ms:.1f} ms" for name, ms in zip(("bf16", "MXFP8"), totals)])
    return f


def compare(title, set_, logs, length, each):
    """Precisions and, as the last, another seed of bf16. `logs`: name of each run's log behind `set_`. The rest: compare_precision.svg."""
    groups = []
    for name, log in logs.items():
        run = compare_precision.Run(log, [], 1, 1, ROOT / "bench/logs")
        run.rows = read_log(ROOT / f"bench/logs/{set_}-{log}.jsonl.xz", compare_precision.COLUMNS)[1]
        groups.append(compare_precision.Group(name, [run]))
    return compare_precision.svg(groups[:-1], groups[-1:], length, title, each)


def compare_billion():
    """A line of these logs is a mean of 100 steps."""
    return compare("small, a billion tokens of code and prose, one H200", "billion",
                   {"bf16": "bf16", "MXFP8 in experts and dispatch": "mxfp8", "all MXFP8": "everything", "bf16, second seed": "bf16-seed-2"}, 10, 100)


def compare_16b():
    return compare("16b, 49 million tokens of code and prose, four H200", "16b-500",
                   {"bf16": "bf16", "all MXFP8": "mxfp8", "bf16, second seed": "bf16-seed-2"}, 25, 1)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "build/cpu/train_moe"))
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("name", nargs="*")
    args = parser.parse_args()
    drawn = {"ragged": ragged, "dispatch": dispatch, "slots": slots, "mx_block": mx_block, "step_time": step_time,
             "compare_billion": compare_billion, "compare_16b": compare_16b}
    run = {"loss": loss, "loads": loads}
    for name in args.name:
        if name not in {**drawn, **run}:
            fail(f"no figure is called {name}; there are {', '.join([*drawn, *run])}")

    # Runs on the text of `make train`.
    with tempfile.TemporaryDirectory() as folder:
        def log_of(options):
            shards = pathlib.Path(folder) / "text_train_000000.bin"
            if not shards.exists():
                subprocess.run([sys.executable, ROOT / "scripts/prepare_text.py", ROOT / "data/repository.txt.xz", "--split-on",
                                "<|endoftext|>", "--out", folder, "--name", "text", "--val-fraction", "0.1"], check=True,
                               stdout=subprocess.DEVNULL)
            out = pathlib.Path(folder) / "run"
            shutil.rmtree(out, ignore_errors=True)
            subprocess.run([args.program, "--model", "tiny", "--train", str(shards), "--seq-len", "256", "--batch", "8", "--lr",
                            "3e-3", "--val", shards.with_name("text_val_000000.bin"), "--val-every", "0", "--out", out,
                            *options.split()], check=True, stdout=subprocess.DEVNULL)
            return [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()[1:]]

        for name, draw in {**drawn, **run}.items():
            if not args.name or name in args.name:
                path = (args.out or ROOT / ("bench" if name.startswith("compare") else "docs")) / f"{name}.svg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(str(draw(*([log_of] if name in run else []))), "utf-8")
                print(path)


if __name__ == "__main__":
    main()
