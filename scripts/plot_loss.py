#!/usr/bin/env python3
"""Plots the losses, or other columns, of one or several runs from their log.jsonl in one picture.

    python3 scripts/plot_loss.py runs/bf16 runs/mxfp8/log.jsonl --out loss.svg
    python3 scripts/plot_loss.py runs/* --column val_loss grad_norm --over time --out loss.pdf

The thin line has each step. The thick line is the mean of a step with --smooth steps before and after it. It begins
with as many after a step as there are before it, and its end is the mean of the last ones. Circles are columns that most steps lack, such as the validation
loss. Each column has its own panel, but val_loss is drawn with loss. A column with a number for each layer, such as
load_max, has a curve for each. Names of mx_stats columns are like mx_stats/layer3/x/snr_db. The suffix sets the format:
.svg needs only Python, .png and .pdf need matplotlib.
"""
import script
from script import Failure

import argparse
import io
import pathlib
import statistics

from chart import COLOURS, LEAST, WIDTH, Curve, Panel, draw_svg, drawable, short, thin
from runlog import columns_in, fail, finite, read_logs

FORMATS = (".svg", ".png", ".pdf")
NATS = "nats a token"
WORDS = {  # columns by their names in the picture, and their units
    "loss": ("training loss", NATS), "val_loss": ("validation loss", NATS),
    "val_bits_per_byte": ("validation loss", "bits a byte"),
    "grad_norm": ("gradient norm", ""), "lr": ("learning rate", ""), "max_logit": ("largest attention logit", ""),
    "ms": ("time of a step", "ms"), "tokens_per_s": ("speed", "tokens/s"), "mfu": ("MFU", "share of the GPU's peak"),
    "load_max_over_mean": ("load of the fullest expert", "over the mean"),
    "load_max": ("load of each block's fullest expert", "over the mean"),
    "load_min": ("load of each block's emptiest expert", "over the mean"), "mem_gib": ("memory", "GiB")}
UNITS = ((7200, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))  # from this many seconds on


def smooth(values, reach):
    """The mean of each value with up to `reach` known ones before it and as many after it. A None stays None. Near the
    end there are fewer after it."""
    seen = [v for v in values if v is not None]
    means = (statistics.fmean(seen[i - min(i, reach):i + min(i, reach) + 1]) for i in range(len(seen)))
    return [None if v is None else next(means) for v in values]


def tokens(log):
    per_step = finite(log.config.get("tokens-per-step")) or 0
    if per_step <= 0:
        fail(f"{log.path}: the configuration has no tokens-per-step, which --over tokens needs")
    before = finite(log.config.get("tokens-before")) or 0  # of the stages before
    return [before + step * per_step for step in log.steps]


def horizontal(logs, over):
    """The places of each log's steps on the horizontal axis, and its label."""
    if over == "steps":
        return [log.steps for log in logs], "step"
    if over == "tokens":
        return [tokens(log) for log in logs], "tokens"
    for log in logs:
        if not log.has("ms"):
            fail(f"{log.path}: the log has no ms, which --over time needs")
    seconds = [log.seconds() for log in logs]
    longest = max(times[-1] for times in seconds)
    _, length, name = next(unit for unit in UNITS if longest >= unit[0])
    return [[t / length for t in times] for times in seconds], f"{name} of training"


def known(points):
    return [(x, v) for x, v in points if v is not None]


def line(log, xs, column, reach):
    values = log.column(column)
    return Curve(list(zip(xs, values)), list(zip(xs, smooth(values, reach))) if reach else [], [])


def circles(log, xs, column):
    return Curve([], [], known(zip(xs, log.column(column))))


def curve_of(log, xs, column, reach):
    rare = 2 * sum(column in row for row in log.rows) < len(log.rows)
    return circles(log, xs, column) if rare else line(log, xs, column, reach)


def word(column):
    return WORDS.get(column, (column,))[0]


def axis(column):
    return ", ".join(filter(None, WORDS.get(column, (column,))))


def end_of(column, points):
    """Words of the legend: a column and where its curve ends."""
    return [f"{word(column)} {short(float(f'{points[-1][1]:.4g}'))}"] if points else []


