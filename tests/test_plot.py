"""scripts/plot_loss.py: python3 tests/test_plot.py (standard library only)."""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "plot_loss.py"
SVG = "{http://www.w3.org/2000/svg}"


class PlotLoss(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.dir = pathlib.Path(self.folder.name)

    def log(self, name, rows, config={"model": "tiny", "tokens-per-step": 4096}, tail=""):
        path = self.dir / name / "log.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in [config] + rows) + tail)
        return path

    def rows(self, n, start=1, val_every=0):
        out = [{"step": s, "loss": 5.0 / s + 1, "lr": 1e-3} for s in range(start, start + n)]
        for row in out:
            if val_every and row["step"] % val_every == 0:
                row["val_loss"] = row["loss"] + 0.1
        return out

    def run_script(self, *args):
        command = [sys.executable, str(SCRIPT), *map(str, args)]
        return subprocess.run(command, cwd=self.dir, capture_output=True, text=True)

    def plot(self, *args):
        """Plot, parse, and return (root, texts, circles, paths that are drawn as curves)."""
        out = self.dir / "out.svg"
        done = self.run_script(*args, "--out", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("nan", out.read_text())
        self.note = done.stderr
        root = ET.parse(out).getroot()
        curves = [p.get("d") for g in root.iter(SVG + "g") for p in g.iter(SVG + "path")]
        return root, [t.text for t in root.iter(SVG + "text")], list(root.iter(SVG + "circle")), curves

    def fails(self, *args, names, says):
        done = self.run_script(*args, "--out", self.dir / "out.svg")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(str(names), done.stderr)
        self.assertIn(says, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertFalse((self.dir / "out.svg").exists())

    def test_one_run(self):
        root, texts, circles, curves = self.plot(self.log("first", self.rows(40, val_every=10)), "--title", "A & <B>")
        self.assertEqual(root.tag, SVG + "svg")
        self.assertIn("A & <B>", texts)
        self.assertIn("step", texts)
        self.assertIn("loss", texts)
        self.assertTrue(any(t.startswith("first (train 1.") and "val 1.225" in t for t in texts), texts)
        self.assertEqual(len(circles), 4)
        self.assertEqual(len(curves), 3)  # each step, average, validation

    def test_several_runs_have_their_own_names_and_colours(self):
        logs = [self.log(name, self.rows(20)) for name in ("a", "b", "c")]
        root, texts, circles, curves = self.plot(*logs)
        for name in "abc":
            self.assertEqual(sum(t.startswith(name + " (") for t in texts), 1)
        colours = {p.get("stroke") for g in root.iter(SVG + "g") for p in g.iter(SVG + "path")}
        self.assertEqual(len(colours), 3)
        self.assertEqual((len(circles), len(curves)), (0, 6))

    def test_same_folder_name_takes_the_one_above(self):
        _, texts, _, _ = self.plot(self.log("x/run", self.rows(5)), self.log("y/run", self.rows(5)))
        for name in ("x/run", "y/run"):
            self.assertEqual(sum(t.startswith(name + " (") for t in texts), 1, texts)

    def test_folder_stands_for_its_log(self):
        _, texts, _, _ = self.plot(self.log("folder", self.rows(5)).parent)
        self.assertTrue(any(t.startswith("folder (") for t in texts))

    def test_legend_lies_above_the_curves(self):
        names = [f"a-run-with-a-rather-long-name-{i}" for i in range(9)]
        root, texts, _, curves = self.plot(*[self.log(name, self.rows(30)) for name in names])
        top = float(root.find(f"{SVG}clipPath/{SVG}rect").get("y"))
        entries = [t for t in root.iter(SVG + "text") if "(train" in t.text]
        self.assertEqual(len(entries), 9)
        self.assertTrue(all(float(t.get("y")) < top for t in entries))
        self.assertTrue(all(y >= top - 0.1 for d in curves for y in self.ys(d)))

    @staticmethod
    def ys(path):
        return [float(y) for y in re.findall(r"[ML][-\d.]+ ([-\d.]+)", path)]

    def test_null_loss_breaks_the_line(self):
        rows = self.rows(20)
        rows[9]["loss"] = None
        rows[10]["loss"] = float("nan")  # not what the program writes, but json.dumps does
        _, _, _, curves = self.plot(self.log("gap", rows))
        self.assertEqual([d.count("M") for d in curves], [2, 2])
        self.assertEqual([len(self.ys(d)) for d in curves], [18, 18])

    def test_resumed_steps_replace_the_older_ones(self):
        rows = self.rows(10) + [{"step": s, "loss": 3.0} for s in range(8, 13)]
        _, texts, _, curves = self.plot(self.log("resumed", rows), "--smooth", 0)
        self.assertEqual(len(curves), 1)
        xs = [float(x) for x in re.findall(r"[ML]([-\d.]+) ", curves[0])]
        self.assertEqual(len(xs), 12)
        self.assertEqual(xs, sorted(set(xs)))
        self.assertTrue(any("train 3.000" in t for t in texts))

    def test_truncated_last_line_is_left_out_and_said(self):
        _, texts, _, curves = self.plot(self.log("torn", self.rows(10), tail='{"step": 11, "lo'), "--smooth", 0)
        self.assertEqual(len(self.ys(curves[0])), 10)
        self.assertIn("torn", self.note)
        self.assertIn("cut short", self.note)

    def test_tokens_axis(self):
        _, texts, _, _ = self.plot(self.log("t", self.rows(1000)), "--x", "tokens")
        self.assertIn("tokens", texts)
        self.assertIn("4M", texts)

    def test_log_axis_and_range(self):
        _, texts, _, _ = self.plot(self.log("l", self.rows(100)), "--log-y")
        self.assertIn("loss (log scale)", texts)
        _, texts, _, _ = self.plot(self.log("l", self.rows(100)), "--y-range", 1, 2)
        self.assertIn("1.0", texts)
        self.assertNotIn("3.0", texts)

    def test_average_of_a_constant_is_the_constant(self):
        rows = [{"step": s, "loss": 2.5} for s in range(1, 30)]
        _, texts, _, curves = self.plot(self.log("flat", rows), "--smooth", 0.99)
        self.assertTrue(any("train 2.500" in t for t in texts))
        self.assertEqual(len({y for d in curves for y in self.ys(d)}), 1)

    def test_one_step(self):
        self.plot(self.log("one", self.rows(1)))

    def test_long_log_is_thinned_and_keeps_its_spike(self):
        rows = [{"step": s, "loss": 9.0 if s == 7777 else 2.0} for s in range(1, 20001)]
        root, _, _, curves = self.plot(self.log("long", rows))
        top = float(root.find(f"{SVG}clipPath/{SVG}rect").get("y"))
        self.assertLess(sum(map(len, curves)), 100000)
        self.assertEqual(sum(y < top + 30 for y in self.ys(curves[0])), 1)

    def test_bad_logs_are_named(self):
        self.fails("none.jsonl", names="none.jsonl", says="cannot read it")
        empty = self.dir / "empty.jsonl"
        empty.write_text("")
        self.fails(empty, names=empty, says="is empty")
        path = self.log("config-only", [])
        self.fails(path, names=path, says="no steps")
        path = self.log("all-null", [{"step": 1, "loss": None}])
        self.fails(path, names=path, says="no finite loss")
        path = self.log("garbage", self.rows(3))
        path.write_text(path.read_text().replace('{"step": 2', '"step": 2'))
        self.fails(path, names=f"{path}:3", says="not a JSON object")
        path = self.log("no-step", [{"loss": 1.0}])
        self.fails(path, names=f"{path}:2", says="no step number")
        path = self.log("no-tokens", self.rows(3), config={"model": "tiny"})
        self.fails(path, "--x", "tokens", names=path, says="tokens-per-step")
        path = self.log("negative", [{"step": 1, "loss": -1.0}])
        self.fails(path, "--log-y", names="--log-y", says="above 0")
        good = self.log("good", self.rows(3))
        self.fails(good, "none.jsonl", names="none.jsonl", says="cannot read it")  # one bad among several

    def test_wrong_usage(self):
        path = self.log("u", self.rows(3))
        for args in (["--smooth", "1"], ["--x", "epoch"], ["--y-range", "3", "2"]):
            self.assertEqual(self.run_script(path, *args).returncode, 2)
        self.assertEqual(self.run_script().returncode, 2)


if __name__ == "__main__":
    unittest.main()
