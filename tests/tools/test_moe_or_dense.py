"""bench/moe_or_dense.py on made-up logs: python3 tests/tools/test_moe_or_dense.py (standard library only)."""
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))
sys.dont_write_bytecode = True
import moe_or_dense  # noqa: E402

# In place of the program: logs of runs whose last losses are a line over the logarithm of seconds, with steps of a second for dense and
# two for MoE. A run of as many steps as SLOW says waits for SIGTERM after one.
PROGRAM = """#!{python}
import json, math, pathlib, signal, sys
given = dict(zip(sys.argv[1:], sys.argv[2:]))
moe, steps, seed, here = "--experts" in given, int(given["--steps"]), int(given.get("--seed", 1)), pathlib.Path(__file__).parent
seconds = steps * (2 if moe else 1)
end = (3.8 if moe else 4.0) - 0.5 * math.log(seconds / 100) + 0.02 * (seed - 1) * (-1 if moe else 1)
slow, log = int((here / "SLOW").read_text()), pathlib.Path(given["--out"], "log.jsonl")
assert "--resume" in sys.argv
rows = log.read_text().split("\\n")[:-1] if log.exists() else [json.dumps(dict(device=(here / "card").read_text() + ", 132 SMs"))]
for step in range(len(rows), steps + 1):
    validation = dict(val_loss=None if "--diverges" in given else end) if step == int(given["--val-every"]) else dict()
    rows.append(json.dumps(dict(step=step, ms=2000 if moe else 1000, **validation)))
    if steps == slow:
        log.write_text("\\n".join(rows) + "\\n")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.pause()
log.write_text("\\n".join(rows) + "\\n")
pathlib.Path(given["--out"], "step_00000001").mkdir(exist_ok=True)
"""


class Parts(unittest.TestCase):
    def test_place_of_the_first_crossing(self):
        """Over the logarithm of the places, between the two around it; the first of several; none where there is none."""
        losses = {1.0: 4.0, 100.0: 2.0, 200.0: 3.0, 400.0: 1.0}
        self.assertAlmostEqual(moe_or_dense.place_of(3.0, losses), 10.0)
        self.assertAlmostEqual(moe_or_dense.place_of(3.5, losses), 10**0.5)
        self.assertAlmostEqual(moe_or_dense.place_of(2.0, losses), 100.0)
        self.assertAlmostEqual(moe_or_dense.place_of(1.5, losses), 200.0 * 2**0.75)
        self.assertAlmostEqual(moe_or_dense.place_of(3.0, dict(reversed(losses.items()))), 10.0)
        for loss in (4.0, 4.5, 0.5):  # there at once, or never
            self.assertIsNone(moe_or_dense.place_of(loss, losses), loss)
        self.assertIsNone(moe_or_dense.place_of(3.0, {1.0: 4.0}))

    def test_frontier(self):
        """The mean over seeds; of each length the options with the lowest mean, not those with the lowest seed or the lowest highest seed."""
        runs = [dict(model=model, options=options, length=length, seconds=seconds, loss=loss) for model, options, length, seconds, loss in (
            ("dense", "--dim 640", 800, 802, 2.0), ("dense", "--dim 512", 800, 801, 2.2), ("dense", "--dim 640", 100, 100, 2.39), ("MoE", "", 100, 50, 1.0),
            ("dense", "--dim 512", 100, 99, 2.4), ("dense", "--dim 512", 100, 101, 2.5), ("dense", "--dim 640", 100, 100, 2.55),
            ("dense", "--dim 384", 100, 100, 2.46), ("dense", "--dim 768", 800, 803, 2.1))]
        points = [tuple(round(value, 9) for value in point) for point in moe_or_dense.frontier(runs, "dense")]
        self.assertEqual(points, [(100, 2.45, 2.4, 2.5), (802, 2.0, 2.0, 2.0)])

    def test_between(self):
        """A line is straight over the logarithm of seconds: 200 s are half of the way from 100 to 400."""
        a, b, c = moe_or_dense.Point(100, 4, 3, 5), moe_or_dense.Point(400, 2, 1, 4), moe_or_dense.Point(900, 1, 1, 1)
        line = moe_or_dense.between([a, b, c])
        self.assertEqual((len(line), line[0], line[20], line[-1]), (41, a, b, c))
        self.assertEqual(tuple(round(value, 9) for value in line[10]), (200, 3, 2, 4.5))
        self.assertEqual(moe_or_dense.between([a]), [a])


