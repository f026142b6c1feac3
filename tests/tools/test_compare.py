"""scripts/compare_precision.py with the program TRAIN_MOE (build/cpu/train_moe): python3 tests/tools/test_compare.py"""
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree as ET

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import PROGRAM, ROOT, text, write_shard  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
MODEL = """--layers 2 --dim 32 --heads 2 --kv-lora 32 --nope-dim 32 --rope-dim 16 --v-dim 32 --dense-ffn 64 --experts 4
    --top-k 2 --expert-ffn 32 --seq-len 32 --batch 2 --lr 1e-2 --warmup 2""".split()
STEPS, WINDOW = 24, 4
ONE_BUILD = True  # tests/run.py: nothing here depends on what computes
SLOW = True


class Compare(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="train_moe_compare_")
        cls.addClassCleanup(folder.cleanup)
        cls.dir = pathlib.Path(folder.name)
        write_shard(cls.dir / "text_train_000000.bin", text(4000, 2))
        write_shard(cls.dir / "text_val_000000.bin", text(400, 3))
        cls.data = ["--train", f"{cls.dir}/text_train_*.bin", "--val", f"{cls.dir}/text_val_*.bin"]
        cls.out = cls.dir / "all"
        cls.first = cls.compare(cls)

    def command(self, *args, out=None, steps=STEPS, more=()):
        return [sys.executable, str(ROOT / "scripts/compare_precision.py"), "--out", str(out or self.out), "--program",
                PROGRAM, *map(str, args), "--", *self.data, *MODEL, "--steps", str(steps), *more]

    def run_script(self, command, **more):
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8:strict", **more}  # as in most locales
        return subprocess.run(command, cwd=self.dir, env=environment, timeout=120, stdin=subprocess.DEVNULL,
                              capture_output=True, encoding="utf-8", errors="surrogateescape")

    def compare(self):
        """The comparison of most tests: the three sets, one set equal to bf16, and a second seed."""
        args = ("--set", "same", "--timeout 99", "--seeds", 2, "--window", WINDOW)
        done = self.run_script(self, self.command(self, *args, more=("--save-every", "10")))
        if done.returncode:
            raise AssertionError(done.stderr)
        return done

    def again(self):
        done = type(self).compare(type(self))
        return done.stdout, done.stderr

    NAMES = ["bf16", "mxfp8", "mxfp8-exact", "same", "bf16-seed-2"]  # folders
    ROWS = {**{name: name for name in NAMES[:4]}, "bf16, seed 2": "bf16-seed-2"}

    def log(self, name):
        first, *rows = map(json.loads, (self.out / name / "log.jsonl").read_text("utf-8").splitlines())
        self.assertEqual([row["step"] for row in rows], list(range(1, STEPS + 1)))
        return first, rows

    def rows(self):
        lines = [line for line in self.first.stdout.splitlines() if line.startswith("|")]
        self.assertTrue(all(line.count("|") == 9 for line in lines), lines)
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return {row[0]: row[1:] for row in cells[2:]}

    def fails(self, command, *says, code=1, **more):
        done = self.run_script(command, **more)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(done.stdout, "")
        for words in says:
            self.assertIn(words, done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_sets_have_their_options_and_the_rest_in_common(self):
        parts = [f"{part}-precision" for part in ("expert", "dispatch", "combine", "wgrad", "linear")]
        expected = {"mxfp8": ["mxfp8"] * 5, "mxfp8-exact": ["mxfp8-exact", "mxfp8", "mxfp8", "mxfp8", "mxfp8-exact"]}
        configs = {name: self.log(name)[0] for name in self.NAMES}
        for name, config in configs.items():
            self.assertEqual([config[key] for key in parts], expected.get(name, ["bf16"] * 5))
            self.assertEqual(config["seed"], 2 if name == "bf16-seed-2" else 1)
            self.assertEqual(config["data-seed"], 1)
            for key in set(config) - {"precision", *parts, "seed", "out", "timeout"}:
                self.assertEqual(config[key], configs["bf16"][key], key)

    def test_table_is_what_the_logs_say(self):
        rows = self.rows()
        self.assertEqual(list(rows), list(self.ROWS))
        self.assertIn(f"training loss, last {STEPS} steps", self.first.stdout)
        base = [row["loss"] for row in self.log("bf16")[1]]
        for name, (val, above, train, largest, mean_gap, speed, memory) in rows.items():
            log = self.log(self.ROWS[name])[1]
            if name == "bf16":
                self.assertEqual((above, largest, mean_gap), ("-", "-", "-"))
            else:
                self.assertAlmostEqual(float(above), 100 * (log[-1]["val_loss"] / self.log("bf16")[1][-1]["val_loss"] - 1), delta=6e-4)
            loss = [row["loss"] for row in log]
            self.assertAlmostEqual(float(val), log[-1]["val_loss"], delta=6e-6)
            self.assertAlmostEqual(float(train), sum(loss) / STEPS, delta=6e-6)
            median = statistics.median(row["tokens_per_s"] for row in log)
            self.assertAlmostEqual(float(speed.replace(",", "")), median, delta=0.6)
            self.assertAlmostEqual(float(memory), max(row["mem_gib"] for row in log), delta=0.006)
            if name not in ("same", "bf16"):
                gaps = {end: sum(loss[end - i] - base[end - i] for i in range(1, WINDOW + 1)) / WINDOW
                        for end in range(WINDOW, STEPS + 1)}
                value, step = re.fullmatch(r"([+-][\d.]+) \(step (\d+)\)", largest).groups()
                self.assertAlmostEqual(float(value), gaps[int(step)], delta=6e-6)
                self.assertAlmostEqual(abs(float(value)), max(map(abs, gaps.values())), delta=6e-6)
                self.assertAlmostEqual(float(mean_gap), sum(gaps.values()) / len(gaps), delta=6e-6)
                self.assertNotEqual(float(value), 0)

    def test_equal_sets_have_no_gap(self):
        same, bf16 = self.rows()["same"], self.rows()["bf16"]
        self.assertEqual(same[:5], [bf16[0], "0", bf16[2], "0", "0"])

    def test_picture(self):
        root = ET.parse(self.out / "compare.svg").getroot()
        texts = [text.text for text in root.iter(SVG + "text")]
        for name in self.ROWS:
            self.assertEqual(texts.count(name), 1, name)
        self.assertIn("training loss, nats a token", texts)
        self.assertIn("gap to bf16, nats a token", texts)
        self.assertIn(f"training loss and gap: mean of the last {WINDOW} steps", texts)
        self.assertIn(f"\n{STEPS} steps of 64 tokens; {self.log('bf16')[0]['build']}; CPU, ", self.first.stdout)
        # Beside another seed the gaps of the sets would be flat: those of the sets have a panel alone.
        above, alone, below, val = [[path for path in group.iter(SVG + "path")] for group in root.iter(SVG + "g")]
        for curves, count in ((above, 5), (alone, 4), (below, 5)):
            self.assertEqual(len({path.get("stroke") for path in curves}), count)
            self.assertEqual([path.get("d").count("L") for path in curves], [STEPS - WINDOW] * count)
        self.assertIn("validation loss, nats a token", texts)
        self.assertEqual(len(val), 5)
        heights = [{float(y) for y in re.findall(r"[ML]-?[\d.]+ ([\d.]+)", path.get("d"))} for path in alone]
        self.assertEqual(heights[0], heights[3])  # bf16 and the set equal to it are at 0
        self.assertEqual([len(ys) == 1 for ys in heights], [True, False, False, True])

    def test_finished_runs_are_not_repeated_and_an_unfinished_one_goes_on(self):
        logs = {name: (self.out / name / "log.jsonl").read_bytes() for name in self.NAMES}
        for checkpoint in (self.out / "same").glob("step_*"):
            shutil.rmtree(checkpoint)  # a finished run does not need them
        stdout, stderr = self.again()
        self.assertEqual(stdout, self.first.stdout)
        self.assertEqual(stderr.count("finished already"), len(self.NAMES))

        folder, lines = self.out / "mxfp8", logs["mxfp8"].splitlines(keepends=True)
        shutil.rmtree(folder / f"step_{STEPS:08d}")
        (folder / "log.jsonl").write_bytes(b"".join(lines[:23]) + lines[23][:40])
        stdout, stderr = self.again()
        self.assertIn("/mxfp8/step_00000020", stderr)
        self.assertEqual(stderr.count("finished already"), len(self.NAMES) - 1)
        after = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)
        self.assertEqual(after[1:21], lines[1:21])  # the steps before the checkpoint were not run again
        losses = [[json.loads(line)["loss"] for line in text[1:]] for text in (lines, after)]
        self.assertEqual(*losses)
        for name in self.NAMES:
            if name != "mxfp8":
                self.assertEqual((self.out / name / "log.jsonl").read_bytes(), logs[name])
        type(self).first = subprocess.CompletedProcess([], 0, stdout, stderr)  # the speed of that run has changed

    def test_a_log_without_its_last_line(self):
        """A log without its last line is an error: nothing resumes from the last checkpoint, so a retry cannot help."""
        out = self.dir / "torn"
        shutil.copytree(self.out / "bf16", out / "bf16")
        log = out / "bf16/log.jsonl"
        log.write_text("".join(log.read_text("utf-8").splitlines(keepends=True)[:-1]), "utf-8")
        command = self.command("--only", "bf16", out=out, more=("--save-every", "10"))
        self.fails(command, f"bf16 ended at step {STEPS - 1} of {STEPS}, as its log says, but its last checkpoint is there, from "
                            f"which nothing goes on; remove {out}/bf16, and the same command trains it again")
        shutil.rmtree(out / "bf16")
        self.assertEqual(self.run_script(command).returncode, 0)

    def test_a_signal_saves_and_the_same_command_goes_on(self):
        """A signal saves the runs, also behind a launcher that does not pass it on; after nohup SIGHUP does nothing."""
        launch = """sh -c 'trap : USR1; "$0" "$@"; exit $?'"""
        odd = os.fsencode(self.dir) + b"/\xff"  # the name of a process may have any bytes
        shutil.copy(shutil.which("sleep"), odd)
        other = subprocess.Popen([odd, "300"])
        self.addCleanup(other.wait)
        self.addCleanup(other.kill)
        for before, number in (((), signal.SIGTERM), ((), signal.SIGHUP), (("nohup",), signal.SIGTERM)):
            out = self.dir / "-".join(["signal", *before, str(int(number))])
            command = self.command("--only", "mxfp8", "--launch", launch, out=out, steps=10000000)
            with subprocess.Popen([*before, *command], cwd=self.dir, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, encoding="utf-8",  # even if these tests ignore SIGHUP
                                  preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)) as process:
                log, deadline = out / "bf16/log.jsonl", time.monotonic() + 60
                while not (log.exists() and log.read_text("utf-8").count("\n") > 3) and time.monotonic() < deadline:
                    time.sleep(0.05)
                if before:
                    process.send_signal(signal.SIGHUP)
                    time.sleep(0.3)
                    self.assertIsNone(process.poll())
                    self.assertEqual(list(out.glob("bf16/step_*")), [])
                process.send_signal(number)
                _, stderr = process.communicate(timeout=60)
            step, = re.findall(r"bf16 ended at step (\d+) of 10000000; the same command goes on", stderr)
            self.assertEqual(process.returncode, 1)
            self.assertTrue((out / f"bf16/step_{int(step):08d}").is_dir())
            self.assertFalse((out / "mxfp8").exists())

    def test_several_at_once(self):
        """--at-once gives the same losses, output is in each run's folder; a failure stops the others, which can resume."""
        out = self.dir / "at_once"
        args = ("--set", "same", "--timeout 99", "--at-once", 3, "--window", WINDOW)
        done = self.run_script(self.command(*args, out=out, more=("--save-every", "10")))
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in self.NAMES[:4]:
            losses = [[json.loads(line)["loss"] for line in (folder / name / "log.jsonl").read_text("utf-8").splitlines()[1:]]
                      for folder in (out, self.out)]
            self.assertEqual(*losses)
            self.assertIn(f"step {STEPS}/{STEPS}", (out / name / "output.txt").read_text("utf-8"))
        out = self.dir / "at_once_failed"
        self.fails(self.command("--set", "odd", "--experts no", "--at-once", 4, out=out, steps=10000000),
                   f"odd failed with exit code 2, its message is in {out}/odd/output.txt", "\nbf16 ended ",
                   "\nmxfp8 ended ", "\nmxfp8-exact ended ")
        self.assertIn("--experts takes a whole number", (out / "odd/output.txt").read_text("utf-8"))

    def test_each_at_once_has_a_gpu_of_its_own(self):
        program, out = self.dir / "gpu", self.dir / "gpus"
        program.write_text('#!/bin/sh\necho "GPU $CUDA_VISIBLE_DEVICES."\nexit 1\n', "utf-8")
        program.chmod(0o755)
        for visible, expected in (({"CUDA_VISIBLE_DEVICES": "4,6"}, "46"), ({}, "01"), ({"CUDA_VISIBLE_DEVICES": ""}, ["", ""])):
            self.fails(self.command("--at-once", 2, "--program", program, out=out), "failed with exit code 1", **visible)
            said = [(out / name / "output.txt").read_text("utf-8").splitlines()[-1] for name in ("bf16", "mxfp8")]
            self.assertEqual(said, [f"GPU {gpu}." for gpu in expected])
        self.fails(self.command("--at-once", 3, out=self.dir / "usage"), "--at-once 3: CUDA_VISIBLE_DEVICES names 2 GPUs", code=2,
                   CUDA_VISIBLE_DEVICES="4,6")

    def test_the_cuda_build_is_for_a_gpu(self):
        checkout = self.dir / "checkout"
        shutil.copytree(ROOT / "scripts", checkout / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        smi = checkout / "nvidia-smi"
        for builds, said, used in ((("cpu", "cuda"), "echo No devices found.", "cpu"), (("cpu", "cuda"), "echo GPU 0: H100", "cuda"),
                                   (("cpu",), "echo GPU 0: H100", "cpu"), (("cpu", "cuda"), "echo no GPU >&2; exit 9", "cpu")):
            shutil.rmtree(checkout / "build", ignore_errors=True)
            for build in builds:
                (checkout / "build" / build).mkdir(parents=True)
                (checkout / "build" / build / "train_moe").touch()
            smi.write_text(f"#!/bin/sh\n{said}\n", "utf-8")
            smi.chmod(0o755)
            done = self.run_script([sys.executable, checkout / "scripts/compare_precision.py", "--help"], COLUMNS="1000",
                                   PATH=f"{checkout}:{os.environ['PATH']}")
            self.assertIn(f"(default: {checkout}/build/{used}/train_moe)", done.stdout)

    def test_a_window_longer_than_the_runs_is_refused_before_they_are_trained(self):
        out, says = self.dir / "window", f"--window {STEPS + 1} is more than the {STEPS} steps"
        self.fails(self.command("--window", STEPS + 1, out=out), says)
        self.fails(self.command("--window", STEPS + 1, out=out, steps=999, more=(f"--steps={STEPS}",)), says)
        self.fails(self.command("--window", STEPS + 1, "--set", "short", f"--steps {STEPS}", out=out, steps=999), says)
        self.assertFalse(out.exists())

    def test_unknown_precisions_are_refused_before_anything_is_trained(self):
        out = self.dir / "unknown"
        for args, says in ((("--precisions", "fp8"), "fp8: --precision takes one of bf16|"),
                           (("--gemms", "mxfp4-weights"), "mxfp4-weights-linear: --linear-precision takes one of bf16|"),
                           (("--gemms", "mxfp8-exact"), "mxfp8-exact-wgrad: --wgrad-precision takes one of bf16|")):
            self.fails(self.command(*args, out=out), says)
        self.assertFalse(out.exists())

    def test_statistics_where_something_is_quantized(self):
        out = self.dir / "statistics"
        done = self.run_script(self.command("--precisions", "", "--gemms", "nvfp4", out=out, steps=2, more=("--mx-stats", "1")))
        self.assertEqual(done.returncode, 0, done.stderr)
        has = {path.parent.name: "mx_stats" in path.read_text("utf-8").splitlines()[-1] for path in out.glob("*/log.jsonl")}
        self.assertEqual(has, {"bf16": False, "nvfp4-expert": True, "nvfp4-linear": True, "nvfp4-wgrad": False, "nvfp4": True})

    def test_failures_say_what_failed(self):
        out = self.dir / "failed"
        self.fails(self.command("--set", "odd", "--experts no", out=out), "train_moe: error: --experts takes a whole number",
                   "odd failed with exit code 2")
        self.assertFalse((out / "compare.svg").exists())
        # Finished runs stay. The names of runs that did not begin may be used again with other options.
        done = self.run_script(self.command("--set", "odd", "--recompute block", "--launch", "env", out=out))
        self.assertEqual((done.returncode, done.stderr.count("finished already")), (0, 3), done.stderr)
        self.fails(self.command("--set", "odd", "--recompute moe", out=out), "odd holds a run with other options",
                   "--recompute block", "--recompute moe")
        self.fails(self.command(out=out, more=("--clip", "2")), f"{out}/bf16 holds a run with other options")
        self.fails(self.command("--window", STEPS + 1, out=out), f"--window {STEPS + 1} is more than the {STEPS} steps")
        (self.dir / "loop").symlink_to("loop")
        for program in ("nothing", "loop"):
            self.fails(self.command("--program", program, out=out), f"{program} is not there")
        self.fails(self.command("--launch", "no-such-launcher", out=self.dir / "new"), "cannot start no-such-launcher")
        (out / "bf16/log.jsonl").write_text("{}\n", "utf-8")
        self.fails(self.command(out=out), f"{out}/bf16/log.jsonl is not a log of train_moe")
        (self.dir / "file").write_text("", "utf-8")
        self.fails(self.command(out=self.dir / "file"), "file/bf16: Not a directory")

    def test_damaged_logs(self):
        """A damaged log is an error that names it, before any run starts. tests/tools/test_plot.py has other damages."""
        config, row = b'{"steps": 2}', b'{"step": 1, "loss": 1.0}'
        first = [b"{}", b'{"steps": "10"}', b'{"steps": null}', b'{"steps": true}', b'{"steps": 1.5}']
        rows = [b"{}", *(b'{"step": 2, "%s": "1"}' % key for key in (b"loss", b"val_loss", b"mem_gib", b"tokens_per_s"))]
        out = self.dir / "damaged"
        log = out / "bf16/log.jsonl"
        log.parent.mkdir(parents=True)
        for number, line in [(1, line) for line in first] + [(3, line) for line in rows]:
            log.write_bytes(b"\n".join([line, row] if number == 1 else [config, row, line]) + b"\n")
            self.fails(self.command(out=out), f"{log} is not a log of train_moe: line {number}: ")
        self.assertEqual(list(out.iterdir()), [log.parent])

    def test_numbers_that_are_not_finite(self):
        """Values that are not finite are left out of means, and counted; --at-once may exceed the number of runs."""
        out = self.dir / "huge"
        for name in self.NAMES:
            (out / name).mkdir(parents=True)
            for file in ("log.jsonl", "options.txt"):
                shutil.copy(self.out / name / file, out / name / file)
        log = out / "same/log.jsonl"
        lines = log.read_text("utf-8").splitlines(keepends=True)
        for i, loss in ((3, "1" + "0" * 400), (4, "1e400"), (5, "-3.5e38"), (6, "null")):
            lines[i] = re.sub(r'"loss": [^,]+', f'"loss": {loss}', lines[i])
        lines[7] = re.sub(r'"loss": [^,]+, ', "", lines[7])
        log.write_text("".join(lines), "utf-8")
        args = ("--set", "same", "--timeout 99", "--seeds", 2, "--window", WINDOW, "--at-once", 10**15)
        done = self.run_script(self.command(*args, out=out, more=("--save-every", "10")))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("\nsame: the loss of 5 steps was not finite; they are left out.\n", done.stdout)
        self.assertEqual(ET.parse(out / "compare.svg").getroot().tag, SVG + "svg")

    def test_names_of_any_bytes(self):
        folder = self.dir / os.fsdecode(b"\xff\x01")
        folder.mkdir()
        for path in self.dir.glob("text_*.bin"):
            shutil.copy(path, folder)
        command = [str(a).replace(f"{self.dir}/text", f"{folder}/text")
                   for a in self.command("--only", "a.b+c-\xe9", "--set", "a.b+c-\xe9", "", out=folder / "out")]
        done = self.run_script(command)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.endswith(f"\nwrote {folder}/out/compare.svg\n"), done.stdout)
        texts = [text.text for text in ET.parse(folder / "out/compare.svg").iter(SVG + "text")]
        self.assertIn("a.b+c-\xe9", texts)
        again = self.run_script(command)
        self.assertEqual((again.returncode, again.stderr.count("finished already")), (0, 2), again.stderr)

    def test_wrong_usage(self):
        for args, says in ((["--set", "bf16", ""], "there is a set of this name"), (["--set", "a/b", ""], "a name has"),
                           (["--only", "fp4"], "the sets are bf16, mxfp8, mxfp8-exact"),
                           (["--set", "a\x01", ""], "a name has"), (["--set", "a<", ""], "a name has"),
                           (["--set", "a", "'"], "--set a: No closing quotation"),
                           (["--set", "bf16-seed-2", ""], "does not end in -seed-NUMBER"),
                           (["--set", "a-seed-12", ""], "does not end in -seed-NUMBER"),
                           (["--seed", 0], "--seed is at least 1"), (["--seed", -1], "--seed is at least 1"),
                           (["--precision", "mxfp8"], "unrecognized arguments: --precision mxfp8"),
                           (["--all-seeds"], "--all-seeds goes with --seeds of at least 2"),
                           (["--launch", "'"], "argument --launch"),
                           (["--set", "a", "--out x"], "--out among"), (["--seeds", 0], "at least 1"), (["--at-once", 0], "at least 1"),
                           (["--at-once", 2, "--launch", "mpirun -np 2"], "goes without --launch")):
            self.fails(self.command(*args, out=self.dir / "usage"), says, code=2)
        self.fails(self.command(out=self.dir / "usage", more=("--seed", "3")), "--seed among", code=2)
        for option in ("--precision", "--expert-precision", "--dispatch-precision", "--combine-precision", "--wgrad-precision",
                       "--linear-precision", "--precision=mxfp8"):
            self.fails(self.command(out=self.dir / "usage", more=(option, "mxfp8")),
                       f"{option.split('=')[0]} behind --: each set has its own; write --set NAME 'OPTIONS'", code=2)
        self.fails(self.command(out=self.dir / "usage")[:4], "they follow --", code=2)
        self.assertFalse((self.dir / "usage").exists())


if __name__ == "__main__":
    unittest.main()
