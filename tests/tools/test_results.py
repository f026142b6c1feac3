"""bench/results.jsonl, the pages made of it, and the pages that quote it: python3 tests/tools/test_results.py"""
import datetime
import decimal
import json
import pathlib
import re
import shlex
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "bench")]
import results  # noqa: E402
from runlog import read_log  # noqa: E402

KEYS = ["id", "date", "commit", "card", "command", "metric", "value", "spread", "runs", "yardstick", "section", "label"]
LINK = r"\]\((?:\.\./)?bench/(RESULTS|h200|h100|cpu)\.md#?([\w-]*)\)"
PAGES = results.pages_of({path.stem: path.read_text("utf-8") for path in (ROOT / "bench/parts").glob("*.md")})  # of sections
NUMBER = r"(?<![\w.^-])\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?(?![\w^]|\.\d|,\d{3}| steps)"


def lines():
    return [json.loads(line, parse_float=decimal.Decimal, parse_int=decimal.Decimal)
            for line in (ROOT / "bench/results.jsonl").read_text("utf-8").splitlines()]


def linked(line, links):
    """Whether one of the links (page, anchor) shows a line. RESULTS.md links to all pages."""
    page = PAGES.get(line["section"])
    return page and any(there == "RESULTS" or there == page and anchor in ("", results.anchor(line["section"])) for there, anchor in links)


def quotes(text):
    """(sentence or row, number, links) of a page's sentences with a link to the results, and of the tables next to their
    paragraphs.

    A row's first cell, code, dates and counts of steps are not measured. Numbers of one digit, and integers in sentences,
    are left out: they count seeds, tokens and GPUs."""
    blocks = [block for block in re.split(r"\n\s*\n", text) if not block.startswith("![")]
    for i, block in enumerate(blocks):
        if not re.search(LINK, block):
            continue
        said = re.split(r"(?<=[.!?:])\s+", " ".join(block.split()))
        tables = [row for near in blocks[max(0, i - 1):i + 2] if near.startswith("|") for row in near.splitlines()[2:]]
        for sentence in [s for s in said if re.search(LINK, s)] + tables:
            plain = re.sub(r"^\|[^|]*\|", "|", sentence)
            plain = re.sub(r"`[^`]*`|\d{4}-\d\d-\d\d|\]\([^)]*\)", " ", plain)
            for number in re.findall(NUMBER, plain):
                if len(number) > 1 and (sentence in tables or "." in number):
                    yield sentence, number, re.findall(LINK, block)


