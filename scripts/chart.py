"""Draws the curves of runs over a common axis, in panels one below another, as SVG. Standard library only, so that
pictures need no packages.
"""
import math
import re
from collections import namedtuple
from itertools import groupby
from xml.sax.saxutils import escape

from runlog import fail

# Okabe and Ito's palette, which colour-blind readers can tell apart; yellow is left out, it vanishes on white.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"]
WIDTH = 960
LEFT, RIGHT, BOTTOM = 84, 24, 58
COLUMNS = 600  # a line is drawn with at most this many steps' worth of detail
LEAST = 1e-12  # a logarithmic axis begins no lower
NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that no XML may hold

# A run in a panel. A thin line, a thick line and circles are lists of (x, y), y None for a gap. A band behind them is a
# list of (x, low, high), both None for a gap.
Curve = namedtuple("Curve", "each average marks band", defaults=[()])


class Panel:
    """A vertical axis and a curve for each run. Its range covers the values `shown`, or else all finite values. Curves are
    clipped to it."""

    def __init__(self, label, curves, log_y=False, y_range=None, shown=None):
        self.label, self.curves, self.log_y = label, curves, log_y
        points = [point for curve in curves for line in curve for point in line]
        ys = shown or [y for _, *ys in points for y in ys if y is not None]
        self.x1 = max([1] + [point[0] for point in points])
        self.y0, self.y1 = y_range or (min(ys), max(ys))
        if log_y and self.y0 < LEAST:
            fail(f"--log-y: {label} must be at least {LEAST:g}, and goes down to {self.y0:g}; give a higher --y-range")
        if y_range:
            return
        if log_y:
            pad = max(1.02, (self.y1 / self.y0) ** 0.04)
            self.y0, self.y1 = self.y0 / pad, self.y1 * pad
        else:
            pad = max(0.04 * (self.y1 - self.y0), 1e-3 * abs(self.y1)) or 1  # a flat curve has no range
            self.y0, self.y1 = self.y0 - pad, self.y1 + pad

    def marks(self):
        """Round numbers along the axis, with their labels."""
        marks = log_ticks(self.y0, self.y1) if self.log_y else ticks(self.y0, self.y1, 7)
        if max(map(abs, marks), default=0) >= 1e4:
            return [(v, short(v)) for v in marks]
        decimals = max((len(f"{v:.6g}".partition(".")[2]) for v in marks), default=0)
        return [(v, f"{v:.{decimals}f}") for v in marks]

    def title(self):
        return self.label + (" (log scale)" if self.log_y else "")


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


def short(x):
    """4000 -> 4k, 2.5e9 -> 2.5B"""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= unit:
            return f"{x / unit:.6g}{suffix}"
    return f"{x:.6g}"


def text_width(text, size):
    return 0.54 * size * len(text)  # sans-serif, a little wide, so that entries never touch


def drawable(text, most):
    """At most `most` characters; those that no font or XML has become replacement characters."""
    return NOT_XML.sub(chr(0xFFFD), text if len(text) <= most else text[:most - 1] + "…")


def legend_rows(entries):
    """Break the entries into rows above the plot, as (run, x) pairs: there they cannot cover a curve."""
    rows, x = [[]], LEFT
    for i, entry in enumerate(entries):
        width = 34 + text_width(entry, 13) + 22
        if rows[-1] and x + width > WIDTH - RIGHT:
            rows.append([])
            x = LEFT
        rows[-1].append((i, x))
        x += width
    return rows


def style(i):
    """The stroke of run i; dashed once the colours are used up."""
    dash = ' stroke-dasharray="8 5"' if i // len(COLOURS) % 2 else ""
    return f'stroke="{COLOURS[i % len(COLOURS)]}"{dash}'


def text(x, y, text, size=13, anchor="start", colour="#333", extra=""):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{extra}>'
            f'{escape(text)}</text>')


