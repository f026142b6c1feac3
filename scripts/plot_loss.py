#!/usr/bin/env python3
"""Plot the loss of one or several runs from their log.jsonl into one SVG. Standard library only.

    python3 scripts/plot_loss.py runs/bf16 runs/mxfp8/log.jsonl --out loss.svg

The thin line is the training loss of each step, the thick line its moving average, circles are the validation loss.
The first line of a log is the run's configuration; then one object per step, where null stands for a loss that was not
finite. A number that float32 cannot hold counts as not finite too. A last line cut short (the run is alive, or died
writing) is left out.
"""
import argparse
import json
import math
import os
import pathlib
import re
import sys
from xml.sax.saxutils import escape

# Okabe and Ito's palette, which colour-blind readers can tell apart; yellow is left out, it vanishes on white.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"]
WIDTH, HEIGHT = 960, 560
LEFT, RIGHT, BOTTOM = 76, 24, 58
COLUMNS = 600  # a line is drawn with at most this many steps' worth of detail
LEAST = 1e-12  # a logarithmic axis begins no lower
NUMBERS = ("loss", "val_loss", "tokens_per_s", "mem_gib")  # what is read of a step
NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that no XML may hold


def note(message):
    print(f"{pathlib.Path(sys.argv[0]).stem}: {message}", file=sys.stderr)


def fail(message):
    note(message)
    sys.exit(1)


def finite(x):
    return x if type(x) in (int, float) and abs(x) < 2.0**128 else None


def read_log(path):
    """A log as (configuration, {step: {one of NUMBERS: its value, None if it is not there or not finite}})."""
    def bad(what):
        fail(f"{path} is not a log of train_moe: {what}")

    try:
        *lines, tail = path.read_bytes().decode("utf-8", "replace").split("\n")
    except OSError as error:
        fail(f"{path}: cannot read it: {error.strerror}")
    lines += [tail] if tail else []
    if not lines:
        bad("it is empty")
    rows = {}
    for i, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if tail and 1 < i == len(lines):
                note(f"{path}: the last line is cut short, left out")
                break
            row = None
        if not isinstance(row, dict):
            bad(f"line {i}: not a JSON object")
        if i == 1:
            config = row
            continue
        step = row.get("step")
        if type(step) is not int or not 0 <= step < 2**63:
            bad(f"line {i}: no step number")
        for key in NUMBERS:
            if type(row.get(key)) not in (int, float, type(None)):
                bad(f"line {i}: {key} is not a number")
        # A step that was run again after a resume replaces the older one.
        rows[step] = {key: finite(row.get(key)) for key in NUMBERS}
    return config, rows


class Run:
    """The steps of one log, ascending: self.steps, self.loss and self.val (None where there is none)."""

    def __init__(self, path):
        self.path = path / "log.jsonl" if os.path.isdir(path) else path
        self.folder = pathlib.Path(os.path.realpath(self.path)).parent
        self.config, rows = read_log(self.path)
        if not rows:
            fail(f"{self.path}: the log holds no steps")
        self.steps = sorted(rows)
        self.loss = [rows[s]["loss"] for s in self.steps]
        self.val = [rows[s]["val_loss"] for s in self.steps]
        if not any(v is not None for v in self.loss + self.val):
            fail(f"{self.path}: no finite loss in this log")

    def xs(self, axis):
        if axis == "step":
            return self.steps
        per_step = finite(self.config.get("tokens-per-step")) or 0
        if per_step <= 0:
            fail(f"{self.path}: the configuration has no tokens-per-step, which --x tokens needs")
        return [s * per_step for s in self.steps]


def smooth(values, beta):
    """Exponential moving average, corrected for its start. A None stays None and does not move the average."""
    out, total, weight = [], 0.0, 0.0
    for v in values:
        if v is None:
            out.append(None)
            continue
        total, weight = beta * total + (1 - beta) * v, beta * weight + (1 - beta)
        out.append(total / weight)
    return out


def thin(points):
    """At most about COLUMNS columns, each by its least and greatest value, so that no spike is lost."""
    size = -(-len(points) // COLUMNS)
    if size < 3:
        return points
    out = []
    for i in range(0, len(points), size):
        part = points[i:i + size]
        known = [p for p in part if p[1] is not None]
        if len(known) < len(part):
            out.append((part[0][0], None))  # keep the gap
        if known:
            ends = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])}
            out += sorted(ends)
    return out


def ticks(lo, hi, count):
    """Round numbers within [lo, hi], about `count` of them."""
    raw = (hi - lo) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    return [i * step for i in range(math.ceil(lo / step - 1e-9), math.floor(hi / step + 1e-9) + 1)]


