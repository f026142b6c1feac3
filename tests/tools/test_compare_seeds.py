"""Several seeds in scripts/compare_precision.py: python3 tests/tools/test_compare_seeds.py"""
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SVG = "{http://www.w3.org/2000/svg}"
STEPS, WINDOW = 24, 4
ONE_BUILD = True  # tests/run.py: nothing here depends on what computes
SLOW = True
# A program that trains nothing: its loss falls from 10 to 4, and seeds are about 0.1 apart. The set mxfp8 is 0.003 from
# bf16 of the same seed, but 1 at the first steps. The first line of its log is its command.
FAKE = f"""#!{sys.executable}
import json, math, pathlib, random, sys
words = [word for argument in sys.argv[1:-1] for word in argument.split("=")]
options = dict(zip(words[::2], words[1::2]))
seed, steps = int(options["--seed"]), int(options["--steps"])
away, gap = random.Random(seed).gauss(0, 0.1), options.get("--precision", "")
rows = [{{"steps": steps, "command": sys.argv}}]
for step in range(1, steps + 1):
    loss = 4 + 6 * math.exp(-step / 4) + away + random.Random(seed + 10 * step).gauss(0, 0.01)
    if gap:
        loss += (1 if step < 6 else 0.003) * random.Random(gap + str(seed + 10 * step)).random()
    rows.append({{"step": step, "loss": loss, "tokens_per_s": 1000 * seed + step, "mem_gib": seed}})
    if step % 8 == 0:
        rows[-1]["val_loss"] = loss + 0.1
path = pathlib.Path(options["--out"])
(path / "log.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
"""