class Lines(unittest.TestCase):
    def test_fields(self):
        number = decimal.Decimal
        seen = set()
        for line in lines():
            with self.subTest(line.get("id")):
                self.assertEqual(list(line), KEYS + ["log"] * ("log" in line))
                self.assertNotIn(line["id"], seen)
                seen.add(line["id"])
                for key in "id", "card", "command", "label":
                    self.assertRegex(line[key], r"\S")
                self.assertRegex(line["id"], r"^[a-z0-9./-]+/[a-z0-9./-]+$")  # a claim's last cell
                self.assertRegex(line["card"], r"^(\dx )?H[12]00$|^CPU")
                self.assertRegex(line["metric"], r"^\S.*, \S")
                self.assertNotIn("|", "".join(line[key] for key in ("card", "command", "metric", "label")))  # a table's cells
                if line["date"] is not None:
                    datetime.date.fromisoformat(line["date"])
                for key in "commit", "section":
                    self.assertTrue(line[key] is None or line[key].strip())
                self.assertIsInstance(line["value"], number)
                self.assertTrue(line["spread"] is None or line["spread"] and all(isinstance(v, number) for v in line["spread"]))
                self.assertTrue(line["runs"] is None or line["runs"] >= 1)
                if line["yardstick"] is not None:
                    self.assertEqual(list(line["yardstick"]), ["what", "value"])
                    self.assertRegex(line["yardstick"]["what"], r"\S")
                    self.assertIsInstance(line["yardstick"]["value"], number)
        self.assertGreater(len(seen), 500)

    def test_logs(self):
        """Each log in bench/logs is that of a line, with the line's model, and the scripts read it."""
        logs = {}
        for line in lines():
            if "log" in line:
                logs.setdefault(line["log"], []).append(line)
        self.assertEqual(sorted(logs), sorted(f"logs/{path.name}" for path in (ROOT / "bench/logs").iterdir()))
        for name, said in logs.items():
            config, steps = read_log(ROOT / "bench" / name)
            self.assertTrue(name.endswith(".jsonl.xz") and steps, name)
            for line in said:
                for option in "model", "steps", "batch", "experts", "precision", "seed":
                    for value in re.findall(rf"--{option} (\S+)", line["command"].split(";")[0]):
                        self.assertEqual(str(config[option]), value, f"{line['id']}: --{option}")

    def test_pages(self):
        """The pages are up to date, and show every line of a section that has a page."""
        done = subprocess.run([sys.executable, ROOT / "bench/results.py", "--check"], capture_output=True, encoding="utf-8")
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in lines():
            if line["section"] in PAGES:
                rows = [row for row in (ROOT / f"bench/{PAGES[line['section']]}.md").read_text("utf-8").splitlines()
                        if row.startswith(f"| {line['label']} |")]
                values = [re.sub(r" \(.*|,", "", cell) for row in rows for cell in row[:-2].split(" | ")[1:]]
                self.assertIn(line["value"], [decimal.Decimal(v) for v in values if re.fullmatch(r"-?[\d.]+(e-\d+)?", v)], line["id"])


    def test_shared_commands(self):
        """The command above a table is a run's command, where the words of the run's cell replace the three dots."""
        def plain(text):
            return re.sub(r"\s+", " ", text).replace(" ;", ";").strip()

        self.assertEqual(results.shared(["--steps 9 --seed 1; C code", "--steps 9 --seed 2; C code"]), ["--steps 9 ...; C code", "--seed 1", "--seed 2"])
        commands = {}
        for line in lines():
            commands.setdefault(line["section"], []).append(line["command"])
        for section in PAGES:
            above, *rests = results.shared(commands[section])
            for command, rest in zip(commands[section], rests):
                self.assertEqual(plain(above.replace("...", rest)), plain(command), section)

    def test_other_lines(self):
        """The command of RESULTS.md prints the lines that no page has."""
        command, word = re.search(r'`(grep "([^"]+)" bench/results.jsonl)`', (ROOT / "bench/RESULTS.md").read_text("utf-8")).groups()
        found = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout.splitlines()
        self.assertEqual(len(found), sum(line["section"] == word for line in lines()))
        self.assertNotIn(word, PAGES)


class Quotes(unittest.TestCase):
    def test_quoted_numbers_are_measured(self):
        """A number that a page quotes is where its link points to, or it is such a number rounded."""
        measured = lines()
        found = {page.name: list(quotes(page.read_text("utf-8"))) for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
        wrong = []
        for name, quoted in found.items():
            for where, text, links in quoted:
                number = decimal.Decimal(text.replace(",", ""))
                half = decimal.Decimal(5).scaleb(number.as_tuple().exponent - 1)
                there = [n for line in measured if linked(line, links) for n in
                         [line["value"], *(line["spread"] or []), *([line["yardstick"]["value"]] if line["yardstick"] else [])]]
                if not any(abs(number - abs(n)) <= half for n in there):
                    wrong.append(f"{name}: {text} in {where}")
        self.assertEqual(wrong, [])
        for name, least in ("README.md", 12), ("precision.md", 25), ("model.md", 8), ("cuda.md", 4), ("log.md", 6):
            self.assertGreaterEqual(len(found[name]), least, name)


if __name__ == "__main__":
    unittest.main()
