"""bench/search.py with a program that only writes logs: python3 tests/tools/test_search.py (standard library only)."""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Its loss has one minimum: tokens a step 262,144, rates 5.7e-3 and 5e-4, linear, width 640. Deeper models are better. Smaller batches
# have smaller best rates, and with the first rate, 2.8e-3, a batch of 64 is the best.
PROGRAM = """#!/usr/bin/env python3
import json, math, os, pathlib, sys, time
time.sleep(float(os.environ.get("SLEEP", 0)))
o = dict(zip([a[2:] for a in sys.argv[1::2]], sys.argv[2::2]))
def far(name, best):
    return abs(math.log(float(o[name]) / best))
loss = 2 + 0.4 * far("tokens-per-step", 262144) + far("muon-lr", 5.7e-3 * (float(o["tokens-per-step"]) / 262144) ** 0.5) + far("lr", 5e-4) + (o["schedule"] != "linear") + far("dim", 640)
loss -= math.log(float(o["layers"])) + (o.get("experts") == "64")
ms = float(o["tokens-per-step"]) / 65536 * float(o["layers"]) / 8 * 100
with open(pathlib.Path(o["out"], "log.jsonl"), "w") as log:
    print(json.dumps({"device": pathlib.Path(__file__).with_name("card").read_text() + ", 132 SMs"}), file=log)
    for step in range(1, int(o["steps"]) + 1):
        print(json.dumps({"step": step, "ms": ms * (0.6 if step % 4 else 2.2), **({"val_loss": loss} if step == int(o["val-every"]) else {})}), file=log)
pathlib.Path(o["out"], "step_00000001").mkdir()
"""


class Search(unittest.TestCase):
    def test_no_program(self):
        """Both scripts name the program that is missing, in one line."""
        with tempfile.TemporaryDirectory() as folder:
            for name, more in ("search", []), ("moe_or_dense", ["--dense", "", "--moe", ""]):
                done = subprocess.run([sys.executable, ROOT / f"bench/{name}.py", "--train", "t", "--val", "v", "--out", folder, "--program",
                                       "no/program", *more], capture_output=True, encoding="utf-8")
                self.assertEqual((done.returncode, done.stderr), (1, f"{name}.py: error: no no/program: make cuda, or give --program\n"))

    def test_whole(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            program = folder / "program"
            program.write_text(PROGRAM, "utf-8")
            program.chmod(0o755)
            (folder / "card").write_text("H200", "utf-8")

            def search(*options, **environment):
                return subprocess.run([sys.executable, ROOT / "bench/search.py", "--train", "t", "--val", "v", "--out", folder / "out", "--program",
                                       program, "--seconds", "10", "--gpus", "2", *options], capture_output=True, encoding="utf-8", env=os.environ | environment)

            # No time: no run. Then all of them, none twice.
            for seconds, runs in ("0", 0), ("1.5", 1):  # on one GPU the others wait until it is too late
                done = search("--gpus", "1", "--begin-until", seconds, SLEEP="1")
                self.assertIn("the same command goes on", done.stderr)
                self.assertNotEqual(done.returncode, 0)
                self.assertEqual(len(list((folder / "out").glob("*/log.jsonl"))), runs)
            done = search()
            self.assertEqual(done.returncode, 0, done.stderr)
            runs = list(map(json.loads, (folder / "out/runs.jsonl").read_text("utf-8").splitlines()))
            self.assertEqual(len(runs), len({json.dumps([run["model"], run["options"]]) for run in runs}))
            again = search()
            self.assertEqual((again.stdout, again.stderr), (done.stdout, ""))

            # The minimum, with a worse value on both sides of each axis; layers end at the last value there is.
            for model, more in ("dense", ["--dense-layers 24", "--dense-ffn 2432"]), ("MoE", ["--experts 64", "--dense-ffn 2560 --expert-ffn 480"]):
                options, = re.findall(rf"^{model}: (.*)", done.stdout, re.M)
                for option in ("--dim 640 --heads 10 --kv-lora 320 --layers 24", "--batch 64 --tokens-per-step 262144 --muon-lr 0.0057 --schedule linear",
                               "--lr 0.0005", *more):
                    self.assertIn(option, options)
            for axis, values in (("batch", {64, 128, 256, 512}), ("rate", {0.002, 0.0028, 0.004, 0.0057, 0.0081}), ("lr", {0.00025, 0.0005, 0.001, 0.002}),
                                 ("width", {384, 512, 640, 768}), ("layers", {6, 8, 12, 16, 24})):
                row = re.findall(rf"^\| {axis} \| (.*) \|", done.stdout, re.M)[0]
                self.assertEqual({float(value.split(":")[0]) for value in row.split(" | ")}, values, axis)
            # A run has the seconds asked for, although each fourth step is longer, and keeps no checkpoint.
            for run in runs:
                self.assertAlmostEqual(run["seconds"], 10, delta=1.2)
            self.assertEqual(list((folder / "out").glob("*/step_*")), [])
            # Losses after equal seconds on two kinds of cards do not compare.
            (folder / "card").write_text("H100", "utf-8")
            first, *_ = (folder / "out/runs.jsonl").read_text("utf-8").splitlines(True)
            (folder / "out/runs.jsonl").write_text(first, "utf-8")
            done = search()
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("a run is on H100, and others are on H200: their seconds do not compare", done.stderr)
            self.assertEqual((folder / "out/runs.jsonl").read_text("utf-8"), first)


if __name__ == "__main__":
    unittest.main()
