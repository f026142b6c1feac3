#!/usr/bin/env python3
"""Plots the losses, or other columns, of one or several runs from their log.jsonl in one picture.

    python3 scripts/plot_loss.py runs/bf16 runs/mxfp8/log.jsonl --out loss.svg
    python3 scripts/plot_loss.py runs/* --column val_loss grad_norm --over time --out loss.pdf

The thin line has each step, the thick line is its moving average. Circles are columns that most steps lack, such as
the validation loss. Each column has its own panel, but val_loss is drawn with loss. Names of mx_stats columns are
like mx_stats/layer3/x/snr_db. The suffix sets the format: .svg needs only Python, .png and .pdf need matplotlib.
"""
import script
from script import Failure

import argparse
import pathlib

from chart import COLOURS, LEAST, WIDTH, Curve, Panel, draw_svg, drawable, short, thin
from runlog import fail, finite, read_logs

FORMATS = (".svg", ".png", ".pdf")
UNITS = ((7200, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))  # from this many seconds on


def smooth(values, beta):
    """Exponential moving average, divided by the sum of its weights: it starts at the first value, not near 0. A None
    stays None and does not move the average."""
    out, total, weight = [], 0.0, 0.0
    for v in values:
        if v is None:
            out.append(None)
            continue
        total, weight = beta * total + (1 - beta) * v, beta * weight + (1 - beta)
        out.append(total / weight)
    return out


def tokens(log):
    per_step = finite(log.config.get("tokens-per-step")) or 0
    if per_step <= 0:
        fail(f"{log.path}: the configuration has no tokens-per-step, which --over tokens needs")
    return [step * per_step for step in log.steps]


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


def curve_of(log, xs, group, beta):
    """The curve of a panel's columns: lines of the first, circles of another and of what most steps lack."""
    each, average, marks = [], [], []
    for column in group:
        values = log.column(column)
        if column != group[0] or 2 * sum(column in row for row in log.rows) < len(log.rows):
            marks = known(zip(xs, values))
        else:
            each, average = list(zip(xs, values)), list(zip(xs, smooth(values, beta))) if beta else []
    return Curve(each, average, marks)


def panels_of(logs, places, args):
    """Yields (columns, panel)."""
    groups = [[column] for column in dict.fromkeys(args.column)]
    if ["loss"] in groups and ["val_loss"] in groups:
        groups.remove(["val_loss"])
        groups[groups.index(["loss"])] = ["loss", "val_loss"]
    if len(groups) > 1 and args.y_range:
        fail("--y-range goes with one panel; draw one column")
    for group in groups:
        if not any(log.has(column) for log in logs for column in group):
            fail(f"no finite {group[0]} in {', '.join(str(log.path) for log in logs)}")
        curves = [curve_of(log, xs, group, args.smooth) for log, xs in zip(logs, places)]
        label = drawable(group[0] if any(c.each for c in curves) else group[-1], 60)
        yield group, Panel(label, curves, args.log_y, args.y_range)


def entry(name, group, curve):
    """A run in the legend: its name, and where its curve ends."""
    ends = [(group[0], known(curve.average or curve.each)), (group[-1], curve.marks)]
    numbers = [f"{column} {short(float(f'{points[-1][1]:.4g}'))}" for column, points in ends if points]
    return drawable(f"{name} ({', '.join(numbers)})" if numbers else name, 100)


def key_of(panels, beta):
    """The key: kinds of lines and their meaning."""
    curves = [curve for panel in panels for curve in panel.curves]
    lines = f"thin: each step, thick: moving average ({beta:g})" if beta else "line: each step"
    return ", ".join([lines] * any(c.each for c in curves) + ["circles: where measured"] * any(c.marks for c in curves))


def save_by_matplotlib(path, suffix, panels, entries, x_label, title, key):
    """The same picture as draw_svg's, for what SVG is no format."""
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
            axes.set(xlim=(0, max(p.x1 for p in panels)), ylim=(panel.y0, panel.y1), ylabel=panel.title())
            axes.grid(axis="y", color="#e6e6e6")
            axes.spines[["top", "right"]].set_visible(False)
            axes.xaxis.set_major_formatter(lambda x, _: short(x))
        all_axes[-1].set_xlabel(x_label)

        # Title, legend and key above them.
        lines = [draw(all_axes[0], [], i, linestyle=dashes(i), linewidth=2) for i in range(len(entries))]
        figure.legend(lines, entries, loc="outside upper left", frameon=False, title=title, alignment="left")
        all_axes[0].set_title(key, loc="left", fontsize=9, color="#777777")
        figure.savefig(path, format=suffix[1:], dpi=200)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=pathlib.Path, metavar="RUN",
                        help="log.jsonl, or its folder")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("loss.svg"), metavar="FILE",
                        help=f"picture to write, its suffix one of {' '.join(FORMATS)} (default: loss.svg)")
    parser.add_argument("--column", nargs="+", default=["loss", "val_loss"], metavar="NAME",
                        help="columns of the log (default: loss val_loss)")
    parser.add_argument("--over", choices=("steps", "tokens", "time"), default="steps",
                        help="horizontal axis (default: steps); time: of the steps alone, without validation")
    parser.add_argument("--smooth", type=float, default=0.9,
                        help="weight of the past in the moving average, 0 for none (default: 0.9)")
    parser.add_argument("--log-y", action="store_true", help="logarithmic vertical axis")
    parser.add_argument("--y-range", type=float, nargs=2, metavar=("LOW", "HIGH"), help="show only these values")
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    suffix = args.out.suffix.lower()
    if suffix not in FORMATS:
        parser.error(f"--out {args.out}: cannot write '{suffix}', only {', '.join(FORMATS)}")
    if not 0 <= args.smooth < 1:
        parser.error("--smooth must be in [0, 1)")
    if args.y_range:
        low, high = args.y_range
        if None in (finite(low), finite(high)) or not high - low > 1e-9 * max(abs(low), abs(high), LEAST):
            parser.error("--y-range: LOW must be less than HIGH, by as much as can be drawn")

    # The curves.
    names, logs = zip(*read_logs(args.logs, args.column))
    places, x_label = horizontal(logs, args.over)
    groups, panels = zip(*panels_of(logs, places, args))
    entries = [entry(name, groups[0], curve) for name, curve in zip(names, panels[0].curves)]
    picture = panels, entries, x_label, drawable(args.title, 90), key_of(panels, args.smooth)

    # The picture.
    try:
        with script.in_place(args.out) as part:
            if suffix == ".svg":
                part.write_text(draw_svg(*picture), encoding="utf-8")
            else:
                save_by_matplotlib(part, suffix, *picture)
    except Failure as error:
        fail(f"--out {args.out}: {error}")
    except OSError as error:
        fail(f"{args.out}: cannot write it: {error.strerror}")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