class Seeds(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="train_moe_compare_")
        cls.addClassCleanup(folder.cleanup)
        cls.dir = pathlib.Path(folder.name)
        cls.program = cls.dir / "fake"
        cls.program.write_text(FAKE, "utf-8")
        cls.program.chmod(0o755)

    def compare(self, out, *args, more=(), window=("--window", WINDOW)):
        command = [sys.executable, str(ROOT / "scripts/compare_precision.py"), "--out", str(out), "--program",
                   str(self.program), *map(str, (*window, *args)), "--", "--steps", str(STEPS), *more]
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}  # it bounds --at-once
        return subprocess.run(command, env=dict(environment, PYTHONIOENCODING="ascii"), timeout=120,
                              stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8")

    def fake(self, name, *args, more=()):
        """The folder of a comparison, and the finished process of the script."""
        done = self.compare(self.dir / name, *args, more=more)
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.dir / name, done

    def log(self, name, out):
        first, *rows = map(json.loads, (out / name / "log.jsonl").read_text("utf-8").splitlines())
        self.assertEqual([row["step"] for row in rows], list(range(1, STEPS + 1)))
        return first, rows

    def rows(self, done):
        lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return {row[0]: row[1:] for row in cells[2:]}

    def losses(self, out, name, key="loss"):
        return {row["step"]: row[key] for row in self.log(name, out)[1] if key in row}

    def smooth(self, values):
        return {end: statistics.fmean(values[end - i] for i in range(WINDOW))
                for end in range(WINDOW, STEPS + 1)}

    def gaps(self, out, name, base):
        a, b = self.losses(out, name), self.losses(out, base)
        return self.smooth({step: a[step] - b[step] for step in a})

    def panels(self, out):
        """For each panel of the picture: its group, a function from its heights to values, and its range."""
        root = ET.parse(out / "compare.svg").getroot()
        labels = [(float(t.get("y")) - 4.5, float(t.text)) for t in root.iter(SVG + "text")
                  if t.get("text-anchor") == "end"]
        for clip, group in zip(root.iter(SVG + "clipPath"), root.iter(SVG + "g")):
            self.assertEqual(group.get("clip-path"), f"url(#{clip.get('id')})")
            rect = clip.find(SVG + "rect")
            top = float(rect.get("y"))
            bottom = top + float(rect.get("height"))
            (y0, v0), *_, (y1, v1) = [(y, v) for y, v in labels if top - 1 <= y <= bottom + 1]

            def value(y, y0=y0, v0=v0, slope=(v1 - v0) / (y1 - y0)):
                return v0 + (y - y0) * slope

            yield group, value, (value(bottom), value(top))

    def assert_range(self, shown, values):
        """Checks that the range covers the values and 4 % on either side; labels are rounded to 0.1 of 320 pixels."""
        low, high = min(values), max(values)
        for edge, expected in zip(shown, (low - 0.04 * (high - low), high + 0.04 * (high - low))):
            self.assertAlmostEqual(edge, expected, delta=0.004 * (high - low))

    def settled(self, curve):
        first, last = curve[WINDOW], curve[STEPS]
        return min(step for step in curve if first - curve[step] >= 0.8 * (first - last))

    def test_precisions_by_gemm_from_equal_weights(self):
        """A list of precisions, one of them by GEMM; --from gives every run the same weights, and its seed the data."""
        out, done = self.fake("gemms", "--precisions", "mxfp8,mxfp4", "--gemms", "nvfp4", "--from", "model", "--seeds", 2,
                              "--all-seeds")
        given = {}
        for path in out.glob("*/options.txt"):
            given[path.parent.name] = path.read_text("utf-8").split("--init model ")[1].strip()
        of_gemms = {f"nvfp4-{gemm}": f"--{gemm}-precision nvfp4 " for gemm in ("expert", "linear", "wgrad")}
        sets = {"bf16": "", **of_gemms, **{name: f"--precision {name} " for name in ("mxfp8", "mxfp4", "nvfp4")}}
        self.assertEqual(given, {name + ("-seed-2" if seed == 2 else ""): f"{options}--seed {seed} --data-seed {seed}"
                                 for name, options in sets.items() for seed in (1, 2)})
        self.assertEqual([line.split(" | ")[0] for line in done.stdout.splitlines() if line.startswith("| ")][1:],
                         [f"| {name}" for name in ("bf16", *of_gemms, "mxfp8", "mxfp4", "nvfp4")])

    def test_seeds_change_the_weights_alone(self):
        """Every run has the --data-seed of the first seed, or the given one, exactly once."""
        all_seeds = [f"{name}{end}" for name in ("bf16", "mxfp8", "a-seed-6b") for end in ("", "-seed-6", "-seed-7")]
        one = ("--set", "a-seed-6b", "--lr 1e-3", "--only", "mxfp8", "--only", "a-seed-6b", "--seed", 5, "--seeds", 3)
        for name, args, more, folders, data_seed in (
                ("paired", (*one, "--all-seeds"), (), all_seeds, ["--data-seed", "5"]),
                ("paired_bf16", one, (), [*all_seeds[:4], "a-seed-6b"], ["--data-seed", "5"]),
                ("paired_given", (*one, "--all-seeds"), ("--data-seed", "9"), all_seeds, ["--data-seed", "9"]),
                ("paired_equals", (*one, "--all-seeds"), ("--data-seed=9",), all_seeds, ["--data-seed=9"])):
            out, _ = self.fake(name, *args, more=more)
            self.assertEqual(sorted(path.name for path in out.iterdir()), sorted([*folders, "compare.svg"]))
            rest = {}
            for folder in folders:
                command = self.log(folder, out)[0]["command"]
                self.assertEqual([word for word in command if word.startswith("--data-seed")], data_seed[:1])
                at = command.index(data_seed[0])
                self.assertEqual(command[at:at + len(data_seed)], data_seed)
                at = command.index("--seed")
                self.assertEqual(command.count("--seed"), 1)
                of, _, seed = re.fullmatch(r"(.+?)(-seed-(\d+))?", folder).groups()
                self.assertEqual(command[at + 1], seed or "5")
                command[at + 1] = command[command.index("--out") + 1] = ""
                self.assertEqual(rest.setdefault(of, command), command)
            self.assertEqual(len({tuple(command) for command in rest.values()}), 3)

    def test_table_of_several_seeds(self):
        """The table has mean, standard error and number of seeds; each gap is relative to bf16 of the same seed."""
        out, done = self.fake("seeds", "--only", "mxfp8", "--seeds", 3, "--all-seeds")
        rows, ends = self.rows(done), ("", "-seed-2", "-seed-3")
        self.assertEqual(list(rows), ["bf16", "mxfp8"])

        def check(cell, numbers, delta=6e-6):
            found = re.fullmatch(r"([+-]?[\d.]+) ± ([\d.]+) \((\d+)\)", cell)
            self.assertTrue(found, cell)
            self.assertAlmostEqual(float(found[1]), sum(numbers) / 3, delta=delta)
            self.assertAlmostEqual(float(found[2]), statistics.stdev(numbers) / 3**0.5, delta=delta)
            self.assertEqual(found[3], "3")

        for name, (val, _, train, _, _, speed, memory) in rows.items():
            check(val, [self.losses(out, name + end, "val_loss")[STEPS] for end in ends])
            check(train, [statistics.fmean(self.losses(out, name + end).values()) for end in ends])
            self.assertEqual((speed, memory), ("2,012", "3.00"))  # the median and the largest of all three
        self.assertEqual([rows["bf16"][i] for i in (1, 3, 4)], ["-", "-", "-"])
        pairs = [[self.losses(out, name + end, "val_loss")[STEPS] for name in ("mxfp8", "bf16")] for end in ends]
        check(rows["mxfp8"][1], [100 * (own / bf16 - 1) for own, bf16 in pairs], 6e-4)
        gaps = [self.gaps(out, "mxfp8" + end, "bf16" + end) for end in ends]
        check(rows["mxfp8"][4], [statistics.fmean(gap.values()) for gap in gaps])
        value, step = re.fullmatch(r"([+-][\d.]+) \(step (\d+)\)", rows["mxfp8"][3]).groups()
        means = {step: statistics.fmean(gap[step] for gap in gaps) for step in gaps[0]}
        self.assertAlmostEqual(float(value), means[int(step)], delta=6e-6)
        self.assertAlmostEqual(float(value), max(means.values()), delta=6e-6)
        self.assertIn("the mean ± its standard error (seeds)", done.stdout)

    def test_seeds_of_bf16_alone(self):
        """Rows and curves are of the first seed; each further one has its own, and its gap is to the first."""
        out, done = self.fake("seeds_bf16", "--only", "mxfp8", "--seeds", 3)
        rows = self.rows(done)
        folders = {"bf16": "bf16", "mxfp8": "mxfp8", "bf16, seed 2": "bf16-seed-2", "bf16, seed 3": "bf16-seed-3"}
        self.assertEqual(list(rows), list(folders))
        for name, folder in folders.items():
            self.assertEqual(rows[name][0], f"{self.losses(out, folder, 'val_loss')[STEPS]:.5f}")
            self.assertEqual(rows[name][2], f"{statistics.fmean(self.losses(out, folder).values()):.5f}")
            if name != "bf16":
                gap = statistics.fmean(self.gaps(out, folder, "bf16").values())
                self.assertAlmostEqual(float(rows[name][4]), gap, delta=6e-6)
        self.assertNotIn("±", done.stdout)

        # The picture has the same: each curve ends where the run of its row does, in every panel of losses.
        losses, _, _, val = self.panels(out)
        for (group, value, shown), wanted in ((losses, [self.smooth(self.losses(out, folder))[STEPS] for folder in folders.values()]),
                                              (val, [self.losses(out, folder, "val_loss")[STEPS] for folder in folders.values()])):
            self.assertEqual(group.findall(SVG + "polygon"), [])
            ends = [value(float(re.findall(r"L[\d.]+ (-?[\d.]+)", path.get("d"))[-1])) for path in group.findall(SVG + "path")]
            self.assertEqual(len(ends), 4)
            for drawn, end in zip(ends, wanted):
                self.assertAlmostEqual(drawn, end, delta=0.004 * (shown[1] - shown[0]))

    def test_a_signal_is_an_error(self):
        """A signal in the last step of a run, while another waits, is no comparison; the same command goes on."""
        program, out = self.dir / "signals", self.dir / "signalled"
        program.write_text(FAKE + "import os\nif not gap: os.kill(os.getppid(), 15)\n", "utf-8")
        program.chmod(0o755)
        args = ("--only", "mxfp8", "--program", program)
        done = self.compare(out, *args)
        self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        self.assertTrue(done.stderr.endswith("error: ended by SIGTERM; the same command goes on\n"), done.stderr)
        self.assertEqual([path.name for path in out.iterdir()], ["bf16"])
        done = self.compare(out, *args)
        self.assertEqual((done.returncode, list(self.rows(done))), (0, ["bf16", "mxfp8"]), done.stderr)

    def test_an_error_leaves_no_run_alone(self):
        """A run whose log cannot be read ends the script; the others are asked to stop, as after any failure."""
        program, out = self.dir / "broken", self.dir / "broken_log"
        program.write_text(f"""#!{sys.executable}
import pathlib, signal, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
def stop(*_):
    (out / "stopped").touch()
    sys.exit()
signal.signal(signal.SIGUSR1, stop)
if "--precision" in sys.argv:
    while not (out.parent / "bf16/ready").exists():
        time.sleep(0.01)
    (out / "log.jsonl").write_text("x")
else:
    (out / "ready").touch()
    time.sleep(60)
""", "utf-8")
        program.chmod(0o755)
        done = self.compare(out, "--only", "mxfp8", "--program", program, "--at-once", 2)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("is not a log of train_moe", done.stderr)
        deadline = time.monotonic() + 20
        while not (out / "bf16/stopped").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertTrue((out / "bf16/stopped").exists())

    def test_a_seed_that_diverged(self):
        """The standard error is over the finite seeds, and their number is shown."""
        args = ("--only", "mxfp8", "--seeds", 3, "--all-seeds")
        out, _ = self.fake("diverged", *args)
        path = out / "mxfp8-seed-2/log.jsonl"
        *lines, last = path.read_text("utf-8").splitlines()
        path.write_text("\n".join([*lines, json.dumps(json.loads(last) | {"val_loss": None})]) + "\n", "utf-8")
        _, done = self.fake("diverged", *args)
        values = [self.losses(out, name, "val_loss")[STEPS] for name in ("mxfp8", "mxfp8-seed-3")]
        self.assertEqual(self.rows(done)["mxfp8"][0],
                         f"{statistics.fmean(values):.5f} ± {statistics.stdev(values) / 2**0.5:.5f} (2)")

    def test_many_steps(self):
        """The training loss is a mean over the last 50 steps; the default window is 50, or a tenth of a short run."""
        for steps, window in ((600, 50), (120, 12)):
            done = self.compare(self.dir / f"many_{steps}", "--only", "bf16", more=("--steps", str(steps)), window=())
            rows = (self.dir / f"many_{steps}/bf16/log.jsonl").read_text("utf-8").splitlines()[-50:]
            self.assertEqual(self.rows(done)["bf16"][2], f"{statistics.fmean(json.loads(row)['loss'] for row in rows):.5f}")
            self.assertIn("training loss, last 50 steps", done.stdout)
            self.assertIn(f"as a mean of {window} steps", done.stdout)

    def test_bands_and_ranges(self):
        """Bands reach from the lowest to the highest seed; the first steps are drawn, but outside the panels."""
        args = ("--only", "mxfp8", "--seeds", 3, "--all-seeds")
        out, _ = self.fake("bands", *args)
        names = {name: [name + end for end in ("", "-seed-2", "-seed-3")] for name in ("bf16", "mxfp8")}
        expected = [{name: [self.smooth(self.losses(out, run)) for run in runs] for name, runs in names.items()},
                    {name: [self.gaps(out, *pair) for pair in zip(names[name], names["bf16"])] for name in names},
                    {name: [self.losses(out, run, "val_loss") for run in runs] for name, runs in names.items()}]
        curve = {step: statistics.fmean(seed[step] for seed in expected[0]["bf16"]) for step in expected[0]["bf16"][0]}
        start = self.settled(curve)
        self.assertTrue(WINDOW + 2 < start < STEPS - 5, start)
        texts = ET.parse(out / "compare.svg").iter(SVG + "text")
        steps = [float(text.text) for text in texts if (text.get("text-anchor"), text.get("font-size")) == ("middle", "13")]
        self.assertTrue(steps and min(steps) >= min(start, STEPS // 2), (steps, start))  # the picture begins there
        self.assertIn("bands: from the lowest to the highest of 3 seeds", (out / "compare.svg").read_text("utf-8"))
        panels = list(self.panels(out))
        self.assertEqual(len(panels), 3)
        for (group, value, shown), curves in zip(panels, expected):
            bands, lines = group.findall(SVG + "polygon"), group.findall(SVG + "path")
            self.assertEqual((len(bands), len(lines)), (2, 2))
            near = 0.004 * (shown[1] - shown[0])  # 0.1 of 320 pixels, and the labels' rounding
            for band, line, seeds in zip(bands, lines, curves.values()):
                self.assertEqual(band.get("fill"), line.get("stroke"))
                self.assertTrue(0 < float(band.get("fill-opacity")) < 0.5)
                points = [value(float(point.split(",")[1])) for point in band.get("points").split()]
                self.assertEqual(len(points), 2 * len(seeds[0]))
                middle = [value(float(y)) for y in re.findall(r"[ML]-?[\d.]+ (-?[\d.]+)", line.get("d"))]
                for i, step in enumerate(seeds[0]):
                    at = [seed[step] for seed in seeds]
                    # Beyond the panel, the error of the scale, which comes from two labels, grows with the distance.
                    most = near * max(1, abs(statistics.fmean(at) - shown[1]) / (shown[1] - shown[0]) * 4)
                    for drawn, wanted in ((points[i], min(at)), (points[-1 - i], max(at)), (middle[i], sum(at) / 3)):
                        self.assertAlmostEqual(drawn, wanted, delta=most)
            values = [seed[step] for seeds in curves.values() for seed in seeds for step in seed if step >= start]
            self.assert_range(shown, values + [-1e-3, 1e-3] * (group is panels[1][0]))
        self.assertLess(panels[0][2][1], max(expected[0]["bf16"][0].values()) - 1)  # clipped

        # A step in which one seed has no finite loss is a gap in the band.
        log = out / "mxfp8-seed-2/log.jsonl"
        lines = log.read_text("utf-8").splitlines(keepends=True)
        for step in range(10, 10 + WINDOW):
            lines[step] = re.sub(r'"loss": [^,]+', '"loss": null', lines[step])
        log.write_text("".join(lines), "utf-8")
        self.fake("bands", *args)
        group, _, _ = next(self.panels(out))
        self.assertEqual([len(band.get("points").split()) for band in group.findall(SVG + "polygon")],
                         [2 * (STEPS - WINDOW + 1), 2 * (12 - WINDOW + 1), 2 * (STEPS - 13)])

    def test_another_seed_leaves_the_gaps_readable(self):
        """Where another seed of bf16 would widen the sets' panel of gaps threefold, a panel of its own has all gaps."""
        out, _ = self.fake("readable", "--only", "mxfp8", "--seeds", 2)
        start = self.settled(self.smooth(self.losses(out, "bf16")))
        gap, seed = [[v for step, v in self.gaps(out, name, "bf16").items() if step >= start]
                     for name in ("mxfp8", "bf16-seed-2")]
        near, far = [*gap, -1e-3, 1e-3], [*gap, *seed, -1e-3, 1e-3]
        self.assertGreater(max(far) - min(far), 3 * (max(near) - min(near)))
        (_, alone, beside, _) = self.panels(out)
        for (group, _, shown), values, count in ((alone, near, 2), (beside, far, 3)):
            self.assert_range(shown, values)
            self.assertEqual(len(group.findall(SVG + "path")), count)
        out, _ = self.fake("readable_alone", "--only", "bf16", "--seeds", 2)
        panels = list(self.panels(out))
        self.assertEqual(len(panels), 3)
        self.assert_range(panels[1][2], [*seed, -1e-3, 1e-3])

    def test_runs_of_before(self):
        """Runs from before --data-seed, whose data order was --seed's, count for the first seed and no other."""
        args = ("--only", "mxfp8", "--seeds", 2)
        out, first = self.fake("before", *args)
        for name in ("bf16", "mxfp8", "bf16-seed-2"):
            path = out / name / "options.txt"
            text, count = re.subn(" --data-seed 1\n$", "\n", path.read_text("utf-8"))
            self.assertEqual(count, 1)
            if name != "bf16-seed-2":
                path.write_text(text, "utf-8")
        _, again = self.fake("before", *args)
        self.assertEqual((again.stderr.count("finished already"), again.stdout), (3, first.stdout))
        path.write_text(text, "utf-8")
        done = self.compare(out, *args)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        for words in ("bf16-seed-2 holds a run with other options", "--seed 2\n", "--seed 2 --data-seed 1\n"):
            self.assertIn(words, done.stderr)


if __name__ == "__main__":
    unittest.main()
