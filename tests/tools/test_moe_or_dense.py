"""bench/moe_or_dense.py on made-up logs: python3 tests/tools/test_moe_or_dense.py (standard library only)."""
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))
sys.dont_write_bytecode = True
import moe_or_dense  # noqa: E402

# In place of the program: logs of runs whose last losses are a line over the logarithm of tokens. The validation at three
# quarters of a run is lower than its last one, so that it cannot pass for it.
PROGRAM = """#!{python}
import json, math, pathlib, sys
given = dict(zip(sys.argv[1:], sys.argv[2:]))
moe, steps, rate, seed = "--experts" in given, int(given["--steps"]), float(given["--muon-lr"]), int(given["--seed"])
end = (3.8 if moe else 4.0) - 0.5 * math.log(steps / 100) + 0.02 * (seed - 1) + 0.1 * (rate != (1e-3 if moe else 2e-3))
with open(pathlib.Path(given["--out"], "log.jsonl"), "w") as log:
    print(json.dumps(dict(vocab=257)), file=log)
    for step in range(1, steps + 1):
        val = end + (1 - 2 * step / steps if step < steps else 0)
        val = val if step % int(given["--val-every"]) == 0 or step == steps else None
        print(json.dumps(dict(step=step, ms=1200 if moe else 1000, val_loss=val)), file=log)
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

    def test_seconds_of_a_log(self):
        """They are those of all steps, where a line may stand for several, and those before a validation."""
        rows = [{"vocab": 5}, {"step": 10, "ms": 100, "val_loss": None}, {"step": 20, "ms": 50, "val_loss": 3.0}, {"step": 21, "ms": 4.0},
                {"step": 25, "ms": 1000, "val_loss": 2.5}]
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            run = moe_or_dense.Run(pathlib.Path(folder))
        self.assertEqual(run.steps, 25)
        self.assertEqual([loss for _, loss in run.points], [3.0, 2.5])
        for (seconds, _), want in zip(run.points, (1.5, 5.504)):
            self.assertAlmostEqual(seconds, want)


class Whole(unittest.TestCase):
    def test_table_and_picture(self):
        """Tokens, seconds and their share come of the ends of whole runs, with the best rate of each model."""
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "program").write_text(PROGRAM.format(python=sys.executable), "utf-8")
            (folder / "program").chmod(0o755)
            command = [sys.executable, ROOT / "bench/moe_or_dense.py", "--train", "t", "--val", "v", "--out", folder / "out", "--program",
                       folder / "program", "--tokens", "100e6", "200e6", "--seeds", "2", "1", "--rates", "1e-3", "2e-3", "--torch", "0",
                       "--batch", "1000", "--seq-len", "1000", "--validations", "4", "--gpus", "2"]
            done = subprocess.run(command, capture_output=True, encoding="utf-8")
            self.assertEqual(done.returncode, 0, done.stderr)
            again = subprocess.run(command, capture_output=True, encoding="utf-8")
            self.assertEqual((again.returncode, again.stdout, again.stderr), (0, done.stdout, ""))  # no run is repeated
            titles = re.findall(">(MoE [^<]* s)<", (folder / "out/moe_or_dense.svg").read_text("utf-8"))
        self.assertIn("MoE, 100M tokens, Muon's rate: 0.001: 3.8000, 0.002: 3.9000\n", done.stdout)
        self.assertIn("dense, 100M tokens, Muon's rate: 0.001: 4.1000, 0.002: 4.0000\n", done.stdout)

        # A MoE run that should end at the longest dense run's loss: between the means of seeds at 100M and at 200M.
        first, last, dense = 3.81, 3.8 - 0.5 * math.log(2), 4.0 - 0.5 * math.log(2)
        same = 100e6 * 2 ** ((first - dense) / (first - last))
        steps = round(same / 1e6)
        ends = 3.8 - 0.5 * math.log(steps / 100)
        # With its end too: MoE needs so many tokens, and so many seconds, 240 s for 200M.
        met = 100e6 * (same / 100e6) ** ((first - dense) / (first - ends))
        took = met / 200e6 * 240
        rows = [line for line in done.stdout.splitlines() if line.startswith(("| MoE", "| dense"))]
        self.assertEqual(rows, [
            "| MoE | 100M | 3.8000, 3.8200 | 120.0, 120.0 |  |  |  |",
            "| dense | 100M | 4.0000, 4.0200 | 100.0, 100.0 |  |  |  |",  # MoE's shortest run ends lower
            f"| MoE | {same / 1e6:.4g}M | {ends:.4f} | {1.2 * steps:.1f} |  |  |  |",
            f"| MoE | 200M | {last:.4f} | 240.0 |  |  |  |",
            f"| dense | 200M | {dense:.4f} | 200.0 | {met / 1e6:.1f}M | {took:.1f} | {took / 200:.2f} |"])

        # The picture's title: between the validations of the run with `same` tokens, where it first falls to dense's last loss.
        every = steps // 4
        points = [(1.2 * step, ends + (1 - 2 * step / steps) * (step < steps)) for step in [*range(every, steps, every), steps]]
        passes = next(s0 * (s1 / s0) ** ((l0 - dense) / (l0 - l1)) for (s0, l0), (s1, l1) in zip(points, points[1:]) if l0 > dense >= l1)
        self.assertEqual(titles, [f"MoE passes dense's last loss after {passes:.0f} s; dense needs 200 s"])


if __name__ == "__main__":
    unittest.main()