def log_ticks(lo, hi):
    """Round numbers for a logarithmic axis; the plain ones if the range is less than a factor of 3."""
    if hi / lo < 3:
        return ticks(lo, hi, 6)
    digits = range(1, 10) if hi / lo < 30 else (1, 2, 5)
    powers = range(math.floor(math.log10(lo)), math.ceil(math.log10(hi)) + 1)
    return [d * 10.0 ** p for p in powers for d in digits if lo <= d * 10.0 ** p <= hi]


def label(x):
    """4000 -> 4k, 2.5e9 -> 2.5B"""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= unit:
            return f"{x / unit:.6g}{suffix}"
    return f"{x:.6g}"


def text_width(text, size):
    return 0.54 * size * len(text)  # sans-serif, a little wide, so that entries never touch


def shorten(text, most):
    return text if len(text) <= most else text[:most - 1] + "…"


def style(i):
    """The stroke of run i; dashed once the colours are used up."""
    dash = ' stroke-dasharray="8 5"' if i // len(COLOURS) % 2 else ""
    return f'stroke="{COLOURS[i % len(COLOURS)]}"{dash}'


class Chart:
    def __init__(self, args, runs):
        self.args, self.out = args, []
        self.log_y = args.log_y
        self.curves = []
        for run in runs:
            xs = run.xs(args.x)
            self.curves.append((list(zip(xs, run.loss)), list(zip(xs, smooth(run.loss, args.smooth))),
                                [(x, v) for x, v in zip(xs, run.val) if v is not None]))
        self.entries = [self.entry(name, curve) for name, curve in zip(names(runs), self.curves)]
        self.rows = self.legend_rows()
        self.top = (46 if args.title else 18) + 22 * len(self.rows) + 26
        self.height = HEIGHT + max(0, self.top - 110)  # many runs make the picture taller, not the chart flatter
        self.set_ranges()

    @staticmethod
    def entry(name, curve):
        _, average, val = curve
        last = [v for _, v in average if v is not None]
        numbers = ([f"train {last[-1]:.3f}"] if last else []) + ([f"val {val[-1][1]:.3f}"] if val else [])
        return f"{shorten(name, 60)} ({', '.join(numbers)})"

    def legend_rows(self):
        """Break the entries into rows above the plot, as (run, x) pairs: there they cannot cover a curve."""
        rows, x = [[]], LEFT
        for i, text in enumerate(self.entries):
            width = 34 + text_width(text, 13) + 22
            if rows[-1] and x + width > WIDTH - RIGHT:
                rows.append([])
                x = LEFT
            rows[-1].append((i, x))
            x += width
        return rows

    def set_ranges(self):
        points = [p for curve in self.curves for line in curve for p in line if p[1] is not None]
        xs = [x for curve in self.curves for line in curve for x, _ in line]
        ys = [y for _, y in points]
        self.x0, self.x1 = 0, max(max(xs), 1)
        self.y0, self.y1 = self.args.y_range or (min(ys), max(ys))
        if self.log_y and self.y0 < LEAST:
            fail(f"--log-y needs losses (and --y-range) of at least {LEAST:g}")
        if not self.args.y_range:
            if self.log_y:
                pad = max(1.02, (self.y1 / self.y0) ** 0.04)
                self.y0, self.y1 = self.y0 / pad, self.y1 * pad
            else:
                pad = max(0.04 * (self.y1 - self.y0), 1e-3 * abs(self.y1)) or 1  # a flat curve has no range
                self.y0, self.y1 = self.y0 - pad, self.y1 + pad

    def x(self, v):
        return LEFT + (v - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, v):
        f = (lambda v: math.log(max(v, LEAST))) if self.log_y else float
        part = (f(v) - f(self.y0)) / (f(self.y1) - f(self.y0))
        return self.height - BOTTOM - part * (self.height - BOTTOM - self.top)

    def add(self, markup):
        self.out.append(markup)

    def text(self, x, y, text, size=13, anchor="start", colour="#333", extra=""):
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{extra}>'
                 f'{escape(NOT_XML.sub(chr(0xFFFD), text))}</text>')

    def line(self, points, style, width, opacity):
        """A path with a gap wherever the value is None; a lone point between gaps becomes a dot by its round cap."""
        path, pen_down = [], False
        for x, v in thin(points):
            if v is None:
                pen_down = False
                continue
            at = f"{self.x(x):.1f} {self.y(v):.1f}"
            path.append(f"L{at}" if pen_down else f"M{at}h0")
            pen_down = True
        if path:
            self.add(f'<path d="{"".join(path)}" fill="none" {style} stroke-width="{width}" '
                     f'stroke-opacity="{opacity}" stroke-linejoin="round" stroke-linecap="round"/>')

    def axes(self):
        left, right, top, bottom = LEFT, WIDTH - RIGHT, self.top, self.height - BOTTOM
        marks = log_ticks(self.y0, self.y1) if self.log_y else ticks(self.y0, self.y1, 7)
        decimals = max((len(f"{v:.6g}".partition(".")[2]) for v in marks), default=0)
        for v in marks:
            self.add(f'<line x1="{left}" x2="{right}" y1="{self.y(v):.1f}" y2="{self.y(v):.1f}" stroke="#e6e6e6"/>')
            self.text(left - 8, self.y(v) + 4.5, f"{v:.{decimals}f}", anchor="end")
        for v in ticks(self.x0, self.x1, 8):
            self.add(f'<line x1="{self.x(v):.1f}" x2="{self.x(v):.1f}" y1="{bottom}" y2="{bottom + 5}" stroke="#888"/>')
            self.text(self.x(v), bottom + 20, label(v), anchor="middle")
        self.add(f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#888"/>')
        self.text((left + right) / 2, self.height - 14, "tokens" if self.args.x == "tokens" else "step", 14, "middle")
        middle = (top + bottom) / 2
        self.text(20, middle, "loss" + (" (log scale)" if self.log_y else ""), 14, "middle",
                  extra=f' transform="rotate(-90 20 {middle:.1f})"')

    def legend(self):
        if self.args.title:
            self.text(LEFT, 30, shorten(self.args.title, 90), 18, colour="#111", extra=' font-weight="bold"')
        y = 46 if self.args.title else 18
        for row in self.rows:
            for i, x in row:
                self.add(f'<line x1="{x}" x2="{x + 26}" y1="{y}" y2="{y}" {style(i)} stroke-width="3"/>')
                self.text(x + 34, y + 4.5, self.entries[i])
            y += 22
        average = f"thin: each step, thick: moving average ({self.args.smooth:g})"
        key = average if self.args.smooth else "line: each step"
        if any(val for _, _, val in self.curves):
            key += ", circles: validation"
        self.text(LEFT, y + 3, key, 12, colour="#777")

    def svg(self):
        self.add(f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.height}" '
                 f'viewBox="0 0 {WIDTH} {self.height}" font-family="Helvetica, Arial, sans-serif">')
        self.add(f'<rect width="{WIDTH}" height="{self.height}" fill="#fff"/>')
        self.add(f'<clipPath id="plot"><rect x="{LEFT - 5}" y="{self.top}" width="{WIDTH - LEFT - RIGHT + 10}" '
                 f'height="{self.height - BOTTOM - self.top}"/></clipPath>')
        self.axes()
        self.add('<g clip-path="url(#plot)">')
        # All raw lines lie below all averages, and those below the validation points.
        for i, (raw, _, _) in enumerate(self.curves):
            self.line(raw, style(i), 1, 0.3 if self.args.smooth else 0.9)
        if self.args.smooth:
            for i, (_, average, _) in enumerate(self.curves):
                self.line(average, style(i), 2, 1)
        for i, (_, _, val) in enumerate(self.curves):
            self.line(val, style(i), 1.2, 0.8)
            for x, v in val:
                self.add(f'<circle cx="{self.x(x):.1f}" cy="{self.y(v):.1f}" r="3.5" fill="#fff" '
                         f'stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="1.6"/>')
        self.add("</g>")
        self.legend()
        self.add("</svg>")
        return "\n".join(self.out) + "\n"


