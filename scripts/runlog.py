"""Reads log.jsonl (data/runlog.h) for the scripts in this folder. Standard library only.

A log whose name ends in .xz is packed. The first line of a log is the run's configuration. One object per step follows, where null is a number that was not
finite. A number that float32 cannot hold is not finite either. An incomplete last line (of a run that goes on, or was
killed) is left out with a message. If a step is there twice, the later line counts.

Columns are the numbers of a step by name. In a list of objects, the other fields of an object name its numbers:
{"mx_stats": [{"layer": 3, "tensor": "x", "snr_db": 31.5}]} is the column mx_stats/layer3/x/snr_db. A list of numbers
has one column per layer: {"load_max": [null, 1.5]} is load_max/layer1 (and an empty load_max/layer0).
"""
import functools
import json
import lzma
import os
import pathlib
import sys


class NoLog(Exception):
    """The file is no log, or has none of the wanted columns; the message has the reason."""


def say(kind, message):
    print(f"{pathlib.Path(sys.argv[0]).name}: {kind}: {message}", file=sys.stderr)


@functools.cache  # once, however often a log is read
def warn(message):
    say("warning", message)


def fail(message):
    say("error", message)
    sys.exit(1)


def is_number(x):
    return type(x) in (int, float, type(None))


def finite(x):
    return x if type(x) in (int, float) and abs(x) < 2.0**128 else None


def columns_of(row):
    """The columns of a step: numbers, None if not finite."""
    out = {}
    for key, value in row.items():
        if is_number(value):
            out[key] = finite(value)
        for i, item in enumerate(value) if isinstance(value, list) else []:
            if is_number(item):
                out[f"{key}/layer{i}"] = finite(item)
            if not isinstance(item, dict):
                continue
            place = "/".join(f"layer{v}" if k == "layer" else v for k, v in item.items()
                             if k == "layer" or isinstance(v, str))
            out |= {f"{key}/{place}/{k}": finite(v) for k, v in item.items() if is_number(v) and k != "layer"}
    del out["step"]
    return out


def read_log(path, columns=None):
    """(configuration, {step: {column: value, None if it is not finite}}); columns: those wanted, None for all."""
    def bad(what):
        raise NoLog(f"{path} is not a log of train_moe: {what}")

    try:
        data = path.read_bytes()
        *lines, tail = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8", "replace").split("\n")
    except OSError as error:
        fail(f"{path}: cannot read it: {error.strerror}")
    except lzma.LZMAError as error:
        bad(error)
    lines += [tail] if tail else []
    if not lines:
        bad("it is empty")
    rows = {}
    for i, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if tail and 1 < i == len(lines):
                warn(f"{path}: the last line is cut short, left out")
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
        values, wanted = columns_of(row), set()
        for key in columns or ():
            inside = isinstance(row.get(key), list) and [name for name in values if name.startswith(f"{key}/")]
            if inside and any(isinstance(item, dict) for item in row[key]):
                raise NoLog(f"{path}: {key} is a list of objects; draw one of its columns, such as {inside[-1]}")
            if not inside and not is_number(row.get(key)):
                bad(f"line {i}: {key} is not a number")
            wanted.update(inside or [key])
        rows[step] = {key: value for key, value in values.items() if columns is None or key in wanted}
    return config, rows


def columns_in(paths):
    """Words for a message: the columns of logs with a finite number, of a list of objects only one."""
    found = {}
    for row in (row for path in paths for row in read_log(path)[1].values()):
        for name in (name for name, value in row.items() if value is not None):
            head, *inside = name.split("/")
            found.setdefault(head, name if len(inside) > 1 else head)
    return ", ".join(found.values()) or "none"


class Log:
    """The log of a run, from its file or the run's folder: steps, ascending, and rows, their columns. It has at least one of
    the named columns."""

    def __init__(self, path, columns=None):
        self.path, self.run = log_path(path), run_of(path)
        if os.path.isdir(path) and not os.path.lexists(self.path):
            raise NoLog(f"{path}: a folder without log.jsonl")
        self.config, rows = read_log(self.path, columns and [*columns, "ms"])
        if not rows:
            raise NoLog(f"{self.path}: the log holds no steps")
        self.steps = sorted(rows)
        self.rows = [rows[step] for step in self.steps]
        if columns and not any(self.has(column) or self.layers(column) for column in columns):
            raise NoLog(f"{self.path}: no finite {' or '.join(columns)} in this log; columns are {columns_in([self.path])}")

    def has(self, column):
        return any(row.get(column) is not None for row in self.rows)

    def layers(self, name):
        """The columns of a list with a number for each layer."""
        found = dict.fromkeys(column for row in self.rows for column in row if column.startswith(f"{name}/layer"))
        return list(filter(self.has, found))

    def column(self, name):
        """Its value at each step, None where there is none."""
        return [row.get(name) for row in self.rows]

    def seconds(self):
        """Seconds of training up to each step, without validation and checkpoints: the sum of ms. Missing earlier steps
        count like the first one."""
        out, total, before = [], 0.0, 0
        for step, ms in zip(self.steps, self.column("ms")):
            total += (step - before) * (ms or 0.0) / 1000
            before = step
            out.append(total)
        return out


def log_path(path):
    return path / "log.jsonl" if os.path.isdir(path) else path


def run_of(path):
    """The path that names a run: the folder of its log.jsonl, or a log of another name without .jsonl."""
    log = pathlib.Path(os.path.realpath(log_path(path)))
    return log.parent if log.name == "log.jsonl" else pathlib.Path(str(log).removesuffix(".xz").removesuffix(".jsonl"))


def names(runs):
    """The name of each run: the shortest end of its path that no other run has."""
    out = []
    for run in runs:
        parts = run.parts[1:] or ("run",)
        others = [other.parts for other in runs if other != run]
        count = next((n for n in range(1, len(parts)) if not any(o[-n:] == parts[-n:] for o in others)), len(parts))
        out.append(os.fsencode("/".join(parts[-count:])).decode("utf-8", "replace"))
    return out


def read_logs(paths, columns=None, read=Log, wait=False):
    """Yields (name, log) of each run. Runs without a log are left out or waited for, with a message. None left is an error."""
    reasons = []
    for path, name in zip(paths, names([run_of(path) for path in paths])):
        try:
            log = read(path, columns)
        except NoLog as error:
            reasons.append(str(error))
            continue
        yield name, log
    if len(reasons) == len(paths) and not wait:
        fail("\n".join(reasons))
    for reason in reasons:
        warn(f"{reason}; {'waiting for it' if wait else 'left out'}")
