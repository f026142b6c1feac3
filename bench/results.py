#!/usr/bin/env python3
"""Writes the pages of measured results from bench/results.jsonl: python3 bench/results.py [--check]

A line of results.jsonl is one measurement:

    id         its name: no two lines have the same
    date       of the run; null for a check that every `make test` repeats
    commit     of the program, null where it is unknown
    card       H200, H100, "4x H200", "CPU: ..."
    command    without the program's path, --train and --val; behind a semicolon are the data and how runs alternate
    metric     "what, unit"
    value      the number; of several seeds the first one's
    spread     null, or the numbers of the other runs; null in runs: the ends of a range
    runs       how many runs there were, null where that is unknown
    yardstick  null, or {"what", "value"}: the same metric of something else, by which the value is judged
    section    the heading of its table; null: a former version or an older run
    label      its row there
    log        the run's log.jsonl or a part of it, in bench/, packed by xz, without host and folders; a line without this key has none

A page is its text in bench/parts, where {table} is the table of all lines whose section is the heading above it. A section without
such a heading is in results.jsonl alone. In parts/RESULTS.md the last cell of a row is the id of a line. It becomes that line's
number, spread, yardstick, page and log. --check writes nothing and fails where a page is not up to date.
"""
import argparse
import decimal
import json
import os
import pathlib
import re
import sys

BENCH = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH.parent / "scripts"))
import least_python  # noqa: E402,F401


def load():
    """The lines of results.jsonl. Numbers keep their digits."""
    return [json.loads(line, parse_float=decimal.Decimal) for line in (BENCH / "results.jsonl").read_text("utf-8").splitlines()]


def pages_of(parts):
    """The page of each section that has a table."""
    return {section: name for name, part in parts.items()
            for section in re.findall(r"^## (.*)\n(?:(?!## ).*\n)*?\{table\}$", part, re.M)}


def show(number):
    return f"{number:e}" if 0 < abs(number) < decimal.Decimal("0.001") else f"{number:,}"


def spread_of(line):
    return ", ".join(map(show, line["spread"] or []))


def yardstick_of(line, what=True):
    return show(line["yardstick"]["value"]) + f": {line['yardstick']['what']}" * what if line["yardstick"] else ""


def place(line):
    return ", ".join(filter(None, (line["card"], line["date"])))


def anchor(section):
    return re.sub(r"[^\w\- ]", "", section.lower()).replace(" ", "-")


def cells(*values):
    return "| " + " | ".join(values) + " |"


def shared(texts):
    """The commands' text with "..." where they differ, then what each has there. An option stays with its value."""
    texts = [re.findall(r";|--[\w-]+ [^\s;-][^\s;]*|[^\s;]+", text) for text in texts]
    begin = os.path.commonprefix(texts)
    rests = [text[len(begin):] for text in texts]
    end = os.path.commonprefix([rest[::-1] for rest in rests])[::-1]
    rests = [rest[:len(rest) - len(end)] for rest in rests]
    return [" ".join(words).replace(" ;", ";") for words in (begin + ["..."] * any(rests) + end, *rests)]


def table(lines):
    """The line of what the runs share; a row for each label and run, a column for each metric, for its yardstick and for the run."""
    rows, columns = {}, {}  # the lines of a label and run, a metric's yardsticks
    for line in lines:
        rows.setdefault((line["label"], place(line), line["command"]), {})[line["metric"]] = line
        columns.setdefault(line["metric"], {}).update({line["yardstick"]["what"]: None} if line["yardstick"] else {})
    command, *rests = shared([command for _, _, command in rows])
    places = {where for _, where, _ in rows}
    above = [*places] * (len(places) == 1) + [f"`{command}`"] * (command != "...")
    runs = [": ".join([where] * (len(places) > 1) + [f"`{rest}`"] * bool(rest)) for (_, where, _), rest in zip(rows, rests)]
    head = ["what"]
    for metric, whats in columns.items():
        head += [metric] + ["yardstick" if len(whats) > 1 else what for what in list(whats)[:1]]
    head += ["run"] * any(runs)
    out = [f"Run: {': '.join(above)}"] * bool(above) + ["", cells(*head), "|" + "---|" * len(head)]
    for ((label, *_), found), run in zip(rows.items(), runs):
        row = [label]
        for metric, whats in columns.items():
            line = found.get(metric)
            row.append(show(line["value"]) + f" ({spread_of(line)})" * bool(line["spread"]) if line else "")
            if whats:
                row.append(yardstick_of(line, len(whats) > 1) if line else "")
        out.append(cells(*row, *[run] * any(runs)))
    return "\n".join(out)


def claim(text, line, pages):
    unit = line["metric"].rpartition(", ")[2]
    page = pages.get(line["section"]) or sys.exit(f"parts/RESULTS.md: no page has {line['id']}: {line['section']}")
    where = f"[{place({**line, 'card': line['card'].partition(':')[0]})}]({page}.md#{anchor(line['section'])})"
    log = f"[log]({line['log']})" if "log" in line else "none"
    return cells(text, f"{show(line['value'])} {unit}", spread_of(line), yardstick_of(line), where, log)


def page(name, part, pages, lines):
    ids = {line["id"]: line for line in lines}
    out, heading = [f"<!-- Made by bench/results.py of results.jsonl and parts/{name}.md: edit those. -->"], None
    for text in part.splitlines():
        heading = text[3:] if text.startswith("## ") else heading
        row = re.match(r"\| (.*) \| (\S+/\S+) \|$", text)
        if text == "{table}":
            text = table([line for line in lines if line["section"] == heading]
                         or sys.exit(f"parts/{name}.md: results.jsonl has no section {heading}"))
        elif row:
            text = claim(row[1], ids.get(row[2]) or sys.exit(f"parts/{name}.md: results.jsonl has no {row[2]}"), pages)
        out.append(text)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)) + "\n"


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, lines = parser.parse_args().check, load()
    parts = {path.stem: path.read_text("utf-8") for path in (BENCH / "parts").glob("*.md")}
    for name, part in parts.items():
        path, text = BENCH / f"{name}.md", page(name, part, pages_of(parts), lines)
        if not check:
            path.write_text(text, "utf-8")
        elif path.read_text("utf-8") != text:
            sys.exit(f"bench/{name}.md is not up to date: run python3 bench/results.py")


if __name__ == "__main__":
    main()