def entry(name, ends):
    return drawable(f"{name} ({', '.join(ends)})" if ends else name, 100)


def curves_of(group, names, logs, places, reach):
    """Yields (key, words in the legend, curve); a key has a colour. Keys are runs, or layers of each run. The validation
    loss has the colour of its run, or one of its own where there is a single run."""
    for name, log, xs in zip(names, logs, places):
        layers = log.layers(group[0])
        for column in layers:
            layer = column.rpartition("/")[2]
            yield (name, layer), entry(f"{name} {layer}", []), curve_of(log, xs, column, reach)
        if layers:
            continue
        curve = curve_of(log, xs, group[0], reach)
        ends = end_of(group[0], known(curve.average or curve.each) or curve.marks)
        validation = circles(log, xs, group[1]) if group[1:] and log.has(group[1]) else Curve([], [], [])
        measured = end_of(group[-1], validation.marks)
        if measured and len(logs) > 1:
            curve, ends, measured = curve._replace(marks=validation.marks), ends + measured, []
        yield (name,), entry(name, ends), curve
        if measured:
            yield "validation", measured[0], validation


def picture_of(names, logs, places, args):
    """The panels, the legend's entries, and the key with the kinds of lines."""
    groups = [[column] for column in dict.fromkeys(args.column)]
    if ["loss"] in groups and ["val_loss"] in groups:
        groups.remove(["val_loss"])
        groups[groups.index(["loss"])] = ["loss", "val_loss"]
    if len(groups) > 1 and args.y_range:
        fail("--y-range goes with one panel; draw one column")

    drawn = []  # a dictionary of curves for each panel
    entries = {}  # the legend has the words of the first panel
    for group in groups:
        if not any(log.has(column) or log.layers(column) for log in logs for column in group):
            fail(f"no finite {group[0]} in {', '.join(str(log.path) for log in logs)}; "
                 f"columns are {columns_in([log.path for log in logs])}")
        drawn.append({})
        for key, words, curve in curves_of(group, names, logs, places, args.smooth):
            drawn[-1][key] = curve
            entries.setdefault(key, words)
    lined = any(curve.each for curves in drawn for curve in curves.values())
    for i, (name, value) in enumerate(args.baseline):
        drawn[0][i] = Curve([(0, value), (max(xs[-1] for xs in places), value)], [], [])
        entries[i] = drawable(f"{name} {value:g}", 100)

    panels, circled = [], []
    for group, curves in zip(groups, drawn):
        both = group[1:] and any(log.has("loss") for log in logs)
        label = drawable(f"loss, {NATS}" if both else axis(group[-1]), 60)
        panels.append(Panel(label, [curves.get(key, Curve([], [], [])) for key in entries], args.log_y, args.y_range))
        circled += [word(group[-1]) if group[-1] == "val_loss" else "where measured"] * any(c.marks for c in curves.values())
    lines = f"thin: each step, thick: its mean with {args.smooth} steps before and after" if args.smooth else "line: each step"
    circled = [f"circles: {what}" for what in dict.fromkeys(circled)]
    return panels, list(entries.values()), ", ".join([lines] + circled if lined else [])