class Whole(unittest.TestCase):
    def test_figure_of_the_record(self):
        """bench/moe_or_dense.svg is drawn from bench/worth.jsonl."""
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, ROOT / "bench/moe_or_dense.py", "--out", folder, "--runs", ROOT / "bench/worth.jsonl"], check=True,
                           stdout=subprocess.DEVNULL)
            self.assertEqual(pathlib.Path(folder, "moe_or_dense.svg").read_text("utf-8"), (ROOT / "bench/moe_or_dense.svg").read_text("utf-8"))

    def test_table_and_picture(self):
        """The share comes of whole runs of several lengths; runs that --stop-after ends go on, and no finished run is repeated."""
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "program").write_text(PROGRAM.format(python=sys.executable), "utf-8")
            (folder / "program").chmod(0o755)
            (folder / "card").write_text("H200", "utf-8")

            def race(slow, *more):
                (folder / "SLOW").write_text(str(slow), "utf-8")
                return subprocess.run([sys.executable, ROOT / "bench/moe_or_dense.py", "--train", "t", "--val", "v", "--out", folder / "out", "--program",
                                       folder / "program", "--dense", "--lr 1", "--moe", "--experts 64", "--dense-seconds", "400", "100", "--moe-seconds",
                                       "50", "100", "200", "--seeds", "2", "--gpus", "3", *more], capture_output=True, encoding="utf-8")

            done = race(400, "--stop-after", "5")
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("--stop-after has passed; the same command goes on", done.stderr)
            first, = folder.glob("out/dense-*/400-s-seed-2/log.jsonl")
            log = first.read_text("utf-8").splitlines()
            self.assertEqual(len(log), 2)  # the configuration and the first step
            done = race(0)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(first.read_text("utf-8").splitlines()[:2], log)
            again = race(25, "--stop-after", "0")
            self.assertEqual((again.returncode, again.stdout, again.stderr), (0, done.stdout, ""))
            picture = (folder / "out/moe_or_dense.svg").read_text("utf-8")
            self.assertEqual(list(folder.glob("out/*/*/step_*")), [])
            diverged = race(0, "--dense", "--diverges 1")  # no finished run of other options is taken for these
            self.assertEqual(diverged.returncode, 1)
            self.assertRegex(diverged.stderr, r"^[^\n]+dense-[^\n]+: the last loss is not finite; try a lower learning rate\n$")
            none = subprocess.run([sys.executable, ROOT / "bench/moe_or_dense.py", "--out", folder], capture_output=True, encoding="utf-8")
            self.assertEqual(none.returncode, 2)
            self.assertIn(f"error: {folder}/runs.jsonl: no runs; give --dense and --moe\n", none.stderr)
            # A run that the record does not have goes on, also after a line that was cut short, and a run on another card is no part of it.
            record, (last,) = folder / "out/runs.jsonl", folder.glob("out/MoE-*/50-s-seed-1/log.jsonl")
            others = [line for line in record.read_text("utf-8").splitlines(True) if '"length": 50.0, "seed": 1,' not in line]
            self.assertEqual(len(others), 9)
            for card, code in ("H200", 0), ("H100", 1):
                record.write_text("".join(others), "utf-8")
                last.write_text(json.dumps(dict(device=f"{card}, 132 SMs")) + '\n{"step": 1, "m', "utf-8")
                self.assertEqual(race(0).returncode, code)
            self.assertIn("their seconds do not compare", race(0).stderr)
            record.write_text("".join(others[:1] + [others[1].replace("H200", "H100")]), "utf-8")
            self.assertIn("runs.jsonl: a run is on H100, and others are on H200", race(0, "--out", folder / "new", "--runs", record).stderr)
        rows = [line for line in done.stdout.splitlines() if line.startswith(("| MoE", "| dense |"))]
        after = 4.01 - 0.5 * math.log(4)
        self.assertEqual(rows, [*(f"| MoE | {s:.1f} | {loss:.4f} | {loss - 0.01:.4f}, {loss + 0.01:.4f} |"
                                  for s in (50, 100, 200) for loss in [3.79 - 0.5 * math.log(s / 100)]),
                                "| dense | 100.0 | 4.0100 | 4.0000, 4.0200 |", f"| dense | 400.0 | {after:.4f} | {after - 0.01:.4f}, {after + 0.01:.4f} |"])
        # MoE has loss L after 100 exp(2 (3.8 - L)) seconds with its highest seed, 3.78 with its lowest; means 3.79 and 4.01: e^-0.44 of dense's
        # 100 s. e^-0.48 and e^-0.4 are also between 50 and 100 s. Those for 400 s are all beyond 200 s, so the longest MoE run is too short.
        self.assertIn(f"\n| 100.0 | 4.0100 | {math.exp(-0.44):.2f} | {math.exp(-0.48):.2f}, {math.exp(-0.4):.2f} |\n", done.stdout)
        self.assertIn(f"\n| 400.0 | {after:.4f} | none | none, none |\n", done.stdout)
        self.assertEqual(picture.count("<circle"), 5)


if __name__ == "__main__":
    unittest.main()