class SvgPanel:
    """A panel in the picture's coordinates, from `top` to `bottom`."""

    def __init__(self, panel, x0, x1, top, bottom):
        self.panel, self.x0, self.x1, self.top, self.bottom = panel, x0, x1, top, bottom

    def x(self, v):
        return LEFT + (v - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, v):
        f = (lambda v: math.log(max(v, LEAST))) if self.panel.log_y else float
        low, high = f(self.panel.y0), f(self.panel.y1)
        return self.bottom - (f(v) - low) / (high - low) * (self.bottom - self.top)

    def axes(self):
        right, middle = WIDTH - RIGHT, (self.top + self.bottom) / 2
        for v, name in self.panel.marks():
            yield f'<line x1="{LEFT}" x2="{right}" y1="{self.y(v):.1f}" y2="{self.y(v):.1f}" stroke="#e6e6e6"/>'
            yield text(LEFT - 8, self.y(v) + 4.5, name, anchor="end")
        for v in ticks(self.x0, self.x1, 8):
            at = f"{self.x(v):.1f}"
            yield f'<line x1="{at}" x2="{at}" y1="{self.bottom}" y2="{self.bottom + 5}" stroke="#888"/>'
            yield text(self.x(v), self.bottom + 20, short(v), anchor="middle")
        yield f'<path d="M{LEFT} {self.top}V{self.bottom}H{right}" fill="none" stroke="#888"/>'
        yield text(14, middle, self.panel.title(), 14, "middle", extra=f' transform="rotate(-90 14 {middle:.1f})"')

    def line(self, points, style, width, opacity):
        """A path with a gap where the value is None; a lone point between gaps becomes a dot by its round cap."""
        path, pen_down = [], False
        for x, v in thin(points):
            if v is None:
                pen_down = False
                continue
            at = f"{self.x(x):.1f} {self.y(v):.1f}"
            path.append(f"L{at}" if pen_down else f"M{at}h0")
            pen_down = True
        if path:
            yield (f'<path d="{"".join(path)}" fill="none" {style} stroke-width="{width}" '
                   f'stroke-opacity="{opacity}" stroke-linejoin="round" stroke-linecap="round"/>')

    def area(self, band, colour):
        """A polygon for each stretch of the band without a gap."""
        for known, part in groupby(band, key=lambda p: p[1] is not None):
            if known:
                low, high = zip(*[((x, low), (x, high)) for x, low, high in part])
                edge = [f"{self.x(x):.1f},{self.y(v):.1f}" for x, v in thin(low) + thin(high)[::-1]]
                yield f'<polygon points="{" ".join(edge)}" fill="{colour}" fill-opacity="0.18"/>'

    def curves(self):
        """From back to front: all bands, all thin lines, all thick lines, all circles."""
        curves = self.panel.curves
        for i, curve in enumerate(curves):
            yield from self.area(curve.band, COLOURS[i % len(COLOURS)])
        for i, curve in enumerate(curves):
            yield from self.line(curve.each, style(i), 1, 0.3 if curve.average else 0.9)
        for i, curve in enumerate(curves):
            yield from self.line(curve.average, style(i), 2, 1)
        for i, curve in enumerate(curves):
            yield from self.line(curve.marks, style(i), 1.2, 0.8)
            for x, v in [mark for mark in curve.marks if mark[1] is not None]:
                yield (f'<circle cx="{self.x(x):.1f}" cy="{self.y(v):.1f}" r="3.5" fill="#fff" '
                       f'stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="1.6"/>')


def draw_svg(panels, entries, x_label, title="", key="", x0=0):
    """The picture as text, from x0 on; entries name the runs, title and key may be empty."""
    # Above the panels: title, legend, key.
    head = [text(LEFT, 30, title, 18, colour="#111", extra=' font-weight="bold"')] if title else []
    y = 46 if title else 18
    for row in legend_rows(entries):
        for i, x in row:
            head.append(f'<line x1="{x}" x2="{x + 26}" y1="{y}" y2="{y}" {style(i)} stroke-width="3"/>')
            head.append(text(x + 34, y + 4.5, entries[i]))
        y += 22
    if key:
        head.append(text(LEFT, y + 3, key, 12, colour="#777"))
        y += 26

    # The panels.
    body, x1, tall = [], max(panel.x1 for panel in panels), 410 if len(panels) == 1 else 320
    for i, panel in enumerate(panels):
        drawn = SvgPanel(panel, x0, x1, y, y + tall)
        left = LEFT if x0 else LEFT - 5  # a circle at 0 is whole
        body.append(f'<clipPath id="plot{i}"><rect x="{left}" y="{y}" width="{WIDTH - left - RIGHT + 5}" '
                    f'height="{tall}"/></clipPath>')
        body += [*drawn.axes(), f'<g clip-path="url(#plot{i})">', *drawn.curves(), "</g>"]
        y += tall + BOTTOM
    body.append(text((LEFT + WIDTH - RIGHT) / 2, y - 14, x_label, 14, "middle"))

    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
                      f'viewBox="0 0 {WIDTH} {y}" font-family="Helvetica, Arial, sans-serif">',
                      f'<rect width="{WIDTH}" height="{y}" fill="#fff"/>', *body, *head, "</svg>"]) + "\n"