def drawn_by_matplotlib(suffix, panels, entries, x_label, title, key):
    """The bytes of the same picture as draw_svg's, for what SVG is no format."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Failure(f"{suffix} needs the matplotlib package: pip install matplotlib (.svg does not)") from error

    def draw(axes, points, i, **more):
        xs, ys = zip(*[(x, float("nan") if y is None else y) for x, y in thin(points)]) if points else ((), ())
        return axes.plot(xs, ys, color=COLOURS[i % len(COLOURS)], **more)[0]

    def dashes(i):
        return "--" if i // len(COLOURS) % 2 else "-"

    with matplotlib.rc_context({"text.parse_math": False, "pdf.fonttype": 42}):  # a name is no formula; text is text
        height = 1.7 + 0.2 * len(entries) + (4 if len(panels) == 1 else 3.2 * len(panels))
        figure = Figure(figsize=(WIDTH / 100, height), layout="constrained")
        all_axes = figure.subplots(len(panels), squeeze=False)[:, 0]

        # The panels.
        for axes, panel in zip(all_axes, panels):
            for i, curve in enumerate(panel.curves):
                draw(axes, curve.each, i, linestyle=dashes(i), linewidth=0.7, alpha=0.3 if curve.average else 0.9)
                draw(axes, curve.average, i, linestyle=dashes(i), linewidth=1.5, zorder=3)
                draw(axes, curve.marks, i, linestyle=dashes(i), linewidth=0.9, marker="o", markersize=4,
                     markerfacecolor="white", zorder=4)
            axes.set_yscale("log" if panel.log_y else "linear")
            axes.minorticks_off()
            axes.set_yticks(*zip(*panel.marks()))
            axes.set(xlim=(0, 1.006 * max(p.x1 for p in panels)), ylim=(panel.y0, panel.y1), ylabel=panel.title())
            axes.grid(axis="y", color="#e6e6e6")
            axes.spines[["top", "right"]].set_visible(False)
            axes.xaxis.set_major_formatter(lambda x, _: short(x))
        all_axes[-1].set_xlabel(x_label)

        # Title, legend and key above them.
        lines = [draw(all_axes[0], [], i, linestyle=dashes(i), linewidth=2) for i in range(len(entries))]
        figure.legend(lines, entries, loc="outside upper left", frameon=False, title=title, alignment="left")
        all_axes[0].set_title(key, loc="left", fontsize=9, color="#777777")
        file = io.BytesIO()  # on a full disk its writer of PDF fails otherwise
        figure.savefig(file, format=suffix[1:], dpi=200)
        return file.getvalue()


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=pathlib.Path, metavar="RUN",
                        help="log.jsonl, or its folder")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("loss.svg"), metavar="FILE",
                        help=f"picture to write, its suffix one of {' '.join(FORMATS)} (default: loss.svg)")
    parser.add_argument("--column", nargs="+", default=["loss", "val_loss"], metavar="NAME",
                        help="columns of the log (default: loss val_loss)")
    parser.add_argument("--over", choices=("steps", "tokens", "time"), default="steps",
                        help="horizontal axis (default: steps); time: of the steps alone, without validation")
    parser.add_argument("--smooth", type=int, default=10, metavar="STEPS",
                        help="steps before and after in the mean, 0 for no mean (default: 10)")
    parser.add_argument("--baseline", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
                        help="a level line in the first panel, such as the loss of a bigram model; may be repeated")
    parser.add_argument("--log-y", action="store_true", help="logarithmic vertical axis")
    parser.add_argument("--y-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="show only these values")
    parser.add_argument("--title", type=script.text, default="")
    args = parser.parse_args()
    suffix = args.out.suffix.lower()
    if suffix not in FORMATS:
        parser.error(f"--out {args.out}: cannot write '{suffix}', only {', '.join(FORMATS)}")
    if args.smooth < 0:
        parser.error("--smooth must be at least 0")
    try:
        args.baseline = [(script.text(name), float(value)) for name, value in args.baseline]
    except ValueError as error:
        parser.error(f"--baseline: {error}")
    if None in [finite(value) for _, value in args.baseline]:
        parser.error("--baseline: VALUE must be finite")
    if args.y_range:
        low, high = args.y_range
        if None in (finite(low), finite(high)) or not high - low > 1e-9 * max(abs(low), abs(high), LEAST):
            parser.error("--y-range: LOW must be less than HIGH, by as much as can be drawn")

    # The curves.
    names, logs = zip(*read_logs(args.logs, args.column))
    places, x_label = horizontal(logs, args.over)
    panels, entries, key = picture_of(names, logs, places, args)
    picture = panels, entries, x_label, drawable(args.title, 90), key

    # The picture.
    try:
        with script.in_place(args.out) as part:
            part.write_bytes(draw_svg(*picture).encode() if suffix == ".svg" else drawn_by_matplotlib(suffix, *picture))
    except Failure as error:
        fail(f"--out {args.out}: {error}")
    except OSError as error:
        fail(f"{args.out}: cannot write it: {error.strerror}")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
