"""scripts/plot_loss.py: python3 tests/tools/test_plot.py (standard library only; .png and .pdf where there is matplotlib)."""
import contextlib
import io
import json
import lzma
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET
from unittest import mock

SCRIPT = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts" / "plot_loss.py"
sys.path.insert(0, str(SCRIPT.parent))
sys.dont_write_bytecode = True
import plot_loss  # noqa: E402

try:
    import matplotlib.image
except ImportError:
    matplotlib = None

SVG = "{http://www.w3.org/2000/svg}"


class PlotLoss(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.dir = pathlib.Path(self.folder.name)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.dir)

    def log(self, name, rows, config={"model": "tiny", "tokens-per-step": 4096}, tail=""):
        path = self.dir / name / "log.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in [config] + rows) + tail, "utf-8")
        return path

    def rows(self, n, start=1, val_every=0):
        out = [{"step": s, "loss": 5.0 / s + 1, "lr": 1e-3} for s in range(start, start + n)]
        for row in out:
            if val_every and row["step"] % val_every == 0:
                row["val_loss"] = row["loss"] + 0.1
        return out

    def run_script(self, *args):
        """Runs the script in this process, because separate processes would take too long."""
        command, stdout, stderr, code = [str(SCRIPT), *map(str, args)], io.StringIO(), io.StringIO(), 0
        with mock.patch.object(sys, "argv", command), contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
            try:
                plot_loss.main()
            except SystemExit as end:
                code = end.code
        return subprocess.CompletedProcess(command, code, stdout.getvalue(), stderr.getvalue())

    def plot(self, *args):
        """Plots, parses, and returns (root, texts, circles, paths that are drawn as curves)."""
        out = self.dir / "out.svg"
        done = self.run_script(*args, "--out", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("nan", out.read_text("utf-8"))
        self.note = done.stderr
        root = ET.parse(out).getroot()
        curves = [p.get("d") for g in root.iter(SVG + "g") for p in g.iter(SVG + "path")]
        return root, [t.text for t in root.iter(SVG + "text")], list(root.iter(SVG + "circle")), curves

    def fails(self, *args, names, says):
        (self.dir / "out.svg").unlink(missing_ok=True)
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
        self.assertIn("loss, nats a token", texts)
        self.assertTrue(any(t.startswith("first (training loss 1.") for t in texts), texts)
        self.assertIn("validation loss 1.225", texts)
        self.assertIn("thin: each step, thick: its mean with 10 steps before and after, circles: validation loss", texts)
        self.assertEqual(len(circles), 4)
        self.assertEqual(len(curves), 3)  # each step, average, validation
        colours = [p.get("stroke") for g in root.iter(SVG + "g") for p in g.iter(SVG + "path")]
        self.assertEqual((colours[0], len(set(colours))), (colours[1], 2))  # the validation loss has a colour of its own
        self.assertEqual({c.get("stroke") for c in circles}, {colours[2]})

    def test_validation_of_several_runs(self):
        """With several runs, the validation loss has the colour of its run."""
        logs = [self.log(name, self.rows(40, val_every=10)) for name in "ab"]
        root, texts, circles, _ = self.plot(*logs)
        self.assertEqual(sum(t in (f"{name} (training loss 1.144, validation loss 1.225)" for name in "ab") for t in texts), 2, texts)
        paths = [p.get("stroke") for g in root.iter(SVG + "g") for p in g.iter(SVG + "path")]
        self.assertEqual({c.get("stroke") for c in circles}, set(paths))

    def test_baseline(self):
        """A baseline is a level line over the whole width of the first panel, within its range."""
        path = self.log("byte bigram", self.rows(40))  # a run of the same name is another curve
        root, texts, _, curves = self.plot(path, "--baseline", "byte bigram", 7.25, "--column", "loss", "lr", "--smooth", 0)
        self.assertIn("byte bigram 7.25", texts)
        self.assertEqual([len(g.findall(SVG + "path")) for g in root.iter(SVG + "g")], [2, 1])
        box = root.find(f"{SVG}clipPath/{SVG}rect")
        left, right = float(box.get("x")) + 5, float(box.get("x")) + float(box.get("width")) - 5
        xs = [float(x) for x in re.findall(r"[ML]([-\d.]+) ", curves[1])]
        self.assertEqual((xs, len(set(self.ys(curves[1])))), ([left, right], 1))
        self.assertGreater(self.ys(curves[1])[0], float(box.get("y")))
        self.assertLess(self.ys(curves[1])[0], self.ys(curves[0])[0])  # 7.25 is above the first loss, 6

    def test_same_folder_name_takes_the_one_above(self):
        _, texts, _, _ = self.plot(self.log("x/run", self.rows(5)), self.log("y/run", self.rows(5)))
        for name in ("x/run", "y/run"):
            self.assertEqual(sum(t.startswith(name + " (") for t in texts), 1, texts)

    def test_logs_of_one_folder_have_their_own_names(self):
        logs = [self.log(name, self.rows(5)).rename(self.dir / f"{name}.jsonl") for name in ("a", "b.1")]
        _, texts, _, _ = self.plot(*logs)
        for name in ("a", "b.1"):
            self.assertEqual(sum(t.startswith(name + " (") for t in texts), 1, texts)

    def test_folder_stands_for_its_log(self):
        _, texts, _, _ = self.plot(self.log("folder", self.rows(5)).parent)
        self.assertTrue(any(t.startswith("folder (") for t in texts))

    def test_legend_lies_above_the_curves(self):
        names = [f"a-run-with-a-rather-long-name-{i}" for i in range(9)]
        root, texts, _, curves = self.plot(*[self.log(name, self.rows(30)) for name in names])
        top = float(root.find(f"{SVG}clipPath/{SVG}rect").get("y"))
        entries = [t for t in root.iter(SVG + "text") if "(training loss" in t.text]
        self.assertEqual(len(entries), 9)
        self.assertTrue(all(float(t.get("y")) < top for t in entries))
        self.assertTrue(all(y >= top - 0.1 for d in curves for y in self.ys(d)))

    @staticmethod
    def ys(path):
        return [float(y) for y in re.findall(r"[ML][-\d.]+ ([-\d.]+)", path)]

    def test_numbers_of_an_axis_are_beside_its_title(self):
        """The longest number of an axis, -0.0005 with its neighbours, ends right of the title, whose descenders are below x."""
        root, _, _, _ = self.plot(self.log("near", [{"step": s, "gap": 1e-3 * (-1) ** s} for s in range(20)]), "--column", "gap")
        title, = [t for t in root.iter(SVG + "text") if t.get("transform")]
        numbers = [t for t in root.iter(SVG + "text") if t.get("text-anchor") == "end"]
        self.assertIn("-0.0005", [t.text for t in numbers])
        for number in numbers:
            left = float(number.get("x")) - 0.56 * 13 * len(number.text)  # a digit of Helvetica is 0.56 of its height wide
            self.assertGreater(left, float(title.get("x")) + 0.25 * 14)

    def test_null_loss_breaks_the_line(self):
        rows = self.rows(20)
        rows[9]["loss"] = None
        rows[10]["loss"] = float("nan")  # json.dumps writes it, the program does not
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
        self.assertTrue(any("loss 3)" in t for t in texts))

    def test_truncated_last_line_is_left_out_and_said(self):
        _, texts, _, curves = self.plot(self.log("torn", self.rows(10), tail='{"step": 11, "lo'), "--smooth", 0)
        self.assertEqual(len(self.ys(curves[0])), 10)
        self.assertIn("torn", self.note)
        self.assertIn("cut short", self.note)

    def test_packed_log(self):
        """A log packed by xz has the curves of the log. A damaged one is refused by name."""
        log = self.log("run", self.rows(20))
        packed = self.dir / "run.jsonl.xz"
        packed.write_bytes(lzma.compress(log.read_bytes()))
        self.assertEqual(self.plot(packed)[3], self.plot(log)[3])
        packed.write_bytes(packed.read_bytes()[:-20])
        self.fails(packed, names=packed, says="is not a log of train_moe: Compressed data ended")

    def test_tokens_axis(self):
        _, texts, _, _ = self.plot(self.log("t", self.rows(1000)), "--over", "tokens")
        self.assertIn("tokens", texts)
        self.assertIn("4M", texts)
        root, _, _, curves = self.plot(self.log("few", self.rows(4)), "--over", "tokens", "--smooth", 0)
        box = root.find(f"{SVG}clipPath/{SVG}rect")
        left, width = float(box.get("x")) + 5, float(box.get("width")) - 10
        for x, step in zip(re.findall(r"[ML]([-\d.]+) ", curves[0]), (1, 2, 3, 4)):  # a step's own tokens count
            self.assertAlmostEqual(float(x), left + width * step / 4, delta=0.051)
        # A stage goes on where the stages before it ended.
        stage = self.log("stage", self.rows(4), config={"model": "tiny", "tokens-per-step": 4096, "tokens-before": 4 * 4096})
        _, _, _, curves = self.plot(self.dir / "few/log.jsonl", stage, "--over", "tokens", "--smooth", 0)
        for curve, before in zip(curves, (0, 4), strict=True):
            for x, step in zip(re.findall(r"[ML]([-\d.]+) ", curve), (1, 2, 3, 4), strict=True):
                self.assertAlmostEqual(float(x), left + width * (before + step) / 8, delta=0.051)

    def test_log_axis_and_range(self):
        _, texts, _, _ = self.plot(self.log("l", self.rows(100)), "--log-y")
        self.assertIn("loss, nats a token (log scale)", texts)
        _, texts, _, _ = self.plot(self.log("l", self.rows(100)), "--y-range", 1, 2)
        self.assertIn("1.0", texts)
        self.assertNotIn("3.0", texts)

    def test_one_step(self):
        self.plot(self.log("one", self.rows(1)))

    def test_long_log_is_thinned_and_keeps_its_spikes(self):
        rows = [{"step": s, "loss": {7777: 9.0, 7778: 1.0}.get(s, 5.0)} for s in range(1, 20001)]
        root, _, _, curves = self.plot(self.log("long", rows))
        box = root.find(f"{SVG}clipPath/{SVG}rect")
        top, height = float(box.get("y")), float(box.get("height"))
        self.assertLess(sum(map(len, curves)), 100000)
        self.assertEqual(sum(y < top + 30 for y in self.ys(curves[0])), 1)
        self.assertEqual(sum(y > top + height - 30 for y in self.ys(curves[0])), 1)

    def test_bad_logs_are_named(self):
        self.fails("none.jsonl", names="none.jsonl", says="cannot read it")
        empty = self.dir / "empty.jsonl"
        empty.write_text("", "utf-8")
        self.fails(empty, names=empty, says="is empty")
        path = self.log("config-only", [])
        self.fails(path, names=path, says="no steps")
        path = self.log("all-null", [{"step": 1, "loss": None}])
        self.fails(path, names=path, says="no finite loss")
        path = self.log("garbage", self.rows(3))
        path.write_text(path.read_text("utf-8").replace('{"step": 2', '"step": 2'), "utf-8")
        self.fails(path, names=path, says="is not a log of train_moe: line 3: not a JSON object")
        path = self.log("no-step", [{"loss": 1.0}])
        self.fails(path, names=path, says="is not a log of train_moe: line 2: no step number")
        path = self.log("no-tokens", self.rows(3), config={"model": "tiny"})
        self.fails(path, "--over", "tokens", names=path, says="tokens-per-step")
        path = self.log("negative", [{"step": 1, "loss": -1.0}])
        self.fails(path, "--log-y", names="--log-y", says="at least 1e-12")
        good = self.log("good", self.rows(3))
        self.fails(good, "none.jsonl", names="none.jsonl", says="cannot read it")  # one bad among several

    def test_wrong_usage(self):
        path = self.log("u", self.rows(3))
        for args in (["--smooth", "0.9"], ["--smooth", "-1"], ["--baseline", "a", "b"], ["--baseline", "a", "nan"], ["--over", "epoch"], ["--y-range", "3", "2"],
                     ["--y-range", "1", "inf"], ["--y-range", "nan", "1"], ["--y-range", "0", "5e-324"],
                     ["--y-range", "-1e308", "1e308"], ["--y-range", "1", "1.0000000000000002"]):
            self.assertEqual(self.run_script(path, *args).returncode, 2, args)
        self.assertEqual(self.run_script().returncode, 2)

    def test_average_does_not_lag(self):
        """The mean has as many values after a step as before it; at the ends those that are there. A gap is no value."""
        values = [9.0, None, 3.0, 4.0, 1.0, 2.0]
        self.assertEqual(plot_loss.smooth(values, 1), [9.0, None, 16 / 3, 8 / 3, 7 / 3, 1.5])
        falling = [100.0 - i for i in range(50)]
        for i, mean in enumerate(plot_loss.smooth(falling, 10)):
            self.assertEqual(mean, falling[i] + max(0, i - 39) / 2)  # no lag but at the end
        rows = [{"step": s, "loss": float(s)} for s in range(1, 101)]
        _, texts, _, _ = self.plot(self.log("end", rows))
        self.assertIn("end (training loss 95)", texts)  # the mean of the steps from 90 to 100

    STATS = [{"layer": i, "tensor": t, "snr_db": 30.0 + i, "inexact": None} for i in (0, 1) for t in ("x", "w13")]

    def test_columns_have_panels(self):
        rows = self.rows(40, val_every=10)
        for row in rows:
            row["grad_norm"] = 100.0 * row["step"]
            if row["step"] % 4 == 0:
                row.update(mx_stats=self.STATS, load_max=[None, 1.5])
        path = self.log("columns", rows)
        root, texts, circles, curves = self.plot(path, "--column", "grad_norm", "loss", "val_loss",
                                                 "mx_stats/layer1/x/snr_db")
        labels = [t.text for t in root.iter(SVG + "text") if t.get("transform")]
        self.assertEqual(labels, ["gradient norm", "loss, nats a token", "mx_stats/layer1/x/snr_db"])
        counts = [(len(list(g.iter(SVG + "path"))), len(list(g.iter(SVG + "circle")))) for g in root.iter(SVG + "g")]
        self.assertEqual(counts, [(2, 0), (3, 4), (1, 10)])  # a value that most steps lack is drawn as circles alone
        tops = [float(r.get("y")) for r in root.iterfind(f"{SVG}clipPath/{SVG}rect")]
        heights = [float(r.get("height")) for r in root.iterfind(f"{SVG}clipPath/{SVG}rect")]
        for top, height, below in zip(tops, heights, tops[1:] + [float(root.get("height"))]):
            self.assertLess(top + height, below)
        for i, g in enumerate(root.iter(SVG + "g")):
            ys = [y for p in g.iter(SVG + "path") for y in self.ys(p.get("d"))]
            self.assertTrue(all(tops[i] - 0.1 <= y <= tops[i] + heights[i] + 0.1 for y in ys))
        self.assertTrue(any(t.startswith("columns (gradient norm 3.") and t.endswith("k)") for t in texts), texts)
        _, texts, circles, curves = self.plot(path, "--column", "val_loss")
        self.assertEqual((len(circles), len(curves)), (4, 1))
        self.assertIn("validation loss, nats a token", texts)
        self.fails(path, "--column", "mx_stats", names=path,
                   says="mx_stats is a list of objects; draw one of its columns, such as mx_stats/layer1/w13/inexact")
        columns = "columns are loss, lr, grad_norm, mx_stats/layer0/x/snr_db, load_max, val_loss"
        self.fails(path, "--column", "gradnorm", names=path, says=f"no finite gradnorm in this log; {columns}")
        self.fails(path, "--column", "loss", "gradnorm", names=path, says=f"no finite gradnorm in {path}; {columns}")
        self.fails(path, "--column", "loss", "grad_norm", "--y-range", 1, 2, names="--y-range", says="one panel")

    def test_each_layer_of_a_list(self):
        """A column with a number for each layer has a curve for each layer, of every run; a layer without one has none."""
        logs = []
        for name, layers in (("a", 3), ("b", 2)):
            rows = self.rows(20)
            for row in rows:
                row["load_max"] = [None, *[1.0 + layer + row["step"] / 100 for layer in range(1, layers)]]
            logs.append(self.log(name, rows))
        for runs, names in ((logs, ["a layer1", "a layer2", "b layer1"]), (logs[:1], ["a layer1", "a layer2"])):
            root, texts, _, curves = self.plot(*runs, "--column", "load_max", "--smooth", 0)
            self.assertEqual(len(curves), len(names))
            self.assertEqual([t for t in texts if "layer" in t], names)
            self.assertEqual(len({p.get("stroke") for g in root.iter(SVG + "g") for p in g.iter(SVG + "path")}), len(names))
        root, texts, _, _ = self.plot(*logs, "--column", "loss", "load_max", "--smooth", 0)
        strokes = [[p.get("stroke") for p in g.iter(SVG + "path")] for g in root.iter(SVG + "g")]
        self.assertEqual([len(s) for s in strokes], [2, 3])
        self.assertEqual(len({*strokes[0], *strokes[1]}), 5)  # no layer has the colour of a run
        self.assertEqual(sum(t.startswith(("a (training loss", "b (training loss")) for t in texts), 2)

    def test_time_axis_is_the_sum_of_ms(self):
        rows = [{"step": s, "loss": 1.0, "ms": ms} for s, ms in enumerate((1000, 1000, 6000, 2000), 1)]
        root, texts, _, curves = self.plot(self.log("time", rows), "--over", "time", "--smooth", 0)
        box = root.find(f"{SVG}clipPath/{SVG}rect")
        left, width = float(box.get("x")) + 5, float(box.get("width")) - 10
        xs = [float(x) for x in re.findall(r"[ML]([-\d.]+) ", curves[0])]
        for x, seconds in zip(xs, (1, 2, 8, 10)):
            self.assertAlmostEqual(x, left + width * seconds / 10, delta=0.051)  # printed with one digit
        self.assertIn("seconds of training", texts)
        thinned = [{"step": s, "loss": 1.0, "ms": ms} for s, ms in ((10, 100), (20, 100), (40, 300))]  # 1, 2 and 8 s
        _, _, _, curves = self.plot(self.log("thinned", thinned), "--over", "time", "--smooth", 0)
        for x, seconds in zip(re.findall(r"[ML]([-\d.]+) ", curves[0]), (1, 2, 8)):
            self.assertAlmostEqual(float(x), left + width * seconds / 8, delta=0.051)
        rows = [{"step": s, "loss": 1.0, "ms": 3.6e6} for s in range(1, 41)]
        _, texts, _, _ = self.plot(self.log("long", rows), "--over", "time")
        self.assertIn("hours of training", texts)
        self.assertEqual([t for t in texts if t == "40"], ["40"])
        rows = [{"step": s, "loss": 1.0, "ms": 60e3} for s in range(1, 41)]
        _, texts, _, _ = self.plot(self.log("longer", rows), "--over", "time")
        self.assertIn("minutes of training", texts)
        self.assertIn("40", texts)
        path = self.log("no-ms", self.rows(3))
        self.fails(path, "--over", "time", names=path, says="no ms")

    def test_what_is_no_log_is_left_out(self):
        good, out = self.log("good", self.rows(5)), self.dir / "out.svg"
        text = self.dir / "notes.txt"
        text.write_text("some words\n", "utf-8")
        (self.dir / "corpus").mkdir()
        young, other = self.log("young", []), self.log("other", [{"step": 1, "lr": 1.0}])
        _, texts, _, _ = self.plot(text, "corpus", good, young, other)
        self.assertEqual(sum("(training loss" in t for t in texts), 1)
        said = self.note.splitlines()
        self.assertEqual(len(said), 4, said)
        for line, path, why in zip(said, (text, "corpus", young, other),
                                   ("line 1: not a JSON object", "without log.jsonl", "no steps", "no finite loss or val_loss in this log; columns are lr")):
            self.assertTrue(line.startswith(f"plot_loss.py: warning: {path}"), line)
            self.assertIn(why, line)
            self.assertTrue(line.endswith("; left out"), line)
        out.unlink()
        done = self.run_script(text, "corpus", "--out", out)
        self.assertEqual((done.returncode, len(done.stderr.splitlines()), out.exists()), (1, 2, False))

    def test_suffixes(self):
        path = self.log("s", self.rows(5))
        for name in ("loss.jpg", "loss", "loss.svg.gz", ".svg"):
            done = self.run_script(path, "--out", self.dir / name)
            self.assertEqual(done.returncode, 2, name)
            self.assertIn("only .svg, .png, .pdf", done.stderr)
            self.assertFalse((self.dir / name).exists())
        with mock.patch.dict(sys.modules, {"matplotlib": None}):  # cannot be imported
            done = self.run_script(path, "--out", self.dir / "loss.png")
            self.assertEqual((done.returncode, (self.dir / "loss.png").exists()), (1, False))
            self.assertIn("pip install matplotlib", done.stderr)
            self.assertEqual(self.run_script(path, "--out", self.dir / "loss.SVG").returncode, 0)

    @unittest.skipUnless(matplotlib, "matplotlib is not installed")
    def test_other_formats_show_the_same(self):
        """The pixels of other formats have the lines of each run in its colour, at the height of their value."""
        logs = [self.log(f"{os.fsdecode(self.HOSTILE)}/${loss}\\q$", [{"step": s, "loss": loss} for s in range(1, 51)])
                for loss in (0.75, 1.75)]
        for suffix, begins in ((".png", b"\x89PNG\r\n"), (".pdf", b"%PDF-1."), (".PNG", b"\x89PNG\r\n")):
            out = self.dir / f"loss{suffix}"
            done = self.run_script(*logs, "--title", os.fsdecode(self.HOSTILE), "--y-range", 0, 3, "--out", out)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(out.read_bytes().startswith(begins))
        picture = matplotlib.image.imread(self.dir / "loss.png")[:, :, :3]

        def rows_of(x, colour):
            """The middles of the runs of one colour in a column of pixels."""
            rgb = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
            hits = [y for y, pixel in enumerate(picture[:, x]) if max(abs(p - c) for p, c in zip(pixel, rgb)) < 0.02]
            starts = [y for y in hits if y - 1 not in hits]
            return [(y + next(e for e in range(y, len(picture)) if e not in hits) - 1) / 2 for y in starts]

        grid, (bottom, *_) = rows_of(-60, "#e6e6e6"), rows_of(-60, "#000000")  # a line for each 0.5, from the axis at 0
        for colour, loss in zip(plot_loss.COLOURS, (0.75, 1.75)):
            line, = rows_of(picture.shape[1] // 2, colour)
            # The grid's distance is in whole pixels, off by at most one of about 145; the ends are off by half of one.
            self.assertAlmostEqual((bottom - line) / (grid[2] - grid[1]) / 2, loss, delta=(loss + 0.5) / 100)
        (self.dir / "loss.png").unlink()
        done = self.run_script(*logs, "--out", self.dir / "no-folder" / "loss.png")
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot write it", done.stderr)

    def raw_log(self, name, *lines, tail=b""):
        """Writes a log: the configuration, then the given lines unchanged."""
        path = self.dir / name / "log.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(line + b"\n" for line in (b'{"tokens-per-step": 4096}', *lines)) + tail)
        return path

    def test_lines_end_at_newlines_only(self):
        texts = ["\x85", "\u2028", "\u2029", "\x7f"]  # JSON holds them raw; str.splitlines ends a line at most of them
        rows = [json.dumps({"step": i, "loss": 2.0, "note": text}, ensure_ascii=False).encode()
                for i, text in enumerate(texts, 1)]
        _, _, _, curves = self.plot(self.raw_log("odd", *rows), "--smooth", 0)
        self.assertEqual(len(self.ys(curves[0])), len(texts))
        windows = self.raw_log("windows", *[row + b"\r" for row in rows])
        _, _, _, curves = self.plot(windows, "--smooth", 0)
        self.assertEqual(len(self.ys(curves[0])), len(texts))
        for separator in (b"\r", b"\x0b", b"\x0c", b"\x1c"):  # two objects, but one line
            path = self.raw_log("joined", rows[0], separator.join(rows[1:3]), rows[3])
            self.fails(path, names=path, says="line 3: not a JSON object")

    def test_a_whole_last_line_needs_no_newline_but_a_bad_one_is_no_torn_one(self):
        whole = b'{"step": 1, "loss": 2.0}'
        _, _, _, curves = self.plot(self.raw_log("whole", whole, tail=whole.replace(b"1", b"2")), "--smooth", 0)
        self.assertEqual(len(self.ys(curves[0])), 2)
        path = self.raw_log("bad", whole, b'{"step": 2')
        self.fails(path, names=path, says="line 3: not a JSON object")

    def test_odd_values_are_named(self):
        cases = [("step", value) for value in (b'"1"', b"1.0", b"null", b"true", b"[]", b"-1", b"9223372036854775808",
                                               b"1" + b"0" * 400)]
        cases += [(key, value) for key in ("loss", "val_loss") for value in (b'"1"', b"[]", b"{}", b"true")]
        for key, value in cases:
            row = {"step": b"2", "loss": b"1.0", key: value}
            line = b"{%s}" % b", ".join(b'"%s": %s' % (k.encode(), v) for k, v in row.items())
            path = self.raw_log("odd", b'{"step": 1, "loss": 1.0}', line, b'{"step": 3, "loss": 1.0}')
            says = "no step number" if key == "step" else f"{key} is not a number"
            self.fails(path, names=path, says=f"is not a log of train_moe: line 3: {says}")
        deep = [b"[" * 100000, b'{"a":' * 100000, b'{"step": 2, "loss": ' + b"[" * 100000 + b"]" * 100000 + b"}"]
        for line in [b"1", b"null", b'"text"', b"", b"\0\0", b'{"step": 2, "loss": 1' + b"0" * 5000 + b"x}", *deep]:
            path = self.raw_log("odd", b'{"step": 1, "loss": 1.0}', line, b'{"step": 3, "loss": 1.0}')
            self.fails(path, names=path, says="is not a log of train_moe: line 3: ")
            path.write_bytes(line + b"\n" + b'{"step": 3, "loss": 1.0}\n')
            self.fails(path, names=path, says="is not a log of train_moe: line 1: ")
        for value in ('"4096"', "0", "-1", "1e400", "[]", "1" + "0" * 400):
            path = self.raw_log("odd", b'{"step": 1, "loss": 1.0}')
            path.write_text(path.read_text("utf-8").replace("4096", value), "utf-8")
            self.fails(path, "--over", "tokens", names=path, says="tokens-per-step")

    def test_huge_and_tiny_numbers(self):
        """Values beyond float32 are gaps, like values that are not finite; the rest is drawn, on either axis."""
        for loss in ("1e400", "-1e400", "1e308", "1" + "0" * 400, "3.5e38", "Infinity", "NaN", "null"):
            rows = [b'{"step": %d, "loss": %s}' % (s, b"2.0" if s != 3 else loss.encode()) for s in range(1, 6)]
            _, _, _, curves = self.plot(self.raw_log("huge", *rows), "--smooth", 0)
            self.assertEqual([len(self.ys(d)) for d in curves], [4], loss)
        extremes = [("3.4e38", "-3.4e38"), ("0", "5e-324"), ("0", "1e-322"), ("0", "1e-310"), ("5e-324", "5e-324"),
                    ("1e30", "1e30"), ("1", "1.0000000000000002"), ("-1", "100000000000000000000000000000000000000")]
        for pair in extremes:
            rows = [('{"step": %d, "loss": %s, "val_loss": %s}' % (s, *pair)).encode() for s in (1, 2**63 - 1)]
            for axis in ("steps", "tokens"):
                _, _, circles, _ = self.plot(self.raw_log("extreme", *rows), "--over", axis)
                self.assertEqual(len(circles), 2)
        for y_range in (["1e-12", "2"], ["1", "2"], ["1e-12", "3e38"]):
            rows = [b'{"step": 1, "loss": 3e38, "val_loss": -1}', b'{"step": 2, "loss": 1e-300, "val_loss": 0}']
            _, _, circles, _ = self.plot(self.raw_log("log", *rows), "--log-y", "--y-range", *y_range)
            self.assertEqual(len(circles), 2)
        self.plot(self.raw_log("log", b'{"step": 1, "loss": 3e38}', b'{"step": 2, "loss": 1e-12}'), "--log-y")

    def test_as_a_command(self):
        command = [sys.executable, SCRIPT, self.log("first", self.rows(3)), "--out", "command.svg", "--title", b"\xff"]
        done = subprocess.run(command, cwd=self.dir, capture_output=True, encoding="utf-8")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "wrote command.svg\n", ""))
        self.assertIn("\ufffd", [t.text for t in ET.parse(self.dir / "command.svg").iter(SVG + "text")])
        done = subprocess.run([*command[:2], "none.jsonl"], cwd=self.dir, capture_output=True, encoding="utf-8")
        self.assertEqual((done.returncode, done.stderr),
                         (1, "plot_loss.py: error: none.jsonl: cannot read it: No such file or directory\n"))

    def test_a_full_disk(self):
        """It is one line with the picture's name, and leaves no file."""
        log, before = self.log("first", self.rows(300)), None
        for suffix in (".svg", ".png", ".pdf")[:3 if matplotlib else 1]:
            before = before or sorted(os.listdir())
            done = subprocess.run([sys.executable, SCRIPT, log, "--out", f"out{suffix}"], capture_output=True, encoding="utf-8",
                                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200)))
            self.assertEqual((done.returncode, done.stdout, done.stderr),
                             (1, "", f"plot_loss.py: error: out{suffix}: cannot write it: File too large\n"))
            self.assertEqual(sorted(os.listdir()), before)

    HOSTILE = b"a<b>&\"'\x01\x08\x0b\x1b\x7f\xc2\x85\xef\xbf\xbf\xff\xed\xa0\x80]]>\n\t \xf0\x9f\x98\x80"

    def test_any_title_and_name_is_drawn(self):
        """Characters that XML does not allow become replacement characters."""
        hostile = os.fsdecode(self.HOSTILE)
        logs = [self.log(f"{folder}/{hostile}", self.rows(3)) for folder in ("x", "y")]  # two logs of equal names
        _, texts, _, _ = self.plot(*logs, "--title", hostile)
        drawn = "a<b>&\"'\ufffd\ufffd\ufffd\ufffd\x7f\x85\ufffd\ufffd\ufffd\ufffd\ufffd]]>\n\t \U0001f600"
        self.assertIn(drawn, texts)
        for folder in ("x", "y"):
            self.assertEqual(sum(t.startswith(f"{folder}/{drawn} (") for t in texts), 1, texts)

    def test_odd_paths(self):
        os.symlink("loop", self.dir / "loop")
        self.fails("loop", names="loop", says="Too many levels")
        self.fails("x" * 5000, names="x" * 5000, says="File name too long")
        good = self.log("good", self.rows(3))
        os.symlink(good, self.dir / "link")
        _, texts, _, _ = self.plot("link")  # named by its target
        self.assertTrue(any(t.startswith("good (") for t in texts))


if __name__ == "__main__":
    unittest.main()