def names(runs):
    """Each run by its folder; with the folder above where two would read the same."""
    plain = [run.folder.name for run in runs]
    return [f"{run.folder.parent.name}/{name}" if plain.count(name) > 1 else name for run, name in zip(runs, plain)]


def main():
    parser = argparse.ArgumentParser(description="Plot the loss of one or several runs into one SVG.")
    parser.add_argument("logs", nargs="+", type=pathlib.Path, metavar="LOG",
                        help="log.jsonl, or the folder that holds it")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("loss.svg"),
                        help="SVG to write (default: loss.svg)")
    parser.add_argument("--x", choices=("step", "tokens"), default="step", help="horizontal axis (default: step)")
    parser.add_argument("--smooth", type=float, default=0.9,
                        help="weight of the past in the moving average, 0 for none (default: 0.9)")
    parser.add_argument("--log-y", action="store_true", help="logarithmic loss axis")
    parser.add_argument("--y-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="show only these losses")
    parser.add_argument("--title")
    args = parser.parse_args()
    if not 0 <= args.smooth < 1:
        parser.error("--smooth must be in [0, 1)")
    if args.y_range:
        low, high = args.y_range
        if None in (finite(low), finite(high)) or not high - low > 1e-9 * max(abs(low), abs(high), LEAST):
            parser.error("--y-range: LOW must be less than HIGH, by as much as can be drawn")
    svg = Chart(args, [Run(path) for path in args.logs]).svg()
    try:
        args.out.write_text(svg, encoding="utf-8")
    except OSError as error:
        fail(f"{args.out}: cannot write it: {error.strerror}")


if __name__ == "__main__":
    main()
